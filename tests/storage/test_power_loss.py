"""Real file systems lose power, fail an fsync, run full. Needs root and loop devices; skipped without.

Power loss is the ioctl EXT4_IOC_SHUTDOWN (XFS_IOC_GOINGDOWN) without a flush of the journal: what was not
fsynced is gone when the file system is mounted again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ckpt.errors import CheckpointError, FormatError
from ray_ckpt.storage.local import files
from ray_ckpt.storage.local.staging import Staging
from tests.storage import crash_workloads as workloads
from tests.storage.crash_disk import CrashDisk, Noted, recording
from tests.storage.crash_workloads import FIRST, NEVER, SECOND, UID, WORKLOADS, Check, Lost, Run, Torn

SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, struct.pack("I", 2)
IMAGE_BYTES = {"ext4": 32 << 20, "xfs": 320 << 20}  # sparse; mkfs.xfs refuses less than 300 MiB
FAST_CYCLES = 6  # of each workload in `make test`
SLOW_CYCLES = 150
SYSTEM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def command(*words: str | Path) -> None:
    """Run a system command; the test is skipped with its message if it cannot be done here."""
    if shutil.which(str(words[0]), path=SYSTEM_PATH) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, env={**os.environ, "PATH": SYSTEM_PATH}
    )
    if done.returncode:
        pytest.skip(f"{words[0]} does not work here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(*mount: str | Path, at: Path) -> Iterator[Path]:
    """Mount with these arguments at `at`; unmount at the end, which also frees the loop device."""
    at.mkdir(exist_ok=True)
    command("mount", *mount, at)
    try:
        yield at
    finally:
        if subprocess.run(["umount", at], capture_output=True).returncode:
            subprocess.run(["umount", "--lazy", at], check=True)


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid():
        pytest.skip("needs root to mount")


@pytest.fixture(params=["ext4", "xfs"])
def image(request: pytest.FixtureRequest, scratch: Path) -> Path:
    """A file with an empty file system."""
    path = scratch / "image"
    with path.open("wb") as file:
        file.truncate(IMAGE_BYTES[request.param])
    command(f"mkfs.{request.param}", "-q", path)
    return path


def lose_power(mount_point: Path) -> None:
    fd = os.open(mount_point, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, NO_LOG_FLUSH)
    finally:
        os.close(fd)


def cycle(image: Path, run: Run, check: Check, *, at: int) -> int:
    """Lose power before operation `at` of `run`, or at its end, mount again and check. Returns its length."""
    mount_point = image.parent / "mounted"
    with mounted("-o", "loop", image, at=mount_point):
        folder = mount_point / "run"
        folder.mkdir(mode=0o700)
        files.fsync_dir(mount_point)
        power = contextlib.ExitStack()
        power.callback(lose_power, mount_point)
        with recording(folder) as disk:
            disk.at(at, power.close)
            with contextlib.suppress(OSError, CheckpointError):
                run(disk, NEVER)
        power.close()
    with mounted("-o", "loop", image, at=mount_point):
        noted = frozenset(operation.fact for operation in disk.operations if isinstance(operation, Noted))
        try:
            check(folder, noted)
        except Exception as error:
            error.add_note(f"{run.__name__}, power lost before operation {at}")
            raise
        finally:
            shutil.rmtree(folder)
    return len(disk.operations)


def cycles(image: Path, run: Run, check: Check, *, count: int, seed: int) -> None:
    rng = random.Random(seed)
    length = cycle(image, run, check, at=NEVER)
    for _ in range(count):
        cycle(image, run, check, at=rng.randrange(length))


# The other half of the workloads loses power in the quick tests of test_crash.py.
@pytest.mark.parametrize(("run", "check"), WORKLOADS[::2], ids=lambda f: f.__name__)
def test_what_is_acknowledged_survives_a_power_loss(image: Path, run: Run, check: Check) -> None:
    cycles(image, run, check, count=FAST_CYCLES, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "check"), WORKLOADS, ids=lambda f: f.__name__)
def test_it_survives_many(image: Path, run: Run, check: Check) -> None:
    cycles(image, run, check, count=SLOW_CYCLES, seed=1)


def test_a_file_without_its_fsync_is_lost(image: Path) -> None:
    """The rig takes away what was not synced; else the tests above could not fail.

    Bytes written with O_DIRECT are on the disk before the fsync, so this file is written through the cache.
    """

    def unsynced(disk: CrashDisk, at: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            workloads.no_file_sync(patch)
            workloads.two_writers(disk, at)

    with pytest.raises((FormatError, Torn, Lost)):
        cycle(image, unsynced, workloads.check_log, at=NEVER)


def put_large(stage: Staging, size_bytes: int) -> None:
    block = bytes(1 << 20)
    blocks = itertools.repeat(block, size_bytes // len(block))
    stage.put(UID, SECOND.attempt.directory, SECOND.fragments[0].files[0].name, blocks)


def check_refused(stage: Staging, size_bytes: int) -> int:
    """Assert that a put of `size_bytes` fails and leaves nothing; return its errno."""
    with pytest.raises(OSError) as caught:
        put_large(stage, size_bytes)
    assert list(stage.folder(UID, SECOND.attempt.directory).iterdir()) == []
    assert [holding.fragment for holding in stage.holdings(UID)] == [FIRST.fragments[0].metadata]
    return caught.value.errno or 0


def test_a_failed_fsync_is_never_acknowledged(scratch: Path) -> None:
    """A sparse image on too small a disk: writes go to the cache, their fsync fails once."""
    with mounted("-t", "tmpfs", "-o", "size=24m", "tmpfs", at=scratch / "small"):
        image = scratch / "small" / "image"
        with image.open("wb") as file:
            file.truncate(256 << 20)
        command("mkfs.ext4", "-q", image)
        with (
            mounted("-o", "loop", image, at=scratch / "mounted") as disk,
            contextlib.closing(Staging(disk / "stage")) as stage,
        ):
            workloads.put_fragment(CrashDisk(disk), stage, FIRST, 0)
            assert files.free_bytes(disk) > 64 << 20, "so no write fails"
            assert check_refused(stage, 64 << 20) in (errno.EIO, errno.ENOSPC)


def test_a_full_disk_gives_its_space_back(scratch: Path) -> None:
    with (
        mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs", at=scratch / "small") as disk,
        contextlib.closing(Staging(disk / "stage")) as stage,
    ):
        workloads.put_fragment(CrashDisk(disk), stage, FIRST, 0)
        files.make_dirs(stage.folder(UID, SECOND.attempt.directory))
        free = files.free_bytes(disk)
        for _ in range(3):
            assert check_refused(stage, 8 << 20) == errno.ENOSPC
            assert files.free_bytes(disk) == free
        put_large(stage, 2 << 20)
