"""The checkpoints of a run as its log and its storage path show them. Read-only, and works without a cluster.

Trusts nothing that it reads: the log is replayed with every check of a coordinator, and `verify` reads each
byte of a checkpoint against its digest. It refuses to guess: a log with a gap or a damaged record is an
error, never a shorter history.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from ray_ckpt.config import local_path
from ray_ckpt.core.history import RunHistory, SessionInfo
from ray_ckpt.errors import ConfigError, CorruptionError, FormatError, StoragePathError
from ray_ckpt.format import names, records
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import (
    MAX_DESCRIPTION_BYTES,
    MAX_FRAGMENT_BYTES,
    CheckpointDescription,
    decode_checkpoint,
    decode_fragment,
    rows_table,
)
from ray_ckpt.storage.log_store import PosixLogStore, read_covered, read_run
from ray_ckpt.types import CheckpointInfo, FileEntry, Fragment, Level
from ray_ckpt.verify import Damage, Progress, VerifyReport, is_fragment, read_whole, verify_directory

__all__ = [
    "Catalog",
    "CheckpointView",
    "Damage",
    "SessionInfo",
    "VerifyReport",
    "find_runs",
    "is_run",
    "to_datetime",
    "verify_directory",
]

_MAX_TIME_S = 253_402_300_800.0  # the year 10000: what datetime can hold
_MAX_NAMED_RUNS = 10  # in a hint


# The catalog


class Catalog:
    """A run's log, read once from its newest snapshot on. `path` is `<storage_path>/<run>` or its `ray_ckpt`.

    `catalog[30]` is the newest live checkpoint of step 30, the current lineage first; iterating gives the
    live checkpoints in log order. Raises ConfigError if there is no run at `path`, StoragePathError if its
    log cannot be read, FormatError if its log is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _run_root(path)
        self._store = PosixLogStore(self.path / names.LOG_DIR)
        self.refresh()

    def refresh(self) -> None:
        """Read the log again. If that fails, the catalog stays as it was."""
        try:
            listed = [seq for name in self._store.list() if (seq := names.record_seq(name)) is not None]
            history, found = read_run(self._store)  # after the listing: all that was listed must be here
        except OSError as error:
            raise self._unreadable(error) from error
        base = history.copy()
        for record, record_digest in found:
            history.apply(record, record_digest)
        if max(listed, default=-1) >= history.next_seq:
            raise FormatError(
                f"The log in {self.path} has no record {history.next_seq}, but record {max(listed)}.",
                hint="Bring the missing file back from a backup; nothing after it can be trusted.",
                path=str(self.path),
            )
        if history.next_seq == 0:
            raise ConfigError(
                f"The log in {self.path} has no records.", hint="The run has not begun.", path=str(self.path)
            )
        self._base, self._history, self._newest = base, history, tuple(record for record, _ in found)
        self._branch = _whole_lineage(history)

    def _unreadable(self, error: OSError) -> StoragePathError:
        return StoragePathError(
            f"The log in {self.path} cannot be read: {error}.",
            hint="Checkpoints are private to the user that trained; read them as that user.",
            path=str(self.path),
        )

    @property
    def run_name(self) -> str:
        return self._history.run_name

    @property
    def run_uid(self) -> str:
        return self._history.run_uid

    @property
    def sessions(self) -> tuple[SessionInfo, ...]:
        """The training groups of this run, in the order in which they began."""
        return tuple(self._history.sessions.values())

    @property
    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """The live checkpoints, in log order."""
        return self._history.live()

    @property
    def lineage(self) -> tuple[CheckpointInfo, ...]:
        """The live checkpoints that the current session has or comes from, in log order."""
        return self._history.lineage()

    def list(self, *, all: bool = False) -> tuple[CheckpointInfo, ...]:
        """Checkpoints in log order; with `all` also those that are lost, retired or collected."""
        return tuple(self._history.checkpoints.values()) if all else self.checkpoints

    def find(self, step: int, *, all: bool = False) -> CheckpointView | None:
        """The newest checkpoint of `step`: live before others, on the current lineage before others."""
        found = [c for c in self.list(all=all) if c.step == step]
        found.sort(key=lambda c: (c.state == "live", c.id.attempt in self._branch, c.seq))
        return self.view(found[-1]) if found else None

    def newest(self, level: Level = Level.LOCAL) -> CheckpointView | None:
        """The checkpoint to resume from, of those that have reached `level`; None if there is none."""
        found = [c for c in self.lineage if c.level >= level]
        return self.view(found[-1]) if found else None

    def view(self, info: CheckpointInfo) -> CheckpointView:
        folder = self.path / names.CHECKPOINTS_DIR / info.directory
        there = info.level is Level.DURABLE and (
            info.state == "live" or (info.state != "collected" and folder.is_dir())
        )
        return CheckpointView(info=info, path=folder if there else None)

    def __getitem__(self, step: int) -> CheckpointView:
        if (view := self.find(step)) is not None:
            return view
        steps = sorted({c.step for c in self.checkpoints}, key=lambda s: abs(s - step))[:5]
        raise ConfigError(
            f"Run {self.run_name} has no live checkpoint of step {step}.",
            hint=f"The nearest are {', '.join(map(str, sorted(steps)))}." if steps else "It has none at all.",
            step=step,
        )

    def __contains__(self, step: object) -> bool:
        return any(c.step == step for c in self.checkpoints)

    def __iter__(self) -> Iterator[CheckpointView]:
        return map(self.view, self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __repr__(self) -> str:
        return f"Catalog({str(self.path)!r}, run_name={self.run_name!r}, {len(self)} live checkpoints)"

    def to_arrow(self) -> pa.Table:
        """One row per checkpoint that the log knows, in log order, whatever its `state`.

        `resumed` says whether it is on the current lineage: whether the newest state comes from it. Metrics
        are columns `metric.<name>`, null where a checkpoint has none of that name.
        """
        known = self.list(all=True)
        columns: dict[str, pa.Array] = {
            "step": pa.array([c.step for c in known], pa.int64()),
            "session": pa.array([c.id.session for c in known], pa.int64()),
            "attempt": pa.array([c.id.attempt for c in known], pa.string()),
            "state": pa.array([c.state for c in known], pa.string()),
            "level": pa.array([c.level.label for c in known], pa.string()),
            "replicas": pa.array([c.replicas for c in known], pa.int64()),
            "world_size": pa.array([c.world_size for c in known], pa.int64()),
            "num_nodes": pa.array([c.num_nodes for c in known], pa.int64()),
            "size_bytes": pa.array([c.size_bytes for c in known], pa.int64()),
            "committed_at": _times(c.committed_at_s for c in known),
            "root_digest": pa.array([c.root_digest for c in known], pa.string()),
            "directory": pa.array([c.directory for c in known], pa.string()),
            "on_storage": pa.array([self.view(c).path is not None for c in known], pa.bool_()),
            "resumed": pa.array([c.id.attempt in self._branch for c in known], pa.bool_()),
        }
        for name in sorted({name for c in known for name in c.metrics}):
            columns[f"metric.{name}"] = pa.array([c.metrics.get(name) for c in known], pa.float64())
        return pa.table(columns)

    def to_pandas(self) -> Any:
        """`to_arrow` as a pandas DataFrame."""
        return self.to_arrow().to_pandas()

    def events(self) -> pa.Table:
        """The log, one row per record; what an op lacks is null, `text` is for people.

        Only records that are still there: of a long log those between the first and the last day or two are
        in its snapshots alone.
        """
        try:
            covered = read_covered(self._store, self._base)
        except OSError as error:
            raise self._unreadable(error) from error
        log = (*(record for record, _ in covered), *self._newest)
        rows = [self._event(record) for record in log]
        columns = {
            "seq": pa.array([r.seq for r in log], pa.int64()),
            "time": _times(r.time_s for r in log),
            "epoch": pa.array([r.epoch for r in log], pa.int64()),
            "writer": pa.array([r.writer for r in log], pa.string()),
        }
        for name, kind in _EVENT_COLUMNS.items():
            columns[name] = pa.array([row.get(name) for row in rows], kind)
        return pa.table(columns)

    def _event(self, record: records.LogRecord) -> dict[str, Any]:
        """The columns of a record that depend on its op."""
        op = record.op
        attempt = getattr(op, "attempt", None)
        info = self._history.checkpoints.get(attempt) if attempt else None
        level = getattr(op, "level", None)
        return {
            "op": type(op).__name__.lower(),
            "step": info.step if info else None,
            "attempt": attempt,
            "session": info.id.session if info else getattr(op, "session", None),
            "level": level.label if level else None,
            "text": self._event_text(op),
        }

    def _event_text(self, op: records.Op) -> str:
        match op:
            case records.Create(run_name=name):
                return f"run {name}"
            case records.Session(resumed_from=None, world_size=world, num_nodes=nodes):
                return f"from scratch, {world} ranks on {nodes} nodes"
            case records.Session(resumed_from=attempt, world_size=world, num_nodes=nodes):
                step = self._history.checkpoints[str(attempt)].step
                return f"from step {step}, {world} ranks on {nodes} nodes"
            case records.Commit(size_bytes=size, replicas=copies):
                return f"{size} bytes, {copies} replicas"
            case records.Promote(replicas=copies):
                return f"{copies} replicas"
            case records.Epoch(service=service):
                return service
            case records.Pin(owner=owner) | records.Unpin(owner=owner):
                return owner
            case records.Lost(reason=reason) | records.Retired(reason=reason):
                return reason
            case records.Note(text=text):
                return text
            case _:
                return ""


_EVENT_COLUMNS: Mapping[str, pa.DataType] = {
    "op": pa.string(),
    "step": pa.int64(),
    "attempt": pa.string(),
    "session": pa.int64(),
    "level": pa.string(),
    "text": pa.string(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """One checkpoint: what the log says of it and, once it is durable, its files.

    `path` is its folder on the storage path, None while it is in the cluster only. Reading files of such a
    one is a ConfigError; damage is a CorruptionError that names the file.
    """

    info: CheckpointInfo
    path: Path | None

    def description(self) -> CheckpointDescription:
        """What its `checkpoint.json` says, checked against the log."""
        data = read_whole(self._folder() / names.CHECKPOINT_JSON, MAX_DESCRIPTION_BYTES)
        description = decode_checkpoint(data)
        if (description.attempt, description.root_digest) != (self.info.id, self.info.root_digest):
            raise CorruptionError(
                f"{self._folder() / names.CHECKPOINT_JSON} does not describe what the log committed.",
                hint="Run `ray-ckpt verify` on it, and restore another step.",
                file=names.CHECKPOINT_JSON,
            )
        return description

    def fragments(self) -> tuple[Fragment, ...]:
        """Its manifest, by node, each fragment checked against its digest in `checkpoint.json`."""
        listed = [f for f in self.description().files if is_fragment(f.name)]
        return tuple(self._fragment(entry) for entry in listed)

    def slices(self) -> pa.Table:
        """Its manifest as one table, a row per byte range; see format.manifest.COLUMNS."""
        return rows_table(self.fragments())

    def verify(self, progress: Progress | None = None) -> tuple[Damage, ...]:
        """Everything that is wrong with its files; empty if each byte is as it was saved."""
        folder = self._folder()
        return verify_directory(folder, root_digest=self.info.root_digest, progress=progress).damages

    def _fragment(self, entry: FileEntry) -> Fragment:
        data = read_whole(self._folder() / entry.name, MAX_FRAGMENT_BYTES)
        if digest(data) != entry.digest:
            raise CorruptionError(
                f"{self._folder() / entry.name} differs from its digest.",
                hint="Run `ray-ckpt verify` on it, and restore another step.",
                file=entry.name,
            )
        return decode_fragment(data)

    def _folder(self) -> Path:
        if self.path is None:
            where = "in the cluster only" if self.info.state == "live" else self.info.state
            raise ConfigError(
                f"Step {self.info.step} is {where}; the storage path has no files of it.",
                hint="Only live checkpoints that are durable can be read here.",
                step=self.info.step,
            )
        return self.path


def find_runs(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The folders of the runs directly below a storage path, by name."""
    try:
        return tuple(sorted(child for child in _absolute(path).iterdir() if _log_in(child) is not None))
    except OSError:
        return ()


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether `Catalog(path)` finds a log there."""
    return _log_in(_absolute(path)) is not None


def _run_root(path: str | os.PathLike[str]) -> Path:
    folder = _absolute(path)
    if (root := _log_in(folder)) is not None:
        return root
    found = [run.name for run in find_runs(folder)]
    more = f" and {len(found) - _MAX_NAMED_RUNS} more" if len(found) > _MAX_NAMED_RUNS else ""
    hint = "Give <storage_path>/<run name>, as in the RunConfig of the training."
    if found:
        hint = f"It holds the runs {', '.join(found[:_MAX_NAMED_RUNS])}{more}; open {folder / found[0]}, say."
    raise ConfigError(f"There is no run at {folder}.", hint=hint, path=str(folder))


def _log_in(folder: Path) -> Path | None:
    """The folder that holds the log of the run at `folder`."""
    roots = [folder / names.SERVICE_DIR, *([folder] if folder.name == names.SERVICE_DIR else [])]
    return next((root for root in roots if (root / names.LOG_DIR).is_dir()), None)


def _absolute(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    return local_path(text if "://" in text else str(Path(text).expanduser().absolute()))


def _whole_lineage(history: RunHistory) -> frozenset[str]:
    """Attempts on the current lineage, those that are gone by now included."""
    ends = history.branch_points()
    return frozenset(name for name, c in history.checkpoints.items() if c.seq <= ends.get(c.id.session, -1))


def to_datetime(time_s: float) -> datetime | None:
    """Unix seconds as a time in UTC; None for what no calendar holds."""
    return datetime.fromtimestamp(time_s, UTC) if 0 <= time_s < _MAX_TIME_S else None


def _times(times_s: Iterable[float]) -> pa.Array:
    return pa.array([to_datetime(time_s) for time_s in times_s], pa.timestamp("us", tz="UTC"))
