"""Several staging disks as one: files are spread and found, a disk that fails is passed over."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Buffer

from ray_ckpt.errors import CorruptionError, InsufficientSpace, StagingError
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt
from ray_ckpt.storage.local import disks as disks_module
from ray_ckpt.storage.local import files, staging
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.local.staging import Staging
from tests.support.sample_run import SampleCheckpoint, make_checkpoint

UID = "0123456789abcdef" * 2
GIB = 1 << 30


def sample(step: int = 10) -> SampleCheckpoint:
    return make_checkpoint(make_attempt(run_uid=UID, session=1, step=step, attempt=0))


def put(disks: Disks, saved: SampleCheckpoint) -> None:
    for name in sorted(saved.files, reverse=True):  # shards first
        if name.startswith(("shard", "state", "manifest")):
            data = saved.files[name]
            written = disks.put(UID, saved.attempt.directory, name, [data], size_bytes=len(data))
            assert written.digest == digest(data)


def where(disks: Disks, saved: SampleCheckpoint) -> dict[str, list[str]]:
    """Return the names of the files on each disk."""
    return {
        root.name: sorted(p.name for p in (root / UID / saved.attempt.directory).glob("*"))
        for root in disks.roots
    }


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LOCK_WAIT_S", 0.0)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes of each root, by its name: it loses what is written."""
    left = {"a": 100 * GIB, "b": 300 * GIB, "c": 200 * GIB}
    monkeypatch.setattr(files, "free_bytes", lambda root: left[root.name])
    monkeypatch.setattr(Disks, "_file_systems", Disks._working)  # as if each were a disk of its own
    return left


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Disks]:
    with contextlib.closing(Disks([tmp_path / name for name in "abc"])) as disks:
        yield disks


def failing(monkeypatch: pytest.MonkeyPatch, root: Path, code: int) -> Callable[[], int]:
    """Make each fsync of a file below `root` fail from now on. Returns a counter of the failures."""
    fsync, failed = os.fsync, []

    def fail(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(root):
            failed.append(fd)
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    return lambda: len(failed)


def test_a_shard_goes_where_most_room_is(three: Disks, free: dict[str, int]) -> None:
    saved = sample()
    first, second, *_ = sorted(name for name in saved.files if name.startswith("shard"))
    data = saved.files[first]
    three.put(UID, saved.attempt.directory, first, [data], size_bytes=len(data))
    free["b"] = 0
    three.put(UID, saved.attempt.directory, second, [saved.files[second]])
    assert where(three, saved) == {"a": [], "b": [first], "c": [second]}
    three.put(UID, saved.attempt.directory, first, [data])
    assert where(three, saved) == {"a": [], "b": [first], "c": [second]}, "over the one that is there"


def test_files_that_are_written_together_go_to_different_disks(three: Disks, free: dict[str, int]) -> None:
    free["c"] = free["b"]
    saved = sample()
    first, second, *_ = sorted(name for name in saved.files if name.startswith("shard"))

    def chunks() -> Iterator[Buffer]:
        three.put(UID, saved.attempt.directory, second, [saved.files[second]])
        yield saved.files[first]

    three.put(UID, saved.attempt.directory, first, chunks(), size_bytes=len(saved.files[first]))
    assert where(three, saved) == {"a": [], "b": [first], "c": [second]}


def test_a_checkpoint_is_whole_over_all_disks(three: Disks, free: dict[str, int]) -> None:
    saved = sample()
    for step, name in enumerate(sorted(n for n in saved.files if n.startswith(("shard", "state")))):
        free["abc"[step % 3]] = 400 * GIB + step
        three.put(UID, saved.attempt.directory, name, [saved.files[name]])
    assert list(three.holdings(UID)) == []
    put(three, saved)
    found = where(three, saved)
    assert all(found.values()), "files on every disk"
    assert {n for n in itertools.chain(*found.values()) if n.startswith("manifest")} <= set(found["a"])
    holdings = list(three.holdings(UID))
    assert [h.fragment for h in holdings] == [f.metadata for f in saved.fragments]
    for holding in holdings:
        for entry in (*holding.fragment.files, holding.entry):
            path = three.path(UID, saved.attempt.directory, entry.name)
            assert path.read_bytes() == saved.files[entry.name]
    assert three.directories(UID) == (saved.attempt.directory,)

    victim = next(name for name in found["b"] if name.startswith("shard"))
    three.quarantine(UID, saved.attempt.directory, victim)
    assert len(list(three.holdings(UID))) == len(holdings) - 1
    assert not three.path(UID, saved.attempt.directory, victim).exists()
    three.delete(UID, saved.attempt.directory)
    assert three.directories(UID) == () and not any(where(three, saved).values())
    three.delete(UID, saved.attempt.directory)


def test_the_reserve_is_kept_on_each_disk(three: Disks, free: dict[str, int]) -> None:
    three.check_space(200 * GIB, reserve_bytes=100 * GIB, what="A shard")
    with pytest.raises(InsufficientSpace, match=r"A shard needs .* in one of"):
        three.check_space(200 * GIB + 1, reserve_bytes=100 * GIB, what="A shard")
    three.check_space(300 * GIB, reserve_bytes=100 * GIB, what="Two checkpoints", is_one_file=False)
    with pytest.raises(InsufficientSpace, match="in all of") as caught:
        three.check_space(300 * GIB + 1, reserve_bytes=100 * GIB, what="Two", is_one_file=False)
    assert caught.value.fields["free_bytes"] == three.free_bytes() == 600 * GIB


def test_one_file_system_counts_once(three: Disks, tmp_path: Path) -> None:
    assert abs(three.free_bytes() - files.free_bytes(tmp_path)) < GIB
    assert three.total_bytes() == files.total_bytes(tmp_path)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_disk_that_fails_is_passed_over(
    three: Disks,
    free: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    saved, old = sample(), sample(5)
    put(three, old)
    assert any(n.startswith("shard") for n in where(three, old)["b"])
    failures = failing(monkeypatch, three.roots[1], code)
    put(three, saved)
    found = where(three, saved)
    assert found["b"] == [] and any(n.startswith("shard") for n in found["c"])
    tries = sum(not name.startswith("manifest") for name in saved.files if name != "checkpoint.json")
    assert failures() == (tries if code == errno.ENOSPC else 1), (
        "a full disk is tried again, a broken one is not"
    )
    assert [h.fragment.attempt for h in three.holdings(UID)] == [old.attempt] * 2 + [saved.attempt] * 2
    levels = {record.levelno for record in caplog.records}
    assert levels == ({logging.WARNING} if code == errno.ENOSPC else {logging.ERROR})
    assert str(three.roots[1]) in caplog.text


def test_a_disk_on_which_nothing_works_any_more_is_passed_over(
    three: Disks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that has shut down refuses every look-up, also of files that other disks have."""
    saved, old = sample(), sample(5)
    three.write_mark(UID, run_name="gpt", storage_path="/s", epoch=3)
    monkeypatch.setattr(Disks, "_room", lambda self, stage: {"a": 1, "b": 3, "c": 2}[stage.root.name])
    put(three, old)
    names = [name for name in saved.files if name != "checkpoint.json"]
    for call in ("stat", "open", "mkdir", "listdir", "scandir", "statvfs"):
        monkeypatch.setattr(os, call, dead(getattr(os, call), three.roots[1]))
    three.check_space(1, reserve_bytes=0, what="A shard")
    assert three.free_bytes() > 0 < three.total_bytes()
    put(three, saved)
    for name in names:
        assert three.path(UID, saved.attempt.directory, name).read_bytes() == saved.files[name]
    assert [h.fragment.attempt for h in three.holdings(UID)] == [saved.attempt] * 2
    assert three.directories(UID) == (old.attempt.directory, saved.attempt.directory)
    assert [mark.epoch for mark in three.marks("gpt", "/s")] == [3] and three.epoch(UID) == 3
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1


def dead(call: Callable[..., Any], root: Path) -> Callable[..., Any]:
    """Return `call`, which fails for each path below `root`."""

    def fail(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(root):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return call(path, *args, **options)

    return fail


def test_a_stream_cannot_be_written_again(
    three: Disks, free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write raises; when the sender starts again, another disk takes the file."""
    saved = sample()
    name = next(name for name in saved.files if name.startswith("shard"))
    failing(monkeypatch, three.roots[1], errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        three.put(UID, saved.attempt.directory, name, iter([saved.files[name]]))
    three.put(UID, saved.attempt.directory, name, iter([saved.files[name]]))
    assert where(three, saved) == {"a": [], "b": [], "c": [name]}


def test_a_file_moves_away_from_a_broken_disk(
    three: Disks, free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = sample()
    name = next(name for name in saved.files if name.startswith("shard"))
    three.put(UID, saved.attempt.directory, name, [b"bad"])
    failing(monkeypatch, three.roots[1], errno.EIO)
    three.put(UID, saved.attempt.directory, name, [b"good"])
    assert three.path(UID, saved.attempt.directory, name).read_bytes() == b"good"


def test_when_all_disks_fail_the_error_is_raised_and_they_are_tried_again(
    three: Disks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = sample()
    name = next(name for name in saved.files if name.startswith("shard"))
    with monkeypatch.context() as patch:
        failures = failing(patch, tmp_path, errno.EIO)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                three.put(UID, saved.attempt.directory, name, [saved.files[name]])
        assert failures() >= 4
        with pytest.raises(OSError, match="Input/output"):
            three.write_mark(UID, run_name="gpt", storage_path="/s", epoch=3)
    three.put(UID, saved.attempt.directory, name, [saved.files[name]])


def test_other_errors_are_not_the_disks(three: Disks, free: dict[str, int]) -> None:
    saved = sample()
    name = next(name for name in saved.files if name.startswith("shard"))
    with pytest.raises(CorruptionError, match="other bytes than announced"):
        three.put(UID, saved.attempt.directory, name, [b"x"], size_bytes=1, expect="0" * 32)
    assert not any(where(three, saved).values())
    three.put(UID, saved.attempt.directory, name, [b"x"], size_bytes=1, expect=digest(b"x"))
    assert where(three, saved)["b"] == [name]


def test_marks_are_on_every_disk_and_the_highest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [tmp_path / name for name in "abc"]
    with contextlib.closing(Disks(roots)) as disks:
        assert disks.epoch(UID) == 0
        disks.write_mark(UID, run_name="gpt", storage_path="/s", epoch=3)
        failing(monkeypatch, roots[0], errno.EIO)
        disks.write_mark(UID, run_name="gpt", storage_path="/s", epoch=7)
        name = disks.disk
        monkeypatch.undo()
    epochs = []
    for root in roots:
        with contextlib.closing(Staging(root)) as stage:
            epochs.append(stage.epoch(UID))
    assert epochs == [3, 7, 7]
    with contextlib.closing(Disks(roots)) as disks:
        assert disks.epoch(UID) == 7 and disks.disk == name
        assert [(mark.run_uid, mark.epoch) for mark in disks.marks("gpt", "/s")] == [(UID, 7)]
        assert disks.marks("other", "/s") == ()


def test_a_broken_disk_is_left_out_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roots = [tmp_path / name for name in "ab"]
    Disks(roots).close()
    failing(monkeypatch, roots[0], errno.EIO)
    with contextlib.closing(Disks(roots)) as disks:
        assert disks.roots == (roots[1],)
    assert "is left out" in caplog.text
    with pytest.raises(StagingError, match="cannot be used"):
        Disks(roots[:1])


def test_a_folder_of_another_agent_is_an_error(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "ab"]
    with contextlib.closing(Staging(roots[1])), pytest.raises(StagingError, match="Another agent owns"):
        Disks(roots)
    Disks([*roots, roots[0]]).close()  # both locks are free, and a folder twice is one


def test_a_delete_goes_on_behind_a_disk_that_fails(
    three: Disks, free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = sample()
    put(three, saved)
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path.is_relative_to(three.roots[1]):
            raise OSError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OSError, match="not permitted"):
        three.delete(UID, saved.attempt.directory)
    found = where(three, saved)
    assert found["b"] and not found["a"] and not found["c"]
    assert list(three.holdings(UID)) == [] and three.directories(UID) == (saved.attempt.directory,)
    monkeypatch.undo()
    three.delete(UID, saved.attempt.directory)
    assert three.directories(UID) == ()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_delete_ends_without_a_broken_disk_and_the_disk_comes_back_with_orphans(
    three: Disks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: int
) -> None:
    """The broken disk may have no file of the checkpoint; it would fail in each try all the same."""
    old, new = sample(5), sample()
    room = {root.name: k for k, root in enumerate(reversed(three.roots))}
    monkeypatch.setattr(Disks, "_room", lambda self, stage: room[stage.root.name])
    put(three, old)
    with monkeypatch.context() as patch:
        for call in ("stat", "open", "mkdir", "listdir", "scandir", "unlink", "rmdir"):
            patch.setattr(os, call, dead(getattr(os, call), three.roots[broken]))
        for saved in (old, new):
            three.delete(UID, saved.attempt.directory)
        three.forget(UID, ())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    left = (old.attempt.directory,) if broken == 0 else ()
    assert three.directories(UID) == left, "the next inventory lists what the disk has"
    three.delete(UID, old.attempt.directory)
    assert three.directories(UID) == ()


def test_a_delete_fails_if_all_disks_are_broken(
    three: Disks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(three, sample())
    monkeypatch.setattr(os, "stat", dead(os.stat, tmp_path))
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            three.delete(UID, sample().attempt.directory)


def test_one_disk_is_as_its_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One disk is used without a search, a skip or a log line."""
    saved = sample()
    with contextlib.closing(Disks([tmp_path / "only"])) as disks:
        put(disks, saved)
        assert [h.fragment for h in disks.holdings(UID)] == [f.metadata for f in saved.fragments]
        assert (
            disks.path(UID, saved.attempt.directory, "checkpoint.json").parent.name == saved.attempt.directory
        )
        failures = failing(monkeypatch, tmp_path / "only", errno.EIO)
        monkeypatch.setattr(disks_module.log, "error", pytest.fail)
        name = next(name for name in saved.files if name.startswith("shard"))
        for count in (1, 2):
            with pytest.raises(OSError, match="Input/output"):
                disks.put(UID, saved.attempt.directory, name, [saved.files[name]])
            assert failures() == count
        with pytest.raises(InsufficientSpace, match=f"in {tmp_path / 'only'}, which has"):
            disks.check_space(1 << 60, reserve_bytes=0, what="A shard")


def test_a_full_disk_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real full disk shows free space until a file is allocated."""
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], capture_output=True)
    if done.returncode:
        pytest.skip("needs root to mount")
    try:
        saved = sample()
        name = next(name for name in saved.files if name.startswith("shard"))
        with contextlib.closing(Disks([small / "stage", tmp_path / "large"])) as disks:
            monkeypatch.setattr(files, "free_bytes", lambda root: GIB if root.is_relative_to(small) else 0)
            data = bytes(8 << 20)
            disks.put(UID, saved.attempt.directory, name, [data], size_bytes=len(data))
            assert disks.path(UID, saved.attempt.directory, name).is_relative_to(tmp_path / "large")
            assert f"{small / 'stage'} is passed over" in caplog.text
    finally:
        subprocess.run(["umount", small], check=True)
