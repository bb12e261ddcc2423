"""A loop over `steps` that is left before its end, with an iterator that the program still refers to."""

from __future__ import annotations

import gc

import pytest
from torch import nn

from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import close_all
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
