"""Upload some items of a fragment: weights for evaluation, without the rest of the checkpoint.

The directory has the format of a checkpoint. A shard there has the slices of the items only, a state file
only their values, and the fragment lists these files. Each slice is compared on the way with its digest in
the fragment of the whole checkpoint; the coordinator compares that fragment with the commit. Memory holds a
few blocks.

Functions block; call them from threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import Buffer

from ray_ckpt.actors.agent.files import DRAIN_SPREAD_S, holding
from ray_ckpt.actors.agent.priority import ActiveCopies, DrainRateLimiter
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.core.values import ItemsPart
from ray_ckpt.errors import CorruptionError, Unavailable
from ray_ckpt.format.blocks import BlockCutter, merge_ranges
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.format.manifest import MAX_FRAGMENT_BYTES, decode_columns, encode_fragment
from ray_ckpt.format.names import fragment_file
from ray_ckpt.format.row_columns import rows_of
from ray_ckpt.format.shard import ShardLayout, build_layout
from ray_ckpt.format.tree import MAX_TREE_BYTES, decode_state, encode_tree
from ray_ckpt.storage.local.direct import read_written
from ray_ckpt.storage.remote.tier import RateLimiter, RemoteTier
from ray_ckpt.types import AttemptId, FileEntry, Fragment, FragmentMetadata, ManifestRow, RowKind, Slice


def upload_items(
    run: NodeRun, attempt: AttemptId, node_index: int, items: str, copies: ActiveCopies
) -> ItemsPart:
    """Upload these items of a fragment on this node, the fragment that lists them last.

    Equal fragments and items give equal files, so any holder may do this, also twice. CorruptionError if a
    file on this node is damaged or missing, OSError if the store or the disk fails.
    """
    time.sleep(random.uniform(0.0, DRAIN_SPREAD_S))
    held = holding(run, attempt, node_index)
    path = partial(run.staging.path, run.run_uid, attempt.directory)
    data = _read_checked(path(held.entry.name), held.entry.digest, MAX_FRAGMENT_BYTES)
    metadata, table = decode_columns(data)

    def check() -> None:
        if run.machine.is_deleted(attempt.attempt):  # a late upload would bring the step back
            raise Unavailable(f"step {attempt.step} is being deleted here")

    upload = _Upload(
        tier=run.remote.of_items(items),
        metadata=metadata,
        items=tuple(items.split(",")),
        path=path,
        pace=DrainRateLimiter(run.drain_limiter, copies),
        check=check,
    )
    fragment = upload.run(table)
    return ItemsPart(
        source=held.entry,
        fragment=fragment,
        size_bytes=fragment.size_bytes + sum(file.size_bytes for file in upload.files),
    )


class _Upload:
    """The upload of some items of one fragment; `files` and `_rows` are those that were uploaded so far."""

    def __init__(
        self,
        *,
        tier: RemoteTier,
        metadata: FragmentMetadata,
        items: Sequence[str],
        path: Callable[[str], Path],
        pace: RateLimiter,
        check: Callable[[], None],
    ) -> None:
        self.files: list[FileEntry] = []
        self._rows: list[ManifestRow] = []
        self._tier, self._metadata, self._items = tier, metadata, items
        self._path, self._pace, self._check = path, pace, check

    def run(self, table: pa.Table) -> FileEntry:
        """Upload all files, then the fragment; return the entry of the fragment."""
        metadata = self._metadata
        for entry in metadata.files:
            self._check()
            if entry.name.startswith("state-"):
                self._put_state(entry)
            elif rows := rows_of(table.filter(_wanted(table, entry.name, self._items))):
                self._put_shard(entry.name, rows)
        fragment = Fragment(
            attempt=metadata.attempt,
            node_index=metadata.node_index,
            num_nodes=metadata.num_nodes,
            world_size=metadata.world_size,
            ranks=metadata.ranks,
            files=tuple(self.files),
            rows=tuple(self._rows),
            replicated=metadata.replicated,
            metrics=metadata.metrics,
        )
        self._check()
        return self._put(fragment_file(metadata.node_index, metadata.num_nodes), encode_fragment(fragment))

    def _put_state(self, entry: FileEntry) -> None:
        """Upload the part of a state file that is about the items."""
        document = decode_state(_read_checked(self._path(entry.name), entry.digest, MAX_TREE_BYTES))
        for name in ("items", "classes"):
            known = document.get(name, {})
            document[name] = {key: value for key, value in known.items() if key.split(".")[0] in self._items}
        file = self._put(entry.name, encode_tree(document))
        self.files.append(file)
        self._row("state", file.name, 0, file.size_bytes, file.digest)

    def _put(self, name: str, data: bytes) -> FileEntry:
        self._pace.wait(len(data))
        self._tier.put(self._metadata.attempt.directory, name, data)
        return FileEntry(name=name, size_bytes=len(data), digest=digest(data))

    def _put_shard(self, name: str, rows: Iterable[ManifestRow]) -> None:
        """Upload a shard with these slices of the shard of that name, in the same order."""
        by_slice = {row.slice: row for row in rows if row.slice is not None}
        layout, whole = build_layout(by_slice), Digester()
        sources = [by_slice[placed.slice] for placed in layout.slices]
        blocks = self._blocks(name, layout, sources, whole)
        directory = self._metadata.attempt.directory
        size_bytes = self._tier.put_blocks(directory, name, blocks, layout.size_bytes, pace=self._pace)
        self.files.append(FileEntry(name=name, size_bytes=size_bytes, digest=whole.hexdigest()))
        self._row("header", name, 0, len(layout.header), digest(layout.header))
        for placed, source in zip(layout.slices, sources, strict=True):
            self._row("slice", name, placed.byte_offset, placed.nbytes, source.digest, placed.slice)

    def _blocks(
        self, name: str, layout: ShardLayout, sources: Sequence[ManifestRow], whole: Digester
    ) -> Iterator[Buffer]:
        """Yield the bytes of a new shard. CorruptionError if a slice on the disk is damaged."""
        whole.update(layout.header)
        yield layout.header
        path, spans = self._path(name), merge_ranges((row.byte_offset, row.nbytes) for row in sources)
        cutter = BlockCutter(
            block for offset, nbytes in spans for block in read_written(path, offset, nbytes)
        )
        for row in sources:
            own = Digester()
            for piece in cutter.pieces(row.nbytes):
                own.update(piece)
                whole.update(piece)
                yield piece
            if own.hexdigest() != row.digest:
                raise CorruptionError(f"{row.label} in {name} differs from its digest.", file=name)
            self._check()

    def _row(
        self, kind: RowKind, file: str, at: int, nbytes: int, found: str, part: Slice | None = None
    ) -> None:
        self._rows.append(
            ManifestRow(kind=kind, file=file, byte_offset=at, nbytes=nbytes, digest=found, slice=part)
        )


def _wanted(table: pa.Table, file: str, items: Sequence[str]) -> pa.Array:
    """Return which rows are slices of the items in a file, those of single ranks (`rank<k>`) included."""
    names = pc.list_element(pc.split_pattern(pc.fill_null(_texts(table, "name"), ""), ".", max_splits=1), 0)
    item = _texts(table, "item")
    chosen = pa.array(items)
    per_rank = pc.and_(pc.match_substring_regex(item, r"^rank\d+$"), pc.is_in(names, chosen))
    is_ours = pc.or_(pc.is_in(item, chosen), pc.fill_null(per_rank, False))
    return pc.and_(is_ours, pc.equal(_texts(table, "file"), file))


def _texts(table: pa.Table, name: str) -> pa.ChunkedArray:
    return table.column(name).cast(pa.string())


def _read_checked(path: Path, expected: str, max_bytes: int) -> bytes:
    """Return the content of a small file on this node. CorruptionError if it is missing or damaged."""
    try:
        data = b"".join(map(bytes, read_written(path, 0, min(path.stat().st_size, max_bytes))))
    except FileNotFoundError:
        raise CorruptionError(f"{path.name} is missing on this node.", file=path.name) from None
    if digest(data) != expected:
        raise CorruptionError(f"{path.name} differs from its digest.", file=path.name)
    return data
