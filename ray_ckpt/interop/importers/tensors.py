"""Tensors in the pickle of an archive: where their bytes are, without loading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ray_ckpt.capture.walk import DTYPE_NAMES
from ray_ckpt.errors import FormatError, UnsupportedLeaf
from ray_ckpt.format import jsontext
from ray_ckpt.format.shard import ITEMSIZE
from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.source import ReadSlice
from ray_ckpt.interop.importers.unpickler import STORAGE, Foreign, damaged, kind_of

MAX_COPIED_BYTES = 16 << 30  # of one tensor that is not contiguous, which is copied in memory
MAX_DIMS = 64  # dimensions of a tensor: the limit of numpy
MAX_NAME = 500  # characters of a name in an error

DTYPES: Mapping[str, str] = {str(dtype): name for dtype, name in DTYPE_NAMES.items()}
"""Names in a shard by torch's names, such as `torch.float32`."""
_STORAGES = {
    "torch.BoolStorage": "torch.bool",
    "torch.ByteStorage": "torch.uint8",
    "torch.CharStorage": "torch.int8",
    "torch.ShortStorage": "torch.int16",
    "torch.IntStorage": "torch.int32",
    "torch.LongStorage": "torch.int64",
    "torch.HalfStorage": "torch.float16",
    "torch.BFloat16Storage": "torch.bfloat16",
    "torch.FloatStorage": "torch.float32",
    "torch.DoubleStorage": "torch.float64",
    "torch.ComplexFloatStorage": "torch.complex64",
    "torch.ComplexDoubleStorage": "torch.complex128",
}
_REFUSED = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor without memory, on the device meta",
    "_rebuild_wrapper_subclass": "a subclass of a tensor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedTensor:
    """A tensor in a storage. `dtype` is that of a shard, `start` and `strides` are in elements."""

    storage: str  # the key of the storage in its archive
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def reader(self, archive: TorchArchive) -> ReadSlice:
        """Return the function that reads the tensor. Raise CorruptionError if its storage is too small."""
        storage_bytes = archive.storage(self.storage)
        if 0 in self.shape:
            return partial(iter, ())
        itemsize = ITEMSIZE[self.dtype]
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if (self.start + last + 1) * itemsize > storage_bytes:
            raise damaged(str(archive.path), "a tensor is larger than its storage")
        at, nbytes = self.start * itemsize, (last + 1) * itemsize
        if self.is_contiguous:
            return partial(archive.read, self.storage, at, nbytes)
        if max(prod(self.shape) * itemsize, nbytes) > MAX_COPIED_BYTES:
            raise ValueError(f"a tensor of the shape {list(self.shape)} is not contiguous")
        return partial(self._copied, archive, at, nbytes)

    def _copied(self, archive: TorchArchive, at: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a tensor that is not contiguous, in row-major order."""
        itemsize = ITEMSIZE[self.dtype]
        data = bytearray()
        for block in archive.read(self.storage, at, nbytes):
            data += block
        raw = np.frombuffer(data, np.dtype((np.void, itemsize)))
        view = as_strided(raw, self.shape, [n * itemsize for n in self.strides], writeable=False)
        yield np.ascontiguousarray(view).reshape(-1).view(np.uint8).data


def tensor_of(value: Foreign, path: tuple[str, ...]) -> StridedTensor:
    """Return the tensor that torch would rebuild.

    Raise UnsupportedLeaf, with the path, for a kind that cannot be stored; ValueError, TypeError or
    FormatError for a call that torch.save does not write.
    """
    kind, args = value.kind.rpartition(".")[2], value.args
    if kind == "_rebuild_from_type_v2":  # a tensor with attributes, or of another class
        return tensor_of(_inner(args, path), path)
    if kind.startswith("_rebuild_parameter"):
        return tensor_of(args[0], path)
    if kind not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        raise refused(path, f"is {_REFUSED.get(kind, 'a tensor of another device')}")
    storage, start, shape, strides, _, _, *rest = args
    if kind_of(storage) != STORAGE or storage.args[0] != "storage":
        raise ValueError("a tensor has no storage")
    dtype = _STORAGES.get(kind_of(storage.args[1]), kind_of(storage.args[1]))
    if kind == "_rebuild_tensor_v3":
        dtype, *rest = kind_of(rest[0]), *rest[1:]
    if dtype not in DTYPES:
        raise refused(path, f"is a tensor of {dtype}")
    if rest and rest[0]:
        raise refused(path, "is a tensor that is conjugated, negated or otherwise marked")
    return StridedTensor(
        storage=jsontext.text(storage.args[2], "the name of a storage"),
        dtype=DTYPES[dtype],
        start=jsontext.integer(start, "an offset"),
        shape=sizes(shape),
        strides=sizes(strides),
    )


def _inner(args: tuple[Any, ...], path: tuple[str, ...]) -> Foreign:
    """Return the tensor inside of one with attributes, which are left."""
    rebuild, kind, inner, _ = args
    if kind_of(kind) not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        raise refused(path, f"is a {kind_of(kind)}")
    made = rebuild(*inner)
    if not isinstance(made, Foreign):
        raise ValueError("a tensor is not rebuilt by torch")
    return made


def sizes(value: Any) -> tuple[int, ...]:
    """Return a tuple of sizes, which may be a torch.Size. Raise FormatError for anything else."""
    if kind_of(value) == "torch.Size" and isinstance(value, Foreign):
        (value,) = value.args or ((),)
    if type(value) not in (tuple, list) or len(value) > MAX_DIMS:
        raise FormatError("a shape is no tuple of sizes.")
    return tuple(jsontext.integer(number, "a size") for number in value)


def refused(path: tuple[str, ...], what: str) -> UnsupportedLeaf:
    """Return the error for a value that a checkpoint cannot hold."""
    name = ".".join(path)[:MAX_NAME] or "The checkpoint"
    return UnsupportedLeaf(
        f"{name} {what}, which cannot be imported.",
        hint="Load the checkpoint, convert or remove that value, and save it again.",
        path=name,
    )
