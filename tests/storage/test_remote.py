"""The remote tier on a shared folder: checked names, whole files, refusals. Other stores: test_stores."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ckpt.errors import ConfigError, CorruptionError, FormatError, StorageNotShared, StoragePathError
from ray_ckpt.format import zstd
from ray_ckpt.format.digest import digest
from ray_ckpt.location import Location
from ray_ckpt.storage.checkpoint_files import CheckpointFiles
from ray_ckpt.storage.local import files
from ray_ckpt.storage.log_store import CreateResult
from ray_ckpt.storage.remote import file_store
from ray_ckpt.storage.remote.file_store import children_of
from ray_ckpt.storage.remote.tier import RemoteRef, RemoteTier
from ray_ckpt.types import FileEntry

DIRECTORY = "000000000010-0123456789abcdef"
LATER = "000000000020-0123456789abcdef"
SHARD = "shard-00000-of-00001.safetensors"
MANIFEST = "manifest-00000-of-00001.parquet"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a storage path as a probe leaves it."""
    root = tmp_path / "gpt" / "ray_ckpt"
    (root / "log").mkdir(parents=True)
    return root


@pytest.fixture
def tier(root: Path) -> RemoteTier:
    return RemoteTier(Location.parse(root))


def staged(tmp_path: Path, data: bytes) -> tuple[FileEntry, Path]:
    """Return a shard on this node's disk."""
    path = tmp_path / "staged"
    path.write_bytes(data)
    return FileEntry(name=SHARD, size_bytes=len(data), digest=digest(data)), path


def compressible(nbytes: int) -> bytes:
    return np.random.default_rng(1).integers(0, 8, nbytes, np.uint8).tobytes()


def test_the_layout_on_the_storage_path(root: Path, tmp_path: Path) -> None:
    tier = RemoteRef(storage_path=f"file://{tmp_path}", run_name="gpt").open()
    assert tier.log.create("a", b"1") is CreateResult.OK
    tier.put(DIRECTORY, MANIFEST, b"123")
    assert (root / "log" / "a").read_bytes() == b"1"
    path = root / "checkpoints" / DIRECTORY / MANIFEST
    assert path.read_bytes() == b"123" == tier.read_whole(DIRECTORY, MANIFEST, max_bytes=3)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(EOFError, match="allows 2"):
        tier.read_whole(DIRECTORY, MANIFEST, max_bytes=2)


def test_a_file_of_the_disk_goes_there_whole_or_not_at_all(
    tier: RemoteTier, root: Path, tmp_path: Path
) -> None:
    entry, path = staged(tmp_path, random.randbytes(3_000_001))
    for _ in range(2):
        assert tier.put_file(DIRECTORY, entry, path) == entry.size_bytes
    assert b"".join(map(bytes, tier.blocks(DIRECTORY, SHARD))) == path.read_bytes()
    tier.delete(DIRECTORY)
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(CorruptionError):
        tier.put_file(DIRECTORY, entry, path)
    assert tier.files_of(DIRECTORY) == {} and list(tier.uploads()) == []


def test_what_compresses_is_stored_compressed_and_read_as_it_was(
    tier: RemoteTier, root: Path, tmp_path: Path
) -> None:
    data = compressible(3 * zstd.FRAME_BYTES + 17)
    entry, path = staged(tmp_path, data)
    stored = tier.put_file(DIRECTORY, entry, path, level=1)
    assert names_in(root / "checkpoints" / DIRECTORY) == [SHARD + ".zst"]
    assert stored == (root / "checkpoints" / DIRECTORY / (SHARD + ".zst")).stat().st_size < len(data) // 2
    for each in (tier, RemoteTier(tier.root)):
        assert each.size(DIRECTORY, SHARD) == len(data)
        ranges = [(0, 10), (zstd.FRAME_BYTES - 5, 10), (len(data) - 3, 3)]
        got = b"".join(map(bytes, each.read(DIRECTORY, SHARD, ranges)))
        assert got == b"".join(data[offset : offset + nbytes] for offset, nbytes in ranges)
    assert set(tier.files_of(DIRECTORY)) == {SHARD}
    tier.delete(DIRECTORY)
    assert not (root / "checkpoints" / DIRECTORY).exists()


def test_compression_that_does_not_pay_is_left_out(tier: RemoteTier, root: Path, tmp_path: Path) -> None:
    entry, path = staged(tmp_path, random.randbytes(5 << 20))
    assert tier.put_file(DIRECTORY, entry, path, level=1) == entry.size_bytes
    assert names_in(root / "checkpoints" / DIRECTORY) == [SHARD]


def test_a_shard_that_is_stored_again_is_read_in_its_new_form(
    tier: RemoteTier, root: Path, tmp_path: Path
) -> None:
    """The old form may be what was damaged; nobody reads it any more, also who has its table."""
    data = compressible(zstd.FRAME_BYTES)
    entry, path = staged(tmp_path, data)
    folder, reader = root / "checkpoints" / DIRECTORY, RemoteTier(tier.root)
    for level, form in ((None, SHARD), (1, f"{SHARD}.zst"), (None, SHARD), (1, f"{SHARD}.zst")):
        time.sleep(0.01)  # apart, by the clock of the file system
        tier.put_file(DIRECTORY, entry, path, level=level)
        assert [stored.name.rpartition("/")[2] for stored in tier.settle(DIRECTORY).values()] == [form]
        assert names_in(folder) == [form]
        for who in (tier, reader):
            with contextlib.suppress(FileNotFoundError):  # once, by who knows the other form
                list(who.read(DIRECTORY, SHARD, [(0, 1)]))
            assert b"".join(map(bytes, who.blocks(DIRECTORY, SHARD))) == data


def test_a_damaged_table_is_forgotten_once_another_process_has_stored_the_file_again(
    tier: RemoteTier, root: Path, tmp_path: Path
) -> None:
    data = compressible(zstd.FRAME_BYTES)
    entry, path = staged(tmp_path, data)
    stored = root / "checkpoints" / DIRECTORY / f"{SHARD}.zst"
    for level in (1, None):
        reader = RemoteTier(tier.root)
        tier.put_file(DIRECTORY, entry, path, level=1)
        stored.write_bytes(stored.read_bytes()[:-1])
        os.utime(stored, (1.0, 1.0))
        for _ in range(2):
            with pytest.raises(FormatError, match="seek table"):
                reader.size(DIRECTORY, SHARD)
            with pytest.raises(FormatError, match="seek table"):
                list(reader.read(DIRECTORY, SHARD, [(0, 1)]))
        tier.put_file(DIRECTORY, entry, path, level=level)
        tier.settle(DIRECTORY)
        assert reader.size(DIRECTORY, SHARD) == len(data)
        assert b"".join(map(bytes, reader.read(DIRECTORY, SHARD, [(0, len(data))]))) == data


def test_a_form_that_goes_while_it_is_read_is_an_error_and_no_byte_comes_twice(
    tier: RemoteTier, root: Path, tmp_path: Path
) -> None:
    data = compressible(zstd.FRAME_BYTES)
    entry, path = staged(tmp_path, data)
    for level in (None, 1):
        tier.put_file(DIRECTORY, entry, path, level=level)
    blocks = tier.read(DIRECTORY, SHARD, [(0, 10), (20, 10)])
    assert bytes(next(blocks)) == data[:10]
    (root / "checkpoints" / DIRECTORY / SHARD).unlink()
    with pytest.raises(FileNotFoundError):
        next(blocks)
    assert b"".join(map(bytes, tier.read(DIRECTORY, SHARD, [(0, 10), (20, 10)]))) == data[:10] + data[20:30]


@pytest.mark.parametrize("level", [None, 1])
def test_a_file_of_this_node_that_is_short_or_gone_is_damage_of_the_node(
    tier: RemoteTier, tmp_path: Path, level: int | None
) -> None:
    entry, path = staged(tmp_path, compressible(3 << 20))
    path.write_bytes(b"short")
    with pytest.raises(CorruptionError, match="has 5 bytes here"):
        tier.put_file(DIRECTORY, entry, path, level=level)
    path.unlink()
    with pytest.raises(CorruptionError, match="missing on this node"):
        tier.put_file(DIRECTORY, entry, path, level=level)


@pytest.mark.parametrize("level", [None, 1])
def test_a_stored_file_that_is_cut_short_is_not_copied(
    tier: RemoteTier, root: Path, tmp_path: Path, level: int | None
) -> None:
    entry, path = staged(tmp_path, compressible(3 * zstd.FRAME_BYTES))
    stored = tier.put_file(DIRECTORY, entry, path, level=level)
    (origin,) = (root / "checkpoints" / DIRECTORY).iterdir()
    for nbytes in (stored // 2, 1, 0):
        os.truncate(origin, nbytes)
        assert tier.share(DIRECTORY, LATER, entry) is None
    assert tier.files_of(LATER) == {}
    other = compressible(zstd.FRAME_BYTES)
    tier.put_file(DIRECTORY, *staged(tmp_path, other), level=level)
    assert tier.share(DIRECTORY, LATER, entry) is None, "a shard of another size"
    tier.put_file(DIRECTORY, *staged(tmp_path, compressible(3 * zstd.FRAME_BYTES)), level=level)
    assert tier.share(DIRECTORY, LATER, entry) == stored
    assert tier.size(LATER, SHARD) == entry.size_bytes


def test_a_mount_that_is_away_is_not_written_below(tier: RemoteTier, root: Path) -> None:
    tier.put(DIRECTORY, SHARD, b"1")
    mount = root.parents[1]
    mount.rename(mount.with_name("away"))
    for call in (
        lambda: tier.put(DIRECTORY, MANIFEST, b"1"),
        lambda: tier.delete(DIRECTORY),
        lambda: tier.size(DIRECTORY, MANIFEST),
        lambda: list(tier.read(DIRECTORY, SHARD, [(0, 1)])),
        lambda: tier.files_of(DIRECTORY),
        lambda: children_of(tier.files, "checkpoints"),
        lambda: CheckpointFiles(tier.root, tier.files, f"checkpoints/{DIRECTORY}").names,
    ):
        with pytest.raises(OSError, match="is it mounted"):
            call()
    assert not mount.exists()
    mount.with_name("away").rename(mount)
    assert tier.size(DIRECTORY, SHARD) == 1


def test_a_file_that_is_not_there(tier: RemoteTier) -> None:
    assert tier.size(DIRECTORY, SHARD) is None
    for file in (SHARD, MANIFEST):
        with pytest.raises(FileNotFoundError):
            list(tier.read(DIRECTORY, file, [(0, 1)]))


def test_a_delete_takes_the_folder_unless_it_has_foreign_files(tier: RemoteTier, root: Path) -> None:
    for name in (SHARD, MANIFEST, "checkpoint.json"):
        tier.put(DIRECTORY, name, b"1")
    folder = root / "checkpoints" / DIRECTORY
    (folder / "readme").write_text("mine")
    tier.delete(DIRECTORY)
    assert names_in(folder) == ["readme"]
    (folder / "readme").unlink()
    tier.delete(DIRECTORY)
    assert not folder.exists()
    tier.delete(DIRECTORY)


def test_what_a_killed_writer_left_is_an_upload_that_can_be_ended(tier: RemoteTier, root: Path) -> None:
    tier.put(DIRECTORY, MANIFEST, b"1")
    folder = root / "checkpoints" / DIRECTORY
    (folder / ".tmp-dead").write_bytes(b"half")
    (folder / "notes.txt").write_bytes(b"mine")
    (root / "checkpoints" / "other").mkdir()
    (root / "checkpoints" / "other" / ".tmp-x").write_bytes(b"")
    [upload] = tier.uploads()
    assert abs(upload.started_s - time.time()) < 60
    tier.abort(DIRECTORY, "notes.txt", "notes.txt")
    tier.abort(DIRECTORY, "../other/.tmp-x", "x")
    tier.abort(DIRECTORY, ".tmp-dead", upload.id)
    assert names_in(folder) == [MANIFEST, "notes.txt"] and list(tier.uploads(DIRECTORY)) == []
    assert (root / "checkpoints" / "other" / ".tmp-x").exists()


def test_a_folder_that_is_deleted_while_the_storage_path_is_listed_is_left_out(
    tier: RemoteTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, kept = DIRECTORY, "000000000020-0123456789abcdef"
    for directory in (gone, kept):
        tier.put(directory, MANIFEST, b"1")
    scandir = os.scandir

    def scan(path: int | str | Path) -> Any:
        if not isinstance(path, int) and Path(path).name == gone:  # another process was faster
            shutil.rmtree(path, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert [*tier.directories()] == [kept]
    assert [*tier.uploads()] == []


def test_directories_are_dated_by_their_newest_file(tier: RemoteTier, root: Path) -> None:
    tier.put(DIRECTORY, SHARD, b"1")
    tier.put(DIRECTORY, MANIFEST, b"1")
    (root / "checkpoints" / "mine").mkdir()
    (root / "checkpoints" / "mine" / SHARD).write_bytes(b"1")
    os.utime(root / "checkpoints" / DIRECTORY / SHARD, (100.0, 100.0))
    os.utime(root / "checkpoints" / DIRECTORY / MANIFEST, (300.0, 300.0))
    assert tier.directories() == {DIRECTORY: 300.0}
    assert abs(tier.now_s() - time.time()) < 60


@pytest.mark.parametrize("directory", ["..", "", "x", f"../{DIRECTORY}", f"{DIRECTORY}/..", f"{DIRECTORY}\n"])
def test_directory_names_are_checked(tier: RemoteTier, directory: str) -> None:
    with pytest.raises(FormatError):
        tier.delete(directory)
    with pytest.raises(FormatError):
        tier.put(directory, SHARD, b"")


@pytest.mark.parametrize("file", ["..", "", "../log/x", "evil.sh", f"{SHARD}.tmp", f"{SHARD}.zst"])
def test_file_names_are_checked(tier: RemoteTier, file: str) -> None:
    with pytest.raises(FormatError):
        tier.put(DIRECTORY, file, b"")


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "-rf", "x" * 201])
def test_run_names_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        RemoteRef(storage_path=str(tmp_path), run_name=name).open()


def test_the_probe_and_what_nodes_see_of_it(tier: RemoteTier, root: Path, tmp_path: Path) -> None:
    tier.probe_log()
    tier.leave_nonce("nonce-1")
    tier.check_shared("nonce-1", node="n1")
    assert [p for p in root.rglob("*") if p.is_file()] == [root / "shared.probe"]
    with pytest.raises(StorageNotShared, match="does not see") as caught:
        tier.check_shared("nonce-2", node="n1")
    assert caught.value.fields["node"] == "n1"
    tier.probe_log()
    tier.check_shared("nonce-1", node="n1")  # somebody else's look at the log has changed nothing
    with pytest.raises(StorageNotShared):
        RemoteTier(Location.parse(tmp_path / "other")).check_shared("nonce-1", node="n1")
    RemoteTier(tier.root).leave_nonce("nonce-3")
    with pytest.raises(StorageNotShared):
        tier.check_shared("nonce-1", node="n1")


def test_a_probe_file_that_is_no_text_is_another_storage_path(tier: RemoteTier, root: Path) -> None:
    tier.leave_nonce("nonce")
    (root / "shared.probe").write_bytes(b"\xff")
    with pytest.raises(StorageNotShared):
        tier.check_shared("nonce", node="ab" * 28)


def test_nodes_that_look_at_once_do_not_meet(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node has looked, and tidied up, between this one's folder and its file."""
    tier.probe_log()
    tier.leave_nonce("n")
    make_dirs, others = files.make_dirs, iter(["n2"])

    def slowly(path: Path, **mode: int) -> None:
        make_dirs(path, **mode)
        for node in () if mode else others:  # not for parents, which it makes by itself
            tier.check_shared("n", node=node)

    monkeypatch.setattr(files, "make_dirs", slowly)
    tier.check_shared("n", node="n1")
    assert next(others, None) is None


def test_a_storage_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoragePathError, match="cannot be written"):
        RemoteTier(Location.parse(tmp_path / "file")).probe_log()


def test_a_node_that_cannot_write_raises(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.probe_log()
    tier.leave_nonce("n")

    def refuse(*_: object) -> Path:
        raise PermissionError("denied")

    monkeypatch.setattr(file_store, "write_direct", refuse)
    with pytest.raises(StoragePathError, match="Node n1 cannot write"):
        tier.check_shared("n", node="n1")


def test_a_folder_that_is_gone_is_named_with_what_to_do(tier: RemoteTier, root: Path, tmp_path: Path) -> None:
    """The outermost one that is missing; a store that does not answer has lost nothing."""
    assert tier.log.create("00000000000000000000.json", b"1") is CreateResult.OK
    assert tier.missing() == ""
    parked = root.with_name("parked")
    for gone in (root / "log", root, root.parent):
        aside = parked if gone != root.parent else tmp_path / "parked"
        gone.rename(aside)
        assert tier.missing().startswith(f"{gone} is not there any more") and "name" in tier.missing()
        aside.rename(gone)
        assert tier.missing() == ""
    (root / "log" / "00000000000000000000.json").unlink()
    assert tier.missing().startswith(f"{root / 'log'} is not there any more, or is empty")
    (root / "log" / "00000000000000000000.json").mkdir()
    assert tier.missing() == "", "what is damaged is not gone"
