"""State trees: what goes in comes out exactly, what cannot is refused by path, bad bytes are FormatErrors."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from contextlib import suppress
from enum import Enum
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ray_ckpt.errors import FormatError, UnsupportedLeaf
from ray_ckpt.format import tree
from ray_ckpt.format.tree import Kept, TensorRef, TorchDtype, decode_tree, encode_tree
from tests.support.examples import examples

NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
Point = namedtuple("Point", "x y")


class Color(Enum):
    RED = 1
    BLUE = 2


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.dtype):
        return bool(a == b)
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype) and a.shape == b.shape and bool(a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        factories = [getattr(x, "default_factory", None) for x in (a, b)]
        return factories[0] is factories[1] and same(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return same(sorted(map(encode_tree, a)), sorted(map(encode_tree, b)))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


keys = st.text(max_size=5) | st.integers() | st.sampled_from(["$tuple", "$", "$dict", "\ud800", "a.b"])
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
arrays = hnp.arrays(
    dtype=hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?")
    | hnp.complex_number_dtypes()
    | hnp.datetime64_dtypes()
    | hnp.unicode_string_dtypes()
    | hnp.byte_string_dtypes(),
    shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
leaves = (
    hashable
    | st.sets(hashable, max_size=3)
    | st.text(alphabet=st.characters(exclude_categories=()), max_size=4)
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.complex_numbers()
    | st.binary(max_size=9).map(bytearray)
    | arrays
    | st.sampled_from(
        [np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2024-01-01"), np.str_("é")]
    )
    | st.sampled_from([np.bytes_(b"a\0"), np.dtype("<f4"), TorchDtype("bfloat16"), TensorRef("model.w")])
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@given(trees)
@examples(400)
@example([math.inf, -math.inf, math.nan, -math.nan, NAN_WITH_PAYLOAD, -0.0, 5e-324])
@example([10**5000, -(2**63), 2**63, 2**64, True, 1])
@example({"\ud800\udc00": "\udfff", "$tuple": [1], 1: "1", "1": 1})
@example({"": {}, "a": [[], (), set(), frozenset(), OrderedDict(), Counter(), defaultdict(None)]})
@example(np.asfortranarray(np.arange(6).reshape(2, 3)))
@example([np.zeros((0, 3), "<f2"), np.array(7, ">i4"), np.longdouble(1) / 3])
def test_round_trip(value: Any) -> None:
    data = encode_tree(value)
    assert same(decode_tree(data), value)
    assert encode_tree(decode_tree(data)) == data


def test_plain_values_are_plain_json() -> None:
    state = {
        "last_epoch": 3,
        "base_lrs": [0.1, 1e-05],
        "name": "größe",
        "on": True,
        "x": None,
        "nested": {"a": {}},
    }
    assert json.loads(encode_tree(state)) == state
    assert encode_tree({"betas": (0.9, 0.999)}) == b'{"betas": {"$tuple": [0.9, 0.999]}}\n'
    assert encode_tree({"a": {1, 3, 2}}) == encode_tree({"a": {3, 2, 1}})


def test_a_kept_container_is_written_once_and_read_as_it_was() -> None:
    refs = {'a"}': TensorRef('{"$kept": 0}'), "b": TensorRef("b")}
    other = [TensorRef("c")]
    tree = {"x": [refs, (refs, other)], '{"$kept": 1}': '{"$kept": 1}', "$kept": 0}
    kept = {id(one): Kept(one) for one in (refs, other)}
    first = encode_tree(tree, kept)
    assert first == encode_tree(tree, kept) == encode_tree(tree)
    assert all(one.text is not None for one in kept.values()) and same(decode_tree(first), tree)


def test_a_kept_container_may_contain_others() -> None:
    inner = {"b": TensorRef("b")}
    outer = [inner, {"c": TensorRef('{"$kept": 0}')}, inner]
    written = ([outer, inner], {"x": outer}, [inner, (outer,)])
    for order in ((outer, inner), (inner, outer)):
        kept = {id(one): Kept(one) for one in order}
        for each in written:
            assert encode_tree(each, kept) == encode_tree(each)
            assert same(decode_tree(encode_tree(each, kept)), each)


def test_what_is_kept_counts_and_is_refused_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedLeaf) as refused:
        encode_tree({"a": (bad := [object()])}, {id(bad): Kept(bad)})
    assert refused.value.fields["path"] == "a[0]"
    refs = [TensorRef("a")] * 4
    kept = {id(refs): Kept(refs)}
    encode_tree(refs, kept)
    monkeypatch.setattr("ray_ckpt.format.tree.MAX_VALUES", 10)
    with pytest.raises(UnsupportedLeaf, match="beyond the 10 values"):
        encode_tree([refs, refs, 1], kept)


def test_a_decoded_array_is_its_own_and_writable() -> None:
    array = decode_tree(encode_tree(np.arange(3)))
    array[0] = 9
    assert array.flags.owndata


def test_enums_of_the_list_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedLeaf):
        encode_tree(Color.RED)
    monkeypatch.setattr(tree, "ENUMS", {"tests.Color": Color})
    assert decode_tree(encode_tree([Color.BLUE])) == [Color.BLUE]
    for bad in (b'{"$enum": ["tests.Color", "GREEN"]}\n', b'{"$enum": ["os.system", "RED"]}\n'):
        with pytest.raises(FormatError):
            decode_tree(bad)


def cycle() -> list[Any]:
    inner: list[Any] = []
    inner.append({"back": inner})
    return inner


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


class Opaque:
    def __repr__(self) -> str:
        raise RuntimeError("an error message must not call this")


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        ({"scheduler": {"fns": [1, 2, lambda: 0]}}, "scheduler.fns[2]", "only pickle"),
        ({"a b": {3: {Opaque}}}, "['a b'][3]{}", "only pickle"),
        (Opaque(), "", "Opaque"),
        ({"p": Point(1, 2)}, "p", "Point"),
        ({"d": {(1, 2): 3}}, "d", "keys must be str or int"),
        ({10**5000: object()}, f"[{hex(10**5000)[:38]}...{'0' * 39}]", "only pickle"),
        ({"d": {True: 3}}, "d", "keys must be str or int"),
        ({"d": {np.int64(1): 3}}, "d", "keys must be str or int"),
        ({"d": defaultdict(lambda: 0)}, "d", "factory"),
        ({"a": np.array([None])}, "a", "numpy.ndarray"),
        ({"a": np.zeros(2, "i4,f4")}, "a", "numpy.ndarray"),
        ({"a": np.ma.zeros(2)}, "a", "MaskedArray"),
        ({"c": cycle()}, "c[0].back", "contains itself"),
        ({"c": deep(100)}, "c" + "[0]" * 99, "deeper than 100"),
        ({"t": TorchDtype("load('x')")}, "t", "TorchDtype"),
    ],
)
def test_what_only_pickle_could_store_is_refused_by_path(value: Any, path: str, reason: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=reason) as caught:
        encode_tree(value)
    assert caught.value.fields["path"] == path
    assert path in caught.value.message
    assert "state_dict()" in caught.value.hint


def test_a_hundred_levels_are_fine_and_shared_values_do_not_unfold_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert decode_tree(encode_tree(deep(100))) == deep(100)
    doubled: list[Any] = []
    for _ in range(60):
        doubled = [doubled, doubled]
    monkeypatch.setattr(tree, "MAX_VALUES", 1000)
    with pytest.raises(UnsupportedLeaf, match="1000 values"):
        encode_tree(doubled)


def test_too_many_bytes_are_refused_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_tree("x" * 100)
    monkeypatch.setattr(tree, "MAX_TREE_BYTES", 50)
    with pytest.raises(UnsupportedLeaf, match="tensors"):
        encode_tree("x" * 100)
    with pytest.raises(FormatError, match="50"):
        decode_tree(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "NaN",
        '{"a": 1, "a": 2}',
        '{"$new": 1}',
        '{"$tuple": [1], "b": 2}',
        '{"b": 2, "$tuple": [1]}',
        '{"$tuple": {"$set": []}}',
        '{"$tuple": 3}',
        '{"$set": [1, 1]}',
        '{"$set": [[]]}',
        '{"$dict": [["a", 1], ["a", 2]]}',
        '{"$dict": [[1.5, 1]]}',
        '{"$dict": [[[], 1]]}',
        '{"$dict": [["a"]]}',
        '{"$int": "1_0"}',
        '{"$int": 7}',
        '{"$float": "1.0"}',
        '{"$float": "nan:00"}',
        '{"$float": "nan:3ff0000000000000"}',
        '{"$float": {"$numpy": {"dtype": "<i8", "shape": [1], "data": "AAAAAAAAAAA="}}}',
        '{"$complex": [1, 2]}',
        '{"$bytes": "??"}',
        '{"$str": "/w=="}',
        '{"$tensor": 1}',
        '{"$dtype": "load(x)"}',
        '{"$numpy": {"$numpy.scalar": {"dtype": "<i8", "shape": [], "data": "AAAAAAAAAAA="}}}',
        '{"$numpy": {"dtype": "|O", "shape": [], "data": ""}}',
        '{"$numpy": {"dtype": "<U0", "shape": [5], "data": ""}}',
        '{"$numpy": {"dtype": "<i3", "shape": [0], "data": ""}}',
        '{"$numpy": {"dtype": "<i8", "shape": [1], "data": ""}}',
        '{"$numpy": {"dtype": "<i8", "shape": [-1, -1], "data": "AAAAAAAAAAA="}}',
        '{"$numpy": {"dtype": "<i8", "shape": [0, 99999999999999999999999], "data": ""}}',
        '{"$numpy": {"dtype": "<i8", "shape": [true], "data": "AAAAAAAAAAA="}}',
        '{"$numpy.scalar": {"dtype": "<i8", "shape": [1], "data": "AAAAAAAAAAA="}}',
        '{"$defaultdict": ["eval", []]}',
        "1" * 5000,
        "[" * 100_000,
    ],
)
def test_malformed_text_is_a_format_error(text: str) -> None:
    with pytest.raises(FormatError):
        decode_tree(text.encode() + (b"\n" if text != "1" else b""))


RICH = {
    "betas": (0.9, 0.999),
    "milestones": Counter({30: 1, 80: 2}),
    "rng": np.arange(5, dtype=np.uint32),
    "big": 2**80,
    "inf": math.inf,
    "raw": b"\0\xff",
    "w": TensorRef("model.w"),
    "d": TorchDtype("float32"),
    "s": {1, "a"},
    "é": [None, True, {"$x": 1j}],
}


def test_every_truncation_is_found() -> None:
    data = encode_tree(RICH)
    for size in range(len(data)):
        with pytest.raises(FormatError):
            decode_tree(data[:size])


def test_flipped_bits_give_a_value_or_a_format_error() -> None:
    data = bytearray(encode_tree(RICH))
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with suppress(FormatError):
                decode_tree(bytes(data))
            data[index] ^= 1 << bit


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("<i8"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*tree._READERS, "dtype", "shape", "data", "a"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(
    st.binary(max_size=60).map(lambda b: b + b"\n")
    | json_values.map(lambda v: json.dumps(v).encode() + b"\n")
)
@examples(400)
def test_any_bytes_give_a_value_or_a_format_error(data: bytes) -> None:
    with suppress(FormatError):
        decode_tree(data)
