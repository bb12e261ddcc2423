"""Orbax's AsyncCheckpointer with its defaults (OCDBT, zarr3), on jax arrays that hold the same bytes.

jax arrays are immutable, so training waits only for the copies that orbax itself makes. The arrays are made
from the state before a save, and copied back into the state after a load; neither is part of the measured
times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax  # type: ignore[import-not-found]
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-not-found]
import torch

from jobs.bench.peers.child import RETURNED, Live, Peer, main, parser
from jobs.bench.state import tensors


class Orbax(Peer):
    def __init__(self, live: Live) -> None:
        self.checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self.arrays: dict[str, Any] = {}

    def prepare(self, live: Live) -> None:
        self.arrays = {name: jax.numpy.array(value) for name, value in _named(live)}
        jax.block_until_ready(self.arrays)

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        self.checkpointer.save(folder, args=ocp.args.StandardSave(self.arrays))
        yield RETURNED
        self.checkpointer.wait_until_finished()

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> float:
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.arrays)
        self.arrays = {}
        started_s = time.perf_counter()
        self.arrays = self.checkpointer.restore(folder, args=ocp.args.StandardRestore(target))
        jax.block_until_ready(self.arrays)
        used_s = time.perf_counter() - started_s
        for name, value in _named(live):
            value[...] = self.arrays[name]
        return used_s

    def close(self) -> None:
        self.checkpointer.close()


def _named(live: Live) -> Iterator[tuple[str, Any]]:
    for index, tensor in enumerate(tensors(live.model, live.optimizer)):
        yield f"{index:04d}", tensor.numpy() if tensor.dtype is not torch.bfloat16 else np.asarray(tensor)


if __name__ == "__main__":
    main(Orbax, parser().parse_args())
