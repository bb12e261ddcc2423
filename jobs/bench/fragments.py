"""Fragments of a large group: real files of the format, whose shards were never written.

The state is AdamW of a model with three tensors per parameter, each cut over all ranks in its first
dimension. The product encodes the fragment of the first node; the other nodes have the same columns with
their own offsets, files and digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.manifest import COLUMNS, encode_columns, rows_table
from ray_ckpt.format.names import fragment_file, make_attempt, shard_file, state_file
from ray_ckpt.types import (
    AttemptId,
    CheckpointInfo,
    FileEntry,
    Fragment,
    FragmentMetadata,
    Level,
    ManifestRow,
    Slice,
)

RANKS = 8  # per node
KINDS = (("model", "weight"), ("optimizer", "exp_avg"), ("optimizer", "exp_avg_sq"))
COLUMNS_OF_A_TENSOR = 4096
HEADER_BYTES, STATE_BYTES = 200_000, 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A group of `num_nodes` nodes with RANKS ranks, each of which holds `num_slices` slices."""

    num_nodes: int
    num_slices: int

    @property
    def world_size(self) -> int:
        return self.num_nodes * RANKS

    @property
    def attempt(self) -> AttemptId:
        return make_attempt(run_uid="0" * 32, session=1, step=1000, attempt=0)

    def targets(self, rank: int, world_size: int) -> tuple[Slice, ...]:
        """Return what rank `rank` of `world_size` ranks holds; the tensors are cut evenly, up to a row."""
        rows = 2 * self.world_size
        start, end = rank * rows // world_size, (rank + 1) * rows // world_size
        return tuple(
            Slice(
                item=item,
                name=f"layers.{index // 4}.block.{index % 4}.{name}",
                dtype="F32",
                global_shape=(rows, COLUMNS_OF_A_TENSOR),
                offset=(start, 0),
                shape=(end - start, COLUMNS_OF_A_TENSOR),
            )
            for index in range(self.num_slices // len(KINDS))
            for item, name in KINDS
        )

    def write(self, folder: Path) -> CheckpointInfo:
        """Write all fragments into `folder`, unless it has them, and return the checkpoint for the log."""
        folder.mkdir(parents=True, exist_ok=True)
        files: list[FileEntry] = []
        first = self._first()
        for node in range(self.num_nodes):
            path = folder / fragment_file(node, self.num_nodes)
            if not path.exists():
                path.write_bytes(encode_columns(*self._of_node(first, node)))
            data = path.read_bytes()
            files += [
                *self._files(node),
                FileEntry(name=path.name, size_bytes=len(data), digest=digest(data)),
            ]
        return CheckpointInfo(
            id=self.attempt,
            seq=1,
            level=Level.REPLICATED,
            world_size=self.world_size,
            num_nodes=self.num_nodes,
            size_bytes=sum(file.size_bytes for file in files),
            root_digest=root_digest(files),
            committed_at_s=0.0,
            metrics={},
        )

    def _first(self) -> pa.Table:
        """Return the rows of node 0, which the product's own records describe."""
        rows = tuple(row for rank in range(RANKS) for row in self._rows(rank))
        return rows_table([self._fragment(rows)])

    def _fragment(self, rows: tuple[ManifestRow, ...]) -> Fragment:
        return Fragment(
            attempt=self.attempt,
            node_index=0,
            num_nodes=self.num_nodes,
            world_size=self.world_size,
            ranks=tuple(range(RANKS)),
            files=self._files(0),
            rows=rows,
        )

    def _rows(self, rank: int) -> Iterator[ManifestRow]:
        file, at = shard_file(rank, self.world_size), HEADER_BYTES
        no_digest = "0" * 32
        yield ManifestRow(kind="header", file=file, byte_offset=0, nbytes=at, digest=no_digest)
        for part in sorted(self.targets(rank, self.world_size), key=lambda part: part.key):
            nbytes = 4 * part.num_elements
            yield ManifestRow(
                kind="slice", file=file, byte_offset=at, nbytes=nbytes, digest=no_digest, slice=part
            )
            at += nbytes
        state = state_file(rank, self.world_size)
        yield ManifestRow(kind="state", file=state, byte_offset=0, nbytes=STATE_BYTES, digest=no_digest)

    def _files(self, node: int) -> tuple[FileEntry, ...]:
        size = HEADER_BYTES + self.num_slices // len(KINDS) * len(KINDS) * 2 * COLUMNS_OF_A_TENSOR * 4
        return tuple(
            FileEntry(name=name, size_bytes=nbytes, digest=digest(name.encode()))
            for rank in range(node * RANKS, (node + 1) * RANKS)
            for name, nbytes in (
                (shard_file(rank, self.world_size), size),
                (state_file(rank, self.world_size), STATE_BYTES),
            )
        )

    def _of_node(self, first: pa.Table, node: int) -> tuple[FragmentMetadata, pa.Table]:
        """Return the fragment of a node: offsets, file names and digests differ from those of node 0."""
        num_rows, ranks = first.num_rows, range(node * RANKS, (node + 1) * RANKS)
        starts = np.repeat(np.array([2 * rank for rank in ranks], np.int64), num_rows // RANKS)
        is_slice = np.asarray(first.column("item").is_valid())
        values = np.zeros((int(is_slice.sum()), 2), np.int64)
        values[:, 0] = starts[is_slice]
        ends = np.concatenate(([0], np.cumsum(2 * is_slice))).astype(np.int32)
        no_list = pa.array(np.append(~is_slice, False))
        offsets = pa.ListArray.from_arrays(
            pa.array(ends, mask=np.asarray(no_list)), pa.array(values.reshape(-1))
        )
        texts = np.random.default_rng(node).bytes(16 * num_rows).hex()
        columns = {name: first.column(name) for name in COLUMNS.names}
        columns |= {
            "offset": offsets,
            "file": pa.array(self._file_column(first, ranks)),
            "digest": pa.array([texts[at : at + 32] for at in range(0, len(texts), 32)]),
        }
        metadata = FragmentMetadata(
            attempt=self.attempt,
            node_index=node,
            num_nodes=self.num_nodes,
            world_size=self.world_size,
            ranks=tuple(ranks),
            files=self._files(node),
            num_rows=num_rows,
        )
        return metadata, pa.table(columns, schema=COLUMNS)

    def _file_column(self, first: pa.Table, ranks: Sequence[int]) -> list[str]:
        per_rank = first.num_rows // RANKS
        is_state = [kind == "state" for kind in first.column("kind").slice(0, per_rank).to_pylist()]
        return [
            state_file(rank, self.world_size) if state else shard_file(rank, self.world_size)
            for rank in ranks
            for state in is_state
        ]
