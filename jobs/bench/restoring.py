"""A whole restore of one rank, from the arena and from the local disk, into existing parameters.

Everything that a Checkpointer does after it has its ticket: walk the items, plan, read, check each digest,
load the rest of the state. After a restart the agent has checked the digests of the arena before the rank
asks, while its process starts; a rank that comes earlier checks them itself. The limits compared with it only
move bytes: a copy out of the same shared memory with as many threads, and O_DIRECT reads of a file of the
same size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

from jobs.bench.context import Context
from jobs.bench.limits import Limits
from jobs.bench.row import Row, Sampler, measure
from jobs.bench.state import fingerprint, make_state, wipe
from ray_ckpt.actors.agent.arena import ArenaMemory
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.load import load_items
from ray_ckpt.capture.walk import walk
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.format.shard import build_rank_layout
from ray_ckpt.format.tree import decode_tree, encode_tree
from ray_ckpt.restore.manifest import ListedRows
from ray_ckpt.restore.reader import FileSource, SourceReader, num_threads
from ray_ckpt.types import ManifestRow, Tier

ATTEMPT = make_attempt(run_uid="0" * 32, session=1, step=1, attempt=0)
FILE = shard_file(0, 1)


class RankMemory:
    """The memory of one rank and its agent: items, the layout of their shard, and an arena with the shard."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        owners = {"model": model}
        self.items = {
            "model": adapt("model", model, owners),
            "optimizer": adapt("optimizer", optimizer, owners),
        }
        self.walked = walk(self.items, rank=0, world_size=1)
        self.layout = build_rank_layout(live.slice for live in self.walked.slices)
        by_key = {live.slice.key: live for live in self.walked.slices}
        self.slices = [by_key[placed.slice.key] for placed in self.layout.slices]
        self.memory = ArenaMemory(0, self.layout.size_bytes)
        self.memory.populate()
        self.arena = Arena(self.memory.path)
        self.arena.mapping.populate()

    def capture(self) -> None:
        """Copy the state into the arena, and seal it."""
        self.arena.lay_out(self.layout)
        for live, view in zip(self.slices, self.arena.views, strict=True):
            view.copy_(live.tensor)
        self.arena.seal(ATTEMPT.attempt)


class Restores:
    """Restores of a rank's whole state from memory or a file with its sealed shard."""

    def __init__(self, rank: RankMemory) -> None:
        shard = rank.memory.data(rank.layout)
        self._rank = rank
        self._manifest = [
            ManifestRow(
                kind="slice",
                file=FILE,
                byte_offset=placed.byte_offset,
                nbytes=placed.nbytes,
                digest=digest(shard[placed.byte_offset : placed.byte_offset + placed.nbytes]),
                slice=placed.slice,
            )
            for placed in rank.layout.slices
        ]
        trees = {"step": 1, "world_size": 1, "items": dict(rank.walked.trees)}
        self._state: Any = decode_tree(encode_tree(trees))

    def __call__(self, tier: Tier, path: str, *, is_verified: bool = False) -> float:
        """Restore once; return the seconds."""
        started_s = time.perf_counter()
        source = FileSource(tier=tier, where="here", path=path, is_verified=is_verified)
        reader = SourceReader(ATTEMPT, {FILE: (source,)}, credentials=None)
        load_items(self._rank.items, self._state, ListedRows(self._manifest), reader, rank=0, world_size=1)()
        assert not reader.damage, reader.rejected
        return time.perf_counter() - started_s


def rows(context: Context) -> Iterator[Row]:
    model, optimizer = make_state(context.size_bytes)
    rank = RankMemory(model, optimizer)
    rank.capture()
    shard = rank.memory.data(rank.layout)
    restore_s = Restores(rank)

    def row(name: str, what: str, sample: Sampler, beside: tuple[str, Sampler], reach: str) -> Row:
        before = fingerprint(model, optimizer)
        wipe(model, optimizer)
        sample()
        assert fingerprint(model, optimizer) == before, "other bits were restored"
        beside[1]()
        repeat, size = context.repeat, rank.layout.size_bytes
        return measure(name, what, "GB/s", sample, beside=beside, repeat=repeat, reach=reach, size_bytes=size)

    threads = num_threads("memory")
    with context.temporary() as folder, closing(Limits(rank.layout.size_bytes, folder)) as limits:
        with (folder / FILE).open("wb") as file:
            file.write(shard)
            os.fsync(file.fileno())
        what = "a restore from the arena, every digest checked by the rank"
        memcpy = (f"memcpy, {threads} threads", partial(limits.memcpy_s, threads, shard))
        yield row("restore-arena-early", what, partial(restore_s, "memory", rank.memory.path), memcpy, "")
        del memcpy, shard
        del rank.arena
        assert rank.memory.seal_writes(), "the arena is still mapped for writing"
        sealed = partial(restore_s, "memory", rank.memory.path, is_verified=True)
        what = "a restore from the arena, every digest checked by the agent before"
        shard = rank.memory.data(rank.layout)
        memcpy = (f"memcpy, {threads} threads", partial(limits.memcpy_s, threads, shard))
        yield row("restore-arena", what, sealed, memcpy, ">= 0.7")
        limits.write_s()
        raw_read = ("raw O_DIRECT read", limits.read_s)
        what = "a restore from the local disk, every digest checked"
        yield row("restore-disk", what, partial(restore_s, "local", str(folder / FILE)), raw_read, ">= 0.85")
