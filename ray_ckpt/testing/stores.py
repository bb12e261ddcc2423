"""Storage that outlives processes: disks of nodes, and the storage path with its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ray_ckpt.core.messages import DeleteOrphans, LogOpened, RemoteListed
from ray_ckpt.core.values import (
    DiskSpace,
    Inventory,
    ItemsPart,
    StoredFragment,
    StoredParity,
    UnfinishedUpload,
)
from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.names import (
    SNAPSHOT_PREFIX,
    attempt_of,
    fragment_file,
    is_still_name,
    items_suffix,
    record_file,
)
from ray_ckpt.format.records import LogRecord, encode_record
from ray_ckpt.storage.log_store import CreateResult, MemoryLogStore, create_record, read_run
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, ParityGroup

Copy: TypeAlias = tuple[str, int]  # attempt, fragment

START_S = 1_790_000_000.0  # Unix time at which the world begins
FILE_BYTES = 100  # size of every file
STILL_STEPS = 12  # steps after which still slices change: some saves of a schedule


@dataclass(frozen=True, slots=True)
class Parity:
    """A parity file: its group, and the fragments of all members with the files that they list."""

    group: ParityGroup
    members: Mapping[int, tuple[StoredFragment, tuple[str, ...]]]


def still_version(directory: str) -> int:
    """Return the version of the still slices that a checkpoint's folder has."""
    return int(directory.partition("-")[0]) // STILL_STEPS


def part_of(source: FileEntry, items: str) -> ItemsPart:
    """Return the upload of some items of a fragment; its bytes follow from the fragment and the items."""
    fragment = replace(source, digest=digest(f"{items}/{source.digest}".encode()))
    return ItemsPart(source=source, fragment=fragment, size_bytes=FILE_BYTES)


@dataclass(slots=True)
class Disk:
    """A machine's staging folder; all files are fsynced and appear only when fully written."""

    name: str
    folders: dict[str, set[str]] = field(default_factory=dict)  # directory -> files
    fragments: dict[Copy, StoredFragment] = field(default_factory=dict)
    listed: dict[Copy, tuple[str, ...]] = field(default_factory=dict)  # the files that a fragment lists
    since: dict[Copy, int] = field(default_factory=dict)  # number of the event that completed the copy
    rotten: set[Copy] = field(default_factory=set)  # copies with damaged bytes; only a read finds the damage
    parities: dict[Copy, Parity] = field(default_factory=dict)  # the parity file of each member
    inodes: dict[tuple[str, str], int] = field(default_factory=dict)  # of still files: directory, file
    bad_inodes: set[int] = field(default_factory=set)  # with damaged bytes
    num_inodes: int = 0
    num_links: int = 0
    epoch: int = 0
    is_destroyed: bool = False

    def write(self, directory: str, *files: str) -> None:
        """Write files with all their bytes."""
        self.folders.setdefault(directory, set()).update(files)
        for file in filter(is_still_name, files):
            self.num_inodes += 1
            self.inodes[directory, file] = self.num_inodes

    def link(self, directory: str, file: str, *, is_read: bool = False) -> bool:
        """Link a still file to the newest one here with equal bytes; return False if there is none.

        With `is_read` its bytes are compared before.
        """
        like = self._like(directory, file, self.bad_inodes if is_read else set())
        if like is None:
            return False
        self.folders.setdefault(directory, set()).add(file)
        self.inodes[directory, file] = self.inodes[like, file]
        self.num_links += 1
        return True

    def _like(self, directory: str, file: str, bad: Set[int]) -> str | None:
        others = (
            held.attempt.directory
            for copy, held in self.fragments.items()
            if file in self.listed[copy]
            and self.inodes.get((held.attempt.directory, file), -1) not in {-1, *bad}
        )
        version = still_version(directory)
        return max((o for o in others if o != directory and still_version(o) == version), default=None)

    def bad_still_files(self, copy: Copy) -> list[str]:
        """Return the still files of a fragment whose bytes are damaged."""
        if not self.bad_inodes:
            return []
        directory = self.fragments[copy].attempt.directory
        return [file for file in self.listed[copy] if self.inodes.get((directory, file)) in self.bad_inodes]

    def sharers(self, copy: Copy, file: str) -> list[Copy]:
        """Return all complete fragments that list the inode of a fragment's still file."""
        inode = self.inodes[self.fragments[copy].attempt.directory, file]
        return [
            other
            for other, held in self.fragments.items()
            if file in self.listed[other]
            and self.inodes.get((held.attempt.directory, file)) == inode
            and self.has(other)
        ]

    def put(self, held: StoredFragment, listed: tuple[str, ...]) -> None:
        """Add the file of a fragment; the files that it lists are written separately."""
        copy = held.attempt.attempt, held.node_index
        self.write(held.attempt.directory, held.fragment.name)
        self.fragments[copy], self.listed[copy] = held, listed

    def has(self, copy: Copy) -> bool:
        """Return True if the fragment and all files that it names are on this disk, damaged or not."""
        held = self.fragments.get(copy)
        if held is None:
            return False
        folder = self.folders[held.attempt.directory]
        return folder.issuperset((held.fragment.name, *self.listed[copy]))

    def has_intact(self, copy: Copy) -> bool:
        return copy not in self.rotten and self.has(copy) and not self.bad_still_files(copy)

    def alter(self, copy: Copy) -> None:
        """Change bytes of a fragment that no check of the fragment alone covers."""
        held = self.fragments[copy]
        other = replace(held.fragment, digest=digest(f"{self.name}/{held.fragment.digest}".encode()))
        self.fragments[copy] = replace(held, fragment=other)

    def delete(self, directory: str) -> None:
        for file in self.folders.pop(directory, ()):
            self.inodes.pop((directory, file), None)
        for copy in [c for c, held in self.fragments.items() if held.attempt.directory == directory]:
            self._forget(copy)
        attempt = attempt_of(directory)
        self.parities = {copy: parity for copy, parity in self.parities.items() if copy[0] != attempt}

    def quarantine(self, copy: Copy) -> list[StoredFragment]:
        """Remove a bad fragment, and damaged still files of all fragments that share them; return these.

        Other files of its ranks stay.
        """
        damage = [(other, file) for file in self.bad_still_files(copy) for other in self.sharers(copy, file)]
        for other, file in damage:
            directory = self.fragments[other].attempt.directory
            self.folders[directory].remove(file)
            del self.inodes[directory, file]
        others = sorted({other for other, _ in damage} - {copy})
        shared = [self.fragments[other] for other in others]
        for bad in (copy, *others):
            held = self.fragments[bad]
            self.folders[held.attempt.directory].remove(held.fragment.name)
            self._forget(bad)
        return shared

    def _forget(self, copy: Copy) -> None:
        del self.fragments[copy], self.listed[copy]
        self.since.pop(copy, None)
        self.rotten.discard(copy)

    def destroy(self) -> None:
        self.is_destroyed = True
        self.folders, self.fragments, self.listed, self.since, self.rotten = {}, {}, {}, {}, set()
        self.parities, self.inodes = {}, {}

    def space(self, total_bytes: int) -> DiskSpace:
        num_shared = len(self.inodes) - len(set(self.inodes.values()))
        used = FILE_BYTES * (sum(map(len, self.folders.values())) - num_shared)
        return DiskSpace(free_bytes=max(0, total_bytes - used), total_bytes=total_bytes)

    def inventory(self, *, leaving: frozenset[str] = frozenset()) -> Inventory:
        """Return the complete fragments and all folders; attempts in `leaving` are being deleted."""
        return Inventory(
            fragments=tuple(
                held for copy, held in self.fragments.items() if copy[0] not in leaving and self.has(copy)
            ),
            directories=tuple(sorted(self.folders)),
            disk=self.name,
            parities=tuple(
                StoredParity(attempt=parity.members[index][0].attempt, node_index=index, group=parity.group)
                for (attempt, index), parity in self.parities.items()
                if attempt not in leaving
            ),
        )


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished upload of a fragment's file."""

    directory: str
    index: int
    begun_s: float


@dataclass(slots=True)
class Storage:
    """The storage path: a log of records, fragments with their descriptions, and unfinished uploads."""

    log: MemoryLogStore = field(default_factory=MemoryLogStore)
    records: list[tuple[LogRecord, str]] = field(default_factory=list)  # decoded records and digests of `log`
    fragments: dict[str, set[int]] = field(default_factory=dict)  # attempt -> stored fragments
    described: set[str] = field(default_factory=set)
    still_files: set[tuple[str, str]] = field(default_factory=set)  # directory, file
    # (attempt, items) -> the fragments of these items alone, by index
    items: dict[tuple[str, str], dict[int, FileEntry]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)  # attempt -> its items that are described
    written_s: dict[str, float] = field(default_factory=dict)  # directory -> time of its newest object
    uploads: dict[str, Upload] = field(default_factory=dict)  # unfinished uploads, by id
    num_uploads: int = 0
    is_away: bool = False

    def create(self, record: LogRecord) -> tuple[Literal["ok", "exists"], bool]:
        """Create a record; return the store's answer, and whether the record is new."""
        data = encode_record(record)
        is_new = record_file(record.seq) not in self.log.objects
        outcome = create_record(self.log, record.seq, data)
        if is_new and outcome is CreateResult.OK:
            self.records.append((record, digest(data)))
            return "ok", True
        return ("ok" if outcome is CreateResult.OK else "exists"), False

    def opened(self, *, run_name: str, fresh_uid: str) -> LogOpened:
        """Return the log as a coordinator reads it."""
        if not self.log.list(SNAPSHOT_PREFIX):
            return LogOpened(records=tuple(self.records), run_name=run_name, fresh_uid=fresh_uid)
        history, records = read_run(self.log)
        return LogOpened(records=records, history=history, run_name=run_name, fresh_uid=fresh_uid)

    def holds(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if all fragments and the description of a checkpoint are stored."""
        name = checkpoint.id.attempt
        return name in self.described and self.fragments.get(name) == set(range(checkpoint.num_nodes))

    def has_like(self, like: str, directory: str, file: str) -> bool:
        """Return True if the folder `like` has a still file with the bytes of the one in `directory`."""
        return (like, file) in self.still_files and still_version(like) == still_version(directory)

    def put(self, attempt: AttemptId, index: int, files: Iterable[str], now_s: float) -> None:
        self.still_files |= {(attempt.directory, file) for file in files if is_still_name(file)}
        self.fragments.setdefault(attempt.attempt, set()).add(index)
        self.written_s[attempt.directory] = now_s

    def describe(self, checkpoint: CheckpointInfo, now_s: float) -> None:
        self.described.add(checkpoint.id.attempt)
        self.written_s[checkpoint.directory] = now_s

    def put_items(self, attempt: AttemptId, index: int, items: str, entry: FileEntry, now_s: float) -> None:
        """Store some items of a fragment.

        A late upload from another version of the fragment is not modelled once the items are described.
        """
        found = self.items.setdefault((attempt.attempt, items), {})
        if self.exported.get(attempt.attempt) != items:
            found[index] = entry
        self.written_s[attempt.directory] = now_s

    def describe_items(self, checkpoint: CheckpointInfo, items: str, now_s: float) -> None:
        self.exported[checkpoint.id.attempt] = items
        self.written_s[checkpoint.directory] = now_s

    def items_root(self, checkpoint: CheckpointInfo, items: str) -> str | None:
        """Return the root digest of stored items of a checkpoint; None if a fragment is missing."""
        found = self.items.get((checkpoint.id.attempt, items), {})
        return root_digest(found.values()) if len(found) == checkpoint.num_nodes else None

    def holds_items(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if the exported items of a checkpoint are stored as recorded, and described."""
        is_described = self.exported.get(checkpoint.id.attempt) == checkpoint.exported
        return is_described and self.items_root(checkpoint, checkpoint.exported) == checkpoint.exported_root

    def leave_upload(self, attempt: AttemptId, index: int, items: str, now_s: float) -> None:
        """Leave the unfinished upload of a dead agent; no other process has the upload's id."""
        self.num_uploads += 1
        directory = attempt.directory + items_suffix(items)
        self.uploads[f"upload-{self.num_uploads}"] = Upload(directory, index, now_s)

    def delete(self, directory: str) -> None:
        attempt = attempt_of(directory)
        self.described.discard(attempt)
        self.fragments.pop(attempt, None)
        self.exported.pop(attempt, None)
        self.items = {key: found for key, found in self.items.items() if key[0] != attempt}
        self.written_s.pop(directory, None)
        self.still_files = {found for found in self.still_files if found[0] != directory}

    def listed(self, number: int, now_s: float) -> RemoteListed:
        return RemoteListed(
            number=number,
            directories={directory: now_s - at_s for directory, at_s in self.written_s.items()},
            uploads=tuple(
                UnfinishedUpload(
                    directory=upload.directory,
                    file=fragment_file(upload.index, upload.index + 1),
                    upload_id=name,
                    age_s=now_s - upload.begun_s,
                )
                for name, upload in self.uploads.items()
            ),
        )

    def sweep(self, order: DeleteOrphans) -> None:
        for directory in order.directories:
            self.delete(directory)
        for upload in order.uploads:
            self.uploads.pop(upload.upload_id, None)
