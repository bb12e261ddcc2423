"""Write a durable checkpoint into a run without a cluster: an import becomes a session of its own.

The files are complete on the storage path before the log has a record of them. The records are an `epoch`,
which fences the service of the run, a `session` without training, and the commit; the next group that opens
the run continues from the checkpoint. An import that is interrupted leaves no record, and at most a folder
under a name that no other attempt has; the sweep of the storage path deletes the folder.

The session follows the newest older checkpoint of the lineage, so that checkpoints that are imported in the
order of their steps make one lineage. Later checkpoints leave the lineage, as in a rollback.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from secrets import randbits
from typing import Any, TypeAlias

from typing_extensions import Buffer

from ray_ckpt.admin.rollback import LogTail, checked, open_log, read_tail, write_ops
from ray_ckpt.catalog.runs import find_runs, runs_text
from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, Fenced
from ray_ckpt.format import names
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import Digester, digest, root_digest
from ray_ckpt.format.jsontext import FORMAT_VERSION
from ray_ckpt.format.manifest import (
    CheckpointDescription,
    check_coverage,
    encode_checkpoint,
    encode_fragment,
)
from ray_ckpt.format.shard import ShardLayout, build_layout
from ray_ckpt.format.tree import IMPORTED_FROM, encode_tree
from ray_ckpt.location import Location, StoragePath, locate
from ray_ckpt.storage.checkpoint_files import readable
from ray_ckpt.storage.log_store import LogStore
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.types import (
    IMPORT_PREFIX,
    AttemptId,
    CheckpointInfo,
    FileEntry,
    Fragment,
    Level,
    ManifestRow,
    ProgressCallback,
    RowKind,
    Slice,
)

TRY_BITS = 62  # of the random number of an attempt, which no coordinator and no other import draws

ReadSlice: TypeAlias = Callable[[], Iterable[Buffer]]
"""Function that yields the bytes of a slice in row-major order; each block is valid until the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheckpoint:
    """A whole training state of one rank: slices with their bytes, and the items with TensorRefs.

    `imported_from` has the format, its version and the source, for display.
    """

    step: int
    tensors: Mapping[Slice, ReadSlice]
    items: Mapping[str, Any]
    imported_from: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """The size of the shard."""
        return build_layout(self.tensors).size_bytes


def open_or_begin(
    path: StoragePath, storage_options: Mapping[str, str] | None = None
) -> tuple[RemoteTier, LogTail]:
    """Open the run at `path`, `<storage_path>/<run>`; without a run there, return an empty log.

    Writes nothing. Raises the errors of `Catalog`, and ConfigError if a new run cannot have that name, if
    its storage path is a folder that does not exist, or if `path` holds runs, which a run there would hide.
    """
    where = locate(path)
    tier = RemoteTier(where / names.SERVICE_DIR, storage_options)
    with readable(where):
        there = _has_records(tier) or where.name == names.SERVICE_DIR
    if there:
        return open_log(path, storage_options)
    names.check_run_name(where.name)
    _check_storage_path(where.parent)
    if runs := find_runs(where, storage_options):
        raise ConfigError(
            f"{where} holds the runs {runs_text(runs)}.",
            hint="Give <storage_path>/<run name>.",
            path=str(where),
        )
    return tier, LogTail(history=RunHistory(), last_s=None)


def _has_records(tier: RemoteTier) -> bool:
    return any(
        names.record_seq(name) is not None or names.snapshot_seq(name) is not None for name in tier.log.list()
    )


def _check_storage_path(path: Location) -> None:
    if not path.is_posix and not path.path.strip("/"):
        raise ConfigError(
            "A bucket alone is no run.", hint="Give <storage_path>/<run name>, such as s3://bucket/gpt."
        )
    if path.is_posix and not path.folder.is_dir():
        raise ConfigError(
            f"There is no folder {path}, which a new run needs.",
            hint="Create or mount it; give <storage_path>/<run name>.",
            path=str(path),
        )


def left_aside(history: RunHistory, step: int) -> tuple[CheckpointInfo, ...]:
    """Return the checkpoints that leave the lineage if a checkpoint of `step` is written."""
    parent = _parent(history, step)
    return tuple(info for info in history.lineage() if parent is None or info.seq > parent.seq)


def _parent(history: RunHistory, step: int) -> CheckpointInfo | None:
    """Return the newest checkpoint of the lineage before `step`."""
    return next((info for info in reversed(history.lineage()) if info.step < step), None)


def write_checkpoint(
    tier: RemoteTier,
    history: RunHistory,
    new: NewCheckpoint,
    *,
    owner: str,
    now_s: float,
    progress: ProgressCallback | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> CheckpointInfo:
    """Write the files, then the records that directly follow `history`; return the checkpoint.

    A run without records begins under the name of its folder. `owner` is the text of the session, for users;
    `progress` is called with the bytes of tensors as they are written. The memory for tensors is that of one
    block.

    Raises FormatError if the slices do not cover their tensors; UnsupportedLeaf for a value that no state
    file can hold, both before anything is written; the errors of the slices' functions, after which no file
    is left; StoragePathError if the storage path cannot hold a run; and those of `rollback.write_ops`, of
    which Fenced leaves no file of a checkpoint without a record.
    """
    _check_step(new.step)
    run_name = history.run_name or tier.root.parent.name
    attempt = names.make_attempt(
        run_uid=history.run_uid or uuid.uuid4().hex,
        session=history.next_session,
        step=new.step,
        attempt=randbits(TRY_BITS),
        epoch=history.epoch + 1,
    )
    files = _Files(tier, attempt, progress or (lambda nbytes: None))
    layout, state = _checked(new)
    tier.probe_log()
    service = f"{IMPORT_PREFIX}{uuid.uuid4().hex}"
    try:
        description = files.write(layout, new.tensors, state)
        ops = checked(_ops(history, run_name, description, files.size_bytes, service, owner))
    except BaseException:
        files.delete()
        raise
    try:
        after = write_ops(tier.log, history, ops, writer=service, now_s=now_s, pause=pause)
    except Fenced:
        recorded = _recorded(tier.log)
        if recorded is not None and attempt.attempt not in recorded:
            files.delete()
        raise
    return after.checkpoints[attempt.attempt]


def _recorded(log: LogStore) -> Mapping[str, CheckpointInfo] | None:
    """Return the checkpoints in the log; None if it cannot be read.

    A record of ours may be there although its create found "another": once a snapshot covers it, no create is
    certain any more.
    """
    try:
        return read_tail(log).history.checkpoints
    except (OSError, CheckpointError):
        return None


def _check_step(step: int) -> None:
    if not 1 <= step <= r.MAX_STEP:
        raise ConfigError(
            f"The step is {step}.", hint="Give the number of completed optimizer steps, 1 or more.", step=step
        )


def _checked(new: NewCheckpoint) -> tuple[ShardLayout, bytes]:
    """Return the shard's layout and the state file. Raise FormatError or UnsupportedLeaf."""
    rows = (
        ManifestRow(kind="slice", file="", byte_offset=0, nbytes=0, digest="", slice=part)
        for part in new.tensors
    )
    check_coverage(rows)
    document = {
        "step": new.step,
        "world_size": 1,
        "items": dict(new.items),
        IMPORTED_FROM: dict(new.imported_from),
    }
    return build_layout(new.tensors), encode_tree(document)


@dataclass(slots=True)
class _Files:
    """The files of one attempt of one rank on one node."""

    tier: RemoteTier
    attempt: AttemptId
    progress: ProgressCallback
    rows: list[ManifestRow] = field(default_factory=list)
    entries: list[FileEntry] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """The size of all files but checkpoint.json, as a coordinator counts them."""
        return sum(entry.size_bytes for entry in self.entries)

    def write(
        self, layout: ShardLayout, tensors: Mapping[Slice, ReadSlice], state: bytes
    ) -> CheckpointDescription:
        """Store all files, checkpoint.json last, and return its content."""
        self._put_shard(layout, tensors)
        file = names.state_file(0, 1)
        self._put(file, state)
        self._row("state", file, 0, len(state), digest(state))
        fragment = Fragment(
            attempt=self.attempt,
            node_index=0,
            num_nodes=1,
            world_size=1,
            ranks=(0,),
            files=tuple(sorted(self.entries, key=lambda entry: entry.name)),
            rows=tuple(self.rows),
            metrics={},
        )
        entry = self._put(names.fragment_file(0, 1), encode_fragment(fragment))
        description = CheckpointDescription(
            attempt=self.attempt,
            world_size=1,
            num_nodes=1,
            metrics={},
            files=(entry,),
            root_digest=root_digest([entry]),
        )
        self.tier.put(self.attempt.directory, names.CHECKPOINT_JSON, encode_checkpoint(description))
        return description

    def delete(self) -> None:
        """Delete the files as far as possible; the sweep of the storage path deletes the rest."""
        with contextlib.suppress(Exception):
            self.tier.delete(self.attempt.directory)

    def _put(self, file: str, data: bytes) -> FileEntry:
        self.tier.put(self.attempt.directory, file, data)
        self.entries.append(FileEntry(name=file, size_bytes=len(data), digest=digest(data)))
        return self.entries[-1]

    def _row(
        self, kind: RowKind, file: str, at: int, nbytes: int, found: str, part: Slice | None = None
    ) -> None:
        self.rows.append(
            ManifestRow(kind=kind, file=file, byte_offset=at, nbytes=nbytes, digest=found, slice=part)
        )

    def _put_shard(self, layout: ShardLayout, tensors: Mapping[Slice, ReadSlice]) -> None:
        file, whole = names.shard_file(0, 1), Digester()
        name = f"{names.CHECKPOINTS_DIR}/{self.attempt.directory}/{file}"
        blocks = self._shard(file, layout, tensors, whole)
        size_bytes = self.tier.files.put(name, blocks, max_bytes=layout.size_bytes)
        self.entries.append(FileEntry(name=file, size_bytes=size_bytes, digest=whole.hexdigest()))

    def _shard(
        self, file: str, layout: ShardLayout, tensors: Mapping[Slice, ReadSlice], whole: Digester
    ) -> Iterator[Buffer]:
        """Yield the blocks of the shard, and add a row for each slice on the way."""
        whole.update(layout.header)
        self._row("header", file, 0, len(layout.header), digest(layout.header))
        yield layout.header
        for placed in layout.slices:
            own, nbytes = Digester(), 0
            for block in tensors[placed.slice]():
                view = memoryview(block).cast("B")
                own.update(view)
                whole.update(view)
                nbytes += view.nbytes
                yield view
                self.progress(view.nbytes)
            if nbytes != placed.nbytes:
                raise CorruptionError(
                    f"{placed.slice.key} has {nbytes} bytes in its source, not {placed.nbytes}.",
                    key=placed.slice.key,
                )
            self._row("slice", file, placed.byte_offset, nbytes, own.hexdigest(), placed.slice)


def _ops(
    history: RunHistory,
    run_name: str,
    description: CheckpointDescription,
    size_bytes: int,
    service: str,
    owner: str,
) -> Iterator[r.Op]:
    """Yield the operations after `history`. The commit is durable: no node has ever held the checkpoint."""
    attempt, last = description.attempt, history.session
    if not history.next_seq:
        yield r.Create(run_uid=attempt.run_uid, run_name=run_name, format=FORMAT_VERSION)
    yield r.Epoch(service=service)
    parent = _parent(history, attempt.step)
    yield r.Session(
        session=attempt.session,
        opened_by=attempt.epoch,
        service=service,
        owner=owner,
        retention=last.retention if last else "",
        after=last.session if last else None,
        resumed_from=parent.id.attempt if parent else None,
        world_size=1,
        num_nodes=1,
    )
    yield r.Commit2(
        session=attempt.session,
        step=attempt.step,
        attempt=attempt.attempt,
        level=Level.DURABLE,
        replicas=0,
        world_size=1,
        num_nodes=1,
        size_bytes=size_bytes,
        root_digest=description.root_digest,
        metrics={},
    )
    yield r.Promote(attempt=attempt.attempt, level=Level.DURABLE, replicas=0)  # dates it, too
