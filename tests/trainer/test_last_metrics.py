"""The metrics of a save: those that the calls for its step had, whichever call it is that saves."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import nn

from ray_ckpt.config import RunOptions
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink


def begun() -> tuple[Checkpointer, LocalLink]:
    link = LocalLink(RunOptions(memory="single", every_steps=4))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    ckpt.restore()
    return ckpt, link


def test_the_last_save_has_the_metrics_that_finish_gets() -> None:
    ckpt, link = begun()
    assert not ckpt.due(6)
    assert ckpt.finish({"loss": 0.5})
    ckpt.close()
    assert [(s.attempt.step, s.metrics) for s in link.sealed] == [(6, {"loss": 0.5})]


def test_a_save_that_failed_and_is_made_again_at_the_end_keeps_its_metrics() -> None:
    ckpt, link = begun()
    link.fails = True
    ckpt.save(4, {"loss": 0.25})
    ckpt._require_saver().settle()
    link.fails = False
    assert ckpt.finish()
    ckpt.close()
    assert [(s.attempt.step, s.metrics) for s in link.sealed] == [(4, {"loss": 0.25})]


def test_metrics_of_an_earlier_step_are_not_those_of_the_last_one() -> None:
    ckpt, link = begun()
    ckpt.save(4, {"loss": 0.25})
    ckpt.due(5)
    assert ckpt.finish()
    ckpt.close()
    assert [(s.attempt.step, s.metrics) for s in link.sealed] == [(4, {"loss": 0.25}), (5, {})]


def test_the_last_save_has_a_metric_as_it_was_at_the_step() -> None:
    ckpt, link = begun()
    running = torch.tensor(0.5)
    ckpt.step(6, {"loss": running})
    running.zero_()
    assert ckpt.finish()
    ckpt.close()
    assert link.sealed[-1].metrics == {"loss": 0.5}


def test_metrics_may_be_a_series_of_pandas() -> None:
    ckpt, link = begun()
    ckpt.step(4, pd.Series({"loss": 0.5}))
    ckpt.close()
    assert link.sealed[-1].metrics == {"loss": 0.5}


def test_a_save_without_metrics_has_those_of_the_step() -> None:
    ckpt, link = begun()
    ckpt.step(5, {"loss": 0.5})
    assert ckpt.save(5)
    ckpt.close()
    assert [(s.attempt.step, s.metrics) for s in link.sealed] == [(5, {"loss": 0.5})]


@pytest.mark.parametrize("retry", ["save", "step", "finish"])
def test_a_save_that_is_tried_again_keeps_its_metrics(retry: str) -> None:
    ckpt, link = begun()
    saver = ckpt._require_saver()
    wait_free, saver.wait_free = saver.wait_free, lambda timeout_s: False  # type: ignore[method-assign]
    assert not ckpt.save(4, {"accuracy": 0.9})
    saver.wait_free = wait_free  # type: ignore[method-assign]
    getattr(ckpt, retry)(*() if retry == "finish" else (4,))
    ckpt.close()
    assert [(s.attempt.step, s.metrics) for s in link.sealed] == [(4, {"accuracy": 0.9})]


def test_the_metrics_that_finish_gets_are_those_of_the_last_step_also_if_it_is_saved() -> None:
    ckpt, link = begun()
    ckpt.step(4, {"loss": 0.5})
    assert ckpt.finish({"accuracy": 0.9})
    ckpt.close()
    assert [(s.attempt.step, s.metrics) for s in link.sealed] == [(4, {"loss": 0.5})]
    assert [(step, metrics) for step, metrics, *_ in link.annotated] == [(4, {"accuracy": 0.9})]
