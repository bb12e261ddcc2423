"""Names of directories that have some items of a checkpoint."""

from __future__ import annotations

import pytest

from ray_ckpt.errors import ConfigError, FormatError
from ray_ckpt.format import names


def test_directories_of_some_items_are_known_by_the_grammar() -> None:
    whole = "000000000010-0123456789abcdef"
    assert names.items_suffix("ema,model") == ".ema.model" and names.items_suffix("") == ""
    for name in (whole, f"{whole}.model", f"{whole}.ema.model"):
        assert names.whole_directory(name) == whole
    for name in (
        f"{whole}.",
        f"{whole}..model",
        f"{whole}.mo del",
        f"{whole}.1",
        f"{whole}/model",
        "x.model",
    ):
        assert names.whole_directory(name) is None
    for items in ("../model", "model/..", "model.head", ",model", "mod\u00e8le"):
        with pytest.raises(FormatError):
            names.items_suffix(items)


def test_only_ascii_digits_are_numbers_in_names() -> None:
    digit = "\N{FULLWIDTH DIGIT ONE}"
    assert names.record_seq(names.record_file(1)) == names.snapshot_seq(names.snapshot_file(1)) == 1
    assert names.record_seq(f"{digit * 20}.json") is None
    assert names.snapshot_seq(f"snapshot-{digit * 20}.parquet") is None
    assert not names.is_directory_name(f"{digit * 12}-0123456789abcdef")
    for name in (names.shard_file(0, 1, 1), names.state_file(0, 1), names.fragment_file(0, 1)):
        assert names.is_file_name(name) and not names.is_file_name(name.replace("1.", f"{digit}."))


def test_a_bad_run_name_gets_the_whole_rule() -> None:
    for name in ("gpt", "_x", "0", "a.b=c+d-e", "x" * 200):
        assert names.check_run_name(name) == name
    for name in ("", "a b", "a/b", "x" * 201, *(f"{first}a" for first in ".-=+")):
        with pytest.raises(ConfigError) as caught:
            names.check_run_name(name)
        assert caught.value.hint.endswith("and begin with a letter, a digit or '_'.")
