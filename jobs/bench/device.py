"""Snapshots from a GPU: needs no Ray, only torch, the arena and the snapshot code.

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
from jobs.bench.state import make_state, state_bytes, tensors
from ray_ckpt.actors.agent.arena import make_arena
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.overlap_guard import background_slices, guarded_storages
from ray_ckpt.capture.snapshot import Snapshot, Snapshotter
from ray_ckpt.capture.walk import walk
from ray_ckpt.format.shard import build_layout

DEVICE = torch.device("cuda")
ATTEMPT = "0" * 16
BLOCKED_LIMIT_S = 0.010  # of the issue, for a model of several GB


def rows(size_bytes: int, repeat: int) -> Iterator[Row]:
    """Copy rate into the pinned arena beside a plain pinned copy, and what a save blocks."""
    model, optimizer = make_state(size_bytes)
    model.to(DEVICE)
    for state in optimizer.state.values():
        state.update({k: v.to(DEVICE) if v.dim() else v for k, v in state.items()})
    size = state_bytes(model, optimizer)
    items = {"model": adapt("model", model, {"model": model})}
    items["optimizer"] = adapt("optimizer", optimizer, {"model": model})
    walked = walk(items, rank=0, world_size=1)
    layout = build_layout(live.slice for live in walked.slices)
    memory = make_arena(
        0, layout.size_bytes, mode="single", all_bytes=layout.size_bytes, free_bytes=1 << 50, named=False
    )
    memory.buffers[0].populate()
    arena = Arena(memory.buffers[0].path)
    arena.mapping.populate()
    arena.mapping.pin(DEVICE)
    arena.lay_out(layout)
    slices = [walked.by_key[placed.slice.key] for placed in layout.slices]
    background = background_slices(walked.slices, guarded_storages([optimizer]))
    snapshotter = Snapshotter(overlap=True, verify=False, waited=lambda seconds: None)
    errors: list[Exception] = []

    def start() -> Snapshot:
        arena.begin()
        return snapshotter.start(
            arena,
            slices,
            background=background,
            during=lambda: None,
            finish=partial(arena.seal, ATTEMPT),
            fail=errors.append,
        )

    def copied_s() -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        start()
        while arena.mapping.page.sealed != ATTEMPT and not errors:
            time.sleep(0.0002)
        return time.perf_counter() - start_s

    def blocked_s() -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        snapshot = start()
        taken_s = time.perf_counter() - start_s
        snapshot.before_change()
        torch.cuda.synchronize()
        while arena.mapping.page.sealed != ATTEMPT and not errors:
            time.sleep(0.0002)
        return taken_s

    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def plain_s() -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start_s

    copied_s(), plain_s(), blocked_s()
    yield compared(
        "device-copy",
        f"{format_size(size)} from the GPU into the pinned arena",
        "GB/s",
        copied_s,
        ("one pinned copy", plain_s),
        repeat=repeat,
        reach=">= 0.9",
        convert=partial(gb_per_s, size_bytes=size),
    )
    yield measure(
        "device-blocked",
        f"what an overlapped save of {format_size(size)} blocks",
        "s",
        blocked_s,
        repeat=repeat,
        limit=BLOCKED_LIMIT_S,
    )
    copied_s()
    if errors:
        raise errors[0]
    for live, view in zip(slices, arena.views, strict=True):
        if not torch.equal(live.tensor.cpu().view(-1), view.view(-1)):
            raise AssertionError(f"{live.slice.key} was not copied right")
    assert sum(t.nbytes for t in tensors(model, optimizer)) == size


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
