"""Numbers of steps: what a Checkpointer takes for one, and what it refuses at the first such call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import RankProgress
from ray_ckpt.errors import CollectiveError, ConfigError
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.step_count import MAX_STEP, StepCount
from tests.capture.local import LocalLink
from tests.core.driver import Harness, of

CALLS = ("step", "due", "save")


@dataclass
class Loop:
    """One rank that has restored `step`; a save is due after each fifth step."""

    rank: int = 0
    world_size: int = 1
    step: int = 0
    link: LocalLink = field(init=False)
    ckpt: Checkpointer = field(init=False)

    def __post_init__(self) -> None:
        options = RunOptions(every_steps=5, memory="single", max_block_s=10.0)
        self.link = LocalLink(options, rank=self.rank, world_size=self.world_size)
        self.ckpt = Checkpointer(link=self.link, model=torch.nn.Linear(2, 2))
        self.ckpt.restore()
        self.ckpt._count.restore(self.step)

    def call(self, name: str, step: Any) -> Any:
        return getattr(self.ckpt, name)(step)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.ckpt.close()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "step",
    [0, -1, 1.5, 1.0, "3", None, True, np.float64(1.0), np.True_, torch.tensor(1.5), [1], MAX_STEP + 1],
    ids=repr,
)
def test_what_is_no_step_is_an_error_at_once(loop: Loop, call: str, step: Any) -> None:
    with pytest.raises(ConfigError, match="optimizer steps over the whole run"):
        loop.call(call, step)
    loop.call(call, 1)  # nothing has been counted


@pytest.mark.parametrize("step", [torch.tensor(True), torch.tensor([1, 2]), float("nan"), 10**30], ids=repr)
def test_what_nearly_is_an_integer_is_refused(step: Any) -> None:
    with pytest.raises(ConfigError, match="optimizer steps over the whole run"):
        StepCount().complete(step, "step")


def test_a_loop_that_saves_and_never_steps_learns_once_that_it_has_no_salvages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warnings(*calls: str, rank: int = 0, salvage: bool = True) -> int:
        caplog.clear()
        options = RunOptions(every_steps=50, memory="single", max_block_s=10.0, salvage=salvage)
        with closing(Checkpointer(link=LocalLink(options, rank=rank), model=torch.nn.Linear(2, 2))) as ckpt:
            ckpt.restore()
            for step in (1, 2):
                for call in calls:
                    getattr(ckpt, call)(step)
        return sum("keeps no step for a salvage" in record.getMessage() for record in caplog.records)

    assert warnings("due", "save") == warnings("save") == 1
    assert warnings("step", "save") == warnings("step") == warnings("save", salvage=False) == 0
    assert warnings("save", rank=1) == 0  # rank 0 speaks for all


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("step", [5, np.int32(5), np.array(5), torch.tensor(5)], ids=repr)
def test_integers_of_every_kind_are_steps(loop: Loop, call: str, step: Any) -> None:
    loop.call(call, step)
    if call == "due":
        loop.ckpt.save(step)
    loop.ckpt.wait("local")
    assert list(loop.link.files) == [5] and type(loop.link.sealed[0].attempt.step) is int


def test_a_count_that_goes_back_is_an_error_before_anything_is_saved_again(loop: Loop) -> None:
    for step in range(1, 8):
        loop.ckpt.step(step)
    with pytest.raises(ConfigError, match="Step 2 comes after step 7"):
        loop.ckpt.step(2)
    loop.ckpt.flush()
    assert [shard.attempt.step for shard in loop.link.sealed] == [5]


@pytest.mark.parametrize("call", CALLS)
def test_a_count_that_begins_anew_each_epoch_is_an_error_in_the_second_one(loop: Loop, call: str) -> None:
    for step in (1, 2, 3):
        loop.call(call, step)
    with pytest.raises(ConfigError, match="Step 1 comes after step 3"):
        loop.call(call, 1)


@pytest.mark.parametrize("call", ["step", "save"])
def test_a_count_that_stands_still_is_an_error(loop: Loop, call: str) -> None:
    loop.call(call, 1)
    with pytest.raises(ConfigError, match="Step 1 comes twice"):
        loop.call(call, 1)


@pytest.mark.parametrize(
    "calls", [("step", "save"), ("due", "due", "save"), ("due", "step"), ("save", "step")]
)
def test_several_calls_may_be_about_one_step(loop: Loop, calls: tuple[str, ...]) -> None:
    for step in (1, 2):
        for call in calls:
            loop.call(call, step)


def test_a_save_that_captured_nothing_may_be_tried_again(loop: Loop) -> None:
    saver = loop.ckpt._saver
    assert saver is not None
    wait_free, saver.wait_free = saver.wait_free, lambda timeout_s: False  # type: ignore[method-assign]
    assert not loop.ckpt.save(3)
    saver.wait_free = wait_free  # type: ignore[method-assign]
    assert loop.ckpt.save(3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("step", [9, 10])
def test_a_step_that_was_restored_is_not_done_again(call: str, step: int) -> None:
    loop = Loop(step=10)
    with pytest.raises(ConfigError, match=rf"Step {step} does not come after step 10, which was restored"):
        loop.call(call, step)
    loop.call(call, 11)
    loop.ckpt.close()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "prepare, reason", [(lambda ckpt: None, "before restore"), (lambda ckpt: ckpt.close(), "after close")]
)
def test_a_step_outside_of_the_loop_is_an_error_at_once(
    call: str, prepare: Callable[[Checkpointer], None], reason: str
) -> None:
    ckpt = Checkpointer(link=LocalLink(RunOptions(every_steps=5)), model=torch.nn.Linear(2, 2))
    if reason == "after close":
        ckpt.restore()
    prepare(ckpt)
    with pytest.raises(ConfigError, match=f"{call} was called {reason}"):
        getattr(ckpt, call)(1)
    ckpt.close()


@pytest.mark.parametrize("total", [10.0, "10", None, True])
def test_a_total_that_is_no_integer_is_an_error(total: Any) -> None:
    ckpt = Checkpointer(link=LocalLink(RunOptions()), model=torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="total"):
        ckpt.steps(total=total)
    ckpt.close()


def test_an_annotation_of_what_is_no_step_costs_a_warning(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.ckpt.step(1)
    for step in ("3", None, 1.5, True, 0):
        loop.ckpt.annotate(step, metrics={"a": 1.0})  # type: ignore[arg-type]
        assert f"step {step} was not annotated" in caplog.text
    assert not loop.link.annotated


# -- ranks that count differently ------------------------------------------------------------------------


def publish(first: Loop, second: Loop, step: int) -> m.NotifyOutcome:
    """Return the outcome of the save of `step`, with the shards that the two ranks have sealed."""
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(step)
    for node, loop in zip("ab", (first, second), strict=True):
        (sealed,) = (s for s in loop.link.sealed if s.attempt.step == step)
        run.feed(run.stored(attempt, node, replicated=sealed.replicated))
    return of(run.feed(run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a")), m.NotifyOutcome)[0]


def two() -> tuple[Loop, Loop]:
    torch.manual_seed(0)
    first = Loop(rank=0, world_size=2)
    torch.manual_seed(0)
    return first, Loop(rank=1, world_size=2)


@pytest.mark.parametrize("call", ["step", "save"])
@pytest.mark.parametrize(
    "count, step, text",
    [
        (lambda n: n + 1, 10, "10 on rank.s. 0; 9 on rank.s. 1"),
        (lambda n: 2 * n, 10, "10 on .* 0; 5 on .* 1"),
    ],
)
def test_ranks_whose_counts_differ_get_an_error_with_both(
    call: str, count: Callable[[int], int], step: int, text: str
) -> None:
    ranks = two()
    for number in range(1, 11):
        for loop, n in zip(ranks, (number, count(number)), strict=True):
            loop.call(call, n)
            loop.ckpt.flush()
    error = publish(*ranks, step).error
    assert isinstance(error, CollectiveError) and error.fields["step"] == step
    with pytest.raises(CollectiveError, match=f"Step 10 .*{text}") as caught:
        raise error
    assert "not hold the same parameters" not in str(caught.value)
    for loop in ranks:
        loop.ckpt.close()


def test_ranks_that_count_alike_are_not_compared_by_their_calls() -> None:
    """One rank calls `due` on behalf of the others, which call `save` alone."""
    ranks = two()
    for number in range(1, 11):
        if ranks[0].ckpt.due(number):
            for loop in ranks:
                loop.ckpt.save(number)
                loop.ckpt.flush()
    assert publish(*ranks, 10).error is None
    for loop in ranks:
        loop.ckpt.close()


def test_ranks_that_miss_an_agreed_step_have_counted_it() -> None:
    counts = [StepCount(), StepCount()]
    for step in range(1, 8):
        for count in counts:
            count.complete(step, "step")
    assert counts[0].mark() == counts[1].mark() == "steps:7"


def test_ranks_that_did_not_save_are_listed_with_their_steps() -> None:
    run = Harness("ab")
    run.open("ab")
    run.feed(run.stored(run.attempt(10), "a"))
    progress = RankProgress(step=1011, saved_step=0)
    effects = run.feed(m.RanksProgressed(session_key=run.plan.session_key, ranks={1: progress}))
    (notified,) = of(effects, m.NotifyOutcome)
    assert notified.error is not None and "rank 1 has completed step 1011 last" in str(notified.error)
    assert "the same number" in notified.error.hint
    assert replace(progress, step=1012) != progress


def test_ranks_that_save_other_steps_are_listed_when_time_is_up() -> None:
    run = Harness("ab")
    run.open("ab")
    run.feed(run.stored(run.attempt(10), "a"), run.stored(run.attempt(11), "b"))
    where = {0: RankProgress(step=10, saved_step=10), 1: RankProgress(step=11, saved_step=11)}
    before = run.feed(m.RanksProgressed(session_key=run.plan.session_key, ranks=where))
    effects = (*before, *run.tick(61.0))
    texts = [str(each.error) for each in of(effects, m.NotifyOutcome)]
    assert any("rank 1 has completed step 11 last" in text for text in texts), texts
