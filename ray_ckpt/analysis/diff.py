"""Comparison of two durable checkpoints, by tensor and by value, without a cluster.

    catalog = ray_ckpt.Catalog("/shared/runs/gpt")
    for found in compare(catalog[1000], catalog[2000], only=["model.*"]):
        print(found.name, found.relative, found.cosine)

The two may differ in run, world size and layout. A tensor whose slices have the same regions and digests on
both sides is equal and is not read. Any other tensor is read once, in C order, band by band: every saved
slice is read in the order of its bytes, and is compared with its digest at the end of the slice. Memory is
bounded by the bands, whatever the size of the tensors. Numbers are compared in float64, differences of
integers exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from itertools import islice, product
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ray_ckpt.analysis.diff_numbers import Array, ElementSums
from ray_ckpt.analysis.diff_values import ValueDiff, value_diffs
from ray_ckpt.catalog.catalog import CheckpointView
from ray_ckpt.catalog.lazy_tensor import matching_tensors
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, FormatError
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.format.names import shard_files, state_file
from ray_ckpt.format.shard import ITEMSIZE
from ray_ckpt.format.tree import decode_state
from ray_ckpt.plan.regions import Box
from ray_ckpt.plan.restore import plan_restore
from ray_ckpt.storage.checkpoint_files import CheckpointFile
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.types import Fragment, ManifestRow, ProgressCallback, Slice

BAND_BYTES = 16 << 20  # bytes read at a time on each side: enough for the full speed of a disk or a store
TENSORS_AT_A_TIME = 4  # one thread each, because a store answers slowly
CHUNK_ELEMENTS = 256 << 10  # elements compared at a time: 2 MiB as float64, which fits into a cache
READ_TRIES = 2  # a connection may break within an answer; failed requests are repeated by the store itself
MAX_VALUES = 1000  # differing values of one comparison; few people read more

_DAMAGED = "`ray-ckpt verify` shows all damage."

Status: TypeAlias = Literal["equal", "changed", "dtype", "shape", "only_a", "only_b", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """How a tensor of checkpoint B differs from that of the same full name in A.

    `equal` means bit for bit. The numbers are None where no elements were compared: for tensors that are
    equal by their digests, on one side only, of different shapes, empty or damaged. A norm of one tensor
    covers its finite elements; comparisons cover the elements that are finite in both tensors; NaN and
    infinities are counted. A complex number is one element; in the cosine its two parts count.
    """

    name: str
    status: Status
    dtype_a: str | None = None  # dtype names of safetensors
    dtype_b: str | None = None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    num_different: int | None = None  # elements whose bits differ; for two dtypes, whose values differ
    norm_a: float | None = None  # L2 norm
    norm_b: float | None = None
    norm_diff: float | None = None  # of B - A
    relative: float | None = None  # norm_diff / norm_a; infinite if only norm_a is 0
    max_abs: float | None = None  # the largest |B - A| of an element
    cosine: float | None = None  # cosine of the angle; also None if a norm is 0
    nan_a: int | None = None
    nan_b: int | None = None
    inf_a: int | None = None
    inf_b: int | None = None
    detail: str = ""  # place and kind of damage

    @property
    def is_finite(self) -> bool:
        """True if neither side is known to have a NaN or an infinity."""
        return not any((self.nan_a, self.nan_b, self.inf_a, self.inf_b))


def compare(
    a: CheckpointView,
    b: CheckpointView,
    *,
    only: str | Iterable[str] = (),
    progress: ProgressCallback | None = None,
) -> Comparison:
    """Compare two durable checkpoints: all tensors, or those that `only` names.

    `only` is a full name or a pattern, or several of them. The manifests are read and compared with the logs.
    Raise ConfigError if a checkpoint is not on its storage path or is deleted meanwhile, or if a pattern
    matches nothing, and CorruptionError if a manifest is damaged.
    """
    patterns = (only,) if isinstance(only, str) else tuple(only)
    return Comparison(a, b, patterns, progress or (lambda nbytes: None))


class Comparison:
    """Two checkpoints to compare. Iteration yields one TensorDiff per name, sorted by name.

    `size_bytes` is the number of bytes that an iteration reads, of both sides together. A damaged tensor gets
    the status `damaged`, and the iteration continues. If the run deletes a checkpoint meanwhile, ConfigError
    is raised. Where ranks have different tensors of one name, that of the lowest rank counts.
    """

    def __init__(
        self, a: CheckpointView, b: CheckpointView, only: Sequence[str], progress: ProgressCallback
    ) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._a, self._b = (_Side(label, view, self._count) for label, view in (("A", a), ("B", b)))
        names = sorted({*self._a.rows, *self._b.rows})
        wanted = matching_tensors(only, names, " of the two checkpoints")
        self.names = tuple(name for name in names if not only or name in wanted)

    @property
    def size_bytes(self) -> int:
        found = 0
        for name in self.names:
            a, b = self._a.tensor(name), self._b.tensor(name)
            if a is not None and b is not None and _is_read(a, b):
                found += a.size_bytes + b.size_bytes
        return found

    def __iter__(self) -> Iterator[TensorDiff]:
        stopped = threading.Event()
        return map_in_order(
            lambda name: self._compare(name, stopped),
            self.names,
            threads=TENSORS_AT_A_TIME,
            name="diff",
            stopped=stopped,  # tensors are large, so an early end does not wait for whole ones
        )

    def values(self) -> tuple[ValueDiff, ...]:
        """Return up to MAX_VALUES differing plain values of rank 0. Raise CorruptionError if damaged."""
        found = value_diffs(self._a.state(), self._b.state(), "")
        return tuple(islice(found, MAX_VALUES))

    def _compare(self, name: str, stopped: threading.Event) -> TensorDiff:
        a, b = self._a.tensor(name), self._b.tensor(name)
        if a is None or b is None:
            status: Status = "only_a" if b is None else "only_b"
            return _diff(name, status, a, b)
        if not _is_read(a, b):
            problem = next((f"{t.side.label}: {t.problem}" for t in (a, b) if t.problem), "")
            if problem:
                return _diff(name, "damaged", a, b, detail=problem)
            return _diff(name, _status(a, b, is_equal=a.shape == b.shape), a, b)
        try:
            sums = _compare_bands(a, b, stopped)
        except (OSError, EOFError, CorruptionError) as error:
            text = error.message if isinstance(error, CorruptionError) else str(error)
            return _diff(name, "damaged", a, b, detail=text)
        return _diff(name, _status(a, b, is_equal=not sums.num_different), a, b, **sums.numbers())

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._progress(nbytes)


def to_arrow(diffs: Iterable[TensorDiff]) -> pa.Table:
    """Return a table: a row per tensor, a column per field; `.to_pandas()` makes a DataFrame of it."""
    return pa.Table.from_pylist([asdict(found) for found in diffs], schema=_SCHEMA)


_KINDS: Mapping[str, pa.DataType] = {
    "float": pa.float64(),
    "int": pa.int64(),
    "str": pa.string(),
    "Status": pa.string(),
    "tuple[int, ...]": pa.list_(pa.int64()),
}
_SCHEMA = pa.schema([(f.name, _KINDS[str(f.type).removesuffix(" | None")]) for f in fields(TensorDiff)])


def _status(a: _Tensor, b: _Tensor, *, is_equal: bool) -> Status:
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    return "equal" if is_equal else "changed"


def _diff(name: str, status: Status, a: _Tensor | None, b: _Tensor | None, **rest: Any) -> TensorDiff:
    return TensorDiff(
        name=name,
        status=status,
        dtype_a=a.dtype if a else None,
        dtype_b=b.dtype if b else None,
        shape_a=a.shape if a else None,
        shape_b=b.shape if b else None,
        **rest,
    )


# One side


class _Side:
    """The files of a checkpoint, and its rows by tensor."""

    def __init__(self, label: str, view: CheckpointView, count: ProgressCallback) -> None:
        self.label = label
        self._view = view
        self._world_size = view.info.world_size
        self._files = view.files()
        self._count = count
        self._lock = threading.Lock()
        self._opened: dict[str, CheckpointFile] = {}
        self._missing: dict[str, bool] = {}  # for each missing file, whether the checkpoint was deleted
        self._states: dict[str, ManifestRow] = {}
        self.rows: dict[str, list[ManifestRow]] = {}
        for fragment in self._fragments():
            for row in fragment.rows:
                if row.slice is not None:
                    self.rows.setdefault(row.slice.key, []).append(row)
                elif row.kind == "state":
                    self._states[row.file] = row

    def _fragments(self) -> tuple[Fragment, ...]:
        try:
            return self._view.fragments()
        except CorruptionError as error:
            self._check_deleted(str(error.fields.get("file")))
            raise

    def _check_deleted(self, missing: str) -> None:
        """Raise ConfigError if a file is missing because retention has deleted the checkpoint."""
        with self._lock:
            if missing not in self._missing:
                self._missing[missing] = self._view.is_deleted()
            if self._missing[missing]:
                step = self._view.info.step
                raise ConfigError(
                    f"{self.label}: step {step} in {self._view.where} has been deleted meanwhile.",
                    hint="Compare another step.",
                    step=step,
                )

    def tensor(self, name: str) -> _Tensor | None:
        rows = self.rows.get(name)
        return None if rows is None else _Tensor(self, rows, shard_files(0, self._world_size))

    def state(self) -> Any:
        """Return the items of rank 0, with TensorRef for tensors. Raise CorruptionError if damaged."""
        file = state_file(0, self._world_size)
        row = self._states.get(file)
        if row is None:
            raise CorruptionError(f"{self.label}: the manifest has no {file}.", file=file)
        data = np.empty(row.nbytes, np.uint8)
        try:
            self.read(file, row.byte_offset, data)
        except (OSError, EOFError) as error:
            raise CorruptionError(f"{error}.", file=file) from error
        if digest(data.data) != row.digest:
            raise self.damaged(row)
        try:
            return decode_state(data.tobytes())["items"]
        except FormatError as error:
            raise error.at(f"{self.label}: {self._files.place(file)}") from error

    def damaged(self, row: ManifestRow) -> CorruptionError:
        where = self._files.place(row.file)
        return CorruptionError(
            f"{self.label}: {where}: {row.label}: its bytes differ from their digest.",
            hint=_DAMAGED,
            file=row.file,
        )

    def read(self, file: str, offset: int, out: Array) -> None:
        """Fill `out`, a contiguous uint8 array. Raise OSError, EOFError or CorruptionError with the place."""
        for tries_left in reversed(range(READ_TRIES)):
            try:
                self._read(file, offset, out)
                break
            except (OSError, EOFError) as error:
                if isinstance(error, FileNotFoundError):
                    self._check_deleted(file)
                if not tries_left or isinstance(error, FileNotFoundError):
                    text = f"{self.label}: {self._files.place(file)} cannot be read: {error}"
                    raise (EOFError if isinstance(error, EOFError) else OSError)(text) from error
            except CheckpointError as error:  # a compressed file has a bad frame or table
                text = f"{self.label}: {self._files.place(file)}: {error.message}"
                raise CorruptionError(text, hint=_DAMAGED, file=file) from error
        self._count(out.nbytes)

    def _read(self, file: str, offset: int, out: Array) -> None:
        at = 0
        with closing(self._open(file).read([(offset, out.nbytes)])) as blocks:
            for block in blocks:
                out[at : at + block.nbytes] = np.frombuffer(block, np.uint8)
                at += block.nbytes
        if at != out.nbytes:
            raise EOFError(f"it ends at byte {offset + at}")

    def _open(self, name: str) -> CheckpointFile:
        with self._lock:
            if name not in self._opened:
                file = self._files.open(name)
                if file is None:
                    raise FileNotFoundError("it is missing")
                self._opened[name] = file
            return self._opened[name]


class _Tensor:
    """A tensor of one side, with the saved slices that cover it."""

    def __init__(self, side: _Side, rows: Sequence[ManifestRow], own_files: Collection[str]) -> None:
        first = rows[0].slice
        assert first is not None
        self.side = side
        self.dtype, self.shape = first.dtype, first.global_shape
        whole = Slice(
            item=first.item,
            name=first.name,
            dtype=first.dtype,
            global_shape=first.global_shape,
            offset=(0,) * len(first.global_shape),
            shape=first.global_shape,
        )
        plan = plan_restore([whole], rows, own_files=own_files) if prod(self.shape) else None
        self.problem = plan.problems[0] if plan and plan.problems else ""
        self.rows = tuple(read.row for read in plan.reads) if plan else ()

    @property
    def size_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def digests(self) -> Mapping[object, str]:
        """Return digests by region."""
        return {(r.slice.offset, r.slice.shape): r.digest for r in self.rows if r.slice is not None}


def _is_read(a: _Tensor, b: _Tensor) -> bool:
    """Return whether the bytes must be read to compare the two tensors."""
    if a.shape != b.shape or a.problem or b.problem or not prod(a.shape):
        return False
    return a.dtype != b.dtype or a.digests() != b.digests()


class _Part:
    """A saved slice whose bytes were read up to `done`."""

    def __init__(self, row: ManifestRow) -> None:
        assert row.slice is not None
        self.row = row
        self.offset = row.slice.offset or (0,)
        self.shape = row.slice.shape or (1,)
        self.done = 0
        self.state = Digester()


class _Bands:
    """Reads a tensor band by band, in C order."""

    def __init__(self, tensor: _Tensor) -> None:
        self._side, self._itemsize = tensor.side, tensor.itemsize
        self._left = sorted(map(_Part, tensor.rows), key=lambda part: part.offset)

    def read(self, band: Box) -> Array:
        """Return a band as a flat array of unsigned integers of the elements' size."""
        offset, shape = band
        bits = np.empty(shape, f"u{self._itemsize}")
        for part in list(self._left):
            if part.offset[0] >= offset[0] + shape[0]:
                break
            first = tuple(map(max, offset, part.offset))
            ends = zip(offset, shape, part.offset, part.shape, strict=True)
            last = [min(o + n, p + m) for o, n, p, m in ends]
            if all(start < end for start, end in zip(first, last, strict=True)):
                box = tuple(slice(f - o, e - o) for f, e, o in zip(first, last, offset, strict=True))
                self._fill(part, bits[box])
        return bits.reshape(-1)

    def _fill(self, part: _Part, into: Array) -> None:
        """Read the next elements of a part, which have the same order in the band and in the file."""
        raw = into if into.flags.c_contiguous else np.empty(into.shape, into.dtype)
        data = raw.reshape(-1).view(np.uint8)
        self._side.read(part.row.file, part.row.byte_offset + part.done, data)
        part.state.update(data.data)
        part.done += data.nbytes
        if raw is not into:
            into[...] = raw
        if part.done == part.row.nbytes:
            self._left.remove(part)
            if part.state.hexdigest() != part.row.digest:
                raise self._side.damaged(part.row)


def _bands(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Yield the boxes of a tensor in C order, each of at most BAND_BYTES and of one run of elements.

    Such a box has one index in each of the first dimensions, a range of the next dimension, and all indices
    of the rest. The intersection of such a box with any other box is one run of elements in the other box
    too.
    """
    axis, unit = len(shape) - 1, itemsize
    while axis > 0 and unit * shape[axis] <= BAND_BYTES:
        unit *= shape[axis]
        axis -= 1
    step, rest = max(1, BAND_BYTES // unit), shape[axis + 1 :]
    for lead in product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            count = min(step, shape[axis] - start)
            yield (*lead, start, *(0 for _ in rest)), (*(1 for _ in lead), count, *rest)


def _compare_bands(a: _Tensor, b: _Tensor, stopped: threading.Event) -> ElementSums:
    """Compare all elements. Raise CorruptionError, OSError or EOFError if a side is damaged."""
    of_a, of_b, sums = _Bands(a), _Bands(b), ElementSums(a.dtype, b.dtype)
    for band in _bands(a.shape or (1,), max(a.itemsize, b.itemsize)):
        bits_a, bits_b = of_a.read(band), of_b.read(band)
        for start in range(0, bits_a.size, CHUNK_ELEMENTS):
            chunk = slice(start, start + CHUNK_ELEMENTS)
            sums.add(bits_a[chunk], bits_b[chunk])
        del bits_a, bits_b  # frees the memory before the next bands
        if stopped.is_set():
            break
    return sums
