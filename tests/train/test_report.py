"""The pointer that a report writes: once, and anew where a crash has left a part of it. No cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow.fs import LocalFileSystem

from ray_ckpt.train.pointers import POINTER_FILE, Pointer
from ray_ckpt.train.report import _write
from ray_ckpt.types import AttemptId

POINTER = Pointer(attempt=AttemptId(run_uid="0" * 32, session=3, step=20, attempt="abcdef"), run="/runs/gpt")


def storage_at(folder: Path) -> SimpleNamespace:
    """Return Ray Train's storage, as far as a report needs it."""
    return SimpleNamespace(
        storage_filesystem=LocalFileSystem(), build_checkpoint_path_from_name=lambda name: str(folder / name)
    )


def test_a_pointer_is_written_once(tmp_path: Path) -> None:
    assert _write(storage_at(tmp_path), POINTER)
    path = tmp_path / POINTER.directory / POINTER_FILE
    assert Pointer.decode(path.read_bytes()) == POINTER
    assert not _write(storage_at(tmp_path), POINTER)
    path.write_text('{"ray_ckpt": 3}')
    assert not _write(storage_at(tmp_path), POINTER), "it is of a newer version"


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_pointer_that_a_crash_has_cut_off_is_written_anew(tmp_path: Path, size: int) -> None:
    path = tmp_path / POINTER.directory / POINTER_FILE
    path.parent.mkdir()
    path.write_bytes(POINTER.encode().rstrip()[:size])
    assert _write(storage_at(tmp_path), POINTER)
    assert Pointer.decode(path.read_bytes()) == POINTER
