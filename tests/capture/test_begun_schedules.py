"""A schedule that begins as built: the rates of its optimizer, and a cycled momentum, do so too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from ray_ckpt.capture.load import RestoreInfo
from ray_ckpt.config import RunOptions
from ray_ckpt.core.values import SessionKey
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink
from tests.capture.test_classes import AT, MakeOptimizer, Training, Wrapped, restored, saved, state_of


def adamw(params: list[Any]) -> Optimizer:
    return optim.AdamW(params, lr=1e-3)


def sgd(params: list[Any]) -> Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.7)


def of_tensors(params: list[Any]) -> Optimizer:
    return optim.AdamW(params, lr=torch.tensor(1e-3), foreach=False)


def two_groups(params: list[Any]) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.2}]
    return optim.SGD(groups, lr=0.1, momentum=0.7)


def one_cycle(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=50
    )


def warm_cosine(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optimizer, 8),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "warm cosine": warm_cosine,
    "one cycle": one_cycle,
    "swa": lambda o: SWALR(o, 0.05, anneal_epochs=5),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)], o),
}


def training_of(make: MakeOptimizer, kind: str | None) -> Training:
    return Training(make, None if kind is None else SCHEDULES[kind])


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def check_begins_as_built(training: Training, built: Training) -> None:
    """Check that the two have the same rates, and other settings, now and in the next steps."""
    for _ in range(6):
        assert settings_of(training.optimizer) == settings_of(built.optimizer)
        assert training.scheduler is not None and built.scheduler is not None
        assert training.scheduler.get_last_lr() == built.scheduler.get_last_lr()
        training.step()
        built.step()


@pytest.mark.parametrize("make", [adamw, sgd, of_tensors, two_groups])
@pytest.mark.parametrize(
    ("then", "now"),
    [
        (None, "linear"),
        (None, "one cycle"),
        ("exponential", "cosine"),
        ("exponential", "warm cosine"),
        ("one cycle", "lambda"),
        ("linear", "one cycle"),
        ("one cycle", "swa"),
        ("swa", "chained"),
        ("warm cosine", "multiplicative"),
    ],
)
def test_the_rates_begin_as_built(then: str | None, now: str, make: MakeOptimizer, tmp_path: Path) -> None:
    link = saved(training_of(make, then))
    training, built = training_of(make, now), training_of(make, now)
    live = [group["lr"] for group in training.optimizer.param_groups]
    restored(link, tmp_path, training, anew=("scheduler",))
    assert state_of(training.optimizer), "it is restored"
    if make is of_tensors:
        assert [
            group["lr"] is lr for group, lr in zip(training.optimizer.param_groups, live, strict=True)
        ] == [True]
    check_begins_as_built(training, built)


@pytest.mark.parametrize("now", ["linear", "cosine", "one cycle"])
def test_an_optimizer_and_its_schedule_begin_as_built(now: str, tmp_path: Path) -> None:
    link = saved(training_of(adamw, "exponential"))
    training, built = training_of(sgd, now), training_of(sgd, now)
    info = restored(link, tmp_path, training, anew=("scheduler", "optimizer"))
    rates = [changed for changed in info.changed if changed.name == "optimizer.lr"]
    start = built.optimizer.param_groups[0]["initial_lr"]
    assert [(c.built, c.saved, c.is_kept) for c in rates] == [(start, 1e-3, True)]
    check_begins_as_built(training, built)


def test_a_rate_that_differs_is_listed_as_kept_and_other_settings_as_restored(tmp_path: Path) -> None:
    link = saved(Training(lambda p: optim.AdamW(p, lr=1e-3, betas=(0.9, 0.98)), SCHEDULES["one cycle"]))
    training = Training(lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.5), SCHEDULES["exponential"])
    info = restored(link, tmp_path, training, anew=("scheduler",))
    assert {c.name: (c.built, c.saved, c.is_kept) for c in info.changed} == {
        "optimizer.lr": (1e-2, 1e-3 / 25, True),
        "optimizer.betas": ((0.9, 0.999), (0.9, 0.98), False),
        "optimizer.weight_decay": (0.5, 0.01, False),
    }
    assert training.optimizer.param_groups[0]["lr"] == 1e-2


def test_a_schedule_beside_one_that_is_restored_leaves_the_saved_rate(tmp_path: Path) -> None:
    link = saved(training_of(sgd, "exponential"))
    training = training_of(sgd, "exponential")
    plateau = lr_scheduler.ReduceLROnPlateau(training.optimizer)
    training.more["plateau"] = plateau
    restored(link, tmp_path, training, anew=("plateau",))
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**AT)


def test_each_optimizer_has_the_rate_of_its_own_schedule(tmp_path: Path) -> None:
    def built(kind: str) -> Training:
        training = training_of(sgd, "exponential")
        scale = training.more["scale"] = torch.nn.Parameter(torch.ones(2))
        other = training.more["other"] = optim.AdamW([scale], lr=1e-2)
        training.more["others"] = SCHEDULES[kind](other)
        return training

    link, training = saved(built("exponential")), built("linear")
    restored(link, tmp_path, training, anew=("others",))
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**AT)
    assert training.more["other"].param_groups[0]["lr"] == pytest.approx(1e-3)


class Prepared:
    """A schedule in a wrapper, as Accelerate makes them."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


def test_a_schedule_and_an_optimizer_in_wrappers_begin_as_built(tmp_path: Path) -> None:
    link, training = saved(training_of(sgd, None)), training_of(sgd, "linear")
    inner = training.optimizer
    training.optimizer = Wrapped(inner)
    training.more["scheduler"] = Prepared(training.scheduler)
    restored(link, tmp_path, training, anew=("scheduler",))
    assert inner.param_groups[0]["lr"] == pytest.approx(0.01)


@dataclass(slots=True)
class Begins(LocalLink):
    """A rank of a run that begins with another run's checkpoint."""

    other: RestoreTicket = field(default_factory=lambda: RestoreTicket(session_key=(1, 1), checkpoint=None))

    def origin(self, session_key: SessionKey) -> RestoreTicket | None:
        return self.other


def begun_from(link: LocalLink, folder: Path, training: Training, **options: Any) -> RestoreInfo:
    """Restore into a new run that begins with the checkpoint of `link`."""
    other = link.resumed(folder, AT).given
    begins = Begins(options=RunOptions.parse(**options), given=replace(other, checkpoint=None), other=other)
    ckpt = Checkpointer(link=begins, **training.objects)
    info = ckpt.restore()
    ckpt.close()
    assert info is not None
    return info


@pytest.mark.parametrize("then", [None, "cosine", "one cycle"])
def test_a_run_that_begins_with_an_optimizer_alone_has_its_schedule_as_built(
    then: str | None, tmp_path: Path
) -> None:
    link = saved(training_of(sgd, then))
    training, built = training_of(sgd, "cosine"), training_of(sgd, "cosine")
    begun_from(link, tmp_path, training, init_from="s3://bucket/other", init_items=("model", "optimizer"))
    assert state_of(training.optimizer)
    check_begins_as_built(training, built)


def test_a_run_that_begins_with_a_schedule_too_goes_on_with_its_rate(tmp_path: Path) -> None:
    link, training = saved(training_of(sgd, "exponential")), training_of(sgd, "exponential")
    items = ("model", "optimizer", "scheduler")
    begun_from(link, tmp_path, training, init_from="s3://bucket/other", init_items=items)
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**AT)
    (tmp_path / "resumed").mkdir()
    training = training_of(sgd, "exponential")
    assert begun_from(link, tmp_path / "resumed", training, resume="s3://bucket/other").step == AT
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**AT)


def test_an_optimizer_without_a_schedule_has_the_saved_rate(tmp_path: Path) -> None:
    link, training = saved(training_of(sgd, "exponential")), training_of(sgd, None)
    restored(link, tmp_path, training, anew=("scheduler",))
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**AT)
