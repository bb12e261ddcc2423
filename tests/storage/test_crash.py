"""The disk layer loses power after every file operation, on the weakest disk that POSIX allows.

Acknowledged files are there byte for byte, no visible file is torn, and every call can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from ray_ckpt.errors import FormatError
from ray_ckpt.format import names
from ray_ckpt.storage.local import direct, files, staging
from ray_ckpt.storage.local.staging import Staging, delete_checkpoint_dir
from tests.storage import crash_workloads as workloads
from tests.storage.crash_disk import CrashDisk, Operation, Write, crashes, recording, write_image
from tests.storage.crash_workloads import (
    NEVER,
    WORKLOADS,
    Check,
    Lost,
    Run,
    Torn,
    check_log,
    check_staging,
    no_file_sync,
)
from tests.support.sample_run import SampleCheckpoint

Found: TypeAlias = type[Exception] | tuple[type[Exception], ...]

FAST_POINTS = 2  # of the quick tests, where something happens during a run; slow tests have all points
RANDOM_CHOICES = 4  # outcomes of each power loss, beside "nothing unsynced is left" and "all of it is"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page of a small file is a block of its own."""
    monkeypatch.setattr(direct, "BLOCK_BYTES", direct.PAGE_BYTES)


CASES = [pytest.param(run, check, id=run.__name__) for run, check in WORKLOADS]
QUICK_CASES = CASES[1::2]  # with each of the checks; the slow test below has all of them


@dataclass(slots=True)
class Tally:
    """Counts: runs of a workload, their (point, outcome) pairs, and the number of different pairs."""

    runs: int = 0
    crashes: int = 0
    distinct: int = 0


def lose_power_everywhere(
    scratch: Path, run: Run, check: Check, *, at: int, seed: int = 0, tally: Tally | None = None
) -> int:
    """Record `run`, then check what each power loss leaves. Returns how many operations were recorded."""
    tally = tally or Tally()
    with emptied(scratch / "run") as folder, recording(folder) as disk:
        run(disk, at)
        disk.check_complete()
    tally.runs += 1
    seen = set()
    for crash in crashes(disk.operations, seed=seed, random_choices=RANDOM_CHOICES):
        tally.crashes += 1
        if (crash.image, crash.noted) in seen:
            continue
        seen.add((crash.image, crash.noted))
        with emptied(scratch / "left") as folder:
            write_image(crash.image, folder)
            try:
                check(folder, crash.noted)
            except Exception as error:
                before = "\n".join(f"  {short(o)}" for o in disk.operations[: crash.index])
                left = "\n".join(f"  {name}" for name, _ in crash.image)
                error.add_note(
                    f"{run.__name__}(at={at}), seed {seed}, power lost after\n{before}\nleft:\n{left}"
                )
                raise
    tally.distinct += len(seen)
    return len(disk.operations)


def short(operation: Operation) -> str:
    if isinstance(operation, Write):
        return f"Write({operation.inode}, {len(operation.data)} bytes at {operation.offset})"
    return str(operation)


@contextlib.contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(("run", "check"), QUICK_CASES)
def test_what_is_acknowledged_survives_and_what_is_visible_is_whole(
    scratch: Path, run: Run, check: Check
) -> None:
    operations = lose_power_everywhere(scratch, run, check, at=NEVER)
    for at in sorted(random.Random(0).sample(range(operations), FAST_POINTS)):
        lose_power_everywhere(scratch, run, check, at=at, seed=at)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("run", "check"), CASES)
def test_it_does_so_wherever_something_happens_meanwhile(
    scratch: Path, run: Run, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally()
    operations = lose_power_everywhere(scratch, run, check, at=NEVER, tally=tally)
    for at in range(operations):
        lose_power_everywhere(scratch, run, check, at=at, seed=1000 + at, tally=tally)
    with capsys.disabled():
        print(f"\n{run.__name__}: 0 torn, 0 lost in {tally}")
    assert tally.crashes > 1000


# The checks see what is wrong


def no_directory_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "fsync_dir", lambda path: None)


def fragment_first(patch: pytest.MonkeyPatch) -> None:
    def put(disk: CrashDisk, stage: Staging, saved: SampleCheckpoint, node: int) -> None:
        directory, manifest = saved.attempt.directory, names.fragment_file(node, saved.num_nodes)
        stage.put(workloads.UID, directory, manifest, [saved.files[manifest]])
        disk.note("held", directory, manifest)
        for file in saved.fragments[node].files:
            stage.put(workloads.UID, directory, file.name, [saved.files[file.name]])

    patch.setattr(workloads, "put_fragment", put)


def no_settling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "_clean_up", lambda stage: None)
    patch.setattr(files, "is_temporary", lambda name: False)  # the check that comes first


def no_lock(patch: pytest.MonkeyPatch) -> None:
    class NoLock(contextlib.nullcontext[None]):
        def locked(self) -> bool:
            return False

    patch.setattr(staging, "threading", SimpleNamespace(Lock=NoLock))


def no_sync_of_a_delete(patch: pytest.MonkeyPatch) -> None:
    def delete(stage: Staging, run_uid: str, directory: str) -> None:
        delete_checkpoint_dir(stage.folder(run_uid, directory))

    patch.setattr(Staging, "delete", delete)


def rename_for_link(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "link", os.rename)


@pytest.mark.parametrize(
    ("bug", "run", "check", "found"),
    [
        (no_file_sync, workloads.save, check_staging, (Lost, Torn)),
        (no_directory_sync, workloads.save, check_staging, Lost),
        (fragment_first, workloads.save, check_staging, Lost),
        (no_settling, workloads.killed_save, check_staging, Lost),
        pytest.param(no_lock, workloads.save, check_staging, Lost, marks=pytest.mark.slow),
        (no_sync_of_a_delete, workloads.delete, check_staging, Lost),
        (no_directory_sync, workloads.killed_link, check_staging, Lost),
        (no_file_sync, workloads.link_and_delete, check_staging, (Lost, Torn)),
        (rename_for_link, workloads.killed_link, check_staging, Lost),
        (no_file_sync, workloads.killed_writer, check_log, (Lost, FormatError)),
        (no_directory_sync, workloads.killed_writer, check_log, Lost),
        (rename_for_link, workloads.two_writers, check_log, Lost),
        (no_file_sync, workloads.drain, workloads.check_remote, Torn),
        (no_directory_sync, workloads.drain, workloads.check_remote, Lost),
    ],
)
def test_a_planted_bug_is_found(
    scratch: Path, bug: Callable[[pytest.MonkeyPatch], None], run: Run, check: Check, found: Found
) -> None:
    def with_bug(disk: CrashDisk, at: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            run(disk, at)

    with pytest.raises(found):
        for at in (NEVER, *range(120)):
            lose_power_everywhere(scratch, with_bug, check, at=at)
