"""Ranks as threads of this process: torch's threaded process group, with real meshes, DTensors and wrappers.

Collectives run, so `full_tensor()` and training steps do too, and a world of four costs some milliseconds
where processes cost seconds. Random state and torch's global settings are shared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.load import load_items
from ray_ckpt.capture.walk import Walked, walk
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.format.shard import build_layout
from ray_ckpt.format.tree import decode_tree, encode_tree
from ray_ckpt.restore.manifest import ListedRows
from ray_ckpt.restore.reader import FileSource, SourceReader
from ray_ckpt.types import ManifestRow

TIMEOUT_S = 60.0  # of a test's ranks
AFTER_ERROR_S = (
    1.0  # for the others, once one has failed: where they wait in no collective, nothing wakes them
)
POLL_S = 0.1

Result = TypeVar("Result")
_PG: Any = multi_threaded_pg  # neither has types
_C10D: Any = torch._C._distributed_c10d


def on_ranks(world_size: int, work: Callable[[int], Result]) -> list[Result]:
    """Return the results of `work(rank)` on `world_size` ranks, or raise the first error of a rank."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    world, store = _PG._install_threaded_pg(), _C10D.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            _PG.ProcessLocalGroup.exception_handle(error)  # wakes those that wait for this rank
        finally:
            if world == dist.distributed_c10d._world:
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    _C10D._set_thread_isolation_mode(True)
    try:
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + TIMEOUT_S
        for thread in threads:
            while thread.is_alive() and time.monotonic() < deadline_s:
                thread.join(POLL_S)
                if errors:  # the others may be waiting for that rank
                    deadline_s = min(deadline_s, time.monotonic() + AFTER_ERROR_S)
    finally:
        _PG.ProcessLocalGroup.reset()
        _C10D._set_thread_isolation_mode(False)
        _PG._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "the ranks wait for each other"
    return [results[rank] for rank in range(world_size)]


@dataclass(slots=True)
class Files:
    """A checkpoint in a folder, saved and read by ranks on their own: walk, layout, rows, `load_items`."""

    folder: Path
    world_size: int
    rows: list[ManifestRow] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def save(self, items: Mapping[str, Item], rank: int) -> Walked:
        """Add the shard of `rank`."""
        walked = walk(items, rank=rank, world_size=self.world_size)
        owned = {live.slice_key: live for live in walked.owned(rank)}
        layout = build_layout(live.slice for live in owned.values())
        data, file = bytearray(layout.header), shard_file(rank, self.world_size)
        rows = []
        for placed in layout.slices:
            part = _raw(owned[placed.slice.key, placed.slice.offset].tensor)
            assert (placed.byte_offset, placed.nbytes) == (len(data), len(part))
            data += part
            rows.append(
                ManifestRow(
                    kind="slice",
                    file=file,
                    byte_offset=placed.byte_offset,
                    nbytes=placed.nbytes,
                    digest=digest(part),
                    slice=placed.slice,
                )
            )
        (self.folder / file).write_bytes(data)
        tree = {"step": 10, "world_size": self.world_size, "items": dict(walked.trees)}
        with self._lock:
            self.rows += rows
            self.states[rank] = decode_tree(encode_tree(tree))
        return walked

    def load(self, items: Mapping[str, Item], rank: int, world_size: int) -> SourceReader:
        """Restore as `rank` of `world_size`; the returned reader counts the bytes that were read."""
        sources = {
            row.file: (FileSource(tier="local", where="here", path=str(self.folder / row.file)),)
            for row in self.rows
        }
        attempt = make_attempt(run_uid="0" * 32, session=1, step=10, attempt=0)
        reader = SourceReader(attempt, sources, credentials=None)
        state = self.states[rank if rank < self.world_size else 0]
        finish = load_items(items, state, ListedRows(self.rows), reader, rank=rank, world_size=world_size)
        assert not reader.damage and not reader.rejected
        finish()
        return reader


def items_of(**objects: Any) -> dict[str, Item]:
    owners = {n: o for n, o in objects.items() if isinstance(o, torch.nn.Module | torch.nn.Parameter)}
    return {name: adapt(name, obj, owners) for name, obj in objects.items()}


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
