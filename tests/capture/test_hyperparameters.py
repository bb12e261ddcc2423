"""Settings that a checkpoint changes are listed, and those in `keep` stay as the program built them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from ray_ckpt.capture.hyperparameters import MAX_ELEMENTS, Changed, Hyperparameters
from ray_ckpt.errors import ConfigError
from tests.capture.test_load import Saved, items_of
from tests.support.examples import every_few

OLD, NEW = 0.1, 0.03
STEPS = 60  # of a run, long enough for each schedule to have turned


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-9, abs=1e-15)


class Run:
    """A model, an optimizer with two groups, whose rates are one to two, and a scheduler."""

    def __init__(self, lr: float, schedule: Callable[[Optimizer], Any], *, tensor: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups: list[dict[str, Any]] = [
            {"params": list(part.parameters()), "lr": torch.tensor(value) if tensor else value}
            for part, value in zip(self.model, (lr, 2 * lr), strict=True)
        ]
        self.optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False)
        self.scheduler = schedule(self.optimizer)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    @property
    def lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def momenta(self) -> list[float]:
        return [group["momentum"] for group in self.optimizer.param_groups]

    def step(self, times: int = 1) -> Run:
        for _ in range(times):
            self.optimizer.step()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            else:
                self.scheduler.step()
        return self

    def resumed(self, saved: Run, folder: Path, keep: Collection[str] = ()) -> tuple[Changed, ...]:
        folder.mkdir(exist_ok=True)
        checkpoint = Saved(folder).save(items_of(**saved.objects))
        built = Hyperparameters(self.objects)
        built.check(keep)
        checkpoint.load(items_of(**self.objects))
        return built.loaded(keep)


def cosine(optimizer: Optimizer, t_max: int = 20, eta_min: float = 0.0) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, t_max, eta_min=eta_min)


def warm_cosine(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10), cosine(optimizer, 50, 0.001)]
    return lr_scheduler.SequentialLR(optimizer, parts, [10])


def chain(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 7), lr_scheduler.ExponentialLR(optimizer, 0.97)]
    return lr_scheduler.ChainedScheduler([*parts, cosine(optimizer, 25)], optimizer)


def one_cycle(optimizer: Optimizer, scale: float = 1.0, **others: Any) -> lr_scheduler.LRScheduler:
    rates = [group["lr"] * scale for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, rates, total_steps=STEPS + 40, **others)


def cyclic(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    rates = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.CyclicLR(
        optimizer, [r / 10 for r in rates], rates, step_size_up=7, mode="triangular2"
    )


class WarmUp(lr_scheduler.LRScheduler):
    """A scheduler as users write them."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.progress = 0.0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.progress = min(1.0, (self.last_epoch + 1) / self.warmup_steps)
        return [base * self.progress for base in self.base_lrs]


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    "step": lambda o: lr_scheduler.StepLR(o, 9, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [5, 5, 30], 0.3),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.2, 12),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.2, 0.7, 40),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.98),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 50, 2.0),
    "cosine": cosine,
    "cosine with a floor": lambda o: cosine(o, 20, 0.002),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2, eta_min=0.002),
    "sequential": warm_cosine,
    "chained": chain,
    "one cycle": one_cycle,
    "three phases": lambda o: one_cycle(o, three_phase=True, anneal_strategy="linear"),
    "cyclic": cyclic,
    "of a user": lambda o: WarmUp(o, 30),
}


@pytest.mark.parametrize("at", every_few([0, 1, 33, 10, 20], 2))
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_kept_rate_follows_its_schedule_as_if_it_had_been_so_from_the_start(
    kind: str, at: int, tmp_path: Path
) -> None:
    run, fresh = Run(NEW, SCHEDULES[kind]), Run(NEW, SCHEDULES[kind]).step(at)
    changed = run.resumed(Run(OLD, SCHEDULES[kind]).step(at), tmp_path, keep=["optimizer.lr"])
    assert {c.name for c in changed} >= {"optimizer.lr"}
    assert all(c.is_kept for c in changed)
    assert run.scheduler.get_last_lr() == run.lrs
    for _ in range(STEPS - at):
        assert run.lrs == close(fresh.lrs)
        assert run.momenta == close(fresh.momenta)
        run.step()
        fresh.step()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_progress_alone_is_no_difference(kind: str, tmp_path: Path) -> None:
    run, saved = Run(OLD, SCHEDULES[kind]), Run(OLD, SCHEDULES[kind]).step(23)
    assert run.resumed(saved, tmp_path, keep=["*"]) == ()
    assert (run.lrs, run.momenta) == (saved.lrs, saved.momenta)
    assert run.step(9).lrs == saved.step(9).lrs


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_is_not_kept_is_listed_and_stays_as_saved(kind: str, tmp_path: Path) -> None:
    run, saved = Run(NEW, SCHEDULES[kind]), Run(OLD, SCHEDULES[kind]).step(23)
    changed = run.resumed(saved, tmp_path)
    assert {c.name for c in changed} >= {"optimizer.lr"}
    assert not any(c.is_kept for c in changed)
    assert run.lrs == saved.lrs
    assert run.step(9).lrs == saved.step(9).lrs


@pytest.mark.parametrize("kind", ["cosine", "warm restarts", "sequential", "one cycle"])
def test_a_rate_that_is_a_tensor_is_set_in_place(kind: str, tmp_path: Path) -> None:
    run, fresh = Run(NEW, SCHEDULES[kind], tensor=True), Run(NEW, SCHEDULES[kind], tensor=True).step(12)
    held = [group["lr"] for group in run.optimizer.param_groups]
    run.resumed(Run(OLD, SCHEDULES[kind], tensor=True).step(12), tmp_path, keep=["optimizer.lr"])
    assert all(a is group["lr"] for a, group in zip(held, run.optimizer.param_groups, strict=True))
    assert run.lrs == pytest.approx(fresh.lrs, rel=1e-5)
    assert run.step(20).lrs == pytest.approx(fresh.step(20).lrs, rel=1e-4)


@pytest.mark.parametrize("tensor", [False, True])
def test_a_rate_without_a_schedule_is_put_back_as_built(tensor: bool, tmp_path: Path) -> None:
    def none(_: Optimizer) -> Any:
        return {}

    run = Run(NEW, none, tensor=tensor)
    held = run.optimizer.param_groups[0]["lr"]
    (changed,) = run.resumed(Run(OLD, none, tensor=tensor), tmp_path, keep=["optimizer.lr"])
    assert run.lrs == pytest.approx([NEW, 2 * NEW], rel=0 if not tensor else 1e-6)
    assert changed.built == pytest.approx((NEW, 2 * NEW))
    assert changed.saved == pytest.approx((OLD, 2 * OLD))
    assert run.optimizer.param_groups[0]["lr"] is held or not tensor


def test_a_tensor_as_built_stays_one_when_a_number_was_saved(tmp_path: Path) -> None:
    run = Run(NEW, lambda _: {}, tensor=True)
    held = run.optimizer.param_groups[0]["lr"]
    built = Hyperparameters(run.objects)
    run.optimizer.load_state_dict(Run(OLD, lambda _: {}).optimizer.state_dict())
    built.loaded(["*.lr"])
    assert run.optimizer.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(NEW)


def test_a_number_is_the_tensor_that_holds_it(tmp_path: Path) -> None:
    run = Run(NEW, lambda _: {}, tensor=True)
    built = Hyperparameters(run.objects)
    run.optimizer.load_state_dict(Run(NEW, lambda _: {}).optimizer.state_dict())
    assert built.loaded([]) == ()


def test_groups_that_had_another_rate_alone_are_moved(tmp_path: Path) -> None:
    run, saved = Run(OLD, SCHEDULES["exponential"]), Run(OLD, SCHEDULES["exponential"])
    second = saved.optimizer.param_groups[1]
    second["lr"] = second["initial_lr"] = saved.scheduler.base_lrs[1] = 7.0
    saved.step(5)
    (changed,) = run.resumed(saved, tmp_path, keep=["optimizer.lr"])
    assert (changed.built, changed.saved) == ((OLD, 2 * OLD), (OLD, 7.0))
    assert run.lrs == pytest.approx(Run(OLD, SCHEDULES["exponential"]).step(5).lrs, rel=1e-12)
    assert run.lrs[0] == saved.lrs[0]


@pytest.mark.parametrize("kind", ["cosine", "linear", "lambda", "warm restarts", "sequential", "cyclic"])
def test_a_group_that_had_been_still_starts_at_the_schedules_position(kind: str, tmp_path: Path) -> None:
    run, fresh = Run(NEW, SCHEDULES[kind]), Run(NEW, SCHEDULES[kind]).step(13)
    run.resumed(Run(0.0, SCHEDULES[kind]).step(13), tmp_path, keep=["optimizer.lr"])
    assert run.lrs == close(fresh.lrs)
    assert run.step(6).lrs == close(fresh.step(6).lrs)


@pytest.mark.parametrize("first", [cosine, cyclic])
def test_two_schedulers_of_one_optimizer_both_go_on_from_the_new_rate(
    first: Callable[[Optimizer], Any],
) -> None:
    def both(lr: float) -> tuple[Run, lr_scheduler.LRScheduler]:
        run = Run(lr, first)
        return run, lr_scheduler.ExponentialLR(run.optimizer, 0.9)

    (old, old_decay), (run, decay), (fresh, fresh_decay) = both(OLD), both(NEW), both(NEW)
    for each, other in ((old, old_decay), (fresh, fresh_decay)):
        for _ in range(8):
            each.step()
            other.step()
    built = Hyperparameters({**run.objects, "decay": decay})
    run.optimizer.load_state_dict(old.optimizer.state_dict())
    run.scheduler.load_state_dict(old.scheduler.state_dict())
    decay.load_state_dict(old_decay.state_dict())
    assert "optimizer.lr" in {c.name for c in built.loaded(["optimizer.lr"]) if c.is_kept}
    assert run.lrs == pytest.approx(fresh.lrs, rel=1e-12)
    assert (decay.base_lrs, run.scheduler.base_lrs) == (fresh_decay.base_lrs, fresh.scheduler.base_lrs)


def test_a_plateau_records_no_start_so_its_rate_is_not_listed_unless_kept(tmp_path: Path) -> None:
    def plateau(optimizer: Optimizer) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    saved = Run(OLD, plateau).step(10)
    assert saved.lrs[0] < OLD
    run = Run(NEW, plateau)
    assert run.resumed(saved, tmp_path / "a") == ()
    assert run.lrs == saved.lrs
    run = Run(NEW, plateau)
    (changed,) = run.resumed(saved, tmp_path / "b", keep=["optimizer.lr"])
    assert changed.name == "optimizer.lr"
    assert run.lrs == run.scheduler.get_last_lr() == [NEW, 2 * NEW]
    assert run.scheduler.last_epoch == 10


def test_a_cycle_whose_peak_differs_lists_and_keeps_all_its_rates(tmp_path: Path) -> None:
    def other_start(optimizer: Optimizer) -> Any:
        return one_cycle(optimizer, 3.0, div_factor=5.0, max_momentum=0.99)

    run, fresh = Run(OLD, other_start), Run(OLD, other_start).step(17)
    changed = run.resumed(Run(OLD, one_cycle).step(17), tmp_path, keep=["optimizer.lr"])
    kept = {c.name: c.is_kept for c in changed}
    assert kept == {
        "optimizer.lr": True,
        "optimizer.max_lr": True,
        "optimizer.min_lr": True,
        "optimizer.max_momentum": False,
    }
    assert run.lrs == close(fresh.lrs)
    assert run.step(30).lrs == close(fresh.step(30).lrs)
    assert run.momenta != fresh.momenta


def test_a_kept_peak_alone_leaves_the_start(tmp_path: Path) -> None:
    run = Run(OLD, lambda o: one_cycle(o, 3.0))
    changed = run.resumed(Run(OLD, one_cycle).step(17), tmp_path, keep=["optimizer.max_lr"])
    assert [c.name for c in changed if c.is_kept] == ["optimizer.max_lr"]
    first = run.optimizer.param_groups[0]
    assert (first["max_lr"], first["initial_lr"]) == (pytest.approx(3 * OLD), pytest.approx(OLD / 25))


def test_a_shorter_cycle_that_has_ended_already_does_not_raise_before_its_next_step(tmp_path: Path) -> None:
    def short(optimizer: Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, OLD, total_steps=10)

    run = Run(NEW, short)
    names = {c.name for c in run.resumed(Run(NEW, one_cycle).step(50), tmp_path, keep=["*"])}
    assert names >= {"scheduler.total_steps", "scheduler.schedule_phases", "optimizer.lr"}
    assert all(0 < lr < 1 for lr in run.lrs)


def test_the_length_of_a_cycle_goes_with_its_phases(tmp_path: Path) -> None:
    def long(optimizer: Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, [OLD, 2 * OLD], total_steps=400)

    run, fresh = Run(OLD, long), Run(OLD, long).step(18)
    run.resumed(Run(OLD, one_cycle).step(17), tmp_path, keep=["scheduler.total_steps"])
    assert run.step().lrs == close(fresh.lrs)


def test_betas_of_a_cycle_keep_the_first_where_the_cycle_has_it(tmp_path: Path) -> None:
    def adam(beta2: float) -> tuple[Optimizer, Any]:
        optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), betas=(0.9, beta2))
        return optimizer, lr_scheduler.OneCycleLR(optimizer, OLD, total_steps=50)

    (old, old_cycle), (new, _) = adam(0.999), adam(0.95)
    for _ in range(7):
        old.step()
        old_cycle.step()
    built = Hyperparameters({"optimizer": new})
    new.load_state_dict(old.state_dict())
    (changed,) = built.loaded(["optimizer.betas"])
    assert (changed.built, changed.saved) == ((0.95,), (0.999,))
    assert new.param_groups[0]["betas"] == (old.param_groups[0]["betas"][0], 0.95)


def test_a_longer_cosine_goes_on_from_the_restored_rate_without_a_jump(tmp_path: Path) -> None:
    saved = Run(OLD, lambda o: cosine(o, 100)).step(50)
    run = Run(OLD, lambda o: cosine(o, 200))
    (changed,) = run.resumed(saved, tmp_path, keep=["scheduler.T_max"])
    assert changed == Changed(name="scheduler.T_max", built=200, saved=100, is_kept=True)
    assert run.lrs == saved.lrs
    before = run.lrs[0]
    assert before * 0.98 < run.step().lrs[0] < before
    assert run.step(149).lrs[0] == pytest.approx(0.0, abs=1e-12)


def test_warm_restarts_find_their_place_in_cycles_of_another_length(tmp_path: Path) -> None:
    def restarts(first: int, growth: int) -> Callable[[Optimizer], Any]:
        return lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, first, growth)

    for i, (first, growth) in enumerate([(7, 1), (3, 2), (4, 3)]):
        run, fresh = Run(OLD, restarts(first, growth)), Run(OLD, restarts(first, growth)).step(22)
        run.resumed(Run(OLD, restarts(5, 2)).step(22), tmp_path / str(i), keep=["scheduler.T_*"])
        assert (run.scheduler.T_cur, run.scheduler.T_i) == (fresh.scheduler.T_cur, fresh.scheduler.T_i)
        assert run.step(20).lrs == close(fresh.step(20).lrs)


def test_warm_restarts_whose_turn_has_not_come_begin_with_their_new_cycle(tmp_path: Path) -> None:
    def late(first: int) -> Callable[[Optimizer], Any]:
        def made(optimizer: Optimizer) -> Any:
            restarts = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, first)
            return lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), restarts], [8])

        return made

    run, fresh = Run(OLD, late(9)), Run(OLD, late(9)).step(3)
    run.resumed(Run(OLD, late(5)).step(3), tmp_path, keep=["scheduler.1.T_0"])
    for _ in range(20):
        assert run.step().lrs == close(fresh.step().lrs)


def test_a_rate_that_has_not_moved_yet_becomes_the_one_built_to_the_last_bit(tmp_path: Path) -> None:
    rates = [n / 97 for n in range(1, 40)]
    for i, rate in enumerate(rates):
        run = Run(rate, SCHEDULES["step"])
        run.resumed(Run(OLD, SCHEDULES["step"]).step(3), tmp_path / str(i), keep=["optimizer.lr"])
        assert run.lrs == [rate, 2 * rate]


def test_what_a_scheduler_derives_from_a_kept_setting_is_derived_again(tmp_path: Path) -> None:
    def cycles(mode: Any, gamma: float) -> Callable[[Optimizer], Any]:
        return lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.4, 5, mode=mode, gamma=gamma)

    wanted = cycles("exp_range", 0.9)
    run, fresh = Run(OLD, wanted), Run(OLD, wanted).step(11)
    run.resumed(Run(OLD, cycles("triangular", 1.0)).step(10), tmp_path / "a", keep=["scheduler.*"])
    assert run.step().lrs == close(fresh.lrs)

    def plateau(mode: Any) -> Callable[[Optimizer], Any]:
        return lambda o: lr_scheduler.ReduceLROnPlateau(o, mode)

    run = Run(OLD, plateau("max"))
    run.resumed(Run(OLD, plateau("min")), tmp_path / "b", keep=["scheduler.mode"])
    assert run.scheduler.mode_worse == -torch.inf


def test_names_are_those_that_constructors_take() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=False)
    objects = {
        "model": nn.Linear(2, 2),
        "optimizer": optimizer,
        "scheduler": warm_cosine(optimizer),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer),
        "scaler": torch.amp.GradScaler("cpu"),
        "disabled": torch.amp.GradScaler("cpu", enabled=False),
    }
    adam = "lr betas eps weight_decay amsgrad maximize decoupled_weight_decay"
    linear, plateau = "start_factor end_factor total_iters", "factor min_lrs patience cooldown eps mode"
    assert set(Hyperparameters(objects).names) == {
        *(f"optimizer.{key}" for key in adam.split()),
        "scheduler.milestones",
        *(f"scheduler.0.{key}" for key in linear.split()),
        "scheduler.1.T_max",
        "scheduler.1.eta_min",
        *(f"plateau.{key}" for key in [*plateau.split(), "threshold", "threshold_mode"]),
        *(f"scaler.{key}" for key in ("growth_factor", "backoff_factor", "growth_interval")),
    }


@pytest.mark.parametrize(
    "kind", [k for k in SCHEDULES if k not in ("chained", "sequential", "lambda", "multiplicative")]
)
def test_every_schedule_has_names_and_none_of_them_is_progress(kind: str) -> None:
    run = Run(OLD, SCHEDULES[kind])
    hyperparameters = Hyperparameters(run.objects)
    assert any(name.startswith("scheduler.") for name in hyperparameters.names)
    run.step(STEPS)
    assert hyperparameters.loaded([]) == ()


def test_a_scheduler_of_an_unregistered_optimizer_lists_its_own_rates() -> None:
    old, new = Run(OLD, cosine), Run(NEW, cosine)
    built = Hyperparameters({"scheduler": new.scheduler})
    new.scheduler.load_state_dict(old.scheduler.state_dict())
    (changed,) = built.loaded(["scheduler.base_lrs"])
    assert changed.built == (NEW, 2 * NEW)
    assert new.scheduler.base_lrs == [NEW, 2 * NEW]


def test_settings_of_inner_schedulers_are_kept_by_their_place(tmp_path: Path) -> None:
    def longer(optimizer: Optimizer) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, 0.2, total_iters=10), cosine(optimizer, 70, 0.001)]
        return lr_scheduler.SequentialLR(optimizer, parts, [10])

    run = Run(OLD, longer)
    changed = run.resumed(Run(OLD, warm_cosine).step(3), tmp_path, keep=["scheduler.1.*"])
    assert {(c.name, c.is_kept) for c in changed} == {
        ("scheduler.1.T_max", True),
        ("scheduler.0.start_factor", False),
    }
    assert run.scheduler._schedulers[1].T_max == 70
    assert run.scheduler._schedulers[0].start_factor == 0.1


def test_milestones_are_compared_and_kept(tmp_path: Path) -> None:
    def steps(*milestones: int) -> Callable[[Optimizer], Any]:
        return lambda o: lr_scheduler.MultiStepLR(o, milestones)

    run = Run(OLD, steps(12, 40))
    (changed,) = run.resumed(Run(OLD, steps(30)).step(10), tmp_path, keep=["scheduler.milestones"])
    assert (changed.built, changed.saved) == ({12: 1, 40: 1}, {30: 1})
    assert [run.step().lrs[0], run.step().lrs[0]] == [OLD, pytest.approx(OLD / 10)]


def test_a_swa_schedule_anneals_as_built(tmp_path: Path) -> None:
    run = Run(OLD, lambda o: SWALR(o, 0.01, anneal_epochs=5, anneal_strategy="linear"))
    saved = Run(OLD, lambda o: SWALR(o, 0.02, anneal_epochs=10)).step(2)
    changed = run.resumed(saved, tmp_path, keep=["scheduler.*", "optimizer.swa_lr"])
    names = {"optimizer.swa_lr", "scheduler.anneal_epochs", "scheduler.anneal_strategy"}
    assert {c.name for c in changed} == names
    assert run.step(10).lrs == pytest.approx([0.01, 0.01])


def test_settings_of_a_scaler_are_kept(tmp_path: Path) -> None:
    scaler, saved = (torch.amp.GradScaler("cpu", growth_interval=n) for n in (7, 2000))
    saved.scale(torch.ones(1))
    saved.update(4.0)
    built = Hyperparameters({"scaler": scaler})
    scaler.load_state_dict(saved.state_dict())
    assert [str(c) for c in built.loaded(["scaler.*"])] == [
        "scaler.growth_interval: built 7, saved 2000; kept as built"
    ]
    assert scaler.get_growth_interval() == 7
    assert scaler.state_dict()["scale"] == saved.state_dict()["scale"]


def test_other_settings_of_an_optimizer_are_kept_per_group(tmp_path: Path) -> None:
    def adam(*decays: float, foreach: bool) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in decays))
        groups = [{"params": p.parameters(), "weight_decay": d} for p, d in zip(model, decays, strict=True)]
        return {"model": model, "optimizer": torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=foreach)}

    saved, here = adam(0.1, 0.0, foreach=True), adam(0.1, 0.2, foreach=False)
    saved["optimizer"].param_groups[0]["betas"] = (0.8, 0.95)
    built = Hyperparameters(here)
    Saved(tmp_path).save(items_of(**saved)).load(items_of(**here))
    decay, betas = sorted(built.loaded(["optimizer.weight_decay"]), key=lambda c: c.name, reverse=True)
    assert (decay.name, decay.built, decay.saved) == ("optimizer.weight_decay", (0.1, 0.2), (0.1, 0.0))
    assert (betas.name, betas.is_kept) == ("optimizer.betas", False)
    first, second = here["optimizer"].param_groups
    assert (second["weight_decay"], first["betas"]) == (0.2, (0.8, 0.95))


class Progressive(Optimizer):
    """Keeps progress in its groups, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 1.0, warmup: int = 3) -> None:
        super().__init__(params, {"lr": lr, "warmup": warmup, "k": 0, "d": 1e-6})


def test_progress_that_an_optimizer_keeps_in_its_groups_is_no_hyperparameter() -> None:
    groups = [{"params": nn.Linear(2, 2).parameters(), "lr_scale": 0.5}]
    assert set(Hyperparameters({"o": Progressive(groups)}).names) == {"o.lr", "o.warmup", "o.lr_scale"}


def test_unknown_names_to_keep_are_an_error_that_names_what_is_near() -> None:
    hyperparameters = Hyperparameters(Run(OLD, cosine).objects)
    hyperparameters.check(["optimizer.lr", "scheduler.*", "*.weight_decay"])
    with pytest.raises(ConfigError, match=r"'scheduler.T_man'.*Did you mean scheduler\.T_max") as caught:
        hyperparameters.check(["scheduler.T_max", "scheduler.T_man"])
    assert caught.value.fields["entry"] == "scheduler.T_man"
    with pytest.raises(ConfigError, match=r"Known: optimizer\.lr, "):
        hyperparameters.check(["???????"])
    with pytest.raises(ConfigError, match="Known: none"):
        Hyperparameters({}).check(["optimizer.lr"])


class Odd(Optimizer):
    def __init__(self, groups: Any) -> None:
        self.param_groups = groups


class OddScheduler(lr_scheduler.LRScheduler):
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state")


def test_odd_objects_have_no_hyperparameters_and_raise_nothing() -> None:
    odd = {
        "a": Odd([]),
        "b": Odd(None),
        "c": Odd([{}]),
        "d": OddScheduler(0.5),
        "e": {"lr": 3},
        "f": nn.Linear(2, 2),
    }
    hyperparameters = Hyperparameters(odd)
    assert hyperparameters.names == ("d.gamma",)
    assert hyperparameters.loaded(["*"]) == ()


def test_values_that_cannot_be_settings_are_left_out() -> None:
    group = {
        "params": [nn.Parameter(torch.zeros(2))],
        "basis": torch.zeros(MAX_ELEMENTS + 1),
        "hook": print,
        "name": "a",
    }
    optimizer = torch.optim.SGD([group], lr=0.1)
    built = Hyperparameters({"o": optimizer})
    assert "o.name" in built.names
    assert not {"o.basis", "o.hook"} & set(built.names)
    optimizer.param_groups[0]["name"] = print  # what was saved may be anything
    assert built.loaded(["o.name"]) == ()


def test_groups_added_later_and_settings_that_vanish_are_passed_over() -> None:
    run = Run(NEW, cosine)
    built = Hyperparameters(run.objects)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 5.0})
    del run.optimizer.param_groups[0]["dampening"], run.scheduler.T_max
    first = run.optimizer.param_groups[0]
    first["lr"], first["initial_lr"] = OLD / 2, OLD
    (changed,) = built.loaded(["optimizer.lr"])
    assert (changed.built, changed.saved) == ((NEW, 2 * NEW), (OLD, 2 * NEW))
    assert run.lrs == pytest.approx([NEW / 2, 2 * NEW, 5.0])


def test_a_group_without_a_rate_is_passed_over() -> None:
    optimizer = Run(NEW, cosine).optimizer
    first, second = optimizer.param_groups
    del second["lr"], second["initial_lr"]
    built = Hyperparameters({"optimizer": optimizer})
    first["lr"] = first["initial_lr"] = OLD
    (changed,) = built.loaded(["optimizer.lr"])
    assert (changed.built, changed.saved) == ((NEW,), (OLD,))
    assert (first["lr"], "lr" in second) == (NEW, False)


def test_differences_print_shortly_and_travel() -> None:
    change = Changed(name="optimizer.lr", built=0.03, saved=0.1, is_kept=False)
    assert str(change) == "optimizer.lr: built 0.03, saved 0.1; restored as saved"
    assert pickle.loads(pickle.dumps(change)) == copy.copy(change)
    many = Changed(name="x", built=tuple(range(1000)), saved="a" * 1000, is_kept=True)
    assert len(str(many)) < 120
