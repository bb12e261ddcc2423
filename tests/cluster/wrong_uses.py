"""Wrong uses of a Checkpointer, as newcomers write them: one loop each, and what has to name it.

A loop runs on each rank of a group whose steps are collective, as data-parallel training is. To add one,
write the loop and give it a line in WRONG_USES; ARE_RIGHT has what looks odd and is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

import ray_ckpt

STEP_S = 0.05
TOTAL = 200
EVALUATION_S = 8.0  # longer than other ranks wait before they log a warning


class Rank:
    """Objects of a loop on one rank. A step of training waits for all ranks, as all-reduced gradients do."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def make(self) -> ray_ckpt.Checkpointer:
        return ray_ckpt.Checkpointer(model=self.model, optimizer=self.optimizer)

    def backward(self) -> None:
        self.model(torch.ones(2, 4)).square().mean().backward()
        for param in self.model.parameters():
            dist.all_reduce(param.grad)

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(STEP_S)

    def train_all(self, step: Callable[[ray_ckpt.Checkpointer, int], None], total: int = TOTAL) -> None:
        """Train, with `step(ckpt, number)` after each step."""
        ckpt = self.make()
        for number in ckpt.steps(total=total):
            self.train()
            step(ckpt, number)
        ckpt.close()


Loop: TypeAlias = Callable[[Rank], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongUse:
    """`error` is the name of what ends training; None: training goes on. `words` are in it, or in a log.

    `after` is a loop that trains in the same run before, in a group of its own.
    """

    loop: Loop
    error: str | None
    words: str
    options: Mapping[str, Any] = field(default_factory=dict)
    after: str = ""


def step_on_rank_0(rank: Rank) -> None:
    rank.train_all(lambda ckpt, number: ckpt.step(number) if rank.rank == 0 else None)


def step_on_rank_0_without_an_optimizer(rank: Rank) -> None:
    ckpt = ray_ckpt.Checkpointer(model=rank.model)
    for number in ckpt.steps(total=TOTAL):
        rank.backward()
        with ckpt.lock():
            nn.init.constant_(rank.model.weight, number)
        time.sleep(STEP_S)
        if rank.rank == 0:
            ckpt.step(number)


def save_on(saver: int) -> Loop:
    def loop(rank: Rank) -> None:
        ckpt = rank.make()
        ckpt.restore()
        for number in range(1, TOTAL + 1):
            rank.train()
            if rank.rank == saver and number % 5 == 0:
                ckpt.save(number)
        ckpt.close()

    return loop


def save_besides_on_rank_0(rank: Rank) -> None:
    def step(ckpt: ray_ckpt.Checkpointer, number: int) -> None:
        if rank.rank == 0 and number % 7 == 0:
            ckpt.save(number)
        ckpt.step(number)

    rank.train_all(step)


def skip(skipped: int) -> Loop:
    def loop(rank: Rank) -> None:
        rank.train_all(lambda ckpt, n: None if rank.rank == 1 and n == skipped else ckpt.step(n))

    return loop


def stop_after(last: int) -> Loop:
    def loop(rank: Rank) -> None:
        rank.train_all(lambda ckpt, n: ckpt.step(n) if rank.rank == 0 or n <= last else None)

    return loop


def save_other_steps(rank: Rank) -> None:
    ckpt = rank.make()
    ckpt.restore()
    for number in range(1, TOTAL + 1):
        rank.train()
        if number % 10 == rank.rank:
            ckpt.save(number)
    ckpt.close()


def count_differently(rank: Rank) -> None:
    rank.train_all(lambda ckpt, n: ckpt.step(n if rank.rank == 0 else 2 * n))


def make_on_rank_0(rank: Rank) -> None:
    if rank.rank == 0:
        rank.make().restore()
    rank.train()


def restore_on_rank_0(rank: Rank) -> None:
    ckpt = rank.make()
    if rank.rank == 0:
        ckpt.restore()
    rank.train()


def register_other_items(rank: Rank) -> None:
    ckpt = rank.make() if rank.rank == 0 else ray_ckpt.Checkpointer(model=rank.model)
    for number in ckpt.steps(total=TOTAL):
        rank.train()
        ckpt.step(number)


def close_early(rank: Rank) -> None:
    ckpt = rank.make()
    ckpt.restore()
    for number in range(1, TOTAL + 1):
        rank.train()
        if rank.rank == 1 and number == 7:
            ckpt.close()
        if rank.rank == 0 or number < 7:
            ckpt.step(number)


def break_early(rank: Rank) -> None:
    ckpt = rank.make()
    for number in ckpt.steps(total=TOTAL):
        rank.train()
        ckpt.step(number)
        if rank.rank == 1 and number == 7:
            break
    for _ in range(TOTAL - 7 if rank.rank == 1 else 0):
        rank.train()


def accumulate_and_step_on_rank_0(rank: Rank) -> None:
    def step(ckpt: ray_ckpt.Checkpointer, number: int) -> None:
        if rank.rank == 0 and number % 4 == 0:
            ckpt.step(number)

    rank.train_all(step)


def give(first: int, *rest: Any) -> Loop:
    """Return these numbers of steps, one after another, on all ranks."""

    def loop(rank: Rank) -> None:
        ckpt = rank.make()
        ckpt.restore()
        for number in (*range(1, first + 1), *rest):
            rank.train()
            ckpt.step(number)

    return loop


def count_each_epoch(rank: Rank) -> None:
    ckpt = rank.make()
    ckpt.restore()
    for _epoch in range(4):
        for number in range(1, 8):
            rank.train()
            ckpt.step(number)


def step_before_the_restore(rank: Rank) -> None:
    ckpt = rank.make()
    rank.train()
    ckpt.step(1)


def count_one_more_on_rank_1(rank: Rank) -> None:
    """Complete one step more on rank 1 than on the others before each number."""

    def step(ckpt: ray_ckpt.Checkpointer, number: int) -> None:
        if rank.rank == 1:
            ckpt.step(10 * number - 1)  # none that is due
        ckpt.step(10 * number)

    rank.train_all(step)


def restore_into(make: Callable[[Any], torch.optim.Optimizer]) -> Loop:
    """Restore what `train` has saved into another optimizer."""

    def loop(rank: Rank) -> None:
        rank.optimizer = make(rank.model.parameters())
        train(rank)

    return loop


# What is right.


def train(rank: Rank) -> None:
    rank.train_all(lambda ckpt, number: ckpt.step(number), total=40)


def wait_and_flush_on_rank_0(rank: Rank) -> None:
    def step(ckpt: ray_ckpt.Checkpointer, number: int) -> None:
        ckpt.step(number)
        if rank.rank == 0 and number % 10 == 0:
            ckpt.wait("local", timeout_s=30.0)
            ckpt.flush()
            ckpt.annotate(number, metrics={"eval": 1.0})

    rank.train_all(step, total=40)


def evaluate_on_rank_0(rank: Rank) -> None:
    def step(ckpt: ray_ckpt.Checkpointer, number: int) -> None:
        if rank.rank == 0 and number == 10:
            time.sleep(EVALUATION_S)
        ckpt.step(number)

    rank.train_all(step, total=40)


COUNTS: dict[str, Any] = {"restore_timeout_s": 12.0}
SKIPPED = r"some ranks only: rank\(s\) 1|Steps counted since the restore: \d+ or \d+"  # which one comes first

WRONG_USES: dict[str, WrongUse] = {
    "step on rank 0": WrongUse(
        loop=step_on_rank_0, error="SaveNotCollective", words=r"some ranks only: rank\(s\) 1"
    ),
    "step on rank 0, no optimizer": WrongUse(
        loop=step_on_rank_0_without_an_optimizer,
        error="SaveNotCollective",
        words=r"some ranks only: rank\(s\) 1",
    ),
    "save on rank 0": WrongUse(
        loop=save_on(0), error="SaveNotCollective", words=r"some ranks only: rank\(s\) 1"
    ),
    "save on rank 1": WrongUse(
        loop=save_on(1), error="SaveNotCollective", words=r"some ranks only: rank\(s\) 0"
    ),
    "save besides on rank 0": WrongUse(
        loop=save_besides_on_rank_0, error="SaveNotCollective", words=r"Step 7 .*rank\(s\) 1"
    ),
    "skip a step that is saved": WrongUse(loop=skip(15), error="CollectiveError", words=SKIPPED),
    "skip a step that is not saved": WrongUse(
        loop=skip(7), error="CollectiveError", words="Steps counted since the restore: 9 or 10"
    ),
    "skip a step that is reported": WrongUse(loop=skip(10), error="CollectiveError", words=SKIPPED),
    "stop after a step": WrongUse(
        loop=stop_after(12), error="SaveNotCollective", words=r"some ranks only: rank\(s\) 1"
    ),
    "save other steps": WrongUse(loop=save_other_steps, error="SaveNotCollective", words=r"rank\(s\) \d"),
    "count one more on rank 1": WrongUse(
        loop=count_one_more_on_rank_1, error="CollectiveError", words="Steps counted since the restore"
    ),
    "count differently": WrongUse(loop=count_differently, error="SaveNotCollective", words=r"rank\(s\) \d"),
    "a Checkpointer on rank 0": WrongUse(
        loop=make_on_rank_0,
        error="CollectiveError",
        words=r"has waited 12 s for rank\(s\) 1.*make a Checkpointer",
        options=COUNTS,
    ),
    "restore on rank 0": WrongUse(
        loop=restore_on_rank_0,
        error="CollectiveError",
        words=r"has waited 12 s for rank\(s\) 1.*call restore",
        options=COUNTS,
    ),
    "other items": WrongUse(loop=register_other_items, error="CollectiveError", words="do not hold the same"),
    "close early": WrongUse(loop=close_early, error="SaveNotCollective", words=r"rank\(s\) 1"),
    "break early": WrongUse(loop=break_early, error="SaveNotCollective", words=r"rank\(s\) 1"),
    "accumulate, and step on rank 0": WrongUse(
        loop=accumulate_and_step_on_rank_0, error="SaveNotCollective", words=r"rank\(s\) 1"
    ),
}
WRONG_USES |= {
    f"a step of {value!r}": WrongUse(
        loop=give(3, value), error="ConfigError", words="Count completed optimizer steps over the whole run"
    )
    for value in (0, -1, 1.5, "3", None)
}
WRONG_USES |= {
    name: WrongUse(loop=loop, error="ConfigError", words=words)
    for name, loop, words in (
        ("steps that go back", give(7, 2, 3, 4, 5), "Step 2 comes after step 7"),
        ("the same step twice", give(7, 7), "Step 7 comes twice"),
        ("a count that begins anew each epoch", count_each_epoch, "Step 1 comes after step 7"),
        ("step before the restore", step_before_the_restore, "step was called before restore"),
    )
}
WRONG_USES |= {
    f"AdamW into {name}": WrongUse(
        loop=restore_into(make), error="MismatchError", words=rf"AdamW.*{name}|{name}.*AdamW", after="train"
    )
    for name, make in (
        ("SGD", lambda params: torch.optim.SGD(params, lr=0.01)),
        ("RMSprop", lambda params: torch.optim.RMSprop(params, lr=0.01)),
        ("Adagrad", lambda params: torch.optim.Adagrad(params, lr=0.01)),
    )
}
ARE_RIGHT: Mapping[str, Loop] = {
    "train": train,
    "wait on rank 0": wait_and_flush_on_rank_0,
    "evaluate on rank 0": evaluate_on_rank_0,
}
