"""Files of a run are opened by one door: no pipe, device or folder, no link out, and bounded."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ray_ckpt
from ray_ckpt.catalog.catalog import Catalog, verify_directory
from ray_ckpt.cli import app
from ray_ckpt.errors import CheckpointError, FormatError, RestoreError
from ray_ckpt.format.names import record_file, snapshot_file, state_file
from ray_ckpt.format.records import MAX_RECORD_BYTES
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.storage.local.files import NotRegular, open_file, read_small
from ray_ckpt.storage.local.staging import Staging
from tests.support.sample_run import SampleRun, write_run


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        here = os.open(path.parent, os.O_PATH)
        opened.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": make_pipe,
    "a folder": make_folder,
    "a socket": make_socket,
    "a link to a device": make_link("/dev/zero"),
    "a link to a terminal": make_link("/dev/tty"),
    "a link out": make_link("/etc/hostname"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return KINDS[request.param]


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    return write_run(tmp_path / "storage", steps=(10, 20), durable=(10, 20))


def test_only_regular_files_are_opened(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    kind(path)
    for read in (
        lambda: open_file(path),
        lambda: open_file(path, within=tmp_path),
        lambda: read_small(path, 10, within=tmp_path),
        lambda: list(read_blocks_direct(path, 0, 1)),
        lambda: list(read_blocks_direct(path, 0, 1, within=tmp_path)),
    ):
        with pytest.raises(OSError, match="file"):
            read()


def test_links_inside_are_followed_and_so_is_a_link_to_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"12")
    (tmp_path / "real" / "link").symlink_to("file")
    (tmp_path / "root").symlink_to("real")
    root = tmp_path / "root"
    assert read_small(root / "link", 2, within=root) == b"12"
    assert b"".join(map(bytes, read_blocks_direct(root / "link", within=root))) == b"12"
    with pytest.raises(NotRegular, match="a link"):
        read_small(root / "link", 2)
    (root / "folder").symlink_to(tmp_path)
    (tmp_path / "out").write_bytes(b"3")
    with pytest.raises(NotRegular, match="leads out of"):
        read_small(root / "folder" / "out", 2, within=root)


def test_a_small_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert read_small(path, 0) == b""
    os.truncate(path, 1 << 40)  # takes no space
    with pytest.raises(EOFError, match=f"has {1 << 40} bytes; the format allows 5"):
        read_small(path, 5)
    path.write_bytes(b"12345")
    assert read_small(path, 5) == b"12345"


def test_a_record_that_is_no_file_is_named(run: SampleRun, kind: Callable[[Path], None]) -> None:
    for seq in (0, 5):
        path = run.folder / "ray_ckpt" / "log" / record_file(seq)
        good = path.read_bytes()
        path.unlink()
        kind(path)
        with pytest.raises(CheckpointError, match=record_file(seq)) as caught:
            Catalog(run.folder)
        assert "that user" not in caught.value.hint
        found = CliRunner().invoke(app, ["ls", str(run.folder)])
        assert isinstance(found.exception, CheckpointError)
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(good)


def test_a_long_record_is_not_read_whole(run: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.folder / "ray_ckpt" / "log" / record_file(5)
    os.truncate(path, 1 << 40)
    with pytest.raises(FormatError, match=f"{record_file(5)}.*allows {MAX_RECORD_BYTES}"):
        Catalog(run.folder)


def test_a_snapshot_that_is_no_file_is_passed_over(run: SampleRun, kind: Callable[[Path], None]) -> None:
    kind(run.folder / "ray_ckpt" / "log" / snapshot_file(3))
    if not (run.folder / "ray_ckpt" / "log" / snapshot_file(3)).is_socket():
        assert len(Catalog(run.folder)) == 2


def test_a_state_file_that_is_no_file_is_named(run: SampleRun, kind: Callable[[Path], None]) -> None:
    path = run.directory(20) / state_file(0, 2)
    path.unlink()
    kind(path)
    with pytest.raises(RestoreError, match=state_file(0, 2)):
        ray_ckpt.open(run.folder).load(step=20)
    for report in (
        verify_directory(run.directory(20)),
        verify_directory(run.directory(20), root_digest=run.checkpoints[20].root_digest),
    ):
        assert {damage.file for damage in report.damages} == {path.name}


def test_staging_takes_no_pipe_for_a_file(tmp_path: Path) -> None:
    root, uid = tmp_path / "staging", "0" * 32
    with_pipes = root / uid / f"{10:012d}-{'a' * 16}"
    stage = Staging(root)
    stage.write_mark(uid, run_name="gpt", storage_path="/runs", epoch=3)
    with_pipes.mkdir()
    os.mkfifo(with_pipes / "manifest-00000-of-00001.parquet")
    os.mkfifo(with_pipes / "parity-00000-of-00002.bin")
    assert not list(stage.holdings(uid)) and not list(stage.parities(uid))
    (root / uid / "run.json").unlink()
    os.mkfifo(root / uid / "run.json")
    assert stage.epoch(uid) == 0
    stage.close()
    (root / "disk").unlink()
    os.mkfifo(root / "disk")
    with pytest.raises(CheckpointError, match="disk is a named pipe"):
        Staging(root)


def test_a_file_that_is_written_may_not_be_opened_twice(tmp_path: Path) -> None:
    """A refused O_DIRECT may have made the file; one of others is never written into."""
    from ray_ckpt.storage.local import direct, files

    path = files.temporary_name(tmp_path)
    path.symlink_to("/dev/null")
    with pytest.raises(OSError) as caught:
        direct._create(path, flags=0)
    assert caught.value.errno == errno.ELOOP
