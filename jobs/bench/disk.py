"""The local disk: a state to fsynced files and back, compared with plain O_DIRECT loops at the disk's speed.

The writes of ray_ckpt go from an arena, hash the file and each slice, rename, and fsync file and folder; the
reads of ray_ckpt hash each block and copy it to its destination.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from jobs.bench.context import Context
from jobs.bench.limits import Bytes, Limits, fill
from jobs.bench.row import Row, measure
from ray_ckpt.actors.agent.arena import ArenaMemory
from ray_ckpt.format.digest import Digester
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.types import ARENA_PAGE_BYTES

PIECE_BYTES = 1 << 20  # bytes copied at a time, while they are in the CPU cache after hashing
NUM_SLICES = 400  # slices of the state: parameters and two moments of a model with over 100 tensors
RUN_UID = "0" * 32
ATTEMPT = make_attempt(run_uid=RUN_UID, session=1, step=1, attempt=0)
FILE = shard_file(0, 1)


def rows(context: Context) -> Iterator[Row]:
    size = context.size_bytes
    memory = ArenaMemory(0, size)
    memory.populate()
    arena = memory.memory[ARENA_PAGE_BYTES:]
    fill(arena)
    step = -(-size // NUM_SLICES)
    spans = [(at, min(step, size - at)) for at in range(0, size, step)]
    with (
        context.temporary() as folder,
        contextlib.closing(Disks([folder / "stage"])) as disks,
        contextlib.closing(Limits(size, folder)) as limits,
    ):

        def write_s() -> float:
            """Return the seconds until the arena is a durable checkpoint file with all digests."""
            disks.delete(RUN_UID, ATTEMPT.directory)
            started_s = time.perf_counter()
            disks.put(RUN_UID, ATTEMPT.directory, FILE, [arena], size_bytes=size, spans=spans)
            return time.perf_counter() - started_s

        def read_s() -> float:
            """Return the seconds until the file is in the arena, and the digest is computed."""
            into: Bytes = np.frombuffer(arena, np.uint8)
            state, at = Digester(), 0
            started_s = time.perf_counter()
            for block in read_blocks_direct(disks.path(RUN_UID, ATTEMPT.directory, FILE)):
                for offset in range(0, block.nbytes, PIECE_BYTES):
                    piece = block[offset : offset + PIECE_BYTES]
                    state.update(piece)
                    np.copyto(into[at : at + piece.nbytes], np.frombuffer(piece, np.uint8))
                    at += piece.nbytes
            state.hexdigest()
            return time.perf_counter() - started_s

        for name, what, sample, beside in (
            ("write", "state to fsynced local files, hashes included", write_s, limits.write_s),
            ("read", "local file into warm memory, hash included", read_s, limits.read_s),
        ):
            beside()  # the first call of each is slow
            sample()
            yield measure(
                f"disk-{name}",
                what,
                "GB/s",
                sample,
                beside=(f"raw O_DIRECT {name}", beside),
                repeat=context.repeat,
                reach=">= 0.85",
                size_bytes=size,
            )
    memory.close()
