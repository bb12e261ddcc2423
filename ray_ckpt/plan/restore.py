"""Plan of a restore: the reads that fill live slices from saved ones, for any two layouts.

Each target and each saved slice is a box of a global tensor; each copy is one intersection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from ray_ckpt.types import ManifestRow, Slice

RowKey: TypeAlias = tuple[str, int]
"""Identity of a manifest row in a checkpoint: its file, and its offset in the file."""


def row_key(row: ManifestRow) -> RowKey:
    return row.file, row.byte_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy of `shape` elements from `source_start` of the saved slice to `target_start` of `target`."""

    target: int
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One saved slice to read, the copies of its elements, and which of `near_files` have its region."""

    row: ManifestRow
    copies: tuple[Copy, ...]
    near_files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The reads of a restore, and all problems; without problems the checkpoint fits."""

    reads: tuple[Read, ...]
    problems: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(read.row.nbytes for read in self.reads)


def plan_restore(
    targets: Sequence[Slice],
    rows: Iterable[ManifestRow],
    *,
    own_files: Collection[str] = (),
    near_files: Collection[str] = (),
) -> RestorePlan:
    """Return the reads that fill `targets` from the saved `rows`.

    A region that several ranks saved is read once, from one of `own_files` if one of them has the region. So
    a rank gets its own copy of regions that may differ between ranks, also in dtype and global shape.
    Otherwise it is read from one of `near_files`, the files of the ranks on the node, so that these ranks
    read the same row.
    """
    rows = tuple(rows)
    saved, near = _by_key(rows, own_files, near_files), _near_by_region(rows, near_files)
    copies: dict[RowKey, list[Copy]] = {}
    chosen: dict[RowKey, ManifestRow] = {}
    problems: list[str] = []
    for index, target in enumerate(targets):
        found = saved.get(target.key, {})
        if problem := _misfit(target, found):
            problems.append(problem)
            continue
        exact = found.get((target.offset, target.shape))
        if (
            exact is not None and target.num_elements
        ):  # a slice of the same box was saved, as in most restores
            origin = (0,) * len(target.shape)
            whole = Copy(target=index, source_start=origin, target_start=origin, shape=target.shape)
            copies.setdefault(row_key(exact), []).append(whole)
            chosen[row_key(exact)] = exact
            continue
        pieces: list[Copy] = []
        for row in found.values():
            assert row.slice is not None
            if (copy := _intersect(index, target, row.slice)) is not None:
                copies.setdefault(row_key(row), []).append(copy)
                chosen[row_key(row)] = row
                pieces.append(copy)
        filled = sum(prod(piece.shape) for piece in pieces)
        if filled != target.num_elements:
            problems.append(f"{target.key}: {filled} of {target.num_elements} elements were saved")
        elif _overlap(pieces):
            problems.append(f"{target.key}: saved regions overlap, so others are missing")
    reads = tuple(
        Read(row=row, copies=tuple(copies[key]), near_files=frozenset(near.get(_region(row), ())))
        for key, row in sorted(chosen.items())
    )
    return RestorePlan(reads=reads, problems=tuple(problems))


def _by_key(
    rows: Iterable[ManifestRow], own_files: Collection[str], near_files: Collection[str]
) -> Mapping[str, dict[tuple[object, ...], ManifestRow]]:
    def near(row: ManifestRow) -> int:
        return 2 if row.file in own_files else int(row.file in near_files)

    saved: dict[str, list[ManifestRow]] = {}
    for row in rows:
        if row.slice is not None:
            saved.setdefault(row.slice.key, []).append(row)
    return {key: _regions(found, near) for key, found in saved.items()}


def _near_by_region(
    rows: Iterable[ManifestRow], near_files: Collection[str]
) -> Mapping[Hashable, Collection[str]]:
    found: dict[Hashable, set[str]] = {}
    for row in rows:
        if row.file in near_files and row.slice is not None:
            found.setdefault(_region(row), set()).add(row.file)
    return found


def _region(row: ManifestRow) -> Hashable:
    assert row.slice is not None
    return row.slice.key, row.slice.offset, row.slice.shape


def _regions(
    rows: Sequence[ManifestRow], near: Callable[[ManifestRow], int]
) -> dict[tuple[object, ...], ManifestRow]:
    """Return the nearest row of each region of a tensor, of those that agree with the nearest row of all.

    Ranks save tensors of their own under one key, and these may differ in dtype and global shape.
    """
    nearest = max(rows, key=near).slice
    assert nearest is not None
    regions: dict[tuple[object, ...], ManifestRow] = {}
    for row in rows:
        part = row.slice
        assert part is not None
        if (part.dtype, part.global_shape) == (nearest.dtype, nearest.global_shape):
            known = regions.setdefault((part.offset, part.shape), row)
            if near(row) > near(known):
                regions[part.offset, part.shape] = row
    return regions


def _misfit(target: Slice, found: Mapping[tuple[object, ...], ManifestRow]) -> str | None:
    if not found:
        return f"{target.key}: not in the checkpoint"
    saved = next(iter(found.values())).slice
    assert saved is not None
    if saved.global_shape != target.global_shape:
        return f"{target.key}: shape {saved.global_shape} in the checkpoint, {target.global_shape} here"
    if saved.dtype != target.dtype:
        return f"{target.key}: dtype {saved.dtype} in the checkpoint, {target.dtype} here"
    return None


def _overlap(pieces: Sequence[Copy]) -> bool:
    """Return whether two boxes overlap; sorting by the first dimension leaves few pairs to compare."""
    ordered = sorted(pieces, key=lambda piece: piece.target_start)
    for at, one in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if one.shape and other.target_start[0] >= one.target_start[0] + one.shape[0]:
                break
            starts = map(max, one.target_start, other.target_start)
            ends = (
                min(a + m, b + n)
                for a, m, b, n in zip(
                    one.target_start, one.shape, other.target_start, other.shape, strict=True
                )
            )
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                return True
    return False


def _intersect(index: int, target: Slice, saved: Slice) -> Copy | None:
    start = tuple(map(max, target.offset, saved.offset))
    ends_target = map(sum, zip(target.offset, target.shape, strict=True))
    ends_saved = map(sum, zip(saved.offset, saved.shape, strict=True))
    shape = tuple(end - begin for begin, end in zip(start, map(min, ends_target, ends_saved), strict=True))
    if any(n <= 0 for n in shape):
        return None
    return Copy(
        target=index,
        source_start=tuple(a - b for a, b in zip(start, saved.offset, strict=True)),
        target_start=tuple(a - b for a, b in zip(start, target.offset, strict=True)),
        shape=shape,
    )
