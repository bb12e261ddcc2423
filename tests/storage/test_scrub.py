"""Verification of stored files: what is damaged is named, and no file is read into memory without a limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_ckpt.format.names import fragment_file
from ray_ckpt.storage.local import scrub

NAME = fragment_file(0, 1)


def test_a_fragment_of_any_size_is_damaged_and_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "MAX_FRAGMENT_BYTES", 100)
    taken = 0

    def read(name: str) -> Iterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 60
            yield bytes(60)

    assert scrub.verify_stored(read, 0, 1) == (NAME,)
    assert taken == 120


def test_a_fragment_that_is_gone_or_empty_is_damaged() -> None:
    def gone(name: str) -> Iterator[bytes]:
        raise FileNotFoundError(name)

    assert scrub.verify_stored(gone, 0, 1) == scrub.verify_stored(lambda name: iter(()), 0, 1) == (NAME,)
