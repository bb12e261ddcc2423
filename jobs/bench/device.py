"""Snapshots from a GPU, without Ray: only torch, the arena and the snapshot code are needed.

python -m jobs.bench.device --size 4GiB
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial

import torch

from jobs.bench.context import format_size, parse_size
from jobs.bench.row import Row, compared, gb_per_s, measure
from jobs.bench.state import make_state, state_bytes
from ray_ckpt.actors.agent.arena import make_arena
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.overlap_guard import background_slices, guarded_storages
from ray_ckpt.capture.snapshot import Snapshot, Snapshotter
from ray_ckpt.capture.walk import walk
from ray_ckpt.format.shard import build_layout

DEVICE = torch.device("cuda")
ATTEMPT = "0" * 16
BLOCKED_LIMIT_S = 0.010  # for a model of several GB
POLL_S = 0.0002


class DeviceRig:
    """A state of about `size_bytes` on the GPU, and a pinned arena for its snapshots."""

    def __init__(self, size_bytes: int) -> None:
        model, optimizer = make_state(size_bytes)
        model.to(DEVICE)
        for state in optimizer.state.values():
            state.update({k: v.to(DEVICE) if v.dim() else v for k, v in state.items()})
        self.size_bytes = state_bytes(model, optimizer)
        items = {
            "model": adapt("model", model, {"model": model}),
            "optimizer": adapt("optimizer", optimizer, {"model": model}),
        }
        walked = walk(items, rank=0, world_size=1)
        layout = build_layout(live.slice for live in walked.slices)
        memory = make_arena(
            0, layout.size_bytes, mode="single", all_bytes=layout.size_bytes, free_bytes=1 << 50, named=False
        )
        memory.buffers[0].populate()
        self._arena = Arena(memory.buffers[0].path)
        self._arena.mapping.populate()
        self._arena.mapping.pin(DEVICE)
        self._arena.lay_out(layout)
        self._slices = [walked.by_key[placed.slice.key] for placed in layout.slices]
        self._background = background_slices(walked.slices, guarded_storages([optimizer]))
        self._snapshotter = Snapshotter(overlap=True, verify=False, waited=lambda seconds: None)
        self._errors: list[Exception] = []
        self._source = torch.empty(self.size_bytes, dtype=torch.uint8, device=DEVICE)
        self._target = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=True)

    def copied_s(self) -> float:
        """Return the seconds of a snapshot until the arena is sealed."""
        started_s = self._synchronized_s()
        self._start()
        self._wait_sealed()
        return time.perf_counter() - started_s

    def blocked_s(self) -> float:
        """Return the seconds for which a snapshot blocks the training."""
        started_s = self._synchronized_s()
        snapshot = self._start()
        taken_s = time.perf_counter() - started_s
        snapshot.before_change()
        torch.cuda.synchronize()
        self._wait_sealed()
        return taken_s

    def plain_s(self) -> float:
        """Return the seconds of one copy of the same number of bytes into pinned memory."""
        started_s = self._synchronized_s()
        self._target.copy_(self._source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started_s

    def check(self) -> None:
        """Raise an error unless the last snapshot is identical to the state."""
        if self._errors:
            raise self._errors[0]
        for live, view in zip(self._slices, self._arena.views, strict=True):
            if not torch.equal(live.tensor.cpu().view(-1), view.view(-1)):
                raise AssertionError(f"{live.slice.key} was not copied right")

    def _start(self) -> Snapshot:
        self._arena.begin()
        return self._snapshotter.start(
            self._arena,
            self._slices,
            background=self._background,
            during=lambda: None,
            finish=partial(self._arena.seal, ATTEMPT),
            fail=self._errors.append,
        )

    def _wait_sealed(self) -> None:
        while self._arena.mapping.page.sealed != ATTEMPT and not self._errors:
            time.sleep(POLL_S)

    @staticmethod
    def _synchronized_s() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()


def rows(size_bytes: int, repeat: int) -> Iterator[Row]:
    """Yield the copy rate into the pinned arena and the time that a save blocks."""
    rig = DeviceRig(size_bytes)
    size = format_size(rig.size_bytes)
    for sample in (rig.copied_s, rig.plain_s, rig.blocked_s):  # the first calls are slow
        sample()
    yield compared(
        "device-copy",
        f"{size} from the GPU into the pinned arena",
        "GB/s",
        rig.copied_s,
        ("one pinned copy", rig.plain_s),
        repeat=repeat,
        reach=">= 0.9",
        convert=partial(gb_per_s, size_bytes=rig.size_bytes),
    )
    yield measure(
        "device-blocked",
        f"what an overlapped save of {size} blocks",
        "s",
        rig.blocked_s,
        repeat=repeat,
        limit=BLOCKED_LIMIT_S,
    )
    rig.copied_s()
    rig.check()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.bench.device", description=__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size("4GiB"))
    parser.add_argument("--repeat", type=int, default=5)
    chosen = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for row in rows(chosen.size, chosen.repeat):
        print(row.name, f"{row.median:.4g} {row.unit}", row.reach, row.verdict)


if __name__ == "__main__":
    main()
