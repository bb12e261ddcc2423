"""Rows of one file that a thread reads together from one source, and the byte ranges that cover them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ray_ckpt.format.blocks import merge_ranges
from ray_ckpt.plan.restore import RowKey, row_key
from ray_ckpt.restore.sources import ByteSource, Mapped
from ray_ckpt.types import ManifestRow, RestoredPart, Tier

EXTENT_BYTES: Mapping[Tier, int] = {
    "memory": 32 << 20,  # has no start-up cost: small enough that every thread gets a share
    "local": 256 << 20,  # each extent first fills a read-ahead: 64 MiB were a fifth slower
    "peer": 64 << 20,  # a request is cheap, and a shard should arrive in several streams
    "remote": 64 << 20,  # each extent has several streams, and every thread gets a share
}  # bytes that one thread reads at a time
EXTENT_ROWS = 10_000  # rows per extent: bounds a request to a peer
GAP_BYTES: Mapping[Tier, int] = {
    "memory": 64 << 10,
    "local": 64 << 10,
    "peer": 64 << 10,
    "remote": 1 << 20,  # an object store answers after tens of milliseconds
}  # gap between rows; reading a gap costs less than another request


@dataclass(slots=True)
class Tally:
    """Bytes read of a file from one source, and the time of these reads."""

    file: str
    tier: Tier
    where: str
    is_prefetched: bool = False
    size_bytes: int = 0
    start_s: float = math.inf
    end_s: float = 0.0

    @property
    def source_text(self) -> str:
        return f"{self.tier} {self.where}"

    def add(self, size_bytes: int, start_s: float, end_s: float) -> None:
        self.size_bytes += size_bytes
        self.start_s, self.end_s = min(self.start_s, start_s), max(self.end_s, end_s)

    def part(self) -> RestoredPart:
        return RestoredPart(
            file=self.file,
            tier=self.tier,
            where=self.where,
            size_bytes=self.size_bytes,
            seconds=self.end_s - self.start_s,
            is_prefetched=self.is_prefetched,
        )


@dataclass(slots=True)
class Extent:
    """Rows that one thread reads from one source, each with its offset in the source, ordered by offset."""

    source: ByteSource
    tally: Tally
    left: deque[tuple[int, ManifestRow]]
    done: list[ManifestRow] = field(default_factory=list)

    @property
    def speed_tier(self) -> Tier:
        """The tier whose limits apply: rows that the agent has read are in memory, whatever their source."""
        return "memory" if isinstance(self.source, Mapped) else self.tally.tier

    @property
    def start(self) -> int:
        """Offset of the first remaining row; 0 if no row remains."""
        return self.left[0][0] if self.left else 0

    def ranges(self) -> Sequence[tuple[int, int]]:
        """Byte ranges (offset, size) that cover the remaining rows."""
        rows = ((start, row.nbytes) for start, row in self.left)
        return merge_ranges(rows, gap_bytes=GAP_BYTES[self.tally.tier])

    def gap(self, end: int) -> int:
        """Bytes to read and discard from `end` to the next row; 0 if that row begins a new range."""
        gap = self.start - end
        return gap if 0 <= gap <= GAP_BYTES[self.tally.tier] else 0

    def drop_until(self, end: float) -> None:
        """Drop the rows that begin before byte `end`, and at least one row."""
        if self.left:
            self.left.popleft()
        while self.left and self.left[0][0] < end:
            self.left.popleft()


def cut_extents(
    source: ByteSource, tally: Tally, placed: Iterable[tuple[int, ManifestRow]]
) -> Iterator[Extent]:
    """Cut rows into extents of EXTENT_BYTES and EXTENT_ROWS at most; a larger row is an extent by itself."""
    extent = Extent(source, tally, deque())
    limit, size = EXTENT_BYTES[extent.speed_tier], 0
    for start, row in placed:
        if extent.left and (size + row.nbytes > limit or len(extent.left) == EXTENT_ROWS):
            yield extent
            extent, size = Extent(source, tally, deque()), 0
        extent.left.append((start, row))
        size += row.nbytes
    if extent.left:
        yield extent


def rows_by_file(rows: Iterable[ManifestRow]) -> dict[str, list[ManifestRow]]:
    """Group rows by file, each group ordered by offset."""
    files: dict[str, list[ManifestRow]] = {}
    for row in sorted(rows, key=row_key):
        files.setdefault(row.file, []).append(row)
    return files


def first_rows(wanted: Mapping[RowKey, ManifestRow], max_bytes: int) -> Iterator[RowKey]:
    """Yield the keys of the first rows that have `max_bytes` together, but at least one key."""
    size = 0
    for key, row in wanted.items():
        size += row.nbytes
        if size > max_bytes and size > row.nbytes:
            return
        yield key
