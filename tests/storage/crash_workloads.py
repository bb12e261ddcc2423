"""Workloads of the disk layer's callers, and the promises that must hold after a power loss.

A workload is `run(disk, at)`: it notes acknowledged facts in `disk`, and an event happens before operation
`at` (NEVER: no event happens). Its check raises `Torn` or `Lost` if the folder that is left breaks a
promise; it reads with new objects, as a restarted process would.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from ray_ckpt.format import names, records
from ray_ckpt.format.digest import digest
from ray_ckpt.location import Location
from ray_ckpt.storage.local import direct, files
from ray_ckpt.storage.local.staging import Staging
from ray_ckpt.storage.log_store import CreateResult, PosixLogStore
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.verify.content import verify_directory
from tests.storage.crash_disk import CrashDisk, Fact, ProcessDied
from tests.support.sample_run import SampleCheckpoint, make_checkpoint

NEVER = 10**9  # no operation has this number
UID = "0123456789abcdef" * 2


def _sample(step: int, attempt: int = 0) -> SampleCheckpoint:
    return make_checkpoint(
        names.make_attempt(run_uid=UID, session=1, step=step, attempt=attempt), world_size=4, rows=2
    )


FIRST, SECOND = _sample(10), _sample(20)
TWIN = _sample(10, attempt=1)  # has the shards of FIRST
SAVED = {saved.attempt.directory: saved for saved in (FIRST, SECOND, TWIN)}


# What the processes do


def open_staging(root: Path) -> contextlib.closing[Staging]:
    return contextlib.closing(Staging(root / "stage"))


def put_fragment(disk: CrashDisk, stage: Staging, saved: SampleCheckpoint, node: int) -> None:
    """Store a node's own save, or a copy: files, fragment, acknowledgement."""
    directory, fragment = saved.attempt.directory, saved.fragments[node]
    manifest = names.fragment_file(node, saved.num_nodes)
    for name in (*(file.name for file in fragment.files), manifest):
        data = memoryview(saved.files[name])
        stage.put(
            UID, directory, name, [data[: data.nbytes // 2], data[data.nbytes // 2 :]], size_bytes=data.nbytes
        )
    disk.note("held", directory, manifest)


def note_holdings(disk: CrashDisk, stage: Staging) -> None:
    """Take inventory. Reported fragments may be committed from then on."""
    for holding in stage.holdings(UID):
        disk.note("held", holding.fragment.attempt.directory, holding.entry.name)


def meanwhile(disk: CrashDisk, stage: Staging, at: int, action: Callable[[], None]) -> None:
    """Another thread of the agent does `action` at `at`, or as soon as the lock that it takes is free."""

    def attempt() -> None:
        if stage._publishing.locked():
            disk.at(len(disk.operations) + 1, attempt)
        else:
            action()

    disk.at(at, attempt)


def save(disk: CrashDisk, at: int) -> None:
    """Save on a node; at `at` the agent takes inventory."""
    with open_staging(disk.root) as stage:
        meanwhile(disk, stage, at, lambda: note_holdings(disk, stage))
        put_fragment(disk, stage, FIRST, 0)


def save_in_blocks(disk: CrashDisk, at: int) -> None:
    """Write a shard as large ones are, in blocks, by several threads of an agent, which dies at `at`."""
    file = FIRST.fragments[0].files[0].name
    disk.at(at, disk.kill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "PAGE_BYTES", 512)
        patch.setattr(direct, "BLOCK_BYTES", 512)
        for _ in range(2):
            with contextlib.suppress(ProcessDied), open_staging(disk.root) as stage:
                stage.put(UID, FIRST.attempt.directory, file, [FIRST.files[file]], size_bytes=4176)
                disk.note("whole", FIRST.attempt.directory, file)
            disk.restart()


def save_and_copy(disk: CrashDisk, at: int) -> None:
    """Save on a node; at `at` a copy of another node's part of the same checkpoint arrives."""
    with open_staging(disk.root) as stage:
        meanwhile(disk, stage, at, lambda: put_fragment(disk, stage, FIRST, 1))
        put_fragment(disk, stage, FIRST, 0)


def killed_save(disk: CrashDisk, at: int) -> None:
    """Save with an agent that dies at `at`; the next one takes inventory and saves again."""
    disk.at(at, disk.kill)
    for _ in range(2):
        with contextlib.suppress(ProcessDied), open_staging(disk.root) as stage:
            note_holdings(disk, stage)
            put_fragment(disk, stage, FIRST, 0)
        disk.restart()


def put_linked(disk: CrashDisk, stage: Staging) -> None:
    """Store TWIN with links to the files of FIRST, or by writing where that fails, as an agent does."""
    directory, fragment = TWIN.attempt.directory, TWIN.fragments[0]
    for name in (file.name for file in fragment.files):
        try:
            stage.link(UID, FIRST.attempt.directory, directory, name)
        except OSError:
            stage.put(UID, directory, name, [TWIN.files[name]])
    manifest = names.fragment_file(0, TWIN.num_nodes)
    stage.put(UID, directory, manifest, [TWIN.files[manifest]])
    disk.note("held", directory, manifest)


def killed_link(disk: CrashDisk, at: int) -> None:
    """Save with links; the agent dies at `at`, and the next one links again."""
    with open_staging(disk.root) as stage:
        put_fragment(disk, stage, FIRST, 0)
    disk.at(len(disk.operations) + at, disk.kill)
    for _ in range(2):
        with contextlib.suppress(ProcessDied), open_staging(disk.root) as stage:
            note_holdings(disk, stage)
            put_linked(disk, stage)
        disk.restart()


def link_and_delete(disk: CrashDisk, at: int) -> None:
    """Save with links to a checkpoint that is deleted at `at`."""
    with open_staging(disk.root) as stage:
        put_fragment(disk, stage, FIRST, 0)
        disk.note("deleting", FIRST.attempt.directory)
        disk.at(len(disk.operations) + at, lambda: stage.delete(UID, FIRST.attempt.directory))
        put_linked(disk, stage)


def delete(disk: CrashDisk, at: int) -> None:
    """Delete a checkpoint while the next one stays; the agent dies at `at`, the delete is repeated."""
    with open_staging(disk.root) as stage:
        put_fragment(disk, stage, FIRST, 0)
        put_fragment(disk, stage, SECOND, 0)
    disk.note("deleting", FIRST.attempt.directory)
    disk.at(len(disk.operations) + at, disk.kill)
    for _ in range(2):
        with contextlib.suppress(ProcessDied), open_staging(disk.root) as stage:
            stage.delete(UID, FIRST.attempt.directory)
            disk.note("gone", FIRST.attempt.directory)
        disk.restart()


def quarantine(disk: CrashDisk, at: int) -> None:
    """Quarantine a bad file; the agent dies at `at`, and the scrub finds the file again."""
    directory, bad = FIRST.attempt.directory, FIRST.fragments[0].files[0].name
    with open_staging(disk.root) as stage:
        put_fragment(disk, stage, FIRST, 0)
    disk.note("deleting", directory)
    disk.at(len(disk.operations) + at, disk.kill)
    for _ in range(2):
        with contextlib.suppress(ProcessDied), open_staging(disk.root) as stage:
            stage.quarantine(UID, directory, bad)
            disk.note("bad", directory, names.fragment_file(0, FIRST.num_nodes))
        disk.restart()


def mark(disk: CrashDisk, at: int) -> None:
    """Send two epochs to an agent, which dies at `at`, and a third one to the next agent."""
    disk.at(at, disk.kill)
    for epochs in ((1, 2), (3,)):
        with contextlib.suppress(ProcessDied), open_staging(disk.root) as stage:
            for epoch in epochs:
                stage.write_mark(UID, run_name="gpt", storage_path="/shared", epoch=epoch)
                disk.note("mark", str(epoch))
        disk.restart()


def open_log(disk: CrashDisk) -> PosixLogStore:
    """Return the log's folder, which the probe of the storage path has made before."""
    store = PosixLogStore(disk.root / "log")
    files.make_dirs(disk.root / "log")
    return store


def read_log(store: PosixLogStore) -> list[tuple[records.LogRecord, str]]:
    """Return every record up to the first missing number, with its digest."""
    found: list[tuple[records.LogRecord, str]] = []
    while (data := store.read(names.record_file(len(found)))) is not None:
        found.append((records.decode_record(data), digest(data)))
    return found


def append(disk: CrashDisk, store: PosixLogStore, writer: str) -> None:
    """Read to the end of the log and append a record, as a coordinator."""
    log = read_log(store)
    seq = len(log)
    op = records.Note(text="x" * 50) if seq else records.Create(run_uid=UID, run_name="gpt", format=1)
    prev = log[-1][1] if log else ""
    record = records.LogRecord(seq=seq, epoch=0, writer=writer, prev=prev, time_s=0.0, op=op)
    data = records.encode_record(record)
    if store.create(names.record_file(seq), data) is CreateResult.OK:
        disk.note("recorded", names.record_file(seq), digest(data))


def two_writers(disk: CrashDisk, at: int) -> None:
    """Append three records; at `at` another coordinator reads the log and appends two."""
    store = open_log(disk)

    def other() -> None:
        append(disk, store, "b")
        append(disk, store, "b")

    disk.at(at, other)
    for _ in range(3):
        append(disk, store, "a")


def killed_writer(disk: CrashDisk, at: int) -> None:
    """Append with a coordinator that dies at `at`; the next one continues with the log that it finds."""
    store = open_log(disk)
    disk.at(at, disk.kill)
    for writer in ("a", "b"):
        with contextlib.suppress(ProcessDied):
            for _ in range(2):
                append(disk, store, writer)
        disk.restart()


def drain(disk: CrashDisk, at: int) -> None:
    """Upload a checkpoint to the storage path; at `at` another holder uploads the same."""
    remote = RemoteTier(Location.parse(disk.root))
    files.make_dirs(disk.root / names.CHECKPOINTS_DIR)

    def upload() -> None:
        for name in sorted(FIRST.files, key=lambda n: n.startswith("manifest")):
            if name != names.CHECKPOINT_JSON:
                remote.put(FIRST.attempt.directory, name, FIRST.files[name])

    disk.at(at, upload)
    upload()
    remote.put(FIRST.attempt.directory, names.CHECKPOINT_JSON, FIRST.files[names.CHECKPOINT_JSON])
    disk.note("durable", FIRST.attempt.directory)


# What must be true afterwards


class Torn(AssertionError):
    """Something is visible that is not whole."""


class Lost(AssertionError):
    """Something that was acknowledged is not there."""


def check_staging(root: Path, noted: frozenset[Fact]) -> None:
    deleting = {fact[1] for fact in noted if fact[0] == "deleting"}
    gone = {fact[1] for fact in noted if fact[0] == "gone"}
    promised = {fact for fact in noted if fact[0] == "held" and fact[1] not in deleting}
    with open_staging(root) as stage:
        held = set()
        for holding in stage.holdings(UID):
            directory = holding.fragment.attempt.directory
            for entry in (holding.entry, *holding.fragment.files):
                if (stage.folder(UID, directory) / entry.name).read_bytes() != SAVED[directory].files[
                    entry.name
                ]:
                    raise Torn(f"{directory}/{entry.name} has other bytes")
            held.add(("held", directory, holding.entry.name))
        for directory, saved in SAVED.items():
            for file, data in saved.files.items():
                path = stage.path(UID, directory, file)
                if path.exists() and path.read_bytes() != data:
                    raise Torn(f"{directory}/{file} is visible with other bytes")
                if ("whole", directory, file) in noted and not path.exists():
                    raise Lost(f"{directory}/{file} was written and is not there")
        if promised - held:
            raise Lost(f"not held any more: {promised - held}")
        if back := held & {("held", *fact[1:]) for fact in noted if fact[0] == "bad"}:
            raise Torn(f"put aside as bad, but held: {back}")
        if stage.epoch(UID) < max((int(fact[1]) for fact in noted if fact[0] == "mark"), default=0):
            raise Lost(f"the highest epoch is forgotten: {stage.epoch(UID)}")
        if gone & set(stage.directories(UID)):
            raise Lost("a deleted folder came back")
        if left := [path for path in stage.root.rglob("*") if files.is_temporary(path.name)]:
            raise Torn(f"unfinished writes stay: {left}")
        for directory in deleting:
            stage.delete(UID, directory)
            assert directory not in stage.directories(UID), "a repeated delete ends what the first began"


def check_log(root: Path, noted: frozenset[Fact]) -> None:
    store = PosixLogStore(root / "log")
    log = read_log(store)
    numbers = sorted(name for name in store.list() if names.record_seq(name) is not None)
    if numbers != [names.record_file(seq) for seq in range(len(log))]:
        raise Torn(f"a log with gaps: {numbers}")
    there = {("recorded", names.record_file(record.seq), found) for record, found in log}
    if noted - there:
        raise Lost(f"not in the log any more: {noted - there}")
    for (_, found), (record, _) in itertools.pairwise(log):
        if record.prev != found:
            raise Torn(f"record {record.seq} does not follow the one before")


def check_remote(root: Path, noted: frozenset[Fact]) -> None:
    for saved in SAVED.values():
        description = root / names.CHECKPOINTS_DIR / saved.attempt.directory / names.CHECKPOINT_JSON
        if description.exists():
            report = verify_directory(description.parent, root_digest=saved.root_digest)
            if report.damages:
                raise Torn(f"described, but {report.damages}")
        elif ("durable", saved.attempt.directory) in noted:
            raise Lost("a durable checkpoint is not there")


Run: TypeAlias = Callable[[CrashDisk, int], None]
Check: TypeAlias = Callable[[Path, frozenset[Fact]], None]
WORKLOADS: tuple[tuple[Run, Check], ...] = (
    (save, check_staging),
    (save_in_blocks, check_staging),
    (save_and_copy, check_staging),
    (killed_save, check_staging),
    (killed_link, check_staging),
    (link_and_delete, check_staging),
    (delete, check_staging),
    (quarantine, check_staging),
    (mark, check_staging),
    (two_writers, check_log),
    (killed_writer, check_log),
    (drain, check_remote),
)


def no_file_sync(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: files are not fsynced, directories are."""
    fsync = os.fsync
    patch.setattr(os, "fsync", lambda fd: fsync(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None)
