"""One node's staging folder: one owner, complete fragments only, nothing foreign touched."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from typing_extensions import Buffer

from ray_ckpt.errors import FormatError, StagingError
from ray_ckpt.format.manifest import decode_columns
from ray_ckpt.format.names import PARITY_PREFIX, make_attempt
from ray_ckpt.storage.local import files, staging
from ray_ckpt.storage.local.staging import QUARANTINE_DIR, Staging
from ray_ckpt.types import FragmentMetadata
from tests.support.sample_run import SampleCheckpoint, make_checkpoint

UID = "0123456789abcdef" * 2


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LOCK_WAIT_S", 0.0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Staging]:
    opened = Staging(tmp_path / "stage")
    yield opened
    opened.close()


def sample(step: int = 10) -> SampleCheckpoint:
    return make_checkpoint(make_attempt(run_uid=UID, session=1, step=step, attempt=0))


def put(stage: Staging, saved: SampleCheckpoint, *, node: int | None = None) -> None:
    """Store all files, or those of one node's fragment."""
    wanted = {f.name for i, x in enumerate(saved.fragments) if node in (None, i) for f in x.files}
    wanted |= {n for n in saved.files if n.startswith("manifest") and (node is None or f"-{node:05d}-" in n)}
    for name in sorted(wanted, reverse=True):  # shards first
        stage.put(UID, saved.attempt.directory, name, [saved.files[name]])


def test_a_folder_has_one_owner(stage: Staging) -> None:
    with pytest.raises(StagingError, match="Another agent owns") as caught:
        Staging(stage.root)
    assert "{node_id}" in caught.value.hint
    stage.close()
    again = Staging(stage.root)
    again.close()
    stage._lock = staging._Lock(stage.root / "agent.lock")  # for the fixture to close


def test_a_failed_start_lets_go_of_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_temporary", fail)
        with pytest.raises(StagingError, match="full"):
            Staging(tmp_path)
    Staging(tmp_path).close()


def test_a_full_disk_opens_with_what_it_has_and_gets_its_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs may have filled it; its copies may be the last ones, and only deletes make room."""
    saved, root = sample(), tmp_path / "stage"
    with contextlib.closing(Staging(root)) as stage:
        put(stage, saved)
    unfinished = root / UID / saved.attempt.directory / f"{files.TEMPORARIES[:-1]}crashed"
    unfinished.write_bytes(b"x")

    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files, "write_temporary", full)
    with contextlib.closing(Staging(root)) as stage:
        assert len(list(stage.holdings(UID))) == len(saved.fragments) and not unfinished.exists()
        stage.delete(UID, saved.attempt.directory)
        assert stage.directories(UID) == ()


def test_an_epoch_fits_on_a_full_disk_so_that_its_deletes_are_obeyed(tmp_path: Path) -> None:
    """As on a real disk: each file fails from the moment on at which other programs have filled it."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True)
    if done.returncode:
        pytest.skip("needs root to mount")
    root, saved, filler = tmp_path / "stage", sample(), tmp_path / "filler"
    others = ["1" * 32, "2" * 32]
    try:
        with contextlib.closing(Staging(root)) as stage:
            put(stage, saved)
            for uid in (UID, *others):
                stage.write_mark(uid, run_name="gpt", storage_path="/s", epoch=3)
            with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            with pytest.raises(OSError, match="No space"):
                files.write_file(root / "any", [b"x"])
        for epoch in (4, 5):  # of two coordinators; the agent is started anew between them
            with contextlib.closing(Staging(root)) as stage:
                for uid in (UID, *others, "3" * 32):
                    stage.write_mark(uid, run_name="gpt", storage_path="/s", epoch=epoch)
                    assert stage.epoch(uid) == epoch
                assert not (root / staging.BALLAST_FILE).exists()
                assert len(list(stage.holdings(UID))) == len(saved.fragments)
        with contextlib.closing(Staging(root)) as stage:
            stage.delete(UID, saved.attempt.directory)
            assert (root / staging.BALLAST_FILE).stat().st_size == staging.BALLAST_BYTES
            assert stage.epoch(UID) == 5 and stage.directories(UID) == ()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_the_ballast_is_used_for_a_full_disk_only(stage: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "write_temporary", fail)
    ballast = stage.root / staging.BALLAST_FILE
    for code, is_left in ((errno.EIO, True), (errno.EDQUOT, False), (errno.ENOSPC, False)):
        with pytest.raises(OSError, match=os.strerror(code)):
            stage.write_mark(UID, run_name="gpt", storage_path="/s", epoch=3)
        assert ballast.exists() == is_left
    stage.delete(UID, sample().attempt.directory)
    monkeypatch.undo()
    assert not ballast.exists() and list(stage._runs()) == [UID]
    stage.delete(UID, sample().attempt.directory)
    assert ballast.exists()


def test_space_that_a_killed_agent_had_taken_is_free_before_a_new_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Staging(tmp_path)):
        pass
    unfinished = tmp_path / f"{files.TEMPORARIES[:-1]}crashed"
    unfinished.write_bytes(b"x")
    write = files.write_temporary

    def full(directory: Path, chunks: Iterable[Buffer]) -> Path:
        if unfinished.exists():
            raise OSError(errno.ENOSPC, "full")
        return write(directory, chunks)

    (tmp_path / staging.DISK_FILE).unlink()
    monkeypatch.setattr(files, "write_temporary", full)
    Staging(tmp_path).close()


def test_holdings_are_fragments_that_are_complete(stage: Staging) -> None:
    saved = sample()
    put(stage, saved, node=0)
    (holding,) = stage.holdings(UID)
    assert holding.fragment == saved.fragments[0].metadata
    assert holding.entry in saved.entries
    put(stage, saved)
    assert [h.fragment.node_index for h in stage.holdings(UID)] == [0, 1]
    assert list(stage.holdings("f" * 32)) == []


@pytest.mark.parametrize("harm", ["missing", "short", "long", "no manifest", "torn manifest", "elsewhere"])
def test_half_written_folders_hold_nothing(stage: Staging, harm: str) -> None:
    saved = sample()
    put(stage, saved, node=0)
    folder = stage.folder(UID, saved.attempt.directory)
    shard, manifest = next(folder.glob("shard-*")), next(folder.glob("manifest-*"))
    match harm:
        case "missing":
            shard.unlink()
        case "short":
            os.truncate(shard, shard.stat().st_size - 1)
        case "long":
            os.truncate(shard, shard.stat().st_size + 1)
        case "no manifest":
            manifest.unlink()
        case "torn manifest":
            os.truncate(manifest, manifest.stat().st_size // 2)
        case "elsewhere":
            folder.rename(folder.with_name(sample(99).attempt.directory))
    assert list(stage.holdings(UID)) == []
    assert len(stage.directories(UID)) == 1, "but the folder is seen, so that it can be deleted"


@pytest.mark.parametrize("call", ["put", "link"])
def test_a_file_whose_name_could_not_be_made_durable_is_not_there(
    stage: Staging, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Or the next inventory would report a fragment whose save has failed, and a power loss would take it."""
    saved, other = sample(), sample(99)
    put(stage, saved)
    before = list(stage.holdings(UID))
    directory, name = saved.attempt.directory, before[0].entry.name
    files.make_dirs(stage.folder(UID, other.attempt.directory))

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "injected")

    def store(directory: str) -> None:
        if call == "put":
            stage.put(UID, directory, name, [saved.files[name]])
        else:
            stage.link(UID, saved.attempt.directory, directory, name)

    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync_dir", fail)
        for target in (other.attempt.directory, directory):
            with pytest.raises(OSError, match="injected"):
                store(target)
    assert names_in(stage.folder(UID, other.attempt.directory)) == []
    assert list(stage.holdings(UID)) == before, "what was there before stays"


def test_a_delete_leaves_what_is_not_ours(stage: Staging) -> None:
    saved = sample()
    put(stage, saved)
    folder = stage.folder(UID, saved.attempt.directory)
    (folder / "notes.txt").write_text("mine")
    (folder / ".tmp-crashed").write_bytes(b"x")
    stage.delete(UID, saved.attempt.directory)
    assert names_in(folder) == ["notes.txt"]
    (folder / "notes.txt").unlink()
    stage.delete(UID, saved.attempt.directory)
    assert stage.directories(UID) == ()
    stage.delete(UID, saved.attempt.directory)


def test_a_delete_removes_data_before_manifests(stage: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash half-way must not leave data that nothing accounts for."""
    saved = sample()
    put(stage, saved)
    order: list[str] = []
    unlink = Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        order.append(path.name.split("-")[0])
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", note)
    stage.delete(UID, saved.attempt.directory)
    assert order == sorted(order, key=lambda kind: kind == "manifest")
    assert set(order) == {"shard", "state", "manifest"}


def test_a_run_that_is_put_away_leaves_what_it_is_to_keep(stage: Staging) -> None:
    kept, gone, bad = sample(10), sample(20), sample(30)
    for saved in (kept, gone, bad):
        put(stage, saved)
    stage.write_mark(UID, run_name="gpt", storage_path="/x", epoch=3)
    stage.quarantine(UID, bad.attempt.directory, min(bad.files))
    stage.forget(UID, {kept.attempt.directory})
    assert stage.directories(UID) == (kept.attempt.directory,)
    assert len([*stage.holdings(UID)]) == len(kept.fragments) and stage.epoch(UID) == 3
    stage.forget(UID, ())
    assert names_in(stage.root) == ["agent.lock", "ballast", "disk"] and stage.epoch(UID) == 0
    stage.forget(UID, ())


def test_two_scrubs_may_quarantine_at_the_same_time(stage: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = [sample(step) for step in (10, 20)]
    for each in saved:
        put(stage, each)
    first, second = (each.attempt.directory for each in saved)
    stage.quarantine(UID, first, min(saved[0].files))
    stat = Path.stat

    def stat_late(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == first and path.parent.name == QUARANTINE_DIR:
            shutil.rmtree(path, ignore_errors=True)  # as the other scrub does
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat_late)
    stage.quarantine(UID, second, min(saved[1].files))
    assert names_in(stage.root / UID / QUARANTINE_DIR) == [second]


def test_a_run_that_is_put_away_leaves_what_is_not_ours(stage: Staging) -> None:
    saved = sample()
    put(stage, saved)
    stage.write_mark(UID, run_name="gpt", storage_path="/x", epoch=3)
    foreign = stage.root / UID / "notes.txt"
    foreign.write_text("mine")
    stage.forget(UID, ())
    assert names_in(stage.root / UID) == ["notes.txt", "run.json"] and foreign.read_text() == "mine"


def test_foreign_folders_are_not_seen(stage: Staging) -> None:
    (stage.root / UID).mkdir()
    (stage.root / UID / "lost+found").mkdir()
    (stage.root / UID / sample().attempt.directory).write_bytes(b"a file")
    assert stage.directories(UID) == ()
    assert list(stage.holdings(UID)) == []


@pytest.mark.parametrize(
    ("uid", "directory", "file"),
    [
        ("../x", "000000000010-0123456789abcdef", "checkpoint.json"),
        (UID, "..", "checkpoint.json"),
        (UID, "000000000010-0123456789abcdef", "../checkpoint.json"),
        (UID, "000000000010-0123456789abcdef", "agent.lock"),
    ],
)
def test_names_cannot_leave_the_folder(stage: Staging, uid: str, directory: str, file: str) -> None:
    with pytest.raises(FormatError):
        stage.put(uid, directory, file, [b""])
    with pytest.raises(FormatError):
        stage.path(uid, directory, file)


def test_a_link_as_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StagingError, match="is a link"):
        Staging(tmp_path / "link")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_root_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(StagingError, match="others"):
        Staging(tmp_path / "open")


def test_a_root_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(StagingError, match="others own it"):
        Staging(tmp_path)


def test_a_root_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StagingError, match="cannot be used") as caught:
        Staging(tmp_path / "file" / "stage")
    assert "RAY_CKPT_STAGING" in caught.value.hint


def test_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"")
    root = tmp_path / "stage"
    root.mkdir(mode=0o700)
    (root / "agent.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StagingError):
        Staging(root)


def test_a_mark_that_is_damaged_counts_for_nothing(stage: Staging) -> None:
    """Or a flip in its epoch would keep out every coordinator, and a flip in its path would hide the run."""
    stage.write_mark(UID, run_name="gpt", storage_path="/shared", epoch=5)
    path = stage.root / UID / staging.MARK_FILE
    data = path.read_bytes()
    assert stage.epoch(UID) == 5
    for index in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :])
            assert (stage.epoch(UID), stage.marks("gpt", "/shared")) == (0, ())
    mark = json.loads(data)
    del mark["digest"]
    path.write_text(json.dumps(mark) + "\n")
    assert stage.epoch(UID) == 5, "as the first writers wrote it"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_without_descriptors_or_memory_no_file_counts_as_absent(
    stage: Staging, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Or an agent would obey a coordinator that was replaced, and report its copies as lost."""
    saved = sample()
    put(stage, saved)
    stage.write_mark(UID, run_name="gpt", storage_path="/shared", epoch=5)
    (stage.folder(UID, saved.attempt.directory) / f"{PARITY_PREFIX}0.bin").write_bytes(b"x")
    reads: list[Callable[[], object]] = [
        lambda: stage.epoch(UID),
        lambda: stage.marks("gpt", "/shared"),
        lambda: list(stage.holdings(UID)),
        lambda: list(stage.parities(UID)),
    ]

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for read in reads:
            with pytest.raises(OSError, match=os.strerror(code)):
                read()
    assert stage.epoch(UID) == 5 and len(list(stage.holdings(UID))) == len(saved.fragments)


@pytest.mark.parametrize("damaged", [b"", b"\xff" * 32, b"0123", b"g" * 32, b"0" * 32 + b"\n"])
def test_a_folder_whose_name_is_damaged_gets_a_new_one(tmp_path: Path, damaged: bytes) -> None:
    opened = Staging(tmp_path / "stage")
    opened.close()
    (tmp_path / "stage" / staging.DISK_FILE).write_bytes(damaged)
    again = Staging(tmp_path / "stage")
    again.close()
    assert again.disk not in ("", opened.disk) and len(again.disk) == 32
    assert (tmp_path / "stage" / staging.DISK_FILE).read_text() == again.disk


def test_a_fragment_is_checked_once_and_again_when_its_bytes_change(
    stage: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage of rows, which the seal of the metadata does not cover, is found as before."""
    saved, other = sample(), sample(99)
    put(stage, saved)
    decoded: list[bytes] = []

    def counted(data: bytes) -> tuple[FragmentMetadata, pa.Table]:
        decoded.append(data)
        return decode_columns(data)

    monkeypatch.setattr(staging, "decode_columns", counted)
    before = list(stage.holdings(UID))
    assert list(stage.holdings(UID)) == before and len(decoded) == len(before) > 0
    path = stage.path(UID, saved.attempt.directory, before[0].entry.name)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert list(stage.holdings(UID)) == before[1:]
    path.write_bytes(bytes(data[:100]) + bytes([data[100] ^ 1]) + bytes(data[101:]))
    assert list(stage.holdings(UID)) == before and len(decoded) == len(before) + 1
    assert list(stage.holdings(UID, directory=saved.attempt.directory)) == before
    assert list(stage.holdings(UID, directory=other.attempt.directory)) == []


def test_known_fragments_are_bounded() -> None:
    known, metadata = staging.KnownFragments(), sample().fragments[0].metadata
    for at in range(staging.MAX_KNOWN + 5):
        known.add(f"{at:032x}", metadata)
    assert len(known._known) == staging.MAX_KNOWN
