"""`Checkpointer.annotate`: it hands over numbers and never stops training."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ray_ckpt.actors import client as service
from ray_ckpt.config import MAX_METRIC_NAME, RunOptions
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.errors import ConfigError, Unavailable
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.outcomes import PendingSave
from tests.capture.local import LocalLink


@contextmanager
def trained(*, rank: int = 0) -> Iterator[tuple[Checkpointer, LocalLink]]:
    """Open a Checkpointer whose link writes nothing before `link.go` is set."""
    link = LocalLink(RunOptions(memory="double"), rank=rank, world_size=2)
    ckpt = Checkpointer(link=link, model=nn.Linear(4, 4))
    ckpt.restore()
    link.go.clear()
    try:
        yield ckpt, link
    finally:
        link.go.set()
        ckpt.close()


def test_numbers_and_tensors_of_one_element_are_taken_as_in_a_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with trained() as (ckpt, link):
        loss = (torch.ones(1, requires_grad=True) * 2).sum()
        metrics = {"loss": loss, "n": 3, "nan": math.nan, "text": "low", "two": torch.ones(2), "m" * 500: 1}
        ckpt.annotate(7, metrics=metrics)
        ((step, values, attempt, _),) = link.annotated
    assert (step, attempt) == (7, None)
    assert math.isnan(values.pop("nan"))
    assert values == {"loss": 2.0, "n": 3.0, "m" * MAX_METRIC_NAME: 1.0}
    (left_out,) = (r.getMessage() for r in caplog.records if "are left out" in r.getMessage())
    assert "'text' (" in left_out and "'two' (" in left_out


def test_only_rank_0_hands_anything_over() -> None:
    with trained(rank=1) as (ckpt, link):
        ckpt.annotate(1, metrics={"loss": 1.0})
        assert not link.annotated


def test_a_save_that_is_on_its_way_is_named_and_one_that_has_ended_is_not() -> None:
    with trained() as (ckpt, link):
        ckpt.save(5)
        ckpt.annotate(5, metrics={"loss": 1.0})
        ckpt.annotate(4, metrics={"loss": 1.0})
        link.go.set()
        ckpt.flush(commit=True)
        ckpt.annotate(5, metrics={"loss": 1.0})
        named = [attempt.step if attempt else None for _, _, attempt, _ in link.annotated]
    assert named == [5, None, None]


def test_a_save_that_another_thread_begins_meanwhile_costs_no_metrics() -> None:
    class Busy(Future[SaveOutcome]):
        def done(self) -> bool:
            pending.append(pending[0])
            return False

    with trained() as (ckpt, link):
        ckpt.save(5)
        pending = ckpt._outcomes.pending
        busy = PendingSave(attempt=replace(pending[0].attempt, step=6), metrics={}, outcome=Busy())
        pending.append(busy)
        ckpt.annotate(5, metrics={"loss": 1.0})
        pending.remove(busy)
    assert [(step, attempt and attempt.step) for step, _, attempt, _ in link.annotated] == [(5, 5)]


@pytest.mark.parametrize("how", ["at once", "later", "no numbers' mapping"])
def test_what_goes_wrong_is_a_warning(how: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics: Any = [1.0] if how == "no numbers' mapping" else {"loss": 1}
    with trained() as (ckpt, link), caplog.at_level(logging.WARNING, "ray_ckpt"):
        link.fails = how == "at once"
        ckpt.annotate(3, metrics=metrics)
        if how == "later":
            link.annotated[0][-1].set_exception(Unavailable("Step 3 was dropped."))
        link.fails = False
    assert "step 3 was not annotated" in caplog.text


def test_a_number_that_no_float_holds_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with trained() as (ckpt, link), caplog.at_level(logging.WARNING, "ray_ckpt"):
        ckpt.annotate(3, metrics={"loss": 10**400})
        assert not link.annotated
    assert "no numbers: 'loss' (" in caplog.text


def test_nothing_is_handed_over_when_nothing_is_left() -> None:
    with trained() as (ckpt, link):
        ckpt.annotate(1, metrics={})
        ckpt.annotate(1, metrics={"text": "low"})
        assert not link.annotated


def test_from_outside_the_group_what_is_no_number_is_refused() -> None:
    values = service._numbers({"loss": torch.tensor(1.5), "n" * 500: 2})
    assert values == {"loss": 1.5, "n" * MAX_METRIC_NAME: 2.0}
    for wrong in ("low", None, torch.ones(2), 10**400):
        with pytest.raises(ConfigError, match="not a number"):
            service._numbers({"loss": wrong})
