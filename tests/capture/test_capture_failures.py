"""Captures that something goes wrong with: the training goes on, and no wrong byte is stored."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ray_ckpt.capture.arena as arena_module
import ray_ckpt.capture.snapshot as snapshot_module
from ray_ckpt.capture import overlap_guard as guard
from ray_ckpt.capture import shared_copy
from ray_ckpt.capture.torch_private import copy_all
from ray_ckpt.config import RunOptions
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.errors import ConfigError, Unavailable
from ray_ckpt.format.jsontext import metrics_json
from ray_ckpt.format.records import MAX_METRICS
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.link import SealedShard
from tests.capture.local import LocalLink

LONG_S = 10.0  # nothing here may take so long


def options(**more: Any) -> RunOptions:
    return RunOptions(**{"memory": "single", "max_block_s": 10.0, **more})


class Small:
    """A linear layer with AdamW, its Checkpointer, and the agent in this process."""

    def __init__(self, **more: Any) -> None:
        self.link = LocalLink(options(**more))
        self.model = nn.Linear(32, 32)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.extra: dict[str, torch.Tensor] = {"a": torch.full((100,), 1.0), "b": torch.full((300,), 2.0)}
        self.ckpt = Checkpointer(link=self.link, model=self.model, optimizer=self.optimizer, extra=self.extra)
        self.ckpt.restore()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 32)).square().mean().backward()
        self.optimizer.step()


@pytest.fixture
def small() -> Iterator[Small]:
    made = Small()
    made.step()
    yield made
    made.ckpt.close()


def ends(work: Callable[[], object]) -> bool:
    """Return whether `work` returns within LONG_S."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LONG_S)
    return not thread.is_alive()


def test_a_save_after_close_is_an_error_and_holds_nobody_up(small: Small) -> None:
    small.ckpt.close()
    with pytest.raises(ConfigError, match="after close"):
        small.ckpt.save(1)
    assert ends(small.step)


def test_a_copy_without_a_thread_costs_its_save_only(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    assert small.ckpt._saver is not None
    small.ckpt._saver._snapshotter._thread.shutdown()
    assert not small.ckpt.save(1)
    assert "no thread to copy in" in small.link.skipped[1]
    assert ends(small.step) and not guard.running._copies


def test_a_thread_that_cannot_be_kept_to_one_core_copies_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**kwargs: object) -> None:
        raise RuntimeError("a library cannot be read")

    monkeypatch.setattr(shared_copy, "threadpool_limits", refuse)
    small = Small()
    small.step()
    small.ckpt.save(1)
    assert ends(small.step)
    small.ckpt.close()
    assert list(small.link.files) == [1]


def test_a_thread_that_does_not_start_costs_its_saves_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise RuntimeError("no such thread")

    monkeypatch.setattr(snapshot_module, "use_one_core", refuse)
    small = Small()
    small.step()
    small.ckpt.save(1)
    assert ends(small.step)
    small.ckpt.flush()
    assert 1 in small.link.skipped and not small.ckpt.save(2)
    assert ends(small.step)
    small.ckpt.close()


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The event for which copies in the background wait."""
    event = threading.Event()

    def held(*tensors: list[torch.Tensor]) -> None:
        event.wait(10 * LONG_S)
        copy_all(*tensors)

    monkeypatch.setattr(shared_copy, "copy_all", held)
    return event


def test_a_copy_that_never_ends_is_given_up(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "COPY_WAIT_S", 0.2)
    small = Small()
    small.step()
    small.ckpt.save(1)
    assert ends(small.step)
    monkeypatch.setattr(snapshot_module, "COPY_WAIT_S", 10 * LONG_S)
    is_over = ends(small.step)
    go.set()
    assert is_over, "the copy that was given up is waited for again"
    small.ckpt.close()
    assert "took longer" in small.link.skipped[1] and not small.link.files


def test_a_metric_that_is_no_number_costs_nothing(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        small.ckpt.save(step, {"fine": 1.5, "huge": 10**400, "meta": torch.empty((), device="meta")})
        small.ckpt.flush()
    assert dict(small.link.sealed[0].metrics or {}) == {"fine": 1.5}
    assert caplog.text.count("no numbers: ") == 2, "once for each name"
    assert "no numbers: 'meta' (" in caplog.text and "no numbers: 'huge' (" in caplog.text


def test_a_metric_that_raises_or_has_a_name_that_is_no_text_costs_nothing(small: Small) -> None:
    class Undefined:
        def __float__(self) -> float:
            raise KeyError("no batches yet")

    assert small.ckpt.save(1, {"undefined": Undefined(), "lone \ud800": 2.0, "fine": 1.5})
    small.ckpt.flush()
    assert metrics_json(small.link.sealed[0].metrics or {}) == {"lone ?": 2.0, "fine": 1.5}


@pytest.mark.parametrize("metrics", [0.5, ["loss", 0.5], "loss"])
def test_metrics_that_are_no_dict_are_misuse(small: Small, metrics: Any) -> None:
    with pytest.raises(ConfigError, match=r"metrics is .*Give a dict"):
        small.ckpt.save(1, metrics)
    with pytest.raises(ConfigError, match=r"metrics is .*Give a dict"):
        small.ckpt.step(2, metrics)


def test_more_metrics_than_a_record_holds_cost_the_last_ones(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    small.ckpt.save(1, {f"metric {i}": i for i in range(5000)})
    small.ckpt.flush()
    assert list(small.link.sealed[0].metrics or {}) == [f"metric {i}" for i in range(MAX_METRICS)]
    assert "of 5000 metrics the first 100 are kept" in caplog.text


def test_a_message_that_cannot_be_made_gives_the_buffer_back(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**fields: object) -> SealedShard:
        raise RuntimeError("no message")

    with monkeypatch.context() as patch:
        patch.setattr("ray_ckpt.trainer.handoff.SealedShard", broken)
        small.ckpt.save(1)
        small.ckpt.flush()
    assert small.link.skipped == {1: "no message"}
    small.step()
    assert small.ckpt.save(2)
    small.ckpt.flush()
    assert list(small.link.files) == [2]


def test_groups_may_be_added_to_an_optimizer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model[0].parameters())
    link = LocalLink(options())
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    ckpt.save(1)
    ckpt.flush()
    assert "optimizer.state.1.weight.exp_avg" in link.tensors(1)
    stranger = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [stranger]})
    assert not ckpt.save(2), "a parameter that nobody owns"
    assert "belongs to no registered item" in link.skipped[2]
    ckpt.close()


def test_whatever_a_capture_raises_training_goes_on(
    small: Small, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(parts: Sequence[Any]) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_module, "_copy", out_of_memory)
        assert not small.ckpt.save(1)
    assert small.ckpt.stats.dropped == 1 and "RuntimeError: out of memory" in small.link.skipped[1]
    small.step()
    assert small.ckpt.save(2)
    small.ckpt.flush()
    assert list(small.link.files) == [2]


@pytest.mark.parametrize("error", [OSError("no such position"), Unavailable("the store is away")])
def test_an_error_of_a_users_object_does_not_cost_the_memory_of_the_agent(error: Exception) -> None:
    class Loader:
        error: Exception | None = None

        def state_dict(self) -> dict[str, int]:
            if self.error is not None:
                raise self.error
            return {"position": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    link, loader = LocalLink(options()), Loader()
    ckpt = Checkpointer(link=link, model=nn.Linear(4, 4), loader=loader)
    ckpt.restore()
    assert ckpt.save(1)
    loader.error = error
    assert not ckpt.save(2) and str(error) in link.skipped[2]
    loader.error = None
    assert ckpt.save(3)
    ckpt.close()
    assert (link.recovered, len(link.grants), list(link.files)) == (0, 1, [1, 3])


def test_after_an_interrupted_save_the_agent_gets_the_layout_again(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.ckpt.save(1)
    small.ckpt.flush()

    def interrupted(parts: Sequence[Any]) -> None:
        raise KeyboardInterrupt

    small.extra["a"] = torch.full((2000,), 3.0)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_module, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small.ckpt.save(2)
    assert small.ckpt.save(3)
    small.ckpt.flush()
    found = small.link.tensors(3)
    assert torch.equal(found["extra.a"], small.extra["a"]) and torch.equal(found["extra.b"], small.extra["b"])
    layout = small.link.arena.buffers[0].layout  # type: ignore[union-attr]
    assert layout is not None and layout.size_bytes == len(small.link.files[3])


def test_no_hook_of_the_user_runs_when_state_is_predicted() -> None:
    calls: list[object] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *args: calls.append(args)),
        register_optimizer_step_post_hook(lambda *args: calls.append(args)),
    ]
    try:
        small = Small()
        assert not calls
        assert small.link.reserved_bytes > 3 * 32 * 32 * 4, "predicted all the same"
        small.ckpt.close()
    finally:
        for handle in handles:
            handle.remove()


def test_a_change_that_is_still_running_when_the_copy_ends_is_found(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version counts when an operation ends; here that is after the copy has ended."""
    copied = threading.Event()

    def copy(*tensors: list[torch.Tensor]) -> None:
        copy_all(*tensors)
        copied.set()

    monkeypatch.setattr(shared_copy, "copy_all", copy)
    small.ckpt.save(1)
    assert copied.wait(LONG_S)
    time.sleep(0.2)
    with torch.no_grad():
        small.model.weight.add_(1)
    small.ckpt.step(2)
    small.ckpt.flush()
    assert "was changed outside" in small.link.skipped[1] and not small.link.files


@pytest.fixture
def one_rank_group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["dtensor", "to_local"])
def test_changes_of_a_dtensor_are_found_whichever_way_they_come(
    one_rank_group: None, way: str, go: threading.Event
) -> None:
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(64), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    link = LocalLink(options())
    ckpt = Checkpointer(link=link, weight=weight, optimizer=optimizer)
    ckpt.restore()
    ckpt.save(1)
    with torch.no_grad():
        weight.add_(1) if way == "dtensor" else weight.to_local().add_(1)  # type: ignore[attr-defined]
    go.set()
    ckpt.flush()
    assert "weight was changed" in link.skipped[1] and not link.files
    ckpt.close()


def _child(queue: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        queue.put("ray_ckpt" in maps.read())


@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_trains_and_does_not_hold_the_arena(small: Small, go: threading.Event) -> None:
    small.ckpt.save(1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    child.join(LONG_S)
    came_back = child.exitcode == 0
    child.kill()
    go.set()
    assert came_back
    # The agent is in this process here, and its own mapping is inherited; the rank's is not.
    small.ckpt.flush()
    assert list(small.link.files) == [1]


def test_a_large_stream_keeps_its_ring() -> None:
    link = LocalLink(options(memory="stream", max_block_s=30.0))
    big = {"t": torch.zeros(34 << 20)}  # 136 MiB, more than a ring
    ckpt = Checkpointer(link=link, big=big)
    ckpt.restore()
    for step in (1, 2):
        ckpt.save(step)
        ckpt.flush()
    assert len(link.grants) == 1 and sorted(link.files) == [1, 2]
    ckpt.close()


class SlowDisk(LocalLink):
    """The disk stalls in the first stream, and is slow in the second."""

    def seal(self, shard: SealedShard) -> Future[bool]:
        assert self.arena is not None
        arena, buffer = self.arena, self.arena.buffers[shard.buffer]
        if shard.layout is not None:
            buffer.layout = shard.layout
        nth = len(self.sealed)
        self.sealed.append(shard)
        if nth == 0:  # nobody is to wait for it
            self._outcome(shard.attempt).set_result(SaveOutcome(level=None, error=Unavailable("slow")))

        def write() -> bool:
            blocks = []
            for number, chunk in enumerate(arena.chunks(buffer, shard.attempt.attempt)):
                if nth == 0 and number == 1:
                    self.go.wait(30)
                if nth == 1:
                    time.sleep(0.02)
                blocks.append(bytes(chunk))
            arena.check(buffer, shard.attempt.attempt)
            self.files[shard.attempt.step] = b"".join(blocks)
            return False

        return ThreadPoolExecutor(1).submit(write)


def test_a_ring_has_one_reader(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A stream that was given up is still being read when the next save comes: that one has to wait."""
    caplog.set_level(logging.CRITICAL, "ray_ckpt")
    monkeypatch.setattr(arena_module, "RING_STALL_S", 0.5)
    link = SlowDisk(options(memory="stream", max_block_s=0.0))
    link.go.clear()
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(17 << 20)) for _ in range(2)])
    ckpt = Checkpointer(link=link, model=parameters)
    ckpt.restore()
    ckpt.save(1)
    assert ends(lambda: ckpt._saver._snapshotter._thread.submit(bool).result()), "given up at the full ring"  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.arange(parameter.numel()).float())
    assert not ckpt.save(2), "the reader of the first stream is still there"
    link.go.set()
    deadline_s = time.monotonic() + LONG_S
    monkeypatch.setattr(arena_module, "RING_STALL_S", 30.0)
    while not ckpt.save(3):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    while 3 not in link.files:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert 1 not in link.files
    for number, parameter in enumerate(parameters):
        assert torch.equal(link.tensors(3)[f"model.{number}"], parameter)
    ckpt.close()


def test_an_agent_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_ckpt.trainer.saver.SETUP_WAIT_S", 0.3)
    go = threading.Event()
    real = LocalLink.open_arena

    def frozen(self: LocalLink, *args: Any, **kwargs: Any) -> Any:
        go.wait(LONG_S)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LocalLink, "open_arena", frozen)
    small = Small()
    small.step()
    for step, limit_s in ((1, 2.0), (2, 0.2)):
        start_s = time.monotonic()
        assert not small.ckpt.save(step)
        assert time.monotonic() - start_s < limit_s
        assert "no memory" in small.link.skipped[step]
    go.set()
    deadline_s = time.monotonic() + LONG_S
    step = 3
    while not small.ckpt.save(step):
        assert time.monotonic() < deadline_s
        step += 1
        time.sleep(0.05)
    small.ckpt.flush()
    assert list(small.link.files) == [step]
    small.ckpt.close()


def test_whoever_waits_for_a_save_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits until the thread that trains is in no operation; that thread may be waiting for it."""
    monkeypatch.setattr(snapshot_module, "OPERATION_S", 30.0)
    waits: list[Callable[[Checkpointer], object]] = [
        lambda ckpt: ckpt.wait("local"),
        lambda ckpt: ckpt.flush(),
        lambda ckpt: ckpt.save(2),
        lambda ckpt: ckpt._save_last(),
    ]
    for wait in waits:
        small = Small(max_block_s=20.0)
        small.step()
        small.ckpt.save(1)
        start_s = time.monotonic()
        wait(small.ckpt)
        assert time.monotonic() - start_s < LONG_S
        small.ckpt.close()


@pytest.mark.parametrize(("num_changes", "warns"), [(1, False), (9, True)])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_tensor_that_another_thread_changes_during_its_copy_is_copied_again(
    overlap: bool,
    num_changes: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A number in it has one state only. torch counts a change when it has ended."""
    link = LocalLink(options(overlap=overlap))
    state = {"mean": torch.zeros(3), "count": torch.zeros(1), "other": torch.zeros(3)}
    ckpt = Checkpointer(link=link, state=state)
    ckpt.restore()
    copies: list[int] = []

    def copied(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy_all(targets, sources)
        copies.append(len(sources))
        if len(copies) <= num_changes:
            for name in ("mean", "count"):
                thread = threading.Thread(target=state[name].fill_, args=(float(len(copies)),))
                thread.start()
                thread.join()

    monkeypatch.setattr(snapshot_module, "copy_all", copied)
    for step in (1, 2):
        assert ckpt.save(step)
        ckpt.flush()
        copies.clear()
    ckpt.close()
    (mean,) = (tensor for key, tensor in link.tensors(1).items() if key.endswith("state.mean"))
    assert torch.equal(mean, torch.ones(3)) != warns
    found = [record.message for record in caplog.records if "another thread changes it" in record.message]
    assert len(found) == warns and all(text.startswith("state.mean: ") for text in found)


@pytest.mark.parametrize("how", ["moved", "closed"])
@pytest.mark.parametrize("saves", [True, False])
def test_the_memory_of_tensors_that_have_moved_is_free(how: str, saves: bool) -> None:
    """After the restore, and after a save; also if the program still refers to a closed Checkpointer."""
    array = np.ones(4, dtype=np.float32)
    memory = weakref.ref(array)
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = torch.from_numpy(array).view(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = LocalLink()
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    if saves:
        assert ckpt.save(1)
        ckpt.flush()
    if how == "closed":
        ckpt.close()
    with ckpt.lock(moves=how == "moved"):
        model.weight.data = torch.full((1, 4), 2.0)
    del array
    gc.collect()
    assert memory() is None
    if how == "moved":
        assert ckpt.save(2)
        ckpt.close()
        assert torch.equal(link.tensors(2)["model.weight"], torch.full((1, 4), 2.0))


@pytest.mark.parametrize("memory", ["double", "stream"])
def test_the_memory_of_tensors_that_have_moved_is_free_while_the_agent_writes(memory: Any) -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = LocalLink(RunOptions(memory=memory))
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    link.go.clear()
    assert ckpt.save(1)
    left = model.weight.untyped_storage()._weak_ref()
    with ckpt.lock(moves=True):
        model.weight.data = torch.full((1, 4), 2.0)
    until_s = time.monotonic() + 10
    while not torch.UntypedStorage._expired(left) and time.monotonic() < until_s:
        time.sleep(0.01)  # the copying thread notifies the agent, and ends
    assert torch.UntypedStorage._expired(left) and not link.files
    link.go.set()
    ckpt.close()
