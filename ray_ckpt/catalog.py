"""The checkpoints of a run as its log and its storage path show them. Read-only, and works without a cluster.

Trusts nothing that it reads: the log is replayed with every check of a coordinator, and `verify` reads each
byte of a checkpoint against its digest. It refuses to guess: a log with a gap or a damaged record is an
error, never a shorter history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa

from ray_ckpt.core.history import RunHistory, SessionInfo
from ray_ckpt.errors import ConfigError, CorruptionError, FormatError
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
from ray_ckpt.lazy import LazyTensor, SavedTensors
from ray_ckpt.location import Location
from ray_ckpt.storage.file_store import FileStore
from ray_ckpt.storage.log_store import LogStore, MemoryLogStore, read_covered, read_run
from ray_ckpt.storage.remote import RemoteTier, open_store
from ray_ckpt.types import CheckpointInfo, FileEntry, Fragment, Level
from ray_ckpt.verify import (
    CheckpointFiles,
    Damage,
    Progress,
    StoragePath,
    VerifyReport,
    is_fragment,
    locate,
    readable,
    verify_directory,
    verify_files,
)

__all__ = [
    "Catalog",
    "CheckpointView",
    "Damage",
    "SessionInfo",
    "VerifyReport",
    "find_runs",
    "to_datetime",
    "verify_directory",
]

REQUESTS_AT_A_TIME = 16  # for small files of a store that answers late
MAX_FOLDERS = 1000  # of a storage path that are looked into for runs
_MAX_TIME_S = 253_402_300_800.0  # the year 10000: what datetime can hold
_MAX_NAMED_RUNS = 10  # in a hint
MAX_HTML_ROWS = 20  # of a table in a notebook
MAX_HTML_METRICS = 5  # of a checkpoint there


# The catalog


class Catalog:
    """A run's log, read once from its newest snapshot on. `path` is `<storage_path>/<run>` or its `ray_ckpt`.

    It may be a folder or a URL, as the training's storage path; `storage_options` are those of RunOptions.
    `catalog[30]` is the newest live checkpoint of step 30, the current lineage first; iterating gives the
    live checkpoints in log order. Raises ConfigError if there is no run at `path` or no way to open it,
    StoragePathError if its log cannot be read, FormatError if its log is damaged.
    """

    def __init__(self, path: StoragePath, storage_options: Mapping[str, str] | None = None) -> None:
        run = _run_at(locate(path), storage_options)
        self._tier = RemoteTier(run / names.SERVICE_DIR, storage_options)
        self.refresh()

    @property
    def where(self) -> str:
        """The folder that holds the log and the checkpoints: a path or a URL."""
        return self._tier.where

    @property
    def path(self) -> Path | None:
        """`where`, if it is a folder of this machine."""
        root = self._tier.root
        return root.folder if root.is_posix else None

    def refresh(self) -> None:
        """Read the log again. If that fails, the catalog stays as it was."""
        with readable(self._tier.root):
            listed = self._tier.log.list()
            # after the listing: all that was listed must be here
            history, found = read_run(self._ahead(_read_first(listed)))
        base = history.copy()
        for record, record_digest in found:
            history.apply(record, record_digest)
        last = max(_seqs(listed), default=-1)
        if last >= history.next_seq:
            raise FormatError(
                f"The log in {self.where} has no record {history.next_seq}, but record {last}.",
                hint="Bring the missing file back from a backup; nothing after it can be trusted.",
                path=self.where,
            )
        if history.next_seq == 0:
            raise ConfigError(
                f"The log in {self.where} has no records.", hint="The run has not begun.", path=self.where
            )
        self._base, self._history, self._newest = base, history, tuple(record for record, _ in found)
        self._branch = _whole_lineage(history)

    def _ahead(self, wanted: Iterable[str]) -> LogStore:
        """The log, with `wanted` fetched at once where each answer takes long. OSError."""
        log = self._tier.log
        return log if self._tier.root.is_posix else _Fetched(log, wanted)

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
        """What there is of a checkpoint; the store is asked only if it was retired or lost."""
        there = _may_have_files(info)
        if there and info.state != "live":
            with readable(self._tier.root):
                folder = f"{names.CHECKPOINTS_DIR}/{info.directory}"
                there = bool(self._tier.files.children(folder).files)
        return self._view(info, there)

    def views(self, *, all: bool = False) -> tuple[CheckpointView, ...]:
        """As `list`. The folders of what was retired or lost are listed at once, if there are any."""
        known = self.list(all=all)
        folders: tuple[str, ...] = ()
        if any(_may_have_files(info) and info.state != "live" for info in known):
            with readable(self._tier.root):
                folders = self._tier.files.children(names.CHECKPOINTS_DIR).folders
        there = {folder.rpartition("/")[2] for folder in folders}
        return tuple(
            self._view(info, _may_have_files(info) and (info.state == "live" or info.directory in there))
            for info in known
        )

    def _view(self, info: CheckpointInfo, there: bool) -> CheckpointView:
        return CheckpointView(info=info, tier=self._tier if there else None)

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
        return iter(self.views())

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __repr__(self) -> str:
        return f"Catalog({self.where!r}, run_name={self.run_name!r}, {len(self)} live checkpoints)"

    def _repr_html_(self) -> str:
        """For a notebook: the newest live checkpoints. What a log says is escaped."""
        shown = self.checkpoints[-MAX_HTML_ROWS:]
        newest = self.lineage[-1:]
        rows = [
            (
                f"{info.step} (newest)" if info in newest else info.step,
                info.level.label,
                info.id.session,
                info.world_size,
                info.size_bytes,
                to_datetime(info.committed_at_s) or "",
                _metrics_text(info.metrics),
            )
            for info in reversed(shown)
        ]
        title = f"run {self.run_name}: {len(self)} live checkpoints in {self.where}"
        headers = ("step", "level", "session", "ranks", "bytes", "saved at", "metrics")
        return _html_table(title, headers, rows, len(self) - len(shown))

    def to_arrow(self) -> pa.Table:
        """One row per checkpoint that the log knows, in log order, whatever its `state`.

        `resumed` says whether it is on the current lineage: whether the newest state comes from it. Metrics
        are columns `metric.<name>`, null where a checkpoint has none of that name.
        """
        views = self.views(all=True)
        known = [view.info for view in views]
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
            "on_storage": pa.array([view.where is not None for view in views], pa.bool_()),
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
        with readable(self._tier.root):
            seqs = (seq for seq in _seqs(self._tier.log.list()) if seq < self._base.next_seq)
            covered = read_covered(self._ahead(map(names.record_file, seqs)), self._base)
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
            case records.Annotated(metrics=metrics):
                return ", ".join(f"{name}={value:g}" for name, value in metrics.items())
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

    `tier` is None while it is in the cluster only. Reading files of such a one is a ConfigError; damage is a
    CorruptionError that names the file.
    """

    info: CheckpointInfo
    tier: RemoteTier | None

    @property
    def where(self) -> str | None:
        """Its folder on the storage path: a path or a URL."""
        return None if self.tier is None else str(self._location(self.tier))

    @property
    def path(self) -> Path | None:
        """`where`, if it is a folder of this machine."""
        return None if self.tier is None or not self.tier.root.is_posix else self._location(self.tier).folder

    def files(self) -> CheckpointFiles:
        """Nothing is asked of the store yet."""
        if self.tier is None:
            there = "in the cluster only" if self.info.state == "live" else self.info.state
            raise ConfigError(
                f"Step {self.info.step} is {there}; the storage path has no files of it.",
                hint="Only live checkpoints that are durable can be read here.",
                step=self.info.step,
            )
        folder = f"{names.CHECKPOINTS_DIR}/{self.info.directory}"
        return CheckpointFiles(self._location(self.tier), self.tier.files, folder)

    def description(self) -> CheckpointDescription:
        """What its `checkpoint.json` says, checked against the log."""
        return self._description(self.files())

    def fragments(self) -> tuple[Fragment, ...]:
        """Its manifest, by node, each fragment checked against its digest in `checkpoint.json`."""
        files = self.files()
        listed = [f for f in self._description(files).files if is_fragment(f.name)]
        with ThreadPoolExecutor(REQUESTS_AT_A_TIME, thread_name_prefix="ray_ckpt-manifest") as pool:
            return tuple(pool.map(lambda entry: _fragment(files, entry), listed))

    def slices(self) -> pa.Table:
        """Its manifest as one table, a row per byte range; see format.manifest.COLUMNS."""
        return rows_table(self.fragments())

    def tensors(self) -> SavedTensors:
        """Its tensors by their full names; of them nothing is read yet. The manifest read last is kept."""
        if self.tier is None:
            self.files()  # which says why there are none
        assert self.tier is not None
        attempt, found = _LAST_TENSORS.get(self.tier, ("", None))
        if found is None or attempt != self.info.id.attempt:
            found = SavedTensors(self.files(), (row for f in self.fragments() for row in f.rows))
            _LAST_TENSORS[self.tier] = (self.info.id.attempt, found)
        return found

    def __getitem__(self, name: str) -> LazyTensor:
        """A tensor by its full name, such as `model.layers.0.weight`, to be read whole or in part.

        ConfigError, with the nearest names, if there is none of that name.
        """
        return self.tensors()[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors())

    def verify(self, progress: Progress | None = None) -> tuple[Damage, ...]:
        """Everything that is wrong with its files; empty if each byte is as it was saved."""
        return verify_files(self.files(), root_digest=self.info.root_digest, progress=progress).damages

    def _repr_html_(self) -> str:
        """For a notebook: what the log says of it, escaped. No file of it is read."""
        info = self.info
        facts = (
            ("step", info.step),
            ("attempt", info.id.attempt),
            ("session", info.id.session),
            ("state", info.state),
            ("level", info.level.label),
            ("ranks", f"{info.world_size} on {info.num_nodes} nodes"),
            ("bytes", info.size_bytes),
            ("saved at", to_datetime(info.committed_at_s) or ""),
            ("metrics", _metrics_text(info.metrics)),
            ("pins", ", ".join(islice(sorted(info.pins), MAX_HTML_ROWS))),
            ("root digest", info.root_digest),
            ("where", self.where or "no files on the storage path"),
        )
        return _html_table(f"checkpoint of step {info.step}", (), facts, 0)

    def _location(self, tier: RemoteTier) -> Location:
        return tier.root / names.CHECKPOINTS_DIR / self.info.directory

    def _description(self, files: CheckpointFiles) -> CheckpointDescription:
        description = decode_checkpoint(files.read_whole(names.CHECKPOINT_JSON, MAX_DESCRIPTION_BYTES))
        if (description.attempt, description.root_digest) != (self.info.id, self.info.root_digest):
            raise CorruptionError(
                f"{files.place(names.CHECKPOINT_JSON)} does not describe what the log committed.",
                hint=_DAMAGED,
                file=names.CHECKPOINT_JSON,
            )
        return description


_DAMAGED = "Run `ray-ckpt verify` on it, and restore another step."

_LAST_TENSORS: WeakKeyDictionary[RemoteTier, tuple[str, SavedTensors]] = WeakKeyDictionary()
# of each run that is open, with its attempt: views are made anew each time, and a manifest may be large


def _fragment(files: CheckpointFiles, entry: FileEntry) -> Fragment:
    data = files.read_whole(entry.name, MAX_FRAGMENT_BYTES)
    if digest(data) != entry.digest:
        raise CorruptionError(
            f"{files.place(entry.name)} differs from its digest.", hint=_DAMAGED, file=entry.name
        )
    return decode_fragment(data)


def _may_have_files(info: CheckpointInfo) -> bool:
    """On the storage path: a live one has them, and another one until they are deleted."""
    return info.level is Level.DURABLE and info.state != "collected"


# Runs of a storage path


def find_runs(path: StoragePath, storage_options: Mapping[str, str] | None = None) -> tuple[Location, ...]:
    """The folders of the runs directly below a storage path, by name; none if it is not there.

    Looks into the first MAX_FOLDERS folders, with a request each. StoragePathError if the path cannot be
    read, ConfigError if it cannot be opened.
    """
    location = locate(path)
    with readable(location):
        return _runs_in(location, open_store(location, storage_options)[0])


def _run_at(location: Location, storage_options: Mapping[str, str] | None) -> Location:
    """The folder of the run that somebody means by `location`. ConfigError if there is none."""
    with readable(location):
        files = open_store(location, storage_options)[0]
        if (run := _run_in(location, files)) is not None:
            return run
        found = [run.name for run in _runs_in(location, files)]
    more = f" and {len(found) - _MAX_NAMED_RUNS} more" if len(found) > _MAX_NAMED_RUNS else ""
    hint = "Give <storage_path>/<run name>, as in the RunConfig of the training."
    if found:
        hint = (
            f"It holds the runs {', '.join(found[:_MAX_NAMED_RUNS])}{more}; open {location / found[0]}, say."
        )
    raise ConfigError(f"There is no run at {location}.", hint=hint, path=str(location))


def _runs_in(location: Location, files: FileStore) -> tuple[Location, ...]:
    folders = sorted(files.children().folders)[:MAX_FOLDERS]

    def is_run_folder(folder: str) -> bool:
        try:
            return _has_log(files, f"{folder}/{names.SERVICE_DIR}")
        except PermissionError:  # somebody else's
            return False

    with ThreadPoolExecutor(REQUESTS_AT_A_TIME, thread_name_prefix="ray_ckpt-runs") as pool:
        found = zip(folders, pool.map(is_run_folder, folders), strict=True)
        return tuple(location / folder for folder, it_is in found if it_is)


def _run_in(location: Location, files: FileStore) -> Location | None:
    """The run whose folder is `location`, or whose `ray_ckpt` it is; `files` are those below it."""
    if _has_log(files, names.SERVICE_DIR):
        return location
    return location.parent if location.name == names.SERVICE_DIR and _has_log(files, "") else None


def _has_log(files: FileStore, folder: str) -> bool:
    log = f"{folder}/{names.LOG_DIR}" if folder else names.LOG_DIR
    return log in files.children(folder).folders


# Reading


class _Fetched(MemoryLogStore):
    """For reading: what was fetched at once, and the store behind it for everything else."""

    def __init__(self, store: LogStore, wanted: Iterable[str]) -> None:
        super().__init__()
        self._store = store
        asked = tuple(wanted)
        with ThreadPoolExecutor(REQUESTS_AT_A_TIME, thread_name_prefix="ray_ckpt-log") as pool:
            for name, data in zip(asked, pool.map(store.read, asked), strict=True):
                if data is not None:
                    self.objects[name] = data

    def read(self, name: str) -> bytes | None:
        return self.objects[name] if name in self.objects else self._store.read(name)

    def list(self, prefix: str = "") -> tuple[str, ...]:
        return self._store.list(prefix)


def _seqs(listed: Iterable[str]) -> Iterator[int]:
    """The numbers of the records among the names in a log."""
    return (seq for name in listed if (seq := names.record_seq(name)) is not None)


def _read_first(listed: Iterable[str]) -> Iterator[str]:
    """What a reader of the run asks for if all is well: record 0, the newest snapshot, what follows it."""
    listed = tuple(listed)
    newest = max((seq for name in listed if (seq := names.snapshot_seq(name)) is not None), default=-1)
    if newest >= 0:
        yield names.snapshot_file(newest)
    yield from (names.record_file(seq) for seq in _seqs(listed) if seq == 0 or seq > newest)


def _whole_lineage(history: RunHistory) -> frozenset[str]:
    """Attempts on the current lineage, those that are gone by now included."""
    ends = history.branch_points()
    return frozenset(name for name, c in history.checkpoints.items() if c.seq <= ends.get(c.id.session, -1))


def to_datetime(time_s: float) -> datetime | None:
    """Unix seconds as a time in UTC; None for what no calendar holds."""
    return datetime.fromtimestamp(time_s, UTC) if 0 <= time_s < _MAX_TIME_S else None


def _times(times_s: Iterable[float]) -> pa.Array:
    return pa.array([to_datetime(time_s) for time_s in times_s], pa.timestamp("us", tz="UTC"))


# HTML


def _html_table(title: str, headers: Iterable[str], rows: Iterable[Iterable[object]], left_out: int) -> str:
    """A small table without styles of its own; everything is escaped."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    more = f"<p>and {left_out} older ones</p>" if left_out else ""
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table><caption>{escape(title)}</caption>{top}<tbody>{body}</tbody></table>{more}"


def _metrics_text(metrics: Mapping[str, float]) -> str:
    """The first few."""
    text = ", ".join(f"{name} {metrics[name]:.5g}" for name in islice(sorted(metrics), MAX_HTML_METRICS))
    return text + (", ..." if len(metrics) > MAX_HTML_METRICS else "")
