"""The manifest of a checkpoint as a restore uses it: rows in columns, of which a rank makes the few it reads.

The agent of a node puts the fragments into memory, once for all its ranks, and a rank maps them: the columns
that a plan needs as an Arrow stream, and the file itself, from which a rank reads the digests of the rows
that it takes, if it takes any. A rank begins with the fragment of its own node, if that is known to be
committed: what the rank saved itself has exactly the regions that it restores. Only if something is missing
there, the rank requests the whole manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_ckpt.errors import FormatError
from ray_ckpt.format import parquet
from ray_ckpt.format.manifest import read_digests, take_rows
from ray_ckpt.format.row_columns import Ints, Mask, box_values, indices, list_column, validity
from ray_ckpt.storage.local.pages import map_shared
from ray_ckpt.types import ManifestRow, Slice

NOT_WANTED = -1
MAX_KEPT_ROWS = 1 << 17  # rows of a manifest that are kept as objects, of 1 KB each
Boxes: TypeAlias = npt.NDArray[np.int64]


class SavedRows(Protocol):
    """The rows of a checkpoint, or of a part of it. The order of rows is that of fragments, and of files."""

    def of_file(self, file: str) -> Sequence[ManifestRow]:
        """Return the rows of a file; none for a file that is not here."""
        ...

    def of_key(self, key: str) -> Sequence[ManifestRow]:
        """Return the rows of a tensor."""
        ...

    def first_of(self, keys: Iterable[str]) -> Mapping[str, ManifestRow]:
        """Return the first row of each tensor; tensors that are not here are left out."""
        ...

    def meeting(self, targets: Sequence[Slice], near_files: Collection[str] = ()) -> Sequence[ManifestRow]:
        """Return rows for which `plan_restore` makes the plan that it makes for all rows.

        These are the first row of each tensor and the rows that share elements with a target; of rows with
        the same region at least the first one and those in `near_files`, preferred files among them.
        """
        ...

    def complete(self) -> bool:
        """Add the rows that are not here yet; return whether there were any."""
        ...


class ManifestRef(Protocol):
    """A manifest in a ticket."""

    def open(self) -> SavedRows: ...


class ListedRows:
    """Rows as objects: those of a checkpoint that agents describe to a reader in the cluster."""

    def __init__(self, rows: Iterable[ManifestRow]) -> None:
        self._rows = tuple(rows)

    def open(self) -> ListedRows:
        return self

    def files(self) -> list[str]:
        return list(dict.fromkeys(row.file for row in self._rows))

    def keys(self, item: str | None = None) -> set[str]:
        slices = (row.slice for row in self._rows if row.slice is not None)
        return {part.key for part in slices if item is None or part.item == item}

    def of_file(self, file: str) -> Sequence[ManifestRow]:
        return [row for row in self._rows if row.file == file]

    def of_key(self, key: str) -> Sequence[ManifestRow]:
        return [row for row in self._rows if row.slice is not None and row.slice.key == key]

    def first_of(self, keys: Iterable[str]) -> Mapping[str, ManifestRow]:
        wanted, found = set(keys), dict[str, ManifestRow]()
        for row in self._rows:
            if row.slice is not None and row.slice.key in wanted:
                found.setdefault(row.slice.key, row)
        return found

    def meeting(self, targets: Sequence[Slice], near_files: Collection[str] = ()) -> Sequence[ManifestRow]:
        return self._rows

    def complete(self) -> bool:
        return False


class MappedFragment(NamedTuple):
    """A fragment in memory of the agent: (offset, size) of the stream of its columns, and of its file."""

    places: tuple[int, int]
    file: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedManifest:
    """Fragments in memory of the agent, in the order of nodes."""

    path: str
    parts: tuple[MappedFragment, ...]

    def open(self) -> RowColumns:
        """Map the fragments. OSError if the agent has freed the memory, or uses the descriptor otherwise."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            memory = pa.py_buffer(map_shared(fd, 0, size)) if size else pa.py_buffer(b"")
        finally:
            os.close(fd)
        try:
            return RowColumns(
                (pa.ipc.open_stream(memory.slice(*part.places)).read_all(), memory.slice(*part.file))
                for part in self.parts
            )
        except (pa.ArrowException, KeyError) as error:
            raise OSError(f"{self.path} has no manifest: {error}") from error


class RowColumns:
    """Rows in columns: for each fragment those of `format.manifest.decode_places`, and the file's bytes.

    The methods raise FormatError if a row that they return, or search, breaks a rule of rows.
    """

    def __init__(self, fragments: Iterable[tuple[pa.Table, pa.Buffer]]) -> None:
        kept = _Kept(MAX_KEPT_ROWS)
        self._parts = [_Part(places, file, kept) for places, file in fragments]
        self._part_of: dict[str, _Part] = {}

    def open(self) -> RowColumns:
        return self

    def files(self) -> list[str]:
        """Return the names of the files that have rows."""
        return list(dict.fromkeys(name for part in self._parts for name in part.files))

    def keys(self, item: str | None = None) -> set[str]:
        """Return the names of all tensors, or of those of one item."""
        return {key for part in self._parts for key in part.keys(item)}

    def rows(self) -> Iterator[ManifestRow]:
        """Yield every row; `ListedRows` with these takes far more memory and time."""
        for part in self._parts:
            yield from part.all_rows()

    def of_file(self, file: str) -> Sequence[ManifestRow]:
        if not self._part_of:
            self._part_of = {name: part for part in reversed(self._parts) for name in part.files}
        part = self._part_of.get(file)
        return () if part is None else part.rows(np.flatnonzero(part.is_in((file,))))

    def of_key(self, key: str) -> Sequence[ManifestRow]:
        ids = _Keys((key,))
        return [row for part in self._parts for row in part.rows(np.flatnonzero(ids.of(part) == 0))]

    def first_of(self, keys: Iterable[str]) -> Mapping[str, ManifestRow]:
        ids = _Keys(keys)
        found = [row for part in self._parts for row in part.rows(ids.take_first(ids.of(part)))]
        return {row.slice.key: row for row in found if row.slice is not None}

    def meeting(self, targets: Sequence[Slice], near_files: Collection[str] = ()) -> Sequence[ManifestRow]:
        wanted = _Boxes(targets)
        return [row for part in self._parts for row in part.rows(wanted.meeting(part, near_files))]

    def complete(self) -> bool:
        return False


class PartialRows:
    """Some rows of a checkpoint, until `complete` replaces them by all, which `fetch` returns."""

    def __init__(self, rows: SavedRows, fetch: Callable[[], SavedRows]) -> None:
        self._rows = rows
        self._fetch: Callable[[], SavedRows] | None = fetch

    def of_file(self, file: str) -> Sequence[ManifestRow]:
        return self._rows.of_file(file)

    def of_key(self, key: str) -> Sequence[ManifestRow]:
        return self._rows.of_key(key)

    def first_of(self, keys: Iterable[str]) -> Mapping[str, ManifestRow]:
        return self._rows.first_of(keys)

    def meeting(self, targets: Sequence[Slice], near_files: Collection[str] = ()) -> Sequence[ManifestRow]:
        return self._rows.meeting(targets, near_files)

    def complete(self) -> bool:
        """Fetch all rows, once. Raise the errors of `fetch`."""
        if self._fetch is None:
            return False
        self._rows, self._fetch = self._fetch(), None
        return True


@dataclass(slots=True)
class _Kept:
    """The number of rows that may still be kept."""

    left: int


class _Part:
    """The rows of one fragment."""

    def __init__(self, table: pa.Table, file: pa.Buffer, kept: _Kept) -> None:
        self._table = table
        self._file = file
        self._digests: pa.Table | None = None
        self._kept = kept
        self._made: dict[int, ManifestRow] = {}  # by number; a restore takes most of its rows twice
        item, name = parquet.column(table, "item"), parquet.column(table, "name")
        self.items, self.names = item.dictionary, name.dictionary
        self.is_slice: Mask = validity(item)
        self.item_at, self.name_at = indices(item), indices(name)

    @property
    def files(self) -> list[str]:
        found: list[str] = parquet.column(self._table, "file").dictionary.to_pylist()
        return found

    def keys(self, item: str | None) -> Iterator[str]:
        """Yield the name of each tensor once; only tensors of `item`, unless it is None."""
        num_names, items, names = len(self.names), self.items.to_pylist(), self.names.to_pylist()
        for index in self.pairs.tolist():
            owner = items[index // num_names]
            if item is None or owner == item:
                yield _key(owner, names[index % num_names])

    @cached_property
    def pairs(self) -> Ints:
        """The pairs of item and name that occur, each as one number: item x number of names + name."""
        found = self.item_at.astype(np.int64) * len(self.names) + self.name_at
        return np.unique(found[self.is_slice])

    @cached_property
    def key_texts(self) -> list[str]:
        """The keys of the tensors of `pairs`."""
        return list(self.keys(None))

    def has_keys_of(self, other: _Part) -> bool:
        """Return whether the same texts stand in the same order, as in fragments of one layout."""
        return self is other or bool(
            self.items.equals(other.items)
            and self.names.equals(other.names)
            and np.array_equal(self.pairs, other.pairs)
        )

    def is_in(self, files: Collection[str]) -> Mask:
        """Return which rows are those of one of the files."""
        is_wanted = np.array([file in files for file in self.files] or [False])
        is_there: Mask = is_wanted[indices(parquet.column(self._table, "file"))]
        return is_there

    def rows(self, at: Ints) -> list[ManifestRow]:
        """Return the rows with these numbers, in the order of the file. Some are kept for the next call."""
        order = np.sort(at).astype(np.int64, copy=False)
        made = self._made
        new = order[[number not in made for number in order.tolist()]] if made else order
        rows = dict(zip(new.tolist(), self._take(new), strict=True))
        found = [made[number] if number in made else rows[number] for number in order.tolist()]
        if len(rows) <= self._kept.left:
            made.update(rows)
            self._kept.left -= len(rows)
        return found

    def all_rows(self) -> Sequence[ManifestRow]:
        return self._take(np.arange(len(self.is_slice)))

    def _take(self, order: Ints) -> tuple[ManifestRow, ...]:
        if not len(order):
            return ()
        places = pa.Array.from_buffers(pa.int64(), len(order), [None, pa.py_buffer(order)])
        if self._digests is None:
            self._digests = read_digests(self._file.to_pybytes())
        return take_rows(self._table, self._digests, places)

    def num_dims(self) -> Ints:
        starts, _ = list_column(self._table, "offset")
        others, _ = list_column(self._table, "shape")
        if not np.array_equal(starts, others):
            raise FormatError("A row of the manifest has an offset and a shape of different lengths.")
        return np.diff(starts)

    def boxes(self, at: Ints, num_dims: int) -> tuple[Boxes, Boxes]:
        """Return the starts and the ends of the regions of rows, all of `num_dims` dimensions."""
        start = box_values(list_column(self._table, "offset"), at, num_dims)
        return start, start + box_values(list_column(self._table, "shape"), at, num_dims)


class _Keys:
    """Names of tensors, numbered from 0 in the order in which they were given."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.number = {key: at for at, key in enumerate(dict.fromkeys(keys))}
        self._has_row = np.zeros(len(self.number), bool)  # by tensor: `take_first` has returned a row of it
        self._last: tuple[_Part, Ints] | None = None

    def of(self, part: _Part) -> Ints:
        """Return the number of each row's tensor, or NOT_WANTED."""
        if not len(part.items):
            return np.full(len(part.is_slice), NOT_WANTED)
        return np.where(part.is_slice, self._numbers(part)[part.item_at, part.name_at], NOT_WANTED)

    def _numbers(self, part: _Part) -> Ints:
        """Return the tensor's number by item and name. Fragments of one layout have the same texts."""
        if self._last is None or not part.has_keys_of(self._last[0]):
            found = np.full(len(part.items) * len(part.names), NOT_WANTED)
            found[part.pairs] = [self.number.get(key, NOT_WANTED) for key in part.key_texts]
            self._last = part, found.reshape(len(part.items), len(part.names))
        return self._last[1]

    def take_first(self, numbers: Ints) -> Ints:
        """Return the first row of each tensor that had no row in the parts before."""
        new = np.flatnonzero(numbers >= 0)
        new = new[~self._has_row[numbers[new]]]
        found, first = np.unique(numbers[new], return_index=True)
        self._has_row[found] = True
        return new[first]


class _Boxes:
    """Targets by tensor: for each the smallest box that contains all its targets."""

    def __init__(self, targets: Sequence[Slice]) -> None:
        self._keys = _Keys(target.key for target in targets)
        by_dims: dict[int, list[Slice]] = {}
        for target in targets:
            by_dims.setdefault(len(target.shape), []).append(target)
        self._by_dims = {dims: _SameDims(dims, found, self._keys.number) for dims, found in by_dims.items()}

    def meeting(self, part: _Part, near_files: Collection[str]) -> Ints:
        """Return the rows that a plan may need; see `SavedRows.meeting`."""
        numbers = self._keys.of(part)
        first = self._keys.take_first(numbers)
        num_dims = part.num_dims()
        near = part.is_in(near_files) if any(file in near_files for file in part.files) else None
        found = [first]
        for dims, boxes in self._by_dims.items():
            at = np.flatnonzero((numbers >= 0) & (num_dims == dims))
            if len(at):
                found.append(boxes.meeting(part, at, numbers[at], near))
        return np.unique(np.concatenate(found))


class _SameDims:
    """Boxes of targets of `dims` dimensions, by the number of the tensor."""

    def __init__(self, dims: int, targets: Sequence[Slice], number: Mapping[str, int]) -> None:
        self._dims = dims
        self._low = np.full((len(number), dims), np.iinfo(np.int64).max)
        self._high = np.full((len(number), dims), -1)
        self._is_here = np.zeros(len(number), bool)
        at = np.array([number[target.key] for target in targets])
        starts = np.array([target.offset for target in targets], np.int64).reshape(len(targets), dims)
        shapes = np.array([target.shape for target in targets], np.int64).reshape(len(targets), dims)
        np.minimum.at(self._low, at, starts)
        np.maximum.at(self._high, at, starts + shapes)
        self._is_here[at] = True
        self._cover = np.full((len(number), 2 * dims), -1)  # region of a row that contains the whole box
        self._has_cover = np.zeros(len(number), bool)

    def meeting(self, part: _Part, at: Ints, numbers: Ints, near: Mask | None) -> Ints:
        """Return which of the rows `at`, of the tensors `numbers`, share elements with the boxes."""
        starts, ends = part.boxes(at, self._dims)
        low, high = self._low[numbers], self._high[numbers]
        is_met = self._is_here[numbers] & (starts < high).all(axis=1) & (ends > low).all(axis=1)
        if not is_met.any():
            return at[:0]
        at, numbers, starts, ends = at[is_met], numbers[is_met], starts[is_met], ends[is_met]
        low, high = low[is_met], high[is_met]
        return at[~self._is_repeated(numbers, starts, ends, low, high) | _of(near, at)]

    def _is_repeated(self, numbers: Ints, starts: Boxes, ends: Boxes, low: Boxes, high: Boxes) -> Mask:
        """Return which rows have the region of an earlier row that contains the whole box of the tensor.

        A tensor that all ranks save would otherwise give a row for each rank.
        """
        covers = np.flatnonzero((starts <= low).all(axis=1) & (ends >= high).all(axis=1))
        regions = np.concatenate((starts, ends), axis=1)
        new = covers[~self._has_cover[numbers[covers]]]
        found, first = np.unique(numbers[new], return_index=True)
        self._cover[found], self._has_cover[found] = regions[new[first]], True
        is_repeated = np.zeros(len(numbers), bool)
        is_repeated[covers] = (regions[covers] == self._cover[numbers[covers]]).all(axis=1)
        is_repeated[new[first]] = False
        return is_repeated


def _key(item: str, name: str) -> str:
    return f"{item}.{name}" if name else item


def _of(mask: Mask | None, at: Ints) -> Mask:
    return np.zeros(len(at), bool) if mask is None else mask[at]
