"""Bounds of JSON texts, before they are parsed."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from ray_ckpt.errors import FormatError, UnsupportedLeaf
from ray_ckpt.format import jsontext, tree
from tests.support.examples import every_few

MIB = 1 << 20


@pytest.mark.parametrize("item", every_few(['{"a":1}', "{}", "[[[[1]]]]", "[]", '"ab"', "1.5"], 3))
def test_a_text_that_unpacks_far_is_refused_unparsed(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "MAX_VALUES_BYTES", jsontext.MAX_VALUES_BYTES // 4)
    text = b"[" + f"{item},".encode() * (14 * MIB // (len(item) + 1)) + b"0]\n"
    tracemalloc.start()
    began_s = time.monotonic()
    try:
        with pytest.raises(FormatError, match="MiB"):
            jsontext.loads(text, what="The state", max_bytes=16 * MIB)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(text)
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began_s < 20


def test_characters_in_strings_are_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "MAX_VALUES_BYTES", jsontext.MAX_VALUES_BYTES // 4)
    text = '{",[\\' * (5 * MIB // 4) + "\\"
    assert tree.decode_tree(tree.encode_tree({"a": text})) == {"a": text}


def test_a_list_of_many_numbers_is_none_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "MAX_VALUES_BYTES", jsontext.MAX_VALUES_BYTES // 4)
    numbers = list(range(500_000))
    assert tree.decode_tree(tree.encode_tree(numbers)) == numbers


def test_what_no_reader_would_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "MAX_VALUES_BYTES", 10_000)
    with pytest.raises(UnsupportedLeaf, match="take about"):
        tree.encode_tree([[]] * 1000)
