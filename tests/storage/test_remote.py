"""The remote tier on a shared path: checked names, whole files, clear refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ckpt.errors import ConfigError, FormatError, StorageNotShared, StoragePathError
from ray_ckpt.storage import files
from ray_ckpt.storage.log_store import Outcome
from ray_ckpt.storage.remote import RemoteTier

DIRECTORY = "000000000010-0123456789abcdef"
SHARD = "shard-00000-of-00001.safetensors"
MANIFEST = "manifest-00000-of-00001.parquet"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(str(tmp_path), "gpt")


def test_the_layout_on_the_storage_path(tier: RemoteTier, tmp_path: Path) -> None:
    assert tier.root == tmp_path / "gpt" / "ray_ckpt"
    assert tier.log.create("a", b"1") is Outcome.OK
    tier.put(DIRECTORY, SHARD, [b"12", b"3"])
    assert (tmp_path / "gpt" / "ray_ckpt" / "log" / "a").read_bytes() == b"1"
    path = tmp_path / "gpt" / "ray_ckpt" / "checkpoints" / DIRECTORY / SHARD
    assert path == tier.path(DIRECTORY, SHARD) and path.read_bytes() == b"123"
    assert RemoteTier(f"file://{tmp_path}", "gpt").root == tier.root


def test_a_put_can_be_repeated_and_abandoned(tier: RemoteTier) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise EOFError("source ended")

    tier.put(DIRECTORY, SHARD, [b"123"])
    tier.put(DIRECTORY, SHARD, [b"123"])
    with pytest.raises(EOFError):
        tier.put(DIRECTORY, MANIFEST, broken())
    assert names_in(tier.path(DIRECTORY, SHARD).parent) == [SHARD]


def test_a_delete_takes_the_folder_unless_it_has_foreign_files(tier: RemoteTier) -> None:
    for name in (SHARD, MANIFEST, "checkpoint.json"):
        tier.put(DIRECTORY, name, [b"1"])
    folder = tier.path(DIRECTORY, SHARD).parent
    (folder / "readme").write_text("mine")
    tier.delete(DIRECTORY)
    assert names_in(folder) == ["readme"]
    (folder / "readme").unlink()
    tier.delete(DIRECTORY)
    assert not folder.exists()
    tier.delete(DIRECTORY)


@pytest.mark.parametrize("directory", ["..", "", "x", f"../{DIRECTORY}", f"{DIRECTORY}/..", f"{DIRECTORY}\n"])
def test_directory_names_are_checked(tier: RemoteTier, directory: str) -> None:
    with pytest.raises(FormatError):
        tier.delete(directory)
    with pytest.raises(FormatError):
        tier.put(directory, SHARD, [b""])


@pytest.mark.parametrize("file", ["..", "", "../log/x", "evil.sh", f"{SHARD}.tmp"])
def test_file_names_are_checked(tier: RemoteTier, file: str) -> None:
    with pytest.raises(FormatError):
        tier.put(DIRECTORY, file, [b""])


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "-rf", "x" * 201])
def test_run_names_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        RemoteTier(str(tmp_path), name)


@pytest.mark.parametrize("path", ["s3://bucket/runs", "relative/path"])
def test_storage_paths_that_are_not_a_shared_folder_are_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        RemoteTier(path, "gpt")


def test_the_probe_and_what_nodes_see_of_it(tier: RemoteTier, tmp_path: Path) -> None:
    tier.probe("nonce-1")
    tier.check_shared("nonce-1", node="n1")
    assert names_in(tier.root / "checkpoints") == []
    with pytest.raises(StorageNotShared, match="does not see") as caught:
        tier.check_shared("nonce-2", node="n1")
    assert caught.value.fields["node"] == "n1"
    with pytest.raises(StorageNotShared):
        RemoteTier(str(tmp_path / "other"), "gpt").check_shared("nonce-1", node="n1")


def test_a_storage_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoragePathError, match="cannot be written"):
        RemoteTier(str(tmp_path / "file"), "gpt").probe("n")


def test_a_node_that_cannot_write_says_so(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.probe("n")

    def refuse(*_: object) -> Path:
        raise PermissionError("denied")

    monkeypatch.setattr(files, "write_temporary", refuse)
    with pytest.raises(StoragePathError, match="Node n1 cannot write"):
        tier.check_shared("n", node="n1")
