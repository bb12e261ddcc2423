"""No checkpoint mixes two steps, whatever runs beside its copy: real training steps against slowed copies."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ray_ckpt.capture import arena, shared_copy
from ray_ckpt.capture import overlap_guard as guard
from ray_ckpt.capture.torch_private import copy_all
from ray_ckpt.capture.walk import walk
from ray_ckpt.config import RunOptions
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.link import ArenaGrant
from tests.capture.local import LocalLink

PAUSE_S = 0.002  # between the tensors of a copy: long against a step of these models


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor by tensor, with pauses, so that a step that does not wait is sure to be in the middle."""

    def slowly(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            time.sleep(PAUSE_S)
            copy_all([target], [source])

    monkeypatch.setattr(shared_copy, "copy_all", slowly)


class Model(nn.Module):
    """Tied weights, buffers that forward changes, a strided parameter, a frozen one, a buffer inside a
    parameter's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.strided = nn.Parameter(torch.randn(6, 8).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("inside", self.first.bias.detach()[:2])
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y: torch.Tensor = self.second(self.norm(self.first(x))) @ self.strided
        return y


class Training:
    """A loop with what real ones have: schedule, EMA in place, a learning rate that is a tensor."""

    def __init__(self, seed: int, link: LocalLink, *, kind: str = "adamw") -> None:
        torch.manual_seed(seed)
        self.link = link
        self.model = Model()
        self.optimizer: torch.optim.Optimizer
        if kind == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(1e-2))
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.notes = {"count": torch.zeros(2)}
        self.ckpt = Checkpointer(
            link=link,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            ema=self.ema,
            notes=self.notes,
        )
        self.ckpt.restore()
        self.references: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 8)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            for average, value in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                average.lerp_(value, 0.1)
        self.notes["count"] += step

    def save(self, step: int) -> None:
        if self.ckpt.save(step):
            walked = walk(self.ckpt._require_items().items, rank=0, world_size=1)
            self.references[step] = {
                live.slice.key: live.tensor.to("cpu", copy=True) for live in walked.slices
            }

    def check(self) -> int:
        """Compare every checkpoint with the state that it was taken of; returns how many there are."""
        self.ckpt.flush()
        for step in self.link.files:
            found = self.link.tensors(step)
            for key, expected in self.references[step].items():
                assert torch.equal(found[key], expected.contiguous()), (
                    f"step {step}: {key} is of another step"
                )
            assert len(found) == len(self.references[step])
        return len(self.link.files)


def options(**more: Any) -> RunOptions:
    return RunOptions(**{"memory": "single", "max_block_s": 30.0, **more})


@pytest.mark.parametrize("memory", ["single", "double", "stream"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_checkpoint_mixes_two_steps(slow_copies: None, memory: str, kind: str, seed: int) -> None:
    training = Training(seed, LocalLink(options(memory=memory)), kind=kind)
    chance = random.Random(seed)
    for step in range(1, 9):
        training.step(step)
        if step == 1 or chance.random() < 0.6:
            training.save(step)
    assert training.check() >= 3
    assert not training.link.skipped
    training.ckpt.close()


def test_the_step_waits_for_the_copy_and_the_forward_does_not(slow_copies: None) -> None:
    training = Training(0, LocalLink(options()))
    training.step(1)
    training.save(1)
    assert guard.running._copies, "the copy is over before it could be overlapped"
    training.model(torch.randn(16, 8))
    assert guard.running._copies, "the forward pass waited"
    training.optimizer.step()
    assert not any(not s.host_copied.is_set() for s in guard.running._copies.values())
    assert training.check() == 1
    training.ckpt.close()


def test_without_the_hook_a_mixed_copy_is_found_and_given_up(
    slow_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard.running, "wait", lambda: None)
    training = Training(0, LocalLink(options()))
    training.step(1)
    training.save(1)
    training.step(2)
    training.ckpt.flush()
    assert not training.link.files
    assert "changed outside optimizer.step()" in training.link.skipped[1]
    training.ckpt.close()


def test_a_change_behind_the_optimizer_is_found_and_the_tensor_copied_at_once_from_then_on(
    slow_copies: None,
) -> None:
    training = Training(0, LocalLink(options()))
    training.step(1)
    training.save(1)
    with torch.no_grad():
        training.model.first.weight.clamp_(-0.01, 0.01)
    training.ckpt.flush()
    assert (
        "model.first.weight was changed" in training.link.skipped[1]
        and "ckpt.lock()" in training.link.skipped[1]
    )
    training.step(2)
    training.save(2)
    with torch.no_grad():
        training.model.first.weight.clamp_(-0.001, 0.001)
    assert training.check() == 1
    assert training.ckpt.stats.saved == 2
    training.ckpt.close()


def test_a_change_inside_lock_waits_for_the_copy(slow_copies: None) -> None:
    training = Training(0, LocalLink(options()))
    for step in (1, 2):
        training.step(step)
        training.save(step)
        with training.ckpt.lock(), torch.no_grad():
            training.model.first.weight.data.clamp_(-0.01, 0.01)
    assert training.check() == 2
    training.ckpt.close()


def test_verified_captures_find_what_no_version_counter_sees(
    slow_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PAUSE_S", 0.05)  # the machine may be busy
    training = Training(0, LocalLink(options(verify_captures=True)))
    training.step(1)
    training.save(1)
    training.model.strided.data.mul_(2)  # `.data` has a version of its own
    training.ckpt.flush()
    assert "model.strided was changed" in training.link.skipped[1]
    training.step(2)
    training.save(2)
    assert training.check() == 1
    training.ckpt.close()


@pytest.mark.parametrize(
    ("memory", "verify", "count"), [("stream", True, 1), ("single", True, 0), ("stream", False, 0)]
)
def test_captures_through_a_ring_are_not_verified_and_a_warning_reports_that_once(
    memory: str, verify: bool, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(0, LocalLink(options(memory=memory, verify_captures=verify)))
    for step in (1, 2):
        training.step(step)
        training.save(step)
    training.ckpt.close()
    warned = [r for r in caplog.records if "verify_captures does nothing" in r.getMessage()]
    assert len(warned) == count


class PlainSgd:
    """An optimizer that torch knows nothing of: no hook runs before its step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.mul_(0.5)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_parameters_that_no_torch_optimizer_steps_are_copied_at_once(slow_copies: None) -> None:
    model = nn.Linear(4, 4)
    link = LocalLink(options())
    optimizer = PlainSgd(list(model.parameters()))
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    before = model.weight.detach().clone()
    ckpt.save(1)
    optimizer.step()
    ckpt.flush()
    assert torch.equal(link.tensors(1)["model.weight"], before)
    ckpt.close()


def test_an_optimizer_fused_into_backward_is_waited_for_before_backward(slow_copies: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]
        optimizers[parameter].step()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    link = LocalLink(options())
    ckpt = Checkpointer(link=link, model=model, **{f"o{i}": o for i, o in enumerate(optimizers.values())})
    ckpt.restore()
    for step in (1, 2, 3):
        model(torch.randn(2, 4)).sum().backward()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        ckpt.save(step)
        model(torch.randn(2, 4)).sum().backward()
        ckpt.flush()
        found = link.tensors(step)
        assert all(torch.equal(found[f"model.{k}"], v) for k, v in before.items())
    assert not link.skipped
    ckpt.close()


@pytest.mark.slow  # 5 s
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_waits_too(slow_copies: None) -> None:
    training = Training(0, LocalLink(options()), kind="sgd")
    compiled = torch.compile(training.optimizer.step, backend="eager")
    for step in (1, 2, 3):
        training.model(torch.randn(16, 8)).sum().backward()
        compiled()
        training.save(step)
    assert training.check() == 3
    training.ckpt.close()


def test_blocking_saves_return_when_everything_is_copied(slow_copies: None) -> None:
    training = Training(0, LocalLink(options(overlap=False)))
    training.step(1)
    training.save(1)
    assert not guard.running._copies
    training.model.first.weight.data.mul_(7)
    assert training.check() == 1
    training.ckpt.close()


def test_two_buffers_take_a_save_while_the_one_before_it_is_written() -> None:
    for memory, expected in (("double", 2), ("single", 1)):
        link = LocalLink(options(memory=memory, max_block_s=0.0))
        training = Training(0, link)
        training.step(1)
        training.save(1)
        training.ckpt.flush()
        link.go.clear()
        training.step(2)
        for step in (3, 4, 5):
            training.step(step)
            training.save(step)
        assert training.ckpt.stats.saved == 1 + expected
        link.go.set()
        training.check()
        training.ckpt.close()


def test_saves_go_on_while_memory_is_made_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save takes the buffers in turn; the thread that fills their page tables still sees each of them."""
    saved, begun, done = threading.Event(), threading.Event(), []

    def populate(mapping: arena.Mapping) -> None:
        begun.set()
        assert saved.wait(20)
        done.append(mapping)

    monkeypatch.setattr(arena.Mapping, "populate", populate)
    training = Training(0, LocalLink(options(memory="double")))
    training.step(1)
    assert begun.wait(20)
    training.save(1)
    training.check()
    saved.set()
    wait_until = time.monotonic() + 20
    while training.ckpt.setup_s is None and time.monotonic() < wait_until:
        time.sleep(0.01)
    assert len(set(map(id, done))) == 2 and "could not be made ready" not in caplog.text
    training.ckpt.close()


@pytest.mark.parametrize("closes_first", [True, False])
def test_memory_that_no_save_has_used_is_given_up(
    closes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA would keep it registered after it is unmapped, and take it for other memory at that address."""
    link = LocalLink(options(memory="double"))
    go, opened, real = threading.Event(), threading.Event(), LocalLink.open_arena

    def open_arena(*arguments: Any, **more: Any) -> ArenaGrant:
        assert go.wait(20)
        return real(link, *arguments[1:], **more)

    given_up: list[arena.Mapping] = []
    monkeypatch.setattr(arena.Mapping, "give_up", lambda mapping: given_up.append(mapping))
    monkeypatch.setattr(arena.Mapping, "populate", lambda mapping: opened.set())
    monkeypatch.setattr(LocalLink, "open_arena", open_arena)
    training = Training(0, link)
    if closes_first:
        training.ckpt.close()
    go.set()
    assert opened.wait(20)
    training.ckpt.close()
    assert len(given_up) == len(set(map(id, given_up))) == 2


def test_the_first_layout_is_the_predicted_one() -> None:
    training = Training(0, LocalLink(options()))
    predicted = training.ckpt._saver._layout  # type: ignore[union-attr]
    training.step(1)
    training.save(1)
    assert training.ckpt._saver._layout is predicted  # type: ignore[union-attr]
    assert len(training.link.grants) == 1
    assert training.check() == 1
    training.ckpt.close()


def test_the_layout_follows_state_that_appears_and_vanishes() -> None:
    training = Training(0, LocalLink(options()), kind="sgd")
    training.step(1)
    training.save(1)
    training.notes["more"] = torch.ones(1 << 20)
    training.step(2)
    training.save(2)
    del training.notes["more"], training.notes["count"]
    training.notes["count"] = torch.ones(2)
    training.step(3)
    training.save(3)
    assert training.check() == 3
    assert len(training.link.grants) == 2, "the second shard needs more memory, the third does not"
    training.ckpt.close()


def test_the_death_of_an_agent_between_two_saves_costs_none() -> None:
    """A capture into the memory of the dead agent would be lost."""
    training = Training(0, LocalLink(options()))
    training.step(1)
    training.save(1)
    training.ckpt.flush()
    saver = training.ckpt._saver
    assert saver is not None and saver._grant is not None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    saver._grant = replace(saver._grant, paths=(f"/proc/{ended.pid}/fd/7",))
    training.step(2)
    training.save(2)
    assert training.check() == 2
    assert training.link.recovered == 1 and len(training.link.grants) == 2
    training.ckpt.close()


def test_an_agent_that_is_gone_costs_the_save_and_the_next_one_has_a_new_arena() -> None:
    training = Training(0, LocalLink(options()))
    training.step(1)
    training.link.fails = True
    training.save(1)
    training.ckpt.flush()
    training.link.fails = False
    training.step(2)
    training.save(2)
    assert training.link.recovered == 1 and len(training.link.grants) == 2
    assert training.check() == 1
    training.ckpt.close()


def test_a_rank_reaches_memory_by_name_where_it_may_not_look_into_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "no ptrace here")
        fd: int = real(path, *args, **kwargs)
        return fd

    monkeypatch.setattr(os, "open", refuse)
    training = Training(0, LocalLink(options()))
    training.step(1)
    training.save(1)
    assert training.check() == 1
    assert training.link.grants[-1].paths[0].startswith("/dev/shm/")
    training.ckpt.close()
    training.link.arena.close()  # type: ignore[union-attr]


MAX_MORE_THREADS = 20  # of one test, and those that it leaves to be collected


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before, others = torch.get_num_threads(), threading.active_count()  # of tests before, in this process
    yield
    assert torch.get_num_threads() == before, "the capture thread changed the training's threads"
    assert threading.active_count() < others + MAX_MORE_THREADS
