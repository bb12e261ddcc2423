"""The save at the end of training: the state is never saved under the number of an older step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ray_ckpt.config import RunOptions
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink
from tests.capture.test_begun_schedules import Begins


class Loop:
    """A rank that trains for 15 steps, and names some of them; a save is due at each 20th step."""

    def __init__(self, *, has_optimizer: bool = True) -> None:
        self.link = LocalLink(RunOptions(memory="double", every_steps=20))
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.done = {"steps": torch.zeros(1)}
        items = {"optimizer": self.optimizer} if has_optimizer else {}
        self.ckpt = Checkpointer(link=self.link, model=self.model, done=self.done, **items)

    def train(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done["steps"] += 1

    def plain(self, call: Callable[[Checkpointer, int], object], *, last: int = 15) -> None:
        """Train without `steps`."""
        self.ckpt.restore()
        for step in range(1, last + 1):
            self.train()
            if step % 10 == 0:
                call(self.ckpt, step)

    def steps(self, call: Callable[[Checkpointer, int], object]) -> Iterator[int]:
        for step in self.ckpt.steps(total=15):
            self.train()
            if step % 10 == 0:
                call(self.ckpt, step)
            yield step

    @property
    def saved(self) -> dict[int, int]:
        """Return the number of steps in the state of each checkpoint."""
        self.ckpt.close()
        return {step: int(self.link.tensors(step)["done.steps"]) for step in self.link.files}

    def failed_save(self, ckpt: Checkpointer, step: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ckpt._saver, "wait_free", lambda timeout_s: False)
            assert not ckpt.save(step)


CALLS: dict[str, Callable[[Checkpointer, int], object]] = {
    "step": lambda ckpt, step: ckpt.step(step),
    "due": lambda ckpt, step: ckpt.due(step),
}


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("call", ["step", "due", "save"])
def test_a_loop_that_names_no_last_step_saves_none(
    call: str, has_optimizer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(has_optimizer=has_optimizer)
    for _ in loop.steps(CALLS.get(call, loop.failed_save)):
        pass
    assert loop.ckpt.finish() is False
    assert not loop.saved and "ended without ckpt.step(15)" in caplog.text


def test_the_last_step_of_such_a_loop_may_be_saved_behind_it() -> None:
    loop = Loop()
    for _ in loop.steps(CALLS["step"]):
        pass
    assert loop.ckpt.save(15) and loop.ckpt.finish()
    assert loop.saved == {15: 15}


def test_such_a_loop_waits_for_the_save_before() -> None:
    loop = Loop()
    for _ in loop.steps(lambda ckpt, step: ckpt.save(step)):
        pass
    assert loop.link.files and loop.saved == {10: 10}


@pytest.mark.parametrize("call", ["step", "due", "save"])
def test_a_state_is_not_saved_under_a_step_after_which_an_optimizer_has_stepped(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    loop.plain(CALLS.get(call, loop.failed_save))
    assert not loop.ckpt.finish()
    assert not loop.saved and loop.link.skipped[10] == "an optimizer has stepped since then"
    assert "training ends with step 10, which has no checkpoint" in caplog.text


def test_the_last_step_is_saved_once_more_if_its_save_failed_and_it_is_the_state() -> None:
    loop = Loop()
    loop.plain(loop.failed_save, last=10)
    assert loop.ckpt.finish() and loop.saved == {10: 10}


def test_training_behind_a_saved_step_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    loop.plain(lambda ckpt, step: ckpt.save(step))
    assert loop.ckpt.finish() and loop.saved == {10: 10}
    assert "the state at the end is not saved: an optimizer has stepped since step 10" in caplog.text


def test_a_step_named_again_is_that_of_the_state_then() -> None:
    """As in a program that calls `due` before the last optimizer of a step has stepped."""
    loop = Loop()
    loop.plain(CALLS["due"], last=10)
    loop.optimizer.step()
    loop.ckpt.due(10)
    assert loop.ckpt.finish() and loop.saved == {10: 10}


def test_a_loop_that_is_left_behind_one_more_optimizer_step_saves_nothing() -> None:
    loop = Loop()
    for step in loop.steps(CALLS["step"]):
        if step == 10:
            loop.optimizer.step()
            break
    assert not loop.saved and loop.link.skipped[10] == "an optimizer has stepped since then"


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_finish_behind_a_loop_that_has_gone_on_saves_nothing(has_optimizer: bool) -> None:
    loop = Loop(has_optimizer=has_optimizer)
    for step in loop.steps(CALLS["step"]):
        if step == 12:
            break
    assert not loop.ckpt.finish()
    why = "an optimizer has stepped" if has_optimizer else "the loop has gone on"
    assert not loop.saved and loop.link.skipped[10] == f"{why} since then"


@pytest.mark.parametrize("has_warm_up", [True, False])
def test_a_loop_whose_optimizer_steps_are_not_counted_saves_no_later_state(has_warm_up: bool) -> None:
    """As with steps that are replayed from a CUDA graph, after one that was recorded."""
    loop = Loop()
    for step in loop.ckpt.steps(total=35):
        if has_warm_up and step == 1:
            loop.train()
        else:
            with loop.ckpt.lock(), torch.no_grad():
                loop.model.weight.add_(1.0)
                loop.done["steps"] += 1
        if step % 10 == 0:
            loop.ckpt.step(step)
    assert not loop.ckpt.finish() and set(loop.saved) <= {20}


def test_finish_behind_a_loop_that_is_left_at_the_top_saves_the_last_step() -> None:
    loop = Loop()
    for step in loop.ckpt.steps(total=1000):
        if step > 15:
            break
        loop.train()
        loop.ckpt.step(step)
    assert loop.ckpt.finish() and loop.saved == {15: 15}


def test_finish_behind_data_that_ends_before_the_loop_saves_the_last_step() -> None:
    loop = Loop()
    for step, _ in zip(loop.ckpt.steps(total=1000), range(15), strict=False):
        loop.train()
        loop.ckpt.step(step)
    assert loop.ckpt.finish() and loop.saved == {15: 15}


def test_a_loop_whose_last_step_changes_nothing_saves_the_step_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a batch that is skipped, or micro-batches after the last optimizer step."""
    loop = Loop()
    for step in loop.ckpt.steps(total=15):
        if step < 15:
            loop.train()
            loop.ckpt.step(step)
    assert loop.ckpt.finish() and loop.saved == {14: 14}
    assert "ended without ckpt.step(15)" in caplog.text


def test_a_state_without_an_optimizer_counts_as_that_of_the_last_step() -> None:
    """Nothing shows that it has changed."""
    loop = Loop(has_optimizer=False)
    loop.plain(loop.failed_save, last=10)
    assert loop.ckpt.finish() and loop.saved == {10: 10}


def test_a_run_that_begins_with_anothers_last_step_saves_it_as_its_own(tmp_path: Path) -> None:
    first = Loop()
    first.plain(lambda ckpt, step: ckpt.step(step), last=20)
    assert first.ckpt.finish()
    first.ckpt.close()
    other = first.link.resumed(tmp_path, 20)
    options = RunOptions(resume="s3://bucket/other", memory="double")
    begins = Begins(options=options, given=replace(other.given, checkpoint=None), other=other.given)
    for link, has_saved in ((begins, True), (other, False)):
        ckpt = Checkpointer(link=link, model=first.model, done=first.done, optimizer=first.optimizer)
        assert list(ckpt.steps(total=20)) == []
        assert ckpt.finish() and list(link.files) == [20] * has_saved
        ckpt.close()


@pytest.mark.parametrize("live", [10, 15])
def test_a_live_state_is_saved_at_the_end_unless_the_run_has_its_step(live: int, tmp_path: Path) -> None:
    first = Loop()
    first.plain(lambda ckpt, step: ckpt.save(step), last=10)
    first.ckpt.close()
    link = first.link.resumed(tmp_path, 10)
    ckpt = Checkpointer(link=link, model=first.model, done=first.done, optimizer=first.optimizer)
    ckpt.restore(live_step=live)
    assert ckpt.finish() and list(link.files) == [15] * (live == 15)
    ckpt.close()
