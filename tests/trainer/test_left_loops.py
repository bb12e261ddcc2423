"""A loop over `steps` that is left before its end, with an iterator that the program still refers to."""

from __future__ import annotations

import gc
import logging
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from ray_ckpt.config import RunOptions
from ray_ckpt.core.values import Salvage, SessionKey
from ray_ckpt.errors import CheckpointError, ConfigError, RunSuperseded, Unprotected
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import close_all, open_checkpointers
from ray_ckpt.trainer.outcomes import UnprotectedGuard
from tests.capture.local import LocalLink


def left(*, at: int, is_whole: bool = True) -> tuple[Checkpointer, LocalLink, object]:
    """Leave the loop in step `at`, after the call of `step` or before it."""
    link = LocalLink(RunOptions(memory="double", every_steps=4))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    steps = ckpt.steps(total=10)
    for step in steps:
        if step == at and not is_whole:
            break
        ckpt.step(step)
        if step == at:
            break
    return ckpt, link, steps


@pytest.mark.parametrize(("is_whole", "saved"), [(True, [4, 6]), (False, [4])])
def test_close_saves_the_step_at_which_the_loop_was_left(is_whole: bool, saved: list[int]) -> None:
    ckpt, link, _steps = left(at=6, is_whole=is_whole)
    ckpt.close()
    assert [s.attempt.step for s in link.sealed] == saved and not link.skipped
    ckpt.close()


@pytest.mark.parametrize(("at", "saved"), [(6, [4, 6]), (8, [4, 8])])
@pytest.mark.parametrize("by", ["due and save", "save"])
def test_a_loop_without_step_may_be_left_as_well(
    by: str, at: int, saved: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    link = LocalLink(RunOptions(memory="double", every_steps=4))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    for step in ckpt.steps(total=10):
        if ckpt.due(step) if by == "due and save" else step in (4, 8):
            ckpt.save(step)
        if by == "save" and step == 6 == at:
            ckpt._saver.wait_free = lambda timeout_s: False  # type: ignore[method-assign,union-attr]
            assert not ckpt.save(step)
            del ckpt._saver.wait_free  # type: ignore[union-attr]
        if step == at:
            break
    ckpt.close()
    assert [s.attempt.step for s in link.sealed] == saved and "the loop was left" not in caplog.text


def test_a_step_that_is_due_is_not_whole_before_it_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    """An evaluation with other weights may have failed in between."""
    link = LocalLink(RunOptions(memory="double", every_steps=4))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    for step in ckpt.steps(total=10):
        if ckpt.due(step):
            break
    ckpt.close()
    assert not link.sealed and "left in step 4, before the save of that step" in caplog.text


@pytest.mark.parametrize("calls", [("step",), ("due", "save"), ("step", "save")])
def test_a_step_whose_call_raised_is_not_saved_again(calls: tuple[str, ...]) -> None:
    link = LocalLink(RunOptions(memory="double", every_steps=4))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    with pytest.raises(Unprotected):
        for step in ckpt.steps(total=10):
            for call in calls:
                if step == 6 and call == calls[-1]:
                    ckpt._guard = UnprotectedGuard(timedelta(microseconds=1))
                    time.sleep(0.001)
                if call != "save" or step == 6:
                    getattr(ckpt, call)(step)
    ckpt.close()
    assert [s.attempt.step for s in link.sealed].count(6) == ("save" in calls)


class Superseded(LocalLink):
    """A link to a run that another launcher takes over when the test says so."""

    taken: Future[CheckpointError]

    def ended(self, session_key: SessionKey) -> Future[CheckpointError]:
        self.taken = Future()
        return self.taken


@pytest.mark.parametrize("ends_by", ["close", "break", "total"])
def test_all_has_ended_when_the_last_save_raises(ends_by: str) -> None:
    link = Superseded(RunOptions(memory="double", every_steps=4))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    steps = ckpt.steps(total=5)
    thread = ckpt._watch._thread  # type: ignore[union-attr]
    for step in steps:
        ckpt.step(step)
        if step == 5 and ends_by == "total":
            link.taken.set_result(RunSuperseded("Another launcher has the run."))
            with pytest.raises(RunSuperseded):
                next(steps)
            break
        if step == 5:
            break
    if ends_by != "total":
        link.taken.set_result(RunSuperseded("Another launcher has the run."))
        with pytest.raises(RunSuperseded):
            ckpt.close() if ends_by == "close" else steps.close()  # type: ignore[attr-defined]
    assert not thread.is_alive()
    if ends_by == "close":
        saver = ckpt._saver
        assert ckpt not in open_checkpointers and saver is not None and not saver._buffers
    ckpt.close()


def test_a_loop_that_is_in_use_when_its_checkpointer_is_closed_ends_there() -> None:
    link = LocalLink(RunOptions(memory="double", every_steps=4))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    for step in ckpt.steps(total=10):
        ckpt.step(step)
        if step == 5:
            ckpt.close()
    assert step == 5 and [s.attempt.step for s in link.sealed] == [4, 5]


def test_a_loop_that_is_collected_with_its_checkpointer_saves_nothing_and_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The memory of a capture may have been collected before."""
    ckpt, link, steps = left(at=6)
    ckpt.add = [ckpt, steps]  # type: ignore[assignment,method-assign]
    ckpt.flush()
    ckpt._watch.stop()  # type: ignore[union-attr]
    del ckpt, steps
    gc.collect()
    assert [s.attempt.step for s in link.sealed] == [4]
    assert "step 6 may not be saved" in caplog.text


def test_finish_after_close_is_an_error() -> None:
    ckpt, _link, _steps = left(at=6)
    ckpt.close()
    with pytest.raises(ConfigError, match="finish was called after close"):
        ckpt.finish()


def test_the_end_of_a_worker_does_not_end_the_loop_of_another_thread() -> None:
    ckpt, link, _steps = left(at=6)
    ckpt.flush()
    close_all()
    assert [s.attempt.step for s in link.sealed] == [4]


def test_a_loop_whose_data_end_first_says_that_its_last_step_is_not_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = LocalLink(RunOptions(memory="double", every_steps=4))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    for step, _batch in zip(ckpt.steps(total=10), range(6)):  # noqa: B905
        ckpt.step(step)
    ckpt.close()
    assert [s.attempt.step for s in link.sealed] == [4]
    assert "left in step 7; step 6, the last whole one, is not saved" in caplog.text


@pytest.mark.parametrize("at", [1, 5])
def test_a_loop_that_is_left_behind_a_save_says_nothing(at: int, caplog: pytest.LogCaptureFixture) -> None:
    ckpt, _link, _steps = left(at=at, is_whole=False)
    ckpt.close()
    assert "the last whole one" not in caplog.text


def looped(caplog: pytest.LogCaptureFixture, call: str, **options: Any) -> tuple[LocalLink, list[str]]:
    """Run a loop of 20 steps that calls only `call`, at each fifth step; return its log."""
    link = LocalLink(RunOptions(memory="double", **options))
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING, logger="ray_ckpt"):
        for step in ckpt.steps(total=20):
            if step % 5 == 0 and call:
                getattr(ckpt, call)(step)
                ckpt.flush()
    ckpt.close()
    return link, [record.message for record in caplog.records]


def test_a_loop_that_never_names_its_steps_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    link, messages = looped(caplog, "", every_steps=4)
    first, last = messages
    assert first.startswith("step, due and save were not called in the first 10 steps of the loop")
    assert "ended without ckpt.step(20)" in last and not link.sealed


def test_a_loop_that_never_names_its_steps_ends_when_it_has_been_unprotected_too_long() -> None:
    options = RunOptions(memory="double", unprotected_after=timedelta(microseconds=1))
    ckpt = Checkpointer(link=LocalLink(options), model=nn.Linear(2, 2))
    with pytest.raises(Unprotected, match="Training ends at step 1"):
        for _ in ckpt.steps(total=20):
            time.sleep(0.001)


def test_a_loop_that_is_unprotected_between_two_calls_ends_as_by_an_error_in_its_body() -> None:
    options = RunOptions(memory="double", unprotected_after=1, every_steps=100, salvage=True)
    link = LocalLink(options, world_size=2)
    link.decision.set_result(Salvage(session_key=(1, 1), reason="the test has one rank"))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    steps = ckpt.steps(total=20)
    with pytest.raises(Unprotected, match="Training ends at step 6"):
        for step in steps:
            if step <= 5:
                optimizer.step()
                ckpt.step(step)
            if step == 5:
                link.go.clear()
                ckpt.save(step)
                threading.Timer(0.3, link.go.set).start()
            if step == 6:
                ckpt._guard.failed(4, "no space")  # the outcome of an earlier save comes late
    assert ckpt._watch is None and list(link.files) == [5] and link.offers == [(5,)]
    ckpt.close()


@pytest.mark.parametrize("call", ["step", "save"])
def test_a_loop_may_name_some_of_its_steps(call: str, caplog: pytest.LogCaptureFixture) -> None:
    link, messages = looped(caplog, call, every_steps=10)
    assert not messages and link.sealed[-1].attempt.step == 20
