"""Tensors of a durable checkpoint that are read on access, and only the part that is accessed.

A saved slice that is read as a whole is compared with its digest. A part of a slice has no digest of its own
and is not verified. Neither the size of a request to the store nor the memory used in addition to the result
grows with the tensor. torch is imported when the first tensor is read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ray_ckpt.catalog.tables import MAX_HTML_ROWS
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, FormatError
from ray_ckpt.format.blocks import BlockCutter, merge_ranges
from ray_ckpt.format.digest import Digester
from ray_ckpt.format.shard import ITEMSIZE
from ray_ckpt.plan.restore import Copy, Read, RestorePlan, plan_restore
from ray_ckpt.restore.manifest import RowColumns
from ray_ckpt.storage.checkpoint_files import PERHAPS_DELETED, CheckpointFile, CheckpointFiles, readable
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.texts import did_you_mean, html_table
from ray_ckpt.types import ManifestRow, Slice

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16 << 20  # bytes copied at a time: the size of a request to a bucket
GAP_BYTES = 64 << 10  # largest gap between wanted bytes that is read, as another request would cost more
MAX_SEARCHES = 16  # tensors whose rows are searched one by one; a search of a large manifest takes seconds
SLICES_AT_A_TIME = 4  # threads, as a store answers slowly; each has a block and the store's read-ahead

Bytes: TypeAlias = npt.NDArray[np.uint8]
Index: TypeAlias = Any
"""A basic index: an int, a slice, `...`, or a tuple of them."""


class SavedTensors(Mapping[str, "LazyTensor"]):
    """Tensors of one checkpoint by full name, such as `model.layers.0.weight`. Construction reads nothing.

    `manifest` is the checkpoint's, proven by the log. If several ranks saved the same slice, it is read from
    the first file.
    """

    def __init__(self, files: CheckpointFiles, manifest: RowColumns) -> None:
        self._files = files
        self._opened: dict[str, CheckpointFile] = {}
        self._manifest = manifest
        self._names = manifest.keys()
        self._rows: dict[str, list[ManifestRow]] = {}

    def __getitem__(self, name: str) -> LazyTensor:
        if not isinstance(name, str) or name not in self._names:
            raise unknown_tensor(str(name), sorted(self._names))
        rows = self._rows.get(name)
        return LazyTensor(self, name, self._make_rows(name)[name] if rows is None else rows)

    def _make_rows(self, name: str) -> Mapping[str, list[ManifestRow]]:
        """Make the rows of a tensor; once MAX_SEARCHES tensors were wanted, those of all tensors."""
        is_one = len(self._rows) < MAX_SEARCHES
        rows = self._manifest.of_key(name) if is_one else self._manifest.rows()
        found: dict[str, list[ManifestRow]] = {}
        for row in sorted((r for r in rows if r.slice is not None), key=lambda r: (r.file, r.byte_offset)):
            assert row.slice is not None
            found.setdefault(row.slice.key, []).append(row)
        self._rows = {**self._rows, **found}  # another thread may read it, or replace it with its own
        return found

    def get(self, name: str, default: Any = None, /) -> Any:
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"SavedTensors({len(self)} tensors of {self._files.location})"

    def _repr_html_(self) -> str:
        """Return the largest tensors for a notebook. Nothing is read, and names are escaped."""
        largest = sorted(self.values(), key=lambda lazy: (-lazy.nbytes, lazy.name))[:MAX_HTML_ROWS]
        rows = [(lazy.name, lazy.dtype_name, lazy.shape, lazy.nbytes, lazy.num_slices) for lazy in largest]
        hidden = len(self) - len(rows)
        headers = ("tensor", "dtype", "shape", "bytes", "slices")
        title = f"{len(self)} tensors of {self._files.location}"
        return html_table(title, headers, rows, f"and {hidden} smaller ones" if hidden else "")

    def open(self, name: str) -> CheckpointFile:
        """Open a file of the checkpoint. Raise StoragePathError, or CorruptionError if it is missing."""
        opened = self._opened  # another thread that meets an error replaces it
        if name not in opened:
            with readable(self._files.location):
                file = self._files.open(name)
            if file is None:
                raise CorruptionError(
                    f"{self._files.place(name)} is missing.", hint=PERHAPS_DELETED, file=name
                )
            opened[name] = file
        return opened[name]

    def check(self, reads: Iterable[Read]) -> None:
        """Raise CorruptionError if a file is too short for `reads`, before memory is allocated for them."""
        with self._forgetting():
            for row in (read.row for read in reads):
                size_bytes = self.open(row.file).size_bytes
                if row.byte_offset + row.nbytes > size_bytes:
                    raise _damaged(self._files, row, f"cannot be read: it ends at byte {size_bytes}")

    def read(self, read: Read, steps: Sequence[int], out: Bytes) -> None:
        """Read the regions of `read`, in each dimension only every `steps`th index, into `out`.

        Raise StoragePathError, or CorruptionError if the slice is read as a whole and differs from its
        digest, or if its file is too short.
        """
        row = read.row
        with self._forgetting():
            self._read(row, read.copies, steps, out)

    def _read(self, row: ManifestRow, copies: Iterable[Copy], steps: Sequence[int], out: Bytes) -> None:
        file = self.open(row.file)
        try:
            with readable(self._files.location):
                for copy in copies:
                    _copy(file, row, copy, steps, out)
        except EOFError as error:
            raise _damaged(self._files, row, f"cannot be read: {error}") from error
        except _Differs as error:
            raise _damaged(self._files, row, f"differs from its digest {row.digest}") from error
        except (CorruptionError, FormatError) as error:  # a frame or the seek table of a compressed file
            raise _damaged(self._files, row, f"cannot be read: {error.message}") from error

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """After an error, open all files again at the next access, because they may be repaired by then."""
        try:
            yield
        except CheckpointError:
            self._opened = {}
            self._files.forget()
            raise


class LazyTensor:
    """A tensor on the storage path. `lazy[0:10]` reads ten rows, `lazy.load()` the tensor, both to the CPU.

    `torch.as_tensor(lazy)` and `numpy.asarray(lazy)` load it too. For bfloat16 and float8, `asarray` needs a
    dtype that numpy has: `numpy.asarray(lazy, numpy.float32)`.
    """

    def __init__(self, tensors: SavedTensors, name: str, rows: Sequence[ManifestRow]) -> None:
        first = rows[0].slice
        assert first is not None
        self.name = name
        self.shape: tuple[int, ...] = first.global_shape
        self.item, self.short_name = first.item, first.name  # the name is empty if the item is one tensor
        self.dtype_name: str = first.dtype  # safetensors' name of the dtype
        self._slice = first
        self._rows = rows
        self._tensors = tensors

    @property
    def dtype(self) -> torch.dtype:
        from ray_ckpt.capture.walk import DTYPES

        if self.dtype_name not in DTYPES:
            raise ConfigError(f"{self.name} has the dtype {self.dtype_name}, which torch does not have.")
        return DTYPES[self.dtype_name]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype_name]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype_name]

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The saved slices, each once; together they cover the tensor. Empty ones only if the tensor is.

        Slices of other ranks' tensors of this name are left out if their dtype or global shape differs.
        """
        found = [row.slice for row in self._rows if row.slice is not None]
        own = [part for part in found if (part.dtype, part.global_shape) == (self.dtype_name, self.shape)]
        return tuple({part.offset: part for part in own if part.num_elements or not self.nbytes}.values())

    @property
    def num_slices(self) -> int:
        """Number of saved slices, including those that several ranks saved identically."""
        return len(self._rows)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.shape:
            raise TypeError("iteration over a tensor without dimensions")
        return (self[row] for row in range(len(self)))

    def __contains__(self, value: object) -> bool:
        raise TypeError(f"{self.name} is not searched for a value; load() first")

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, shape={self.shape}, dtype={self.dtype_name}, nbytes={self.nbytes})"

    def _repr_html_(self) -> str:
        """Return the tensor's facts for a notebook. Nothing is read, and names are escaped."""
        facts = (
            ("dtype", self.dtype_name),
            ("shape", self.shape),
            ("bytes", self.nbytes),
            ("saved slices", self.num_slices),
            ("files", ", ".join(islice(sorted({row.file for row in self._rows}), MAX_HTML_ROWS))),
        )
        return html_table(self.name, (), facts)

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Return the part at a basic index, like torch: ints, slices with a step of 1 or more, `...`.

        Only this part and gaps of up to GAP_BYTES in the part are read. Saved slices that are read as a whole
        are verified; a part of a slice has no digest. Raise IndexError if an index is out of bounds,
        TypeError for another kind of index, ValueError for a step below 1, and the errors of `load`.
        """
        wanted = _spans(index, self.shape)
        found = self._read([span for span, _ in wanted])
        kept = [len(span) for span, is_kept in wanted if is_kept]
        return found.reshape(kept)

    def load(self) -> torch.Tensor:
        """Read and verify the tensor. Raise StoragePathError if a read fails, CorruptionError for damage."""
        return self._read([range(size) for size in self.shape])

    def read_into(self, out: Bytes) -> None:
        """Read and verify the tensor into `out`, bytes of shape (*shape, bytes of an element).

        Raise the errors of `load`; after an error `out` holds a part of the tensor.
        """
        self._read_into([range(size) for size in self.shape], out)

    def __dlpack__(self, **options: Any) -> Any:
        return self.load().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        import torch

        return torch.empty(0).__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("A lazy tensor has to be read, so numpy cannot have it without a copy.")
        if not self.dtype_name.startswith(("BF", "F8")):
            array: npt.NDArray[Any] = self.load().numpy()
            return array if dtype is None else array.astype(dtype, copy=False)
        if dtype is None:
            hint = "`lazy.load().float()` or `numpy.asarray(lazy, numpy.float32)` has the same values."
            error = f"{self.name} has the dtype {self.dtype_name}, which numpy does not have."
            raise ConfigError(error, hint=hint)
        same: npt.NDArray[Any] = self.load().float().numpy()
        return same.astype(dtype, copy=False)

    def _read(self, spans: Sequence[range]) -> torch.Tensor:
        """Return the elements at these indices of each dimension; a span may be empty."""
        import torch

        shape, dtype = [len(span) for span in spans], self.dtype
        if all(spans):
            self._tensors.check(self._plan(spans).reads)
        out = torch.empty(shape, dtype=dtype)
        if out.numel():
            flat = out.view(-1).view(torch.uint8).numpy()
            self._read_into(spans, flat.reshape(*shape, ITEMSIZE[self.dtype_name]))
        return out

    def check(self) -> None:
        """Raise CorruptionError if a file is shorter than its size in the manifest."""
        if self.nbytes:
            self._tensors.check(self._plan([range(size) for size in self.shape]).reads)

    def _plan(self, spans: Sequence[range]) -> RestorePlan:
        target = Slice(
            item=self._slice.item,
            name=self._slice.name,
            dtype=self.dtype_name,
            global_shape=self.shape,
            offset=tuple(span.start for span in spans),
            shape=tuple(span[-1] - span.start + 1 if span else 0 for span in spans),
        )
        plan = plan_restore([target], self._rows)
        if plan.problems:
            raise CorruptionError(f"The manifest is incomplete: {plan.problems[0]}.", hint=_DAMAGED)
        return plan

    def _read_into(self, spans: Sequence[range], out: Bytes) -> None:
        plan = self._plan(spans)
        read = partial(self._tensors.read, steps=[span.step for span in spans], out=out)
        if len(plan.reads) == 1:  # as for most tensors: threads would cost more than a small one
            read(plan.reads[0])
        else:
            for _ in map_in_order(read, plan.reads, threads=SLICES_AT_A_TIME, name="lazy"):
                pass


_DAMAGED = "Run `ray-ckpt verify` on the checkpoint, and read another step."


def matching_tensors(patterns: Iterable[str], names: Sequence[str], where: str = "") -> set[str]:
    """Return the names that match any of `patterns`. Raise ConfigError for a pattern without a match.

    A pattern that is itself a name, such as `layers[0].w`, matches only this name.
    """
    known, found = set(names), set[str]()
    for pattern in patterns:
        matches = {pattern} & known or {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise unknown_tensor(pattern, names, where)
        found |= matches
    return found


def unknown_tensor(wanted: str, names: Sequence[str], where: str = "") -> ConfigError:
    """Return an error that names the tensors most similar to `wanted`, or the items that have tensors."""
    item = wanted.partition(".")[0]
    same = [name for name in names if name.partition(".")[0] == item] or names
    items = sorted({f"{name.partition('.')[0]}.*" for name in names})
    hint = did_you_mean(wanted, same, known=items)
    return ConfigError(f"No tensor{where} is called {wanted!r}.", hint=hint, pattern=wanted)


def _damaged(files: CheckpointFiles, row: ManifestRow, what: str) -> CorruptionError:
    return CorruptionError(
        f"{files.place(row.file)}: {row.label} {what}.", hint=_DAMAGED, file=row.file, where=row.label
    )


# Indices


def _spans(index: Index, shape: Sequence[int]) -> list[tuple[range, bool]]:
    """Return, for each dimension, the range that a basic index selects and whether the dimension stays."""
    given = list(index) if isinstance(index, tuple) else [index]
    num_dots = sum(part is Ellipsis for part in given)
    if num_dots > 1 or len(given) - num_dots > len(shape):
        raise IndexError(f"too many indices for {len(shape)} dimensions: {index!r}")
    at = next((k for k, part in enumerate(given) if part is Ellipsis), len(given))
    rest = [slice(None)] * (len(shape) - len(given) + num_dots)
    given[at : at + num_dots] = rest
    return [_span(part, size) for part, size in zip(given, shape, strict=True)]


def _span(part: Index, size: int) -> tuple[range, bool]:
    if isinstance(part, slice):
        if part.step is not None and operator.index(part.step) < 1:
            raise ValueError("the step of a slice must be greater than zero")
        return range(size)[part], True
    is_array = getattr(part, "ndim", 0) or str(getattr(part, "dtype", "")).endswith("bool")
    if isinstance(part, bool) or is_array or not hasattr(part, "__index__"):  # a tensor may have __index__
        what = type(part).__name__
        raise TypeError(f"an index is an int, a slice or ..., not of type {what}; load() first")
    at = operator.index(part)
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of bounds for a dimension of {size}")
    return range(at % size, at % size + 1), False


# Reading


class _Differs(Exception):
    """The bytes of a slice that was read as a whole do not match its digest."""


class _Piece(NamedTuple):
    """Bytes of a saved slice that are read together, and the wanted indices in them."""

    start: int  # of the first byte in the slice
    nbytes: int
    parts: tuple[range, ...]  # numbers of the wanted indices in each dimension, counted in the box


def _copy(file: CheckpointFile, row: ManifestRow, copy: Copy, steps: Sequence[int], out: Bytes) -> None:
    """Copy one box of a saved slice to `out`, whose additional last dimension is the bytes of an element.

    Raise _Differs if the slice was read as a whole and differs from its digest, OSError, or EOFError.
    """
    assert row.slice is not None
    itemsize, shape, boxes = ITEMSIZE[row.slice.dtype], row.slice.shape or (1,), _boxes(copy, steps)
    if boxes is None:
        return
    source, target = boxes
    out = out if row.slice.shape else out[None]
    is_whole = all(span == range(size) for span, size in zip(source, shape, strict=True))
    digester = Digester() if is_whole else None
    strides = [prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    pieces = list(_pieces(source, strides, itemsize))
    byte_steps = (*(span.step * stride for span, stride in zip(source, strides, strict=True)), 1)
    ranges = merge_ranges((row.byte_offset + piece.start, piece.nbytes) for piece in pieces)
    with closing(file.read(ranges)) as blocks:
        for piece, data in zip(pieces, _buffers(blocks, [piece.nbytes for piece in pieces]), strict=True):
            if digester is not None:
                digester.update(data.data)
            counts = (*map(len, piece.parts), itemsize)
            wanted: Bytes = np.ndarray(counts, np.uint8, data.data, strides=byte_steps)
            places = zip(target, piece.parts, strict=True)
            out[tuple(slice(first + part.start, first + part.stop) for first, part in places)] = wanted
    if digester is not None and digester.hexdigest() != row.digest:
        raise _Differs


def _boxes(copy: Copy, steps: Sequence[int]) -> tuple[list[range], list[int]] | None:
    """Return, for each dimension, the wanted indices of a saved slice and the target of the first index."""
    source, target = [], []
    for start, at, size, step in zip(copy.source_start, copy.target_start, copy.shape, steps, strict=True):
        first = -(-at // step) * step  # the first index of the target that is a multiple of the step
        wanted = range(start + first - at, start + size, step)
        if not wanted:
            return None
        source.append(wanted)
        target.append(first // step)
    return source or [range(1)], target or [0]


def _pieces(box: Sequence[range], strides: Sequence[int], itemsize: int) -> Iterator[_Piece]:
    """Yield the pieces to read for a box of a slice, in ascending order, each of at most BLOCK_BYTES.

    `strides` are the bytes between two indices of each dimension of the slice. The indices of a dimension are
    read one by one if the gap between them exceeds GAP_BYTES, or if one index alone exceeds BLOCK_BYTES.
    """
    steps = [span.step * stride for span, stride in zip(box, strides, strict=True)]

    def extent(counts: Iterable[int]) -> int:
        """Return the bytes from the first to the last wanted element, with these numbers of indices."""
        return itemsize + sum((count - 1) * step for count, step in zip(counts, steps, strict=True))

    lengths = [len(span) for span in box]
    num_single = 0  # dimensions whose indices are read one by one
    for axis, step in enumerate(steps):
        nbytes = extent([1] * (axis + 1) + lengths[axis + 1 :])  # of one index
        if nbytes > BLOCK_BYTES or (lengths[axis] > 1 and step - nbytes > GAP_BYTES):
            num_single = axis + 1
    together = [1] * num_single + lengths[num_single:]
    if num_single < len(box):
        together[num_single] = max(1, BLOCK_BYTES // steps[num_single])
    cuts = [
        [range(at, min(at + count, length)) for at in range(0, length, count)]
        for count, length in zip(together, lengths, strict=True)
    ]
    for parts in product(*cuts):
        start = sum(span[part.start] * stride for span, part, stride in zip(box, parts, strides, strict=True))
        yield _Piece(start, extent(map(len, parts)), parts)


def _buffers(blocks: Iterator[memoryview], sizes: Sequence[int]) -> Iterator[Bytes]:
    """Yield the bytes of `blocks` in buffers of `sizes`, each valid until the next one. Raise EOFError."""
    buffer, cutter = np.empty(max(sizes), np.uint8), BlockCutter(blocks)
    for size in sizes:
        filled = 0
        for piece in cutter.pieces(size):
            buffer[filled : filled + piece.nbytes] = np.frombuffer(piece, np.uint8)
            filled += piece.nbytes
        yield buffer[:size]
