"""Ranges of flattened tensors in archives, put together as the slices of whole tensors.

Trainers that partition an optimizer flatten its parameters and give each rank a range of the elements. A
range is some boxes of the tensor, and each box is contiguous in the file, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.source import ReadSlice
from ray_ckpt.interop.importers.tensors import StridedTensor, tensor_of
from ray_ckpt.plan.regions import flat_parts
from ray_ckpt.types import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Elements of a flattened tensor, one after the other in the archive."""

    archive: TorchArchive
    tensor: StridedTensor

    @classmethod
    def of(cls, value: Any, archive: TorchArchive, path: tuple[str, ...]) -> Flat:
        """Return the elements of an unpickled tensor. Raise ValueError unless it is contiguous."""
        tensor = tensor_of(value, path)
        if not tensor.is_contiguous:
            raise ValueError(f"{'.'.join(path)} is not contiguous")
        return cls(archive=archive, tensor=replace(tensor, shape=(prod(tensor.shape),), strides=(1,)))

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def part(self, start: int, count: int) -> Flat:
        """Return `count` of the elements. Raise ValueError if there are not as many."""
        if start + count > len(self):
            raise ValueError(f"{start + count} elements are wanted of a tensor with {len(self)}")
        return Flat(
            archive=self.archive,
            tensor=replace(self.tensor, start=self.tensor.start + start, shape=(count,)),
        )

    def read(self) -> ReadSlice:
        """Return the function that reads the elements. Raise CorruptionError if they are not in the file."""
        return self.tensor.reader(self.archive)


def joined(
    item: str, name: str, shape: tuple[int, ...], parts: Sequence[Flat]
) -> Iterator[tuple[Slice, ReadSlice]]:
    """Yield the slices of a tensor, of which `parts` are all elements in order.

    Raise ValueError if the parts have other sizes or dtypes together.
    """
    sizes = list(map(len, parts))
    if sum(sizes) != prod(shape) or len({part.tensor.dtype for part in parts}) != 1:
        raise ValueError(f"{item}.{name} has {sum(sizes)} elements, not {prod(shape)} of one dtype")
    made = partial(Slice, item=item, name=name, dtype=parts[0].tensor.dtype, global_shape=shape)
    if not prod(shape):
        yield made(offset=(0,) * len(shape), shape=shape), partial(iter, ())
        return
    for part, end in zip(parts, accumulate(sizes), strict=True):
        for (offset, size), (at,) in flat_parts(shape, end - len(part), end):
            yield made(offset=offset, shape=size), part.part(at, prod(size)).read()


def widened(found: tuple[Slice, ReadSlice]) -> tuple[Slice, ReadSlice]:
    """Return a slice of 16-bit floating point as float32, which holds each value exactly; others as is."""
    part, read = found
    if part.dtype not in ("BF16", "F16"):
        return found
    return replace(part, dtype="F32"), partial(_widen, read, part.dtype)


def _widen(read: ReadSlice, dtype: str) -> Iterator[memoryview]:
    for block in read():
        data = np.frombuffer(block, "<u2")
        wide = data.view("<f2").astype("<f4") if dtype == "F16" else data.astype("<u4") << 16
        yield wide.view(np.uint8).data


def float32(value: float) -> ReadSlice:
    """Return the function that yields one number as float32."""
    return partial(iter, (memoryview(np.float32(value).tobytes()),))
