"""Files are whole or absent, also when writing them fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.errors import CorruptionError
from ray_ckpt.format.digest import digest
from ray_ckpt.storage.local import files


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "injected")


def test_a_file_is_written_with_private_modes(tmp_path: Path) -> None:
    path = tmp_path / "one" / "two" / "file"
    files.make_dirs(path.parent)
    files.make_dirs(path.parent)
    files.write_file(path, [b"ab", bytearray(b"cd"), memoryview(b"ef")])
    assert path.read_bytes() == b"abcdef"
    assert path.stat().st_mode & 0o777 == files.FILE_MODE
    assert path.parent.stat().st_mode & 0o777 == files.DIR_MODE
    files.write_file(path, [])
    assert path.read_bytes() == b""
    assert names_in(path.parent) == ["file"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write_file(path, [b"old"])
    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "rename" else os, call, fail)
        with pytest.raises(OSError, match="injected"):
            files.write_file(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


def test_chunks_that_raise_leave_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("the peer went away")

    with pytest.raises(ValueError, match="went away"):
        files.write_file(tmp_path / "file", chunks())
    assert not names_in(tmp_path)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    files.write_file(tmp_path / "file", [b"0123456789"])
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_link_in_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "file").symlink_to(victim)
    files.write_file(tmp_path / "file", [b"new"])
    assert victim.read_bytes() == b"mine" and (tmp_path / "file").read_bytes() == b"new"


def test_temporaries_are_known_as_such(tmp_path: Path) -> None:
    path = files.write_temporary(tmp_path, [b"x"])
    assert files.is_temporary(path.name) and not files.is_temporary("shard-00000-of-00001.safetensors")


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_checked_passes_on_what_was_announced(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)

    def run(chunks: Iterable[bytes], size: int, expected: str) -> bytes:
        return b"".join(bytes(c) for c in files.checked(chunks, size_bytes=size, digest=expected, what="f"))

    assert run(chunks, len(whole), digest(whole)) == whole
    wrong: list[tuple[list[bytes], int, str]] = [
        ([*chunks, b"x"], len(whole), digest(whole)),
        (chunks, len(whole) + 1, digest(whole)),
        (chunks, len(whole), digest(whole + b"x")),
    ]
    for some, size, expected in wrong:
        with pytest.raises(CorruptionError, match="f arrived with other bytes"):
            run(some, size, expected)


def test_free_space_is_a_number_of_bytes(tmp_path: Path) -> None:
    assert files.free_bytes(tmp_path) > 0
