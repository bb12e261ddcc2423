"""Sinks for restored bytes: straight into a live tensor's memory, or through a small buffer.

A saved slice that fills contiguous CPU memory is copied there as it arrives. Everything else (a part of a
slice, strided memory, a device) passes through a buffer of the reading thread, one slab of the slice at a
time; on CUDA the buffer is pinned and the copy to the device runs while the next slab is filled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ray_ckpt.restore.reader import Bytes, FlatSink, Sink

SLAB_BYTES = 1 << 20  # slab for host memory: small enough to be in the cache when the slab is copied
DEVICE_SLAB_BYTES = 16 << 20  # slab in a pinned buffer: the fastest of five sizes, jobs/bench/results/h100.md
NUM_BUFFERS = 2  # per thread: one is filled while the other is copied to the device


class Target(NamedTuple):
    """A target: `shape` elements from `source_start` of a saved slice fill `tensor`, which has that shape."""

    tensor: torch.Tensor
    source_start: tuple[int, ...]


def sink_for(shape: Sequence[int], dtype: torch.dtype, targets: Sequence[Target]) -> Sink:
    """Return the sink for a saved slice of `shape`, in C order, with all targets of its elements."""
    if len(targets) == 1 and tuple(targets[0].tensor.shape) == tuple(shape):
        flat = flat_bytes(targets[0].tensor)
        if flat is not None:
            return FlatSink(flat)
    return BoxSink(shape, dtype, targets)


def flat_bytes(tensor: torch.Tensor) -> Bytes | None:
    """Return the writable memory of a contiguous CPU tensor; None for other tensors."""
    if not tensor.is_cpu or type(tensor) is not torch.Tensor or not tensor.is_contiguous():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None  # a conjugate or negative view: its memory has other values
    if not tensor.numel():
        return np.empty(0, np.uint8)  # numpy before 2.4 refuses the null pointer
    return np.asarray(_Memory(tensor))


class _Memory:
    """Array interface to a tensor's memory, in a third of the time of `view(torch.uint8).numpy()`."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # numpy keeps this object, and so keeps the memory
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "version": 3,
        }


class BoxSink:
    """Sink that gathers slabs of a slice and copies parts of each slab to its targets."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, targets: Sequence[Target]) -> None:
        self._shape = tuple(shape) or (1,)
        self._dtype = dtype
        self._targets = [(t.source_start, t.tensor) if shape else ((0,), t.tensor.view(1)) for t in targets]
        self._devices = {tensor.device for _, tensor in self._targets if tensor.device.type == "cuda"}
        limit = DEVICE_SLAB_BYTES if self._devices else SLAB_BYTES
        self._axis, self._unit_bytes = _axis(self._shape, dtype.itemsize, limit)
        self._max_units = max(1, limit // self._unit_bytes)
        self._unit = 0  # first unit of the slab
        self._filled = 0  # bytes in the slab
        self._buffer: _SlabBuffer | None = None

    def write(self, view: memoryview) -> None:
        data = np.frombuffer(view, np.uint8)
        while data.size:
            size = self._slab_units() * self._unit_bytes
            if self._buffer is None:
                self._buffer = _BUFFERS.next(pinned=bool(self._devices))
            part, data = data[: size - self._filled], data[size - self._filled :]
            np.copyto(self._buffer.array[self._filled : self._filled + part.size], part)
            self._filled += part.size
            if self._filled == size:
                self._copy(self._buffer)
                self._buffer, self._filled = None, 0

    def finish(self) -> None:
        """Do nothing: copies to a device are in its stream, and readers wait for the device."""

    def _slab_units(self) -> int:
        """Return the number of units in the slab: as many as fit the buffer, up to the end of the axis."""
        length = self._shape[self._axis]
        return min(self._max_units, length - self._unit % length)

    def _copy(self, buffer: _SlabBuffer) -> None:
        """Copy the full slab to every target, as far as slab and target overlap."""
        axis, count = self._axis, self._slab_units()
        lead = np.unravel_index(self._unit // self._shape[axis], self._shape[:axis]) if axis else ()
        start = (*map(int, lead), self._unit % self._shape[axis], *(0 for _ in self._shape[axis + 1 :]))
        shape = (*(1 for _ in lead), count, *self._shape[axis + 1 :])
        slab = buffer.tensor[: count * self._unit_bytes].view(self._dtype).view(shape)
        for source_start, tensor in self._targets:
            first = tuple(map(max, start, source_start))
            ends = zip(start, shape, source_start, tensor.shape, strict=True)
            size = tuple(min(s + n, t + m) - f for (s, n, t, m), f in zip(ends, first, strict=True))
            if all(n > 0 for n in size):
                there, here = _box(first, source_start, size), _box(first, start, size)
                with torch.inference_mode(tensor.is_inference()):  # torch refuses it elsewhere
                    tensor[there].copy_(slab[here], non_blocking=bool(self._devices))
        buffer.sent(self._devices)
        self._unit += count


def _axis(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, int]:
    """Return the axis of the slabs, and the bytes of one step along the axis, at most `limit` if possible."""
    axis, unit = len(shape) - 1, itemsize
    while axis > 0 and unit * shape[axis] <= limit:
        unit *= shape[axis]
        axis -= 1
    return axis, unit


def _box(first: Sequence[int], origin: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(f - o, f - o + n) for f, o, n in zip(first, origin, size, strict=True))


class _SlabBuffer:
    """Memory for a slab; pinned for a CUDA device."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.array: Bytes = self.tensor.numpy()
        self._copies: list[Any] = []

    def sent(self, devices: Iterable[torch.device]) -> None:
        """Note that copies to these devices now read from the buffer."""
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._copies.append(event)

    def wait(self) -> None:
        """Wait until the buffer may be filled again."""
        while self._copies:
            self._copies.pop().synchronize()


class _SlabBuffers(threading.local):
    """Buffers of each thread, used in turn; a thread reads one row at a time."""

    def __init__(self) -> None:
        self._turn = 0
        self._kept: dict[tuple[int, bool], _SlabBuffer] = {}

    def next(self, *, pinned: bool) -> _SlabBuffer:
        self._turn = (self._turn + 1) % NUM_BUFFERS
        key = (self._turn, pinned)
        if key not in self._kept:
            self._kept[key] = _SlabBuffer(DEVICE_SLAB_BYTES if pinned else SLAB_BYTES, pinned=pinned)
        self._kept[key].wait()
        return self._kept[key]


_BUFFERS = _SlabBuffers()
