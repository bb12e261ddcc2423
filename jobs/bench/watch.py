"""Time that the replica watch takes in a save, beside a capture, on a CPU with one core, as captures run.

A rank digests 1/53 of all that it holds, beside a copy of all of that (`watch`), and beside a copy of the
share that it saves of 2 or 8 replicas: the more replicas, the less there is to copy. Each sample is another
window.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from jobs.bench.context import Context
from jobs.bench.row import Row, measure
from jobs.bench.state import make_state
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.replica_watch import ReplicaWatch
from ray_ckpt.capture.torch_private import copy_all
from ray_ckpt.capture.walk import LiveSlice, walk

REPLICAS = (2, 8)


def rows(context: Context) -> Iterator[Row]:
    model, optimizer = make_state(context.size_bytes)
    owners = {"model": model}
    items = {name: adapt(name, obj, owners) for name, obj in (("model", model), ("optimizer", optimizer))}
    whole = walk(items, rank=0, world_size=2)
    targets = {live.slice_key: torch.zeros_like(live.tensor) for live in whole.slices}
    watch, steps = ReplicaWatch(whole.slices), itertools.count()
    background = {live.slice.key for live in whole.slices}

    def digest() -> float:
        start_s = time.perf_counter()
        found = watch.digests(whole.slices, next(steps), 0)
        found.add_now(background)
        found.complete()
        found.reports()
        return time.perf_counter() - start_s

    def copy_of(slices: Sequence[LiveSlice]) -> Callable[[], float]:
        into, sources = ([targets[s.slice_key] for s in slices], [s.tensor.detach() for s in slices])

        def copy() -> float:
            start_s = time.perf_counter()
            copy_all(into, sources)
            return time.perf_counter() - start_s

        return copy

    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        what, copy = "replica watch in a save, of all that a rank holds", copy_of(whole.slices)
        repeat = context.repeat
        yield measure(
            "watch", what, "s", digest, beside=("copy of all", copy), repeat=repeat, reach="<= 0.02"
        )
        for replicas in REPLICAS:
            what = f"replica watch in a save, beside a rank's share of {replicas} replicas"
            copy = copy_of(walk(items, rank=0, world_size=replicas).owned(0))
            beside = (f"copy of 1/{replicas}", copy)
            yield measure(f"watch-{replicas}", what, "s", digest, beside=beside, repeat=repeat)
    finally:
        torch.set_num_threads(cores)
