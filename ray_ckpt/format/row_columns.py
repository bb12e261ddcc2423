"""The rows of a fragment as columns: their checks and their objects, by loops outside of Python.

A restore of a large cluster reads millions of rows, of which each rank needs some thousands. One row as an
object takes about 10 us and 1 KB, one row as columns 0.5 us and 140 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_ckpt.errors import FormatError
from ray_ckpt.format import parquet
from ray_ckpt.format.shard import ITEMSIZE, METADATA_KEY
from ray_ckpt.types import FileEntry, ManifestRow, Slice

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

SLICE_TEXTS = ("item", "name", "dtype")
SLICE_LISTS = ("global_shape", "offset", "shape")
_HEX = b"0123456789abcdef"
_DIGEST_BYTES = 32
_SAFE_BYTES = 2.0**62  # largest size whose product in int64 is certainly right


def rows_of(table: pa.Table) -> tuple[ManifestRow, ...]:
    """Return the rows as objects; equal texts and equal lists are one object each.

    FormatError if a row has some of the columns of a slice and not all.
    """
    plain = [parquet.values(table, name) for name in ("kind", "file", "byte_offset", "nbytes", "digest")]
    texts = [parquet.values(table, name) for name in SLICE_TEXTS]
    lists = [_tuples(parquet.column(table, name)) for name in SLICE_LISTS]
    return tuple(
        ManifestRow(
            kind=kind,
            file=file,
            byte_offset=byte_offset,
            nbytes=nbytes,
            digest=digest,
            slice=_slice(*parts) if any(part is not None for part in parts) else None,
        )
        for kind, file, byte_offset, nbytes, digest, *parts in zip(*plain, *texts, *lists, strict=True)
    )


def are_sound(table: pa.Table, files: Sequence[FileEntry], max_bytes: Mapping[str, int]) -> bool:
    """Return whether the rows certainly keep all rules for rows of a fragment that lists `files`.

    The texts of `table` are dictionaries. `max_bytes` has the largest sizes by kind. If the result is False,
    a check row by row finds the rule, if one is broken at all.
    """
    kinds, kind_at = _texts(table, "kind")
    names, file_at = _texts(table, "file")
    if not _are_filled(table) or not set(kinds) <= {"header", "slice", "state"}:
        return False
    starts, sizes = ints(table, "byte_offset"), ints(table, "nbytes")
    most = np.array([max_bytes.get(kind, np.iinfo(np.int64).max) for kind in kinds] or [0])
    if (starts < 0).any() or (sizes < 0).any() or (sizes > most[kind_at]).any():
        return False
    is_state_file = np.array([name.startswith("state-") for name in names] or [False])
    is_state = np.array([kind == "state" for kind in kinds] or [False])[kind_at]
    is_header = np.array([kind == "header" for kind in kinds] or [False])[kind_at]
    is_slice = ~is_state & ~is_header
    return bool(
        (is_state_file[file_at] == is_state).all()
        and not starts[is_header].any()
        and _are_digests(table)
        and _are_slices(table, is_slice, sizes)
        and _cover(names, file_at, starts, sizes, files)
    )


def numbers(array: pa.Array) -> npt.NDArray[Any]:
    """Return an array of integers, without a copy. Raises ArrowInvalid if one is null.

    pyarrow's own `to_numpy` imports pandas, and a rank would wait 0.2 s for that.
    """
    if array.null_count:
        raise pa.ArrowInvalid("an integer is null")
    return _numbers(array)


def indices(column: pa.DictionaryArray) -> Ints:
    """Return for each row of a column the index of its text, 0 for null."""
    found = _numbers(column.indices)
    return np.where(validity(column), found, 0) if column.null_count else found


def _numbers(array: pa.Array) -> npt.NDArray[Any]:
    """Return an array of integers, with any number for null."""
    dtype = np.dtype(str(array.type))
    data = array.buffers()[1] or b""
    return np.frombuffer(data, dtype)[array.offset : array.offset + len(array)]


def validity(column: pa.Array) -> Mask:
    """Return which values of a column are not null."""
    bits = column.buffers()[0] if column.null_count else None
    if bits is None:
        return np.ones(len(column), bool)
    found: Mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(bool)
    return found[column.offset : column.offset + len(column)]


def ints(table: pa.Table, name: str) -> Ints:
    """Return a column of integers without nulls, without a copy."""
    return numbers(parquet.column(table, name))


def list_column(table: pa.Table, name: str) -> tuple[Ints, Ints]:
    """Return the beginning of each row's list, with the end of the last one, and all values."""
    found = parquet.column(table, name)
    return numbers(found.offsets), numbers(found.values)


def _texts(table: pa.Table, name: str) -> tuple[list[str], Ints]:
    """Return the distinct texts of a column, and of each row the index of its text (0 for null)."""
    found = parquet.column(table, name)
    return _strings(found).to_pylist(), indices(found)


def _strings(found: pa.DictionaryArray) -> pa.StringArray:
    """Return the distinct texts of a column. FormatError for bytes that are no text."""
    try:
        return found.dictionary.cast(pa.string())
    except pa.ArrowException as error:
        raise FormatError(f"The texts of the fragment are not UTF-8: {error}.") from error


def _are_filled(table: pa.Table) -> bool:
    return not any(
        parquet.column(table, name).null_count for name in ("kind", "file", "byte_offset", "nbytes", "digest")
    )


def _are_digests(table: pa.Table) -> bool:
    texts = _strings(parquet.column(table, "digest"))
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    if not len(texts):
        return True
    data = memoryview(texts.buffers()[2] or b"")[ends[0] : ends[-1]]
    return bool((np.diff(ends) == _DIGEST_BYTES).all() and not bytes(data).translate(None, _HEX))


def _are_slices(table: pa.Table, is_slice: Mask, sizes: Ints) -> bool:
    """Return whether slices, and only they, have all columns of a slice that is inside of its tensor."""
    for name in (*SLICE_TEXTS, *SLICE_LISTS):
        if not np.array_equal(validity(parquet.column(table, name)), is_slice):
            return False
    items, _ = _texts(table, "item")
    dtypes, dtype_at = _texts(table, "dtype")
    if "" in items or METADATA_KEY in items or not set(dtypes) <= ITEMSIZE.keys():
        return False
    itemsize = np.array([ITEMSIZE[dtype] for dtype in dtypes] or [0])[dtype_at]
    columns = [list_column(table, name) for name in SLICE_LISTS]
    dims = [np.diff(ends) for ends, _ in columns]
    if any(not np.array_equal(dims[0], other) for other in dims[1:]) or dims[0][~is_slice].any():
        return False
    found = dims[0][is_slice]
    is_one = len(found) and found.min() == found.max()
    for num_dims in found[:1] if is_one else np.unique(found):
        at = np.flatnonzero(is_slice & (dims[0] == num_dims))
        totals, offsets, shapes = (box_values(column, at, int(num_dims)) for column in columns)
        if (
            (offsets < 0).any()
            or (shapes < 0).any()
            or (totals < 0).any()
            or (shapes > totals - offsets).any()
        ):
            return False
        most = math.prod(float(lengths.max(initial=0)) for lengths in shapes.T) * itemsize.max(initial=0)
        if most > _SAFE_BYTES and (
            (shapes.prod(axis=1, dtype=np.float64) * itemsize[at] > _SAFE_BYTES).any()
        ):
            return False
        nbytes = itemsize[at]
        for lengths in shapes.T:  # numpy's reduction of a short axis takes ten times as long
            nbytes = nbytes * lengths
        if (nbytes != sizes[at]).any():
            return False
    return True


def box_values(column: tuple[Ints, Ints], at: Ints, num_dims: int) -> Ints:
    """Return the lists of the rows `at`, all with `num_dims` values: shape (len(at), num_dims)."""
    starts, values = column
    first = starts[at]
    if len(at) and num_dims and len(at) * num_dims == first[-1] + num_dims - first[0]:  # one after the other
        return values[first[0] : first[-1] + num_dims].reshape(-1, num_dims)
    found: Ints = values[first[:, None] + np.arange(num_dims)]
    return found


def _cover(
    names: Sequence[str], file_at: Ints, starts: Ints, sizes: Ints, files: Sequence[FileEntry]
) -> bool:
    """Return whether the rows of each file cover each of its bytes exactly once."""
    known = {file.name: index for index, file in enumerate(files)}
    listed = np.array([known.get(name, -1) for name in names] or [0])[file_at]
    if (listed < 0).any():
        return False
    ends = starts + sizes
    if (np.diff(listed) < 0).any() or ((np.diff(starts) < 0) & (np.diff(listed) == 0)).any():
        order = np.lexsort((sizes, starts, listed))
        listed, starts, ends = listed[order], starts[order], ends[order]
    is_first = np.diff(listed, prepend=-1) != 0
    is_last = np.diff(listed, append=-1) != 0
    before = np.roll(ends, 1)
    if (starts != np.where(is_first, 0, before)).any():
        return False
    found = np.zeros(len(files), np.int64)
    found[listed[is_last]] = ends[is_last]
    return found.tolist() == [file.size_bytes for file in files]


def _slice(item: Any, name: Any, dtype: Any, global_shape: Any, offset: Any, shape: Any) -> Slice:
    if any(part is None for part in (item, name, dtype, global_shape, offset, shape)):
        raise FormatError("A row of the fragment describes half a slice.")
    return Slice(item=item, name=name, dtype=dtype, global_shape=global_shape, offset=offset, shape=shape)


def _tuples(column: pa.ListArray) -> list[tuple[int, ...] | None]:
    """Return a column of lists as tuples, equal ones as one object; faster than `to_pylist`."""
    values, ends = column.values.to_pylist(), column.offsets.to_pylist()
    present, known = column.is_valid().to_pylist(), dict[tuple[int, ...], tuple[int, ...]]()
    return [
        known.setdefault(found := tuple(values[a:b]), found) if valid else None
        for (a, b), valid in zip(pairwise(ends), present, strict=True)
    ]
