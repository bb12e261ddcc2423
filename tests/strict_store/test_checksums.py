"""Digests of bodies that arrive in pieces."""

from __future__ import annotations

import random

import pytest

from tests.servers.strict_store import checksums
from tests.servers.strict_store.checksums import DIGESTS, digest_of, from_text, joined_crc64

# Of the nine bytes "123456789": the check values of the catalogue of parametrised CRC algorithms.
_CHECKS = {"crc32": "cbf43926", "crc32c": "e3069283", "crc64nvme": "ae8b14860a799888"}


@pytest.mark.parametrize("name", _CHECKS)
def test_a_crc_has_its_check_value(name: str) -> None:
    assert digest_of(name, b"123456789").hex() == _CHECKS[name]


@pytest.mark.parametrize("name", DIGESTS)
def test_pieces_of_all_sizes_make_the_digest_of_the_whole(name: str) -> None:
    chance = random.Random(5)
    for size in (0, 1, 7, 8, 9, 127, 128, 129, 1000, 4096, 70_000):
        body = chance.randbytes(size)
        cuts = sorted(chance.choices(range(size + 1), k=3))
        pieces = [body[start:stop] for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]
        assert digest_of(name, *pieces) == digest_of(name, body)


def test_one_flipped_bit_anywhere_changes_the_crc_64() -> None:
    body = bytearray(random.Random(6).randbytes(2000))
    right = digest_of("crc64nvme", bytes(body))
    for byte in range(0, 2000, 7):
        body[byte] ^= 1 << byte % 8
        assert digest_of("crc64nvme", bytes(body)) != right
        body[byte] ^= 1 << byte % 8


def test_crc_64_of_parts_makes_that_of_the_whole() -> None:
    chance = random.Random(7)
    parts = [chance.randbytes(size) for size in (5, 100, 8, 0, 7777, 16, 1)]
    digests = [digest_of("crc64nvme", part) for part in parts]
    assert joined_crc64(digests, map(len, parts)) == digest_of("crc64nvme", b"".join(parts))


def test_what_is_not_base64_is_refused() -> None:
    with pytest.raises(ValueError):
        from_text("not/base64!")


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 1000, 70_001, 1 << 20])
def test_both_ways_to_a_crc64_agree(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)

    def of(pieces: list[bytes]) -> bytes:
        state = checksums.Crc64Nvme()
        for piece in pieces:
            state.update(memoryview(piece))
        return state.digest()

    native = of([data[:100], data[100:]])
    monkeypatch.setattr(checksums, "_crc64nvme", None)
    assert of([data[:100], data[100:]]) == native
