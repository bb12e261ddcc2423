"""A checkpoint of another optimizer or schedule: an error that names both, and a way to begin anew."""

from __future__ import annotations

import copy
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler

import ray_ckpt
from ray_ckpt.capture.items import OptimizerItem
from ray_ckpt.capture.load import RestoreInfo
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import MismatchError
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink
from tests.catalog.test_load import items_of
from tests.catalog.test_load import save as save_run
from tests.support.examples import every_few
from tests.support.sample_run import RunLog

AT = 7  # steps before the checkpoint
MakeOptimizer: TypeAlias = Callable[[list[Any]], Optimizer]


class Signed(Optimizer):
    """An optimizer as users write them: its state is not known before the first step."""

    key: str

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if not self.state[param]:
                        self.state[param][self.key] = torch.zeros_like(param)
                    moment = self.state[param][self.key]
                    moment.lerp_(param.grad, 1 - group["beta"])
                    param.sub_(moment.sign(), alpha=group["lr"])


class Lion(Signed):
    key = "exp_avg"


class Tiger(Signed):
    key = "momentum"


class ClippedAdamW(optim.AdamW):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step(closure)


class Wrapped(Optimizer):
    """An optimizer that wraps another, as in Accelerate: state and groups are those of the inner one."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "AdamW amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": optim.Adagrad,
    "RMSprop": optim.RMSprop,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "LBFGS": optim.LBFGS,
    "Lion": Lion,
    "Tiger": Tiger,
    "ClippedAdamW": ClippedAdamW,
    "wrapped AdamW": lambda p: Wrapped(optim.AdamW(p)),
    "wrapped SGD": lambda p: Wrapped(optim.SGD(p, lr=0.1, momentum=0.9)),
}


class Training:
    """A model, an optimizer and perhaps a schedule."""

    def __init__(self, make: MakeOptimizer, schedule: Callable[[Optimizer], Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer: Any = make(list(self.model.parameters()))
        self.scheduler = schedule(self.optimizer) if schedule is not None else None
        self.more: dict[str, Any] = {} if self.scheduler is None else {"scheduler": self.scheduler}

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, **self.more}

    def step(self, times: int = 1) -> Training:
        for number in range(times):
            torch.manual_seed(number)

            def closure() -> Any:
                self.optimizer.zero_grad()
                loss: Any = self.model(torch.randn(5, 3)).square().mean()
                loss.backward()
                return loss

            is_with_closure = isinstance(self.optimizer, optim.LBFGS)
            if not is_with_closure:
                closure()
            self.optimizer.step(*[closure] * is_with_closure)
            if self.scheduler is not None:
                self.scheduler.step()
        return self


def saved(training: Training) -> LocalLink:
    """Return a link that has the checkpoint of step AT, after as many steps of this training."""
    link = LocalLink()
    ckpt = Checkpointer(link=link, **training.objects)
    ckpt.restore()
    training.step(AT)
    ckpt.save(AT)
    ckpt.close()
    return link


def restored(link: LocalLink, folder: Path, training: Training, **options: Any) -> RestoreInfo:
    ckpt = Checkpointer(link=link.resumed(folder, AT, RunOptions.parse(**options)), **training.objects)
    info = ckpt.restore()
    ckpt.close()
    assert info is not None and info.step == AT
    return info


def state_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the state of each parameter."""
    every = [param for group in optimizer.param_groups for param in group["params"]]
    return copy.deepcopy([dict(optimizer.state[param]) for param in every if param in optimizer.state])


MISFITS = [
    ("AdamW", "SGD", "does not use exp_avg, exp_avg_sq, step"),
    ("AdamW", "SGD momentum", "does not use exp_avg, exp_avg_sq, step and lacks momentum_buffer"),
    ("AdamW", "Adagrad", "lacks sum"),
    ("AdamW", "RMSprop", "lacks square_avg"),
    ("AdamW", "NAdam", "lacks mu_product"),
    ("AdamW", "Adamax", "lacks exp_inf"),
    ("AdamW", "Adafactor", "lacks"),
    ("SGD momentum", "AdamW", "does not use momentum_buffer and lacks exp_avg"),
    ("Adadelta", "RMSprop", "does not use acc_delta"),
    ("NAdam", "Adam", "does not use mu_product"),
    ("AdamW", "LBFGS", "is not known"),
    ("LBFGS", "AdamW", "lacks exp_avg"),
    ("AdamW", "Lion", "is not known"),
    ("Lion", "AdamW", "lacks exp_avg_sq"),
    ("Lion", "Tiger", "is not known"),
    ("SGD momentum", "ClippedAdamW", "lacks exp_avg"),
    ("ClippedAdamW", "SGD", "does not use exp_avg"),
    ("AdamW", "wrapped SGD", "lacks momentum_buffer"),
    ("wrapped AdamW", "SGD", "does not use exp_avg"),
]


@pytest.mark.parametrize(("then", "now", "words"), every_few(MISFITS, 2))
def test_state_of_another_class_is_an_error_that_names_both(
    then: str, now: str, words: str, tmp_path: Path
) -> None:
    link, training = saved(Training(OPTIMIZERS[then])), Training(OPTIMIZERS[now])
    before = copy.deepcopy(training.model.state_dict())
    with pytest.raises(MismatchError) as caught:
        restored(link, tmp_path, training)
    for name in (then, now):
        assert name.removeprefix("wrapped ").split()[0] in str(caught.value)
    assert words in str(caught.value)
    assert 'anew=("optimizer",)' in caught.value.hint
    now_there = training.model.state_dict()
    assert all(torch.equal(now_there[name], before[name]) for name in before), "nothing was changed"


@pytest.mark.parametrize("now", every_few(sorted({now for _, now, _ in MISFITS}), 2))
def test_an_optimizer_begins_anew_where_the_state_is_of_another_class(now: str, tmp_path: Path) -> None:
    then = "SGD momentum" if "Adam" in now else "AdamW"
    source, training = Training(OPTIMIZERS[then]), Training(OPTIMIZERS[now])
    link, built = saved(source), copy.deepcopy(training.optimizer.param_groups)
    state = state_of(training.optimizer)
    restored(link, tmp_path, training, anew=("optimizer",))
    assert all(
        torch.equal(*pair)
        for pair in zip(source.model.parameters(), training.model.parameters(), strict=True)
    )
    assert str(state_of(training.optimizer)) == str(state)
    for group, was in zip(training.optimizer.param_groups, built, strict=True):
        assert group.keys() == was.keys(), "no setting of the other class"
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in was.items() if k != "params"
        }
    training.step(3)


@pytest.mark.parametrize("kind", every_few(OPTIMIZERS))
def test_an_optimizer_of_its_own_class_is_restored_whether_or_not_it_may_begin_anew(
    kind: str, tmp_path: Path
) -> None:
    source = Training(OPTIMIZERS[kind])
    link = saved(source)
    for options in ({}, {"anew": ("optimizer",)}):
        training = Training(OPTIMIZERS[kind])
        restored(link, tmp_path, training, **options)
        assert str(state_of(training.optimizer)) == str(state_of(source.optimizer))
        assert training.step(2).model[0].weight.isfinite().all()


@pytest.mark.parametrize(
    ("then", "now"),
    every_few(
        [
            ("AdamW", "Adam"),
            ("Adam", "AdamW"),
            ("Adam", "RAdam"),
            ("AdamW", "AdamW fused"),
            ("AdamW", "AdamW foreach"),
            ("AdamW", "AdamW amsgrad"),  # the setting comes back too
            ("AdamW amsgrad", "AdamW"),
            ("SGD", "SGD momentum"),
            ("SGD momentum", "SGD"),
            ("SGD", "AdamW"),  # no state at all
            ("SGD", "Adagrad"),
            ("AdamW", "ClippedAdamW"),
            ("ClippedAdamW", "AdamW"),
            ("wrapped AdamW", "AdamW"),
            ("AdamW", "wrapped AdamW"),
        ],
        2,
    ),
)
def test_state_that_fits_is_restored_whatever_the_class_is_called(
    then: str, now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, training = Training(OPTIMIZERS[then]), Training(OPTIMIZERS[now])
    link = saved(source)
    with caplog.at_level(logging.WARNING, "ray_ckpt"):
        restored(link, tmp_path, training)
    names = [name.removeprefix("wrapped ").split()[0] for name in (then, now)]
    assert (f"optimizer was saved by {names[0]}, and is {names[1]}" in caplog.text) == (names[0] != names[1])
    if then != "SGD":
        assert str(state_of(training.optimizer)) == str(state_of(source.optimizer))
    assert training.step(2).model[0].weight.isfinite().all()


def test_what_makes_a_class_is_not_taken_from_another_one(tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    info = restored(saved(Training(OPTIMIZERS["Adam"])), tmp_path, training)
    assert training.optimizer.param_groups[0]["decoupled_weight_decay"] is True
    assert [c.name for c in info.changed] == ["optimizer.weight_decay"], "its settings are as saved"
    # Adam can be an AdamW, by a setting that is listed.
    training = Training(OPTIMIZERS["Adam"])
    info = restored(saved(Training(OPTIMIZERS["AdamW"])), tmp_path, training)
    assert {c.name for c in info.changed} == {"optimizer.weight_decay", "optimizer.decoupled_weight_decay"}


def test_a_setting_that_is_kept_and_needs_other_state_is_an_error(tmp_path: Path) -> None:
    link = saved(Training(OPTIMIZERS["AdamW"]))
    with pytest.raises(MismatchError, match=r"max_exp_avg_sq.*optimizer\.amsgrad"):
        restored(link, tmp_path, Training(OPTIMIZERS["AdamW amsgrad"]), keep=("optimizer.*",))


def test_a_checkpoint_without_class_names_is_compared_by_state(tmp_path: Path) -> None:
    link = saved(Training(OPTIMIZERS["AdamW"]))
    shard = link.sealed[0]
    tree = json.loads(shard.state)
    assert tree.pop("classes") == {"optimizer": "torch.optim.adamw.AdamW"}
    object.__setattr__(shard, "state", json.dumps(tree).encode() + b"\n")
    for now in ("AdamW", "Adam", "Lion"):
        restored(link, tmp_path, Training(OPTIMIZERS[now]))
    for now in ("SGD", "RMSprop"):
        with pytest.raises(MismatchError, match="another class"):
            restored(link, tmp_path, Training(OPTIMIZERS[now]))


def test_an_optimizer_with_other_groups_begins_anew(tmp_path: Path) -> None:
    def halves(params: list[Any]) -> Optimizer:
        groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
        return optim.AdamW(groups)

    link = saved(Training(OPTIMIZERS["AdamW"]))
    with pytest.raises(MismatchError, match="optimizer: its groups have other parameters than in") as caught:
        restored(link, tmp_path, Training(halves))
    assert 'anew=("optimizer",)' in caught.value.hint
    training = Training(halves)
    restored(link, tmp_path, training, anew=("optimizer",))
    assert [group["lr"] for group in training.optimizer.param_groups] == [1e-3, 0.5]
    assert not state_of(training.optimizer)


def test_an_item_that_the_checkpoint_lacks_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = saved(Training(OPTIMIZERS["AdamW"]))
    training = Training(OPTIMIZERS["AdamW"], lambda o: lr_scheduler.ExponentialLR(o, 0.9))
    with pytest.raises(MismatchError, match="step 7 lacks 'scheduler', which is registered here") as caught:
        restored(link, tmp_path, training)
    assert 'anew=("scheduler",)' in caught.value.hint
    restored(link, tmp_path, training, anew=("scheduler",))
    assert training.scheduler is not None and training.scheduler.last_epoch == 0
    assert "scheduler begins anew: it is not in the checkpoint" in caplog.messages


def test_a_model_that_begins_anew_logs_what_is_not_used_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, training = saved(Training(OPTIMIZERS["AdamW"])), Training(OPTIMIZERS["AdamW"])
    training.model[1] = nn.Linear(4, 2)
    training.optimizer = optim.SGD(training.model.parameters())
    restored(link, tmp_path, training, anew=("model", "optimizer"))
    lines = [line for line in caplog.messages if "begins anew" in line]
    assert lines == [
        "model begins anew: its state in the checkpoint is not used (4 tensors, 2 of them would fit); "
        "2 differences: model.1.weight: shape (1, 4) in the checkpoint, (2, 4) here; ...",
        "optimizer begins anew: its state in the checkpoint is not used (12 tensors); "
        "1 difference: optimizer was saved by AdamW, and is SGD here",
    ]


@pytest.mark.parametrize("make", [optim.AdamW, Lion, optim.Adafactor])
def test_the_optimizer_of_a_model_that_begins_anew_keeps_no_state_of_other_shapes(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = saved(Training(make))

    def wider() -> Training:
        training = Training(make)
        training.model[1] = nn.Linear(4, 2)
        training.optimizer = make(training.model.parameters())
        return training

    with pytest.raises(MismatchError, match=r"optimizer: it has state of 1\.weight and 1 more") as caught:
        restored(link, tmp_path, wider(), anew=("model",))
    assert 'anew=("optimizer",)' in caught.value.hint
    training = wider()
    restored(link, tmp_path, training, anew=("model", "optimizer"))
    assert "1.weight and 1 more with another shape or dtype, which begin anew here" in caplog.text
    training.step(1)
    training = Training(make)  # the state fits, and is used
    restored(link, tmp_path, training, anew=("model", "optimizer"))
    assert state_of(training.optimizer)


def test_an_optimizer_fits_beside_another_item_that_begins_anew_with_its_names(tmp_path: Path) -> None:
    def registered(dtype: torch.dtype) -> Training:
        training = Training(optim.AdamW)
        ema = {n: p.detach().to(dtype, copy=True) for n, p in training.model.named_parameters()}
        training.more["ema"] = ema
        return training

    link, training = saved(registered(torch.bfloat16)), registered(torch.float32)
    restored(link, tmp_path, training, anew=("ema", "optimizer"))
    assert len(state_of(training.optimizer)) == 4


def test_an_optimizer_that_may_begin_anew_is_restored_with_the_memory_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, most, allocate = list[weakref.ref[torch.Tensor]](), 0, OptimizerItem.allocate

    def counting(*args: Any) -> torch.Tensor:
        nonlocal most
        tensor = allocate(*args)
        made.append(weakref.ref(tensor))
        most = max(most, sum(each() is not None for each in made))
        return tensor

    link = saved(Training(optim.AdamW))
    monkeypatch.setattr(OptimizerItem, "allocate", counting)
    restored(link, tmp_path, Training(optim.AdamW), anew=("optimizer",))
    assert most == 4 * 3  # step, exp_avg and exp_avg_sq of 4 parameters


def test_an_item_that_is_no_longer_registered_is_dropped_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = saved(Training(OPTIMIZERS["AdamW"], lambda o: lr_scheduler.ExponentialLR(o, 0.9)))
    training = Training(OPTIMIZERS["AdamW"])
    with pytest.raises(MismatchError, match="step 7 has 'scheduler', which is not registered here") as caught:
        restored(link, tmp_path, training)
    assert 'anew=("scheduler",)' in caught.value.hint
    restored(link, tmp_path, training, anew=("scheduler",))
    assert state_of(training.optimizer)
    assert "scheduler is not restored: it is not registered, and the option anew has it" in caplog.messages


def test_a_name_of_no_item_in_anew_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No error: an item that was dropped is in no later checkpoint, and the option may stay."""
    link = saved(Training(OPTIMIZERS["AdamW"]))
    restored(link, tmp_path, Training(OPTIMIZERS["AdamW"]), anew=("optimiser",))
    assert "anew has optimiser, which is neither registered nor in the checkpoint" in caplog.text
    assert "Did you mean optimizer?" in caplog.text


@pytest.mark.parametrize("kind", ["exponential", "cosine", "lambda"])
def test_a_new_optimizer_follows_the_restored_schedule_from_its_own_rate(kind: str, tmp_path: Path) -> None:
    schedules: dict[str, Callable[[Optimizer], Any]] = {
        "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
        "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    }
    link = saved(Training(OPTIMIZERS["AdamW"], schedules[kind]))
    training, whole = (Training(OPTIMIZERS["SGD momentum"], schedules[kind]) for _ in range(2))
    info = restored(link, tmp_path, training, anew=("optimizer",))
    assert "optimizer.lr" in {changed.name for changed in info.changed if changed.is_kept}
    whole.step(AT)
    group, same = training.optimizer.param_groups[0], whole.optimizer.param_groups[0]
    for _ in range(3):
        assert group["lr"] == pytest.approx(same["lr"])
        training.step()
        whole.step()


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (lambda o: lr_scheduler.StepLR(o, 3), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (lambda o: lr_scheduler.MultiStepLR(o, [3]), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (
            lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0),
            lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 1.0),
        ),
        (
            lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 3)], o),
            lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)], o),
        ),
    ],
)
def test_a_schedule_of_another_class_is_an_error_that_names_both(
    then: Callable[[Optimizer], Any], now: Callable[[Optimizer], Any], tmp_path: Path
) -> None:
    source, training = Training(optim.AdamW, then), Training(optim.AdamW, now)
    link = saved(source)

    def kinds(scheduler: Any) -> list[str]:
        return [type(s).__name__ for s in getattr(scheduler, "_schedulers", [scheduler])]

    with pytest.raises(MismatchError) as caught:
        restored(link, tmp_path, training)
    assert all(kind in str(caught.value) for kind in kinds(source.scheduler) + kinds(training.scheduler))
    training = Training(optim.AdamW, now)
    restored(link, tmp_path, training, anew=("scheduler",))
    assert {s.last_epoch for s in getattr(training.scheduler, "_schedulers", [training.scheduler])} == {0}
    assert state_of(training.optimizer)


def test_a_schedule_of_another_number_of_groups_is_an_error(tmp_path: Path) -> None:
    def halves(params: list[Any]) -> Optimizer:
        return optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)

    def schedule(optimizer: Optimizer) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, 0.9)

    link = saved(Training(OPTIMIZERS["AdamW"], schedule))
    with pytest.raises(MismatchError, match="1 parameter groups in the checkpoint, 2 here"):
        restored(link, tmp_path, Training(halves, schedule), anew=("optimizer",))


def test_load_into_names_both_classes_too(tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW"]).step(AT)
    save_run(RunLog(folder=tmp_path / "gpt"), [items_of(**training.objects)], step=AT)
    run, other = ray_ckpt.open(tmp_path / "gpt"), Training(OPTIMIZERS["SGD momentum"])
    with pytest.raises(MismatchError, match=r"AdamW.*SGD") as caught:
        run.load(into=other.objects)
    assert "leave it out of `into`" in caught.value.hint
    run.load(into={"model": other.model})
