"""Arrow tables and Parquet files with the facts in a log and its manifests.

`checkpoints`, `sessions` and `events` come from the log, `shards` (files) and `slices` from manifests.
`step` and `attempt` join the tables. Times are timestamps in UTC, durations seconds, sizes bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_ckpt.core.history import RunHistory
from ray_ckpt.format import records
from ray_ckpt.format.manifest import rows_table
from ray_ckpt.format.records import MAX_TIME_S
from ray_ckpt.storage.output_file import whole_file
from ray_ckpt.texts import count_text, tiers_text, to_datetime
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, Fragment, ManifestRow, SessionInfo

TableName: TypeAlias = Literal["checkpoints", "shards", "slices", "events", "sessions"]
TABLES: tuple[TableName, ...] = get_args(TableName)

ROW_GROUP_ROWS = 131_072  # rows of a Parquet file in memory at a time: about 30 MB of slices
MAX_CUTS = 8  # different cuts per checkpoint; a layout has three or four
MAX_HTML_ROWS = 20  # rows of a table in a notebook
MAX_HTML_METRICS = 5  # metrics of a checkpoint in a notebook

_TIME = pa.timestamp("us", tz="UTC")
_STRINGS = pa.list_(pa.string())
_NUMBERS = pa.map_(pa.string(), pa.float64())
_RANK = re.compile(r"(?:shard|state)-(\d+)")


# Tables from the log


def checkpoints_table(
    known: Sequence[CheckpointInfo],
    history: RunHistory,
    *,
    on_storage: Sequence[bool],
    cuts: Mapping[str, Sequence[str]],
) -> pa.Table:
    """Return a table with one row per checkpoint of `known`.

    `on_storage` is true for each checkpoint with files on the storage path; `cuts` has the `Cuts.texts` by
    attempt. Metrics are columns `metric.<name>`, null where a checkpoint has no metric of that name.
    """
    ends = history.branch_points()
    branches = _branches(history)
    sessions = [history.sessions[c.id.session] for c in known]
    columns: dict[str, pa.Array] = {
        "step": pa.array([c.id.step for c in known], pa.int64()),
        "session": pa.array([c.id.session for c in known], pa.int64()),
        "attempt": pa.array([c.id.attempt for c in known], pa.string()),
        "seq": pa.array([c.seq for c in known], pa.int64()),
        "state": pa.array([c.state for c in known], pa.string()),
        "level": pa.array([c.level.label for c in known], pa.string()),
        "tiers": pa.array(list(map(_tiers, known, on_storage)), _STRINGS),
        "replicas": pa.array([c.replicas for c in known], pa.int64()),
        "parity": pa.array([c.parity or None for c in known], pa.string()),
        "world_size": pa.array([c.world_size for c in known], pa.int64()),
        "num_nodes": pa.array([c.num_nodes for c in known], pa.int64()),
        "mesh": pa.array([c.mesh or None for c in known], pa.string()),
        "cuts": pa.array([cuts.get(c.id.attempt) for c in known], _STRINGS),
        "size_bytes": pa.array([c.size_bytes for c in known], pa.int64()),
        "shared_bytes": pa.array([c.shared_bytes for c in known], pa.int64()),
        "exported": pa.array([c.exported or None for c in known], pa.string()),
        "committed_at": _times([c.committed_at_s for c in known]),
        "durable_at": _times([c.durable_at_s for c in known]),
        "verified_at": _times([c.verified_at_s for c in known]),
        "drilled_at": _times([c.drilled_at_s for c in known]),
        "drill": pa.array([c.drill or None for c in known], pa.string()),
        "damaged": pa.array([c.damaged or None for c in known], pa.string()),
        "suspect": pa.array([c.suspect or None for c in known], pa.string()),
        "stall_s": pa.array([c.stall_s for c in known], pa.float64()),
        "capture_s": pa.array([c.capture_s for c in known], pa.float64()),
        "local_s": pa.array([c.local_s for c in known], pa.float64()),
        "replicate_s": pa.array([c.replicate_s for c in known], pa.float64()),
        "drain_s": pa.array([c.drain_s for c in known], pa.float64()),
        "resumed_from_step": pa.array([_resumed_from_step(s, history) for s in sessions], pa.int64()),
        "branch": pa.array([branches[s.session] for s in sessions], pa.int64()),
        "on_lineage": pa.array([c.seq <= ends.get(c.id.session, -1) for c in known], pa.bool_()),
        "pins": pa.array(list(map(_pins, known)), _PINS),
        "root_digest": pa.array([c.root_digest for c in known], pa.string()),
        "directory": pa.array([c.directory for c in known], pa.string()),
        "on_storage": pa.array(on_storage, pa.bool_()),
    }
    for name in sorted({name for c in known for name in c.metrics}):
        columns[f"metric.{name}"] = pa.array([c.metrics.get(name) for c in known], pa.float64())
    return pa.table(columns)


_PINS = pa.list_(pa.struct({"owner": pa.string(), "until": _TIME}))


def _tiers(info: CheckpointInfo, on_storage: bool) -> tuple[str, ...]:
    """Return the tiers that hold a checkpoint by the log, which does not record the loss of local copies.

    With parity no other node has a copy.
    """
    has_copies = info.replicas > 0 and not info.parity
    nodes = () if info.state != "live" else ("local", "peer") if has_copies else ("local",)
    return (*nodes, "remote") if on_storage else nodes


def _pins(info: CheckpointInfo) -> list[dict[str, Any]]:
    """Return all pins in the log, including expired ones; a pin without a time never expires."""
    return [{"owner": owner, "until": to_datetime(end_s)} for owner, end_s in sorted(info.pins.items())]


def sessions_table(history: RunHistory) -> pa.Table:
    """Return a table with one row per session, in log order: the session's lineage, group, restore and end.

    `branch` is the first session of the session's branch. A session that resumed from the last commit of a
    branch continues that branch; any other session starts a new one.
    """
    known = history.sessions.values()
    ends, branches = history.branch_points(), _branches(history)
    counts = Counter(c.id.session for c in history.checkpoints.values())
    ended = [info.ended for info in known]
    return pa.table(
        {
            "session": pa.array(history.sessions, pa.int64()),
            "parent": pa.array([s.parent for s in known], pa.int64()),
            "resumed_from": pa.array([s.resumed_from for s in known], pa.string()),
            "resumed_from_step": pa.array([_resumed_from_step(s, history) for s in known], pa.int64()),
            "origin_step": pa.array([s.origin_step for s in known], pa.int64()),
            "branch": pa.array([branches[s] for s in history.sessions], pa.int64()),
            "on_lineage": pa.array([s in ends for s in history.sessions], pa.bool_()),
            "world_size": pa.array([s.world_size for s in known], pa.int64()),
            "num_nodes": pa.array([s.num_nodes for s in known], pa.int64()),
            "num_checkpoints": pa.array([counts[s] for s in history.sessions], pa.int64()),
            "opened_at": _times([s.opened_at_s for s in known]),
            "restored_at": _times([s.restored_at_s for s in known]),
            "read_bytes": pa.array([sorted(s.read_bytes.items()) for s in known], _NUMBERS),
            "first_step_at": _times([e.first_at_s if e else None for e in ended]),
            "last_step_at": _times([e.last_at_s if e else None for e in ended]),
            "last_step": pa.array([e.step if e else None for e in ended], pa.int64()),
            "stalled_s": pa.array([e.stalled_s if e else None for e in ended], pa.float64()),
            "end_cause": pa.array([e.cause if e else None for e in ended], pa.string()),
            "opened_by": pa.array([s.opened_by for s in known], pa.int64()),
            "service": pa.array([s.service for s in known], pa.string()),
            "owner": pa.array([s.owner for s in known], pa.string()),
            "retention": pa.array([s.retention for s in known], pa.string()),
        }
    )


def _resumed_from_step(session: SessionInfo, history: RunHistory) -> int | None:
    return history.checkpoints[session.resumed_from].step if session.resumed_from else None


def _branches(history: RunHistory) -> dict[int, int]:
    """Return the branch of each session. All commits of a session precede the start of the next one."""
    last = {c.id.session: name for name, c in history.checkpoints.items()}
    tips: dict[int, str | None] = {}  # the last commit of each branch so far
    found: dict[int, int] = {}
    for number, info in history.sessions.items():
        branch, source = number, info.resumed_from
        if source is not None:
            before = found[history.checkpoints[source].id.session]
            branch = before if tips[before] == source else number
        found[number] = branch
        tips[branch] = last.get(number, source)
    return found


def events_table(log: Sequence[records.LogRecord], history: RunHistory) -> pa.Table:
    """Return a table with one row per record of `log`; fields that an op lacks are null."""
    ops = [record.op for record in log]
    attempts = [getattr(op, "attempt", None) for op in ops]
    saved = [history.checkpoints.get(attempt or "") for attempt in attempts]
    levels = [getattr(op, "level", None) for op in ops]
    steps = [c.step if c else getattr(op, "step", None) for c, op in zip(saved, ops, strict=True)]
    sessions = [c.id.session if c else getattr(op, "session", None) for c, op in zip(saved, ops, strict=True)]
    return pa.table(
        {
            "seq": pa.array([r.seq for r in log], pa.int64()),
            "time": _times([r.time_s for r in log]),
            "epoch": pa.array([r.epoch for r in log], pa.int64()),
            "writer": pa.array([r.writer for r in log], pa.string()),
            "op": pa.array(list(map(_op_name, ops)), pa.string()),
            "step": pa.array(steps, pa.int64()),
            "attempt": pa.array(attempts, pa.string()),
            "session": pa.array(sessions, pa.int64()),
            "level": pa.array([level and level.label for level in levels], pa.string()),
            "text": pa.array([_event_text(op, history) for op in ops], pa.string()),
        }
    )


def _op_name(op: records.Op) -> str:
    return "commit" if isinstance(op, records.Commit) else type(op).__name__.lower()


def _event_text(op: records.Op, history: RunHistory) -> str:
    match op:
        case records.Create(run_name=name):
            return f"run {name}"
        case records.Session(resumed_from=source, world_size=world, num_nodes=nodes):
            start = "scratch" if source is None else f"step {history.checkpoints[source].step}"
            return f"from {start}, {count_text(world, 'rank')} on {count_text(nodes, 'node')}"
        case records.Commit(size_bytes=size, replicas=copies, suspect=suspect):
            protection = _protection_text(copies, op.parity)
            return f"{size} bytes, {protection}" + (f"; differing: {suspect}" if suspect else "")
        case records.Promote(replicas=copies, parity=parity):
            return _protection_text(copies, parity)
        case records.Damaged(fragments=fragments):
            return f"fragments {fragments}" if fragments else "none any more"
        case records.Exported(items=items, size_bytes=size):
            return f"{items}, {size} bytes"
        case records.Epoch(service=service):
            return service
        case records.Pin(owner=owner) | records.Unpin(owner=owner):
            return owner
        case records.Annotated(metrics=metrics):
            return ", ".join(f"{name}={value:g}" for name, value in metrics.items())
        case records.Lost(reason=reason) | records.Retired(reason=reason):
            return reason
        case records.Restored(session=session, seconds=seconds, read_bytes=read, origin_step=origin_step):
            source = history.sessions[session].resumed_from
            what = "another run" if origin_step is None else f"step {origin_step} of another run"
            if source is not None:
                what = f"step {history.checkpoints[source].step}"
            return f"restored {what} in {seconds:.2f} s: {tiers_text(read)}"
        case records.Ended(cause=cause, step=step):
            return f"{cause}, at step {step}"
        case records.Drilled(scenario=scenario, passed=passed, text=text):
            return f"{'passed' if passed else 'failed'}: {scenario}" + (f": {text}" if text else "")
        case records.Note(text=text):
            return text
        case _:
            return ""


def _protection_text(copies: int, parity: str | None) -> str:
    return f"{copies} losses allowed by parity {parity}" if parity else f"{copies} replicas"


# Tables from manifests

_CHECKPOINT = (("step", pa.int64()), ("attempt", pa.string()), ("session", pa.int64()))
_INT64S = pa.list_(pa.int64())

SHARDS = pa.schema(
    (
        *_CHECKPOINT,
        ("node_index", pa.int64()),
        ("rank", pa.int64()),
        ("kind", pa.string()),
        ("file", pa.string()),
        ("size_bytes", pa.int64()),
        ("digest", pa.string()),
    )
)
SLICES = pa.schema(
    (
        *_CHECKPOINT,
        ("tensor", pa.string()),
        ("item", pa.string()),
        ("name", pa.string()),
        ("dtype", pa.string()),
        ("global_shape", _INT64S),
        ("offset", _INT64S),
        ("shape", _INT64S),
        ("rank", pa.int64()),
        ("file", pa.string()),
        ("byte_offset", pa.int64()),
        ("nbytes", pa.int64()),
        ("digest", pa.string()),
    )
)


def shards_table(fragment: Fragment, own: FileEntry) -> pa.Table:
    """Return a table with one row per file of `fragment` and one for its own file `own`, without a rank."""
    files = (*fragment.files, own)
    columns = {
        "node_index": pa.array([fragment.node_index] * len(files), pa.int64()),
        "rank": pa.array([_rank(file.name) for file in files], pa.int64()),
        "kind": pa.array([file.name.partition("-")[0] for file in files], pa.string()),
        "file": pa.array([file.name for file in files], pa.string()),
        "size_bytes": pa.array([file.size_bytes for file in files], pa.int64()),
        "digest": pa.array([file.digest for file in files], pa.string()),
    }
    return _table(SHARDS, fragment.attempt, columns)


def slices_table(fragment: Fragment) -> pa.Table:
    """Return a table with one row per saved slice of `fragment`; `rank` is the rank that saved the slice."""
    rows = rows_table([fragment])
    rows = rows.filter(pc.equal(rows["kind"], "slice")).combine_chunks()
    item, name = rows["item"], rows["name"]
    ranks = {file.name: _rank(file.name) for file in fragment.files}
    columns = {column: rows[column] for column in rows.column_names}
    columns["tensor"] = pc.if_else(pc.equal(name, ""), item, pc.binary_join_element_wise(item, name, "."))
    columns["rank"] = pa.array([ranks[file] for file in rows["file"].to_pylist()], pa.int64())
    return _table(SLICES, fragment.attempt, columns)


def _table(schema: pa.Schema, attempt: AttemptId, columns: Mapping[str, Any]) -> pa.Table:
    """Return `columns` as a table of `schema`, with the columns that identify the checkpoint."""
    num_rows = len(columns["file"])
    whose = {"step": attempt.step, "attempt": attempt.attempt, "session": attempt.session}
    for name, kind in _CHECKPOINT:
        columns = {**columns, name: pa.repeat(pa.scalar(whose[name], kind), num_rows)}
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _rank(file: str) -> int | None:
    match = _RANK.match(file)
    return int(match[1]) if match else None


class Cuts:
    """The numbers of pieces into which the tensors of one checkpoint are cut, from its manifest.

    A manifest has neither device mesh nor placements, only the saved regions, from which the number of pieces
    along each dimension follows. Replicas along a mesh are invisible, because only one of them is saved. FSDP
    on 4 ranks results in `4`; 2 x 2 ranks of FSDP over tensor parallelism in `4`, `2x2` and `2`.
    """

    def __init__(self) -> None:
        self._starts: dict[object, list[set[int]]] = {}  # offsets of a tensor's slices, per dimension
        self._nbytes: Counter[object] = Counter()

    def add(self, rows: Iterable[ManifestRow]) -> None:
        for row in rows:
            part = row.slice
            if part is None or not part.num_elements:
                continue
            tensor = part.key, part.dtype, part.global_shape  # ranks may have their own of one key
            starts = self._starts.setdefault(tensor, [set() for _ in part.offset])
            for along, start in zip(starts, part.offset, strict=True):
                along.add(start)
            self._nbytes[tensor] += row.nbytes

    def texts(self) -> tuple[str, ...]:
        """Return at most MAX_CUTS cuts, those with the most bytes first.

        `4` means four pieces along the first dimension, `1x2` two along the second, `1` a whole tensor.
        """
        sizes: Counter[str] = Counter()
        for tensor, starts in self._starts.items():
            counts = [len(along) for along in starts]
            while counts and counts[-1] == 1:
                counts.pop()
            sizes["x".join(map(str, counts)) or "1"] += self._nbytes[tensor]
        return tuple(sorted(sizes, key=lambda text: (-sizes[text], text))[:MAX_CUTS])


# Parquet


class ParquetRows:
    """Writer of Parquet rows. Memory holds at most ROW_GROUP_ROWS of them and one more table."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self.num_rows = 0
        self._writer = writer
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0  # rows that are not written yet

    def add(self, table: pa.Table) -> None:
        self.num_rows += table.num_rows
        self._num_waiting += table.num_rows
        self._waiting.append(table)
        if self._num_waiting >= ROW_GROUP_ROWS:
            self.write()

    def write(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting), row_group_size=ROW_GROUP_ROWS)
        self._waiting, self._num_waiting = [], 0


@contextmanager
def parquet_file(path: Path, schema: pa.Schema) -> Iterator[ParquetRows]:
    """Provide the rows of a Parquet file, which appears when the `with` block ends without an error."""
    with (
        whole_file(path) as temporary,
        temporary.open("wb") as file,  # pyarrow would read some names as URLs
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        rows = ParquetRows(writer)
        yield rows
        rows.write()


# Times


def _times(times_s: Sequence[float | None]) -> pa.Array:
    """Convert Unix seconds to timestamps; None and times outside the calendar become null."""
    seconds = np.array(times_s, np.float64)  # None is NaN
    is_known = (seconds >= 0) & (seconds < MAX_TIME_S)
    microseconds = np.round(np.where(is_known, seconds, 0) * 1e6).astype(np.int64)
    return pa.array(microseconds, pa.int64(), mask=~is_known).cast(_TIME)
