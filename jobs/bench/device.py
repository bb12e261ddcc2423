"""Snapshots from a GPU and restores into it, without Ray.

python -m jobs.bench.device --size 4GiB
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Iterator
from functools import partial

import torch

from jobs.bench.context import Context
from jobs.bench.restoring import ATTEMPT, RankMemory, Restores
from jobs.bench.row import Row, measure, skipped
from jobs.bench.state import fingerprint, make_state, state_bytes, wipe
from ray_ckpt.capture.overlap_guard import background_slices, guarded_storages
from ray_ckpt.capture.replica_watch import ReplicaWatch
from ray_ckpt.capture.snapshot import Snapshot, Snapshotter
from ray_ckpt.capture.walk import walk

DEVICE = torch.device("cuda")
BLOCKED_LIMIT_S = 0.010  # for a model of several GB
POLL_S = 0.0002
SIDE = 8192  # of the matrices whose products stand for a training step
PRODUCTS = 200


class DeviceRig:
    """A state of about `size_bytes` on the GPU, and a pinned arena for its snapshots."""

    def __init__(self, size_bytes: int) -> None:
        self.model, self.optimizer = model, optimizer = make_state(size_bytes)
        model.to(DEVICE)
        for state in optimizer.state.values():
            state.update({k: v.to(DEVICE) if v.dim() else v for k, v in state.items()})
        self.size_bytes = state_bytes(model, optimizer)
        self._rank = RankMemory(model, optimizer)
        self._arena = self._rank.arena
        self._arena.mapping.pin(DEVICE)
        self._arena.lay_out(self._rank.layout)
        self._background = background_slices(self._rank.walked.slices, guarded_storages([optimizer]))
        self._snapshotter = Snapshotter(overlap=True, verify=False, waited=lambda seconds: None)
        self._errors: list[Exception] = []
        self._shared = walk(self._rank.items, rank=0, world_size=2).slices  # as if two ranks held all of it
        self._watch, self._steps = ReplicaWatch(self._shared), itertools.count()
        self._source = torch.empty(self.size_bytes, dtype=torch.uint8, device=DEVICE)
        self._target = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=True)
        self._matrix = torch.randn(SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)

    def copied_s(self) -> float:
        """Return the seconds of a snapshot until the arena is sealed."""
        started_s = _synchronized_s()
        self._start().before_change()  # as the next step does; the seal waits for it
        self._wait_sealed()
        return time.perf_counter() - started_s

    def blocked_s(self) -> float:
        """Return the seconds for which a snapshot blocks the training."""
        started_s = _synchronized_s()
        snapshot = self._start()
        taken_s = time.perf_counter() - started_s
        snapshot.before_change()
        torch.cuda.synchronize()
        self._wait_sealed()
        return taken_s

    def plain_s(self) -> float:
        """Return the seconds of one copy of the same number of bytes into pinned memory."""
        started_s = _synchronized_s()
        self._target.copy_(self._source, non_blocking=True)
        return _synchronized_s() - started_s

    def plain_back_s(self) -> float:
        """Return the seconds of one copy of the same number of bytes from pinned memory."""
        started_s = _synchronized_s()
        self._source.copy_(self._target, non_blocking=True)
        return _synchronized_s() - started_s

    def step_s(self) -> float:
        """Return the seconds of a step's matrix products."""
        started_s = _synchronized_s()
        for _ in range(PRODUCTS):
            torch.mm(self._matrix, self._matrix)
        return _synchronized_s() - started_s

    def step_beside_copy_s(self) -> float:
        """Return the seconds of the same products while a snapshot is copied."""
        snapshot = self._start()
        taken_s = self.step_s()
        snapshot.before_change()
        self._wait_sealed()
        return taken_s

    def watch_s(self) -> float:
        """Return the seconds of the replica watch in a save, if all that the rank holds has replicas."""
        started_s = _synchronized_s()
        found = self._watch.digests(self._shared, next(self._steps), 0)
        found.add_now(frozenset())
        found.complete()
        found.reports()
        return _synchronized_s() - started_s

    def restores(self) -> tuple[Restores, str]:
        """Seal the arena as an agent does once the rank is gone; return its restores, and its path."""
        memory = self._rank.memory
        restores = Restores(self._rank)
        self._arena.mapping.give_up()
        del self._arena, self._rank.arena
        gc.collect()
        assert memory.seal_writes(), "the arena is still mapped for writing"
        return restores, memory.path

    def check(self) -> None:
        """Raise an error unless the last snapshot is identical to the state."""
        if self._errors:
            raise self._errors[0]
        for live, view in zip(self._rank.slices, self._arena.views, strict=True):
            if not torch.equal(live.tensor.cpu().view(-1), view.view(-1)):
                raise AssertionError(f"{live.slice.key} was not copied right")

    def _start(self) -> Snapshot:
        self._arena.begin()
        return self._snapshotter.start(
            self._arena,
            self._rank.slices,
            background=self._background,
            during=lambda: None,
            finish=partial(self._arena.seal, ATTEMPT.attempt),
            fail=self._errors.append,
        )

    def _wait_sealed(self) -> None:
        while self._arena.mapping.page.sealed != ATTEMPT.attempt and not self._errors:
            time.sleep(POLL_S)


def rows(context: Context) -> Iterator[Row]:
    """Yield the copy rate into the pinned arena, what a save costs the training, and the rate of restores."""
    if not torch.cuda.is_available():
        yield skipped("device-copy", "from a GPU into the pinned arena", "this machine has no GPU")
        return
    rig = DeviceRig(context.size_bytes)
    for sample in (rig.copied_s, rig.plain_s, rig.blocked_s):  # the first calls are slow
        sample()
    yield measure(
        "device-copy",
        f"from {torch.cuda.get_device_name()} into the pinned arena",
        "GB/s",
        rig.copied_s,
        beside=("one pinned copy", rig.plain_s),
        repeat=context.repeat,
        reach=">= 0.9",
        size_bytes=rig.size_bytes,
    )
    what = "what an overlapped save blocks"
    yield measure("device-blocked", what, "s", rig.blocked_s, repeat=context.repeat, limit=BLOCKED_LIMIT_S)
    yield measure(
        "device-step",
        f"{PRODUCTS} products of matrices while a snapshot is copied",
        "s",
        rig.step_beside_copy_s,
        beside=("alone", rig.step_s),
        repeat=context.repeat,
        reach="<= 1.05",
    )
    rig.watch_s()
    yield measure(
        "device-watch",
        "replica watch in a save, of all that a rank holds",
        "s",
        rig.watch_s,
        beside=("a snapshot", rig.copied_s),
        repeat=context.repeat,
        reach="<= 0.02",
    )
    rig.copied_s()
    rig.check()
    before = fingerprint(rig.model, rig.optimizer)
    restores, path = rig.restores()
    for name, what, is_verified in (
        ("device-restore", "a restore from the arena into the GPU, verified by the agent before", True),
        (
            "device-restore-early",
            "a restore from the arena into the GPU, every digest checked by the rank",
            False,
        ),
    ):
        restore_s = partial(restores, "memory", path, is_verified=is_verified)
        wipe(rig.model, rig.optimizer)
        restore_s()
        assert fingerprint(rig.model, rig.optimizer) == before, "other bits were restored"
        rig.plain_back_s()
        yield measure(
            name,
            what,
            "GB/s",
            restore_s,
            beside=("one pinned copy", rig.plain_back_s),
            repeat=context.repeat,
            size_bytes=rig.size_bytes,
        )


def _synchronized_s() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    from jobs.bench.__main__ import main

    sys.exit(main(["--only", "device", "--size", "4GiB", *sys.argv[1:]]))
