"""Shard layouts: dense, aligned, and readable by the safetensors library and by torch as it ships."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _hf_utils
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from ray_ckpt.errors import FormatError
from ray_ckpt.format import shard
from ray_ckpt.format.shard import ITEMSIZE, ShardLayout, build_layout, check_slice
from ray_ckpt.types import Slice
from tests.support.examples import examples


def whole(name: str, shape: tuple[int, ...] = (), dtype: str = "F32", item: str = "model") -> Slice:
    return Slice(item=item, name=name, dtype=dtype, global_shape=shape, offset=(0,) * len(shape), shape=shape)


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    offset = tuple(draw(st.integers(0, 5)) for _ in shape)
    rest = tuple(draw(st.integers(0, 5)) for _ in shape)
    return Slice(
        item=draw(st.sampled_from(["model", "optimizer", "größe"])),
        name=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=6)),
        dtype=draw(st.sampled_from(sorted(ITEMSIZE))),
        global_shape=tuple(o + n + r for o, n, r in zip(offset, shape, rest, strict=True)),
        offset=offset,
        shape=shape,
    )


slice_lists = st.lists(slices(), max_size=8, unique_by=lambda part: part.key)


def file_of(layout: ShardLayout, arrays: dict[str, np.ndarray]) -> bytes:
    data = bytearray(layout.size_bytes)
    data[: len(layout.header)] = layout.header
    for placed in layout.slices:
        raw = arrays[placed.slice.key].tobytes()
        assert len(raw) == placed.nbytes
        data[placed.byte_offset : placed.byte_offset + placed.nbytes] = raw
    return bytes(data)


@given(slice_lists, st.randoms())
@examples(200)
def test_layouts_are_dense_aligned_and_independent_of_order(parts: list[Slice], random: object) -> None:
    layout = build_layout(parts)
    assert len(layout.header) % shard.ALIGNMENT_BYTES == 0
    end = len(layout.header)
    for placed in layout.slices:
        assert placed.byte_offset == end and placed.byte_offset % ITEMSIZE[placed.slice.dtype] == 0
        end += placed.nbytes
    assert end == layout.size_bytes
    assert sorted(placed.slice.key for placed in layout.slices) == sorted(part.key for part in parts)
    shuffled = list(parts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert build_layout(shuffled) == layout
    header = json.loads(layout.header[8:])
    offsets = json.loads(header.pop("__metadata__")[shard.SHARDING_KEY])
    assert header == {
        p.slice.key: {
            "dtype": p.slice.dtype,
            "shape": list(p.slice.shape),
            "data_offsets": [start := p.byte_offset - len(layout.header), start + p.nbytes],
        }
        for p in layout.slices
    }
    assert offsets == {p.slice.key: {shard.OFFSETS_KEY: list(p.slice.offset)} for p in layout.slices}


@given(slice_lists)
@examples(100)
def test_the_safetensors_library_reads_every_layout(parts: list[Slice]) -> None:
    layout = build_layout(parts)
    tensors = safetensors.deserialize(layout.header + bytes(layout.size_bytes - len(layout.header)))  # type: ignore[no-untyped-call]
    assert {name: tuple(info["shape"]) for name, info in tensors} == {part.key: part.shape for part in parts}
    assert all(
        len(info["data"]) == check_slice(part) for name, info in tensors for part in parts if part.key == name
    )


def test_values_come_back_through_the_safetensors_library() -> None:
    arrays = {
        "model.w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "model.flag": np.array([True, False, True]),
        "model.step": np.array(7, dtype=np.int64),
        "model.half": np.ones((2, 2), np.float16),
        "model.none": np.zeros((0, 4), np.float64),
    }
    names = {"float32": "F32", "bool": "BOOL", "int64": "I64", "float16": "F16", "float64": "F64"}
    parts = [whole(key[6:], a.shape, names[a.dtype.name]) for key, a in arrays.items()]
    read = safetensors.numpy.load(file_of(build_layout(parts), arrays))
    assert read.keys() == arrays.keys()
    assert all(
        np.array_equal(read[key], arrays[key]) and read[key].dtype == arrays[key].dtype for key in arrays
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_and_reshards_two_shards_of_one_tensor(tmp_path: Path) -> None:
    assert (shard.SHARDING_KEY, shard.OFFSETS_KEY) == (
        _hf_utils.CUSTOM_METADATA_KEY,
        _hf_utils.SAVED_OFFSETS_KEY,
    )
    weight = np.arange(24, dtype=np.float32).reshape(6, 4)
    bias = np.arange(5, dtype=np.int64)
    cuts = [slice(0, 2), slice(2, 6)]
    for rank, cut in enumerate(cuts):
        part = Slice(
            item="model",
            name="w",
            dtype="F32",
            global_shape=(6, 4),
            offset=(cut.start, 0),
            shape=(cut.stop - cut.start, 4),
        )
        parts = [part] if rank else [part, whole("b", (5,), "I64")]
        data = file_of(build_layout(parts), {"model.w": weight[cut], "model.b": bias})
        (tmp_path / f"shard-{rank:05d}-of-00002.safetensors").write_bytes(data)
    state = {"model.w": torch.zeros(6, 4), "model.b": torch.zeros(5, dtype=torch.int64)}
    load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["model.w"], torch.from_numpy(weight))
    assert torch.equal(state["model.b"], torch.from_numpy(bias))


def test_several_slices_of_a_tensor_have_names_of_their_own() -> None:
    """A rank's part of a tensor that was cut with strides, or by FSDP1, is more than one box."""
    rows = [
        Slice(item="model", name="w", dtype="F32", global_shape=(8, 2), offset=(at, 0), shape=(2, 2))
        for at in (4, 0, 6)
    ]
    layout = build_layout([*rows, whole("b", (3,))])
    assert layout.signature == build_layout([whole("b", (3,)), *reversed(rows)]).signature
    file = layout.header + bytes(layout.size_bytes - len(layout.header))
    found = dict(safetensors.deserialize(file))  # type: ignore[no-untyped-call]
    assert sorted(found) == ["model.b", "model.w", "model.w@4,0", "model.w@6,0"]
    assert [placed.slice.offset for placed in layout.slices][1:] == [(0, 0), (4, 0), (6, 0)]


def test_nothing_at_all_is_a_valid_shard() -> None:
    layout = build_layout([])
    assert layout.size_bytes == len(layout.header) == 4096
    assert safetensors.deserialize(layout.header) == []  # type: ignore[no-untyped-call]
    assert layout.signature != build_layout([whole("w")]).signature


@pytest.mark.parametrize(
    "parts",
    [
        [whole("w"), whole("w")],
        [whole("b.c", item="a"), whole("c", item="a.b")],
        [whole("w", dtype="F4")],
        [whole("w", (-1,))],
        [whole("w", (2**62,))],
        [whole("w", item="")],
        [whole("", item="__metadata__")],
        [whole("\ud800")],
        [Slice(item="m", name="w", dtype="F32", global_shape=(4,), offset=(3,), shape=(2,))],
        [Slice(item="m", name="w", dtype="F32", global_shape=(4,), offset=(-1,), shape=(2,))],
        [Slice(item="m", name="w", dtype="F32", global_shape=(4,), offset=(0, 0), shape=(2,))],
    ],
)
def test_bad_slices_are_refused(parts: list[Slice]) -> None:
    with pytest.raises(FormatError):
        build_layout(parts)


def test_a_header_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "MAX_HEADER_BYTES", 4000)
    with pytest.raises(FormatError, match="more ranks"):
        build_layout([whole("w")])
