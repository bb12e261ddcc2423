"""Unregistered objects that an exact resume needs are named, and no others."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

from ray_ckpt.capture.unregistered import MAX_NAMED, find_gaps
from ray_ckpt.trainer.rank_items import start_gap_search


@pytest.fixture(autouse=True, scope="module")
def only_own_objects() -> None:
    """Hide the objects of earlier tests from the collector, so that a pass finds none of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.fixture
def objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": model, "optimizer": optimizer}


class Holder:
    """A user's own object that saves what it holds."""

    def __init__(self, **parts: Any) -> None:
        self.parts = [parts]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def unregistered(objects: Mapping[str, object]) -> list[str]:
    return find_gaps(objects)[0]


def early_iterators() -> list[str]:
    return find_gaps({})[1]


def test_a_scheduler_of_a_registered_optimizer_is_named(
    objects: dict[str, object], optimizer: torch.optim.Optimizer
) -> None:
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert unregistered(objects) == [
        "a learning-rate scheduler (CosineAnnealingLR) of the registered optimizer 'optimizer'"
    ]
    assert unregistered(objects | {"scheduler": scheduler}) == []
    assert unregistered(objects | {"state": Holder(scheduler=scheduler)}) == []


class Around(torch.optim.Optimizer):
    """An optimizer around another one, with state of its own, as Lookahead and SAM."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups


def test_an_optimizer_whose_state_the_registered_one_around_it_lacks_is_named(
    objects: dict[str, object], optimizer: torch.optim.Optimizer
) -> None:
    around = Around(optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    registered = {"model": objects["model"], "optimizer": around, "scheduler": scheduler}
    assert unregistered(registered) == ["an optimizer (AdamW) of parameters of the registered 'model'"]
    assert unregistered(registered | {"inner": optimizer}) == []
    del registered["scheduler"]
    assert "a learning-rate scheduler (StepLR) of the registered optimizer 'optimizer'" in unregistered(
        registered
    )
    around.state = optimizer.state
    assert unregistered(registered | {"scheduler": scheduler}) == []


def test_a_scheduler_of_a_strangers_optimizer_is_not() -> None:
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(stranger, 3)
    assert unregistered({"model": nn.Linear(2, 2)}) == []
    assert scheduler.last_epoch == 0


def test_schedulers_inside_another_are_not_named(
    objects: dict[str, object], optimizer: torch.optim.Optimizer
) -> None:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    both = lr_scheduler.SequentialLR(optimizer, parts, [3])
    assert unregistered(objects) == [
        "a learning-rate scheduler (SequentialLR) of the registered optimizer 'optimizer'"
    ]
    assert unregistered(objects | {"scheduler": both}) == []


def test_a_registered_scheduler_does_not_save_its_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    assert unregistered({"model": model, "scheduler": scheduler}) == [
        "an optimizer (AdamW) of parameters of the registered 'model'"
    ]


def test_a_second_optimizer_is_named_also_over_a_bare_parameter(objects: dict[str, object]) -> None:
    bare = nn.Parameter(torch.zeros(3))
    second = torch.optim.SGD([bare], lr=0.1)
    assert unregistered(objects) == []
    assert unregistered(objects | {"temperature": bare}) == [
        "an optimizer (SGD) of parameters of the registered 'temperature'"
    ]
    assert unregistered(objects | {"temperature": bare, "second": second}) == []


def test_an_enabled_scaler_is_named_and_a_disabled_one_is_not(objects: dict[str, object]) -> None:
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    assert unregistered(objects) == ["an enabled gradient scaler (GradScaler)"]
    assert unregistered(objects | {"scaler": scaler}) == []
    assert not off.is_enabled()


def test_an_averaged_model_is_recognized_by_its_shapes(objects: dict[str, object], model: nn.Module) -> None:
    ema, other = AveragedModel(model), AveragedModel(nn.Linear(1, 1))
    assert unregistered(objects) == ["an averaged model (AveragedModel) of the registered module 'model'"]
    assert unregistered(objects | {"ema": ema}) == []
    assert other.n_averaged == 0


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
def test_a_sampler_is_named_unless_it_does_not_shuffle_or_is_a_registered_loaders(
    objects: dict[str, object],
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = list(range(10))
    fixed: Any = DistributedSampler(data, 2, 0, shuffle=False)  # type: ignore[arg-type]
    assert unregistered(objects) == []
    sampler: Any = DistributedSampler(data, 2, 0)  # type: ignore[arg-type]
    plain: Any = DataLoader(data, sampler=sampler)  # type: ignore[arg-type]
    assert unregistered(objects) == ["a sampler that shuffles by epoch (DistributedSampler)"]
    assert unregistered(objects | {"sampler": sampler}) == []
    loader = stateful(data, sampler=sampler)
    assert unregistered(objects) == ["a data loader that knows its position (StatefulDataLoader)"]
    assert unregistered(objects | {"loader": loader}) == []
    assert plain.sampler is sampler and fixed.epoch == 0


def test_subclasses_are_found(objects: dict[str, object], optimizer: torch.optim.Optimizer) -> None:
    class Warmup(lr_scheduler.LambdaLR):
        pass

    warmup = Warmup(optimizer, lambda step: 1.0)
    (phrase,) = unregistered(objects)
    assert "(Warmup)" in phrase and warmup.last_epoch == 0


def test_what_only_a_cycle_keeps_alive_is_not_named(
    objects: dict[str, object], optimizer: torch.optim.Optimizer
) -> None:
    scheduler: Any = lr_scheduler.StepLR(optimizer, 3)
    scheduler.itself = scheduler
    assert len(unregistered(objects)) == 1
    gc.disable()
    try:
        del scheduler
        assert unregistered(objects) == []
    finally:
        gc.enable()


def test_objects_that_lie_or_raise_or_are_half_made_do_no_harm(
    objects: dict[str, object], optimizer: torch.optim.Optimizer
) -> None:
    class Liar:
        @property
        def __class__(self) -> Any:
            return lr_scheduler.StepLR

        @__class__.setter
        def __class__(self, value: Any) -> None: ...

    class Raiser:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    class Strange(lr_scheduler.StepLR):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            raise RuntimeError

        __hash__ = None  # type: ignore[assignment]

    class Unhashable(metaclass=Meta):
        pass

    kinds = (lr_scheduler.StepLR, torch.amp.GradScaler, torch.optim.SGD, AveragedModel, Strange)
    strangers = [Liar(), Raiser(), Unhashable(), *(kind.__new__(kind) for kind in kinds)]
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    assert len(unregistered(objects | {"state": Holder(strangers=strangers[:3])})) == 1
    assert scheduler.step_size == 3 and len(strangers) == 8


def test_other_threads_may_make_tuples_meanwhile(objects: dict[str, object]) -> None:
    """A tuple that grows may have one holder only: a list of all that the collector tracks breaks it."""
    others = [Holder() for _ in range(100_000)]
    stop, errors = threading.Event(), list[SystemError]()

    def make_tuples() -> None:
        try:
            while not stop.is_set():
                assert len(tuple(index for index in range(100))) == 100
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=make_tuples)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # the threads take turns inside a tuple too
    try:
        thread.start()
        for _ in range(30):
            assert unregistered(objects) == []
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    assert not errors and len(others) == 100_000


def test_the_answer_and_its_time_are_bounded(
    objects: dict[str, object], optimizer: torch.optim.Optimizer
) -> None:
    many = [torch.amp.GradScaler("cpu") for _ in range(MAX_NAMED + 5)]
    assert len(unregistered(objects)) == MAX_NAMED
    junk = [[index] for index in range(200_000)]
    start_s = time.perf_counter()
    unregistered(objects | {"junk": junk, "scalers": many})
    assert time.perf_counter() - start_s < 5.0  # 0.05 s on an idle core; looking into the junk takes as long


def test_a_plain_loader_that_is_iterated_already_is_named() -> None:
    samples: Any = [torch.zeros(1)] * 8
    loader: Any = DataLoader(samples, batch_size=2)
    for _ in loader:
        pass
    assert early_iterators() == [], "that one has ended"
    batches = iter(loader)
    next(batches)
    assert early_iterators() == ["a DataLoader is already being iterated (1 of 4 batches are read)"]
    del batches
    assert early_iterators() == []
    cycle: list[Any] = [iter(loader)]
    cycle.append(cycle)
    del cycle
    assert early_iterators() == [], "only a reference cycle holds that one"


def test_a_loader_of_endless_batches_that_is_iterated_already_is_named() -> None:
    """Its sampler has no length, which must not end a restore on rank 0."""

    class Endless:
        def __iter__(self) -> Iterator[list[int]]:
            while True:
                yield [0, 1]

    samples: Any = [torch.zeros(1)] * 8
    batches = iter(DataLoader(samples, batch_sampler=Endless()))
    next(batches)
    assert early_iterators() == ["a DataLoader is already being iterated (1 batches are read)"]


class WithAverage(torch.optim.SGD):
    """An optimizer that has state of its own in its `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it may wait for other ranks")


def test_an_optimizer_with_a_state_dict_of_its_own_is_named(model: nn.Module) -> None:
    first = WithAverage(model.parameters(), lr=0.1)
    objects = {"model": model, "first": first, "second": torch.optim.SGD(model.parameters(), lr=0.1)}
    (warning,) = start_gap_search(objects).result()
    assert warning.startswith("the optimizer first has a state_dict of its own")
