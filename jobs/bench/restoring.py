"""A whole restore of one rank, from the arena and from the local disk, into existing parameters.

Everything that a Checkpointer does after it has its ticket: walk the items, plan, read, check each digest,
load the rest of the state. The limits compared with it only move bytes: a copy out of the same shared memory
with as many threads, and O_DIRECT reads of the same file.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.bench.context import Context
from jobs.bench.disk import huge_buffer, raw_read
from jobs.bench.row import Row, compared, gb_per_s
from jobs.bench.state import fingerprint, make_state, wipe
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.load import load_items
from ray_ckpt.capture.walk import walk
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.format.shard import build_layout
from ray_ckpt.format.tree import decode_tree, encode_tree
from ray_ckpt.restore.reader import FileSource, SourceReader, num_threads
from ray_ckpt.storage.local.pages import make_huge
from ray_ckpt.types import ARENA_PAGE_BYTES, ManifestRow, Tier

ATTEMPT = make_attempt(run_uid="0" * 32, session=1, step=1, attempt=0)
FILE = shard_file(0, 1)
PAGE = mmap.PAGESIZE

Bytes = npt.NDArray[np.uint8]


class Restoring:
    """A live state of about `size_bytes`, an arena with it and, if `folder` is given, a file there."""

    def __init__(self, size_bytes: int, folder: Path | None = None) -> None:
        self._model, self._optimizer = make_state(size_bytes)
        owners = {"model": self._model}
        self._items: dict[str, Item] = {
            "model": adapt("model", self._model, owners),
            "optimizer": adapt("optimizer", self._optimizer, owners),
        }
        walked = walk(self._items, rank=0, world_size=1)
        owned = {live.slice.key: live.tensor for live in walked.owned(0)}
        layout = build_layout([live.slice for live in walked.slices])
        self.size_bytes = layout.size_bytes
        self._fd = os.memfd_create("ray_ckpt-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, -(-(ARENA_PAGE_BYTES + layout.size_bytes) // PAGE) * PAGE)
        make_huge(self._fd, 0, ARENA_PAGE_BYTES + layout.size_bytes)
        self._arena = Arena(f"/proc/{os.getpid()}/fd/{self._fd}")
        self._arena.lay_out(layout)
        for placed, view in zip(layout.slices, self._arena.views, strict=True):
            view.copy_(owned[placed.slice.key])
        self._arena.seal(ATTEMPT.attempt)
        self._shard: Bytes = self._arena.mapping.bytes.numpy()[ARENA_PAGE_BYTES:]
        self._rows = [
            ManifestRow(
                kind="slice",
                file=FILE,
                byte_offset=placed.byte_offset,
                nbytes=placed.nbytes,
                digest=digest(self._shard[placed.byte_offset : placed.byte_offset + placed.nbytes].data),
                slice=placed.slice,
            )
            for placed in layout.slices
        ]
        tree = {"step": 1, "world_size": 1, "items": dict(walked.trees)}
        self._state: Any = decode_tree(encode_tree(tree))
        self._target = huge_buffer(len(self._shard))
        self._path = None if folder is None else folder / FILE
        if self._path is not None:
            self._path.write_bytes(self._shard.data)  # in whole pages, because raw reads need whole pages
            with self._path.open("rb") as file:
                os.fsync(file.fileno())

    def arena_s(self) -> float:
        """Return the seconds to restore from the arena."""
        return self._restore("memory", f"/proc/{os.getpid()}/fd/{self._fd}")

    def disk_s(self) -> float:
        """Return the seconds to restore from the file."""
        return self._restore("local", str(self._path))

    def memcpy_s(self) -> float:
        """Return the seconds to copy the shard out of the arena, with the threads of a restore."""
        threads = num_threads("memory")
        into: Bytes = np.frombuffer(self._target, np.uint8)
        part = -(-len(self._shard) // threads)
        with ThreadPoolExecutor(threads) as pool:
            started_s = time.perf_counter()
            list(pool.map(lambda at: _copy(into, self._shard, at, part), range(0, len(self._shard), part)))
            return time.perf_counter() - started_s

    def raw_read_s(self) -> float:
        """Return the seconds to read the file."""
        assert self._path is not None
        return raw_read(self._path, self._target)

    def check(self, restore: Callable[[], float]) -> None:
        """Raise AssertionError unless `restore` restores every bit."""
        before = fingerprint(self._model, self._optimizer)
        wipe(self._model, self._optimizer)
        restore()
        assert fingerprint(self._model, self._optimizer) == before, "other bits were restored"

    def close(self) -> None:
        os.close(self._fd)

    def _restore(self, tier: Tier, path: str) -> float:
        started_s = time.perf_counter()
        source = FileSource(tier=tier, where="here", path=path)
        reader = SourceReader(ATTEMPT, {FILE: (source,)}, credentials=None)
        load_items(self._items, self._state, self._rows, reader, rank=0, world_size=1)()
        assert not reader.damage, reader.rejected
        return time.perf_counter() - started_s


def rows(context: Context) -> Iterator[Row]:
    with context.temporary() as folder:
        rig = Restoring(context.size_bytes, folder)
        speed = partial(gb_per_s, size_bytes=rig.size_bytes)
        try:
            rig.check(rig.arena_s)
            rig.memcpy_s()
            yield compared(
                "restore-arena",
                "a restore from the arena, every digest checked",
                "GB/s",
                rig.arena_s,
                (f"memcpy, {num_threads('memory')} threads", rig.memcpy_s),
                repeat=context.repeat,
                reach=">= 0.7",
                convert=speed,
            )
            rig.check(rig.disk_s)
            yield compared(
                "restore-disk",
                "a restore from the local disk, every digest checked",
                "GB/s",
                rig.disk_s,
                ("raw O_DIRECT read", rig.raw_read_s),
                repeat=context.repeat,
                reach=">= 0.85",
                convert=speed,
            )
        finally:
            rig.close()


def _copy(into: Bytes, source: Bytes, at: int, nbytes: int) -> None:
    np.copyto(into[at : at + nbytes], source[at : at + nbytes])
