"""Bytes of a saved slice into tensors of any kind, against torch's own copies."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ray_ckpt.capture import sinks
from ray_ckpt.capture.sinks import BoxSink, Target, flat_bytes, sink_for
from ray_ckpt.capture.walk import DTYPES
from ray_ckpt.restore.reader import MIN_RELEASED_BYTES, FlatSink, Sink
from tests.support.examples import examples


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (prod(shape) * dtype.itemsize,))
    return raw.to(torch.uint8).view(dtype).view(shape)


def fill(sink: Sink, data: bytes, cuts: list[int]) -> None:
    for start, end in pairwise([0, *sorted(cuts), len(data)]):
        sink.write(memoryview(data)[start:end])
    sink.finish()


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (4, 6)])
def test_every_dtype_goes_straight_to_its_memory(name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    source, live = noise(shape, dtype), torch.zeros(shape, dtype=dtype)
    sink = sink_for(shape, dtype, [Target(live, (0,) * len(shape))])
    assert isinstance(sink, FlatSink)
    fill(sink, bytes_of(source), [])
    assert bytes_of(live) == bytes_of(source)


@pytest.mark.parametrize("nbytes", [MIN_RELEASED_BYTES - 1, MIN_RELEASED_BYTES, MIN_RELEASED_BYTES + 1])
def test_small_and_large_pieces_of_signed_bytes_are_copied(nbytes: int) -> None:
    """Buffers of Arrow have signed bytes."""
    source = noise((nbytes,), torch.uint8)
    live = torch.zeros_like(source)
    sink_for((nbytes,), torch.uint8, [Target(live, (0,))]).write(memoryview(bytes_of(source)).cast("b"))
    assert torch.equal(live, source)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (7,), (4, 6)])
def test_every_dtype_goes_through_a_buffer(name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    source, live = noise(shape, dtype), torch.zeros(shape, dtype=dtype)
    fill(BoxSink(shape, dtype, [Target(live, (0,) * len(shape))]), bytes_of(source), [1])
    assert bytes_of(live) == bytes_of(source)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_box_of_any_shape(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4), label="shape"))
    monkeypatch.setattr(sinks, "SLAB_BYTES", data.draw(st.integers(4, 200), label="slab"))
    sinks._BUFFERS._kept.clear()  # of another size
    source = torch.arange(prod(shape), dtype=torch.int32).view(shape)
    targets, expected = [], []
    for _ in range(data.draw(st.integers(1, 3), label="targets")):
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
        order = data.draw(st.permutations(range(len(shape))), label="strides")
        live = torch.full([size[i] for i in order], -1, dtype=torch.int32)
        live = live.permute([order.index(i) for i in range(len(shape))])
        targets.append(Target(live, start))
        expected.append(source[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))])
    cuts = data.draw(st.lists(st.integers(0, 4 * source.numel()), max_size=5), label="cuts")
    fill(sink_for(shape, torch.int32, targets), bytes_of(source), cuts)
    for target, right in zip(targets, expected, strict=True):
        assert torch.equal(target.tensor, right)
    sinks._BUFFERS._kept.clear()


def test_memory_that_shows_other_values_than_it_holds_is_not_written_directly() -> None:
    values = torch.zeros(3, dtype=torch.complex64)
    source = torch.tensor([1 + 2j, 3 - 1j, 5j], dtype=torch.complex64)
    for live in (values.conj(), torch.zeros(3, 3)[:, 0], torch.zeros(2, 3).t()):
        assert flat_bytes(live) is None
    fill(sink_for((3,), torch.complex64, [Target(values.conj(), (0,))]), bytes_of(source), [])
    assert torch.equal(values.conj(), source)


def test_tensors_made_in_inference_mode_are_filled() -> None:
    with torch.inference_mode():
        live = torch.zeros(3, 2).t()
    source = torch.rand(2, 3)
    fill(sink_for((2, 3), torch.float32, [Target(live, (0, 0))]), bytes_of(source), [])
    assert torch.equal(live, source)


def test_a_slice_far_larger_than_a_buffer_needs_no_more_than_two() -> None:
    shape = (3, 700_000)
    source, live = torch.rand(shape), torch.zeros(shape[1], shape[0]).t()
    step = 1 << 20
    cuts = list(accumulate([step] * (source.nbytes // step)))
    fill(sink_for(shape, torch.float32, [Target(live, (0, 0))]), bytes_of(source), cuts)
    assert torch.equal(live, source)
    assert sum(buffer.array.nbytes for buffer in sinks._BUFFERS._kept.values()) <= 2 * sinks.SLAB_BYTES
