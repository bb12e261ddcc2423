"""The records of a run's log: small JSON files, each with the digest of the previous record.

A record is a fact: the existence of the file makes it true. A record also has a digest over the record
itself, because no next record proves the last record; records of the oldest writers lack this digest. Known
fields are read strictly and unknown fields are ignored, so that a later version may add fields. An unknown op
is refused, because a skipped fact would change the state of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar, get_args

from ray_ckpt.errors import ConfigError, FormatError
from ray_ckpt.format import jsontext
from ray_ckpt.format.names import MAX_RANKS, check_items, check_run_name, check_run_uid
from ray_ckpt.types import END_CAUSES, EndCause, Level, RootOf

MAX_RECORD_BYTES = 2**20  # size of a record, bounds a reader's memory; a commit takes about 500 bytes
MAX_SEQ = 10**20 - 1  # the limit of 20 digits in file names
MAX_STEP = 10**12 - 1  # the limit of 12 digits in directory names
MAX_TIME_S = 253_402_300_800.0  # Unix time of the year 10000, the limit of calendars; also for time spans
MAX_COMMITTED_METRICS = 10_000  # metrics of one commit; readers show each metric
MAX_DAMAGED = 100  # fragments in a `damaged` record: enough to know that a copy is not safe
MAX_METRICS = 100  # metrics added to a checkpoint later; readers show each as a column

_ATTEMPT = re.compile(r"[0-9a-f]{16}\Z")
_NOT_EMPTY = re.compile(r".", re.DOTALL)
_INDICES = re.compile(r"(?:(?:0|[1-9][0-9]{0,8})(?:,(?!\Z)|\Z))*\Z")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """The run begins. Record 0, and no other record, has this op."""

    run_uid: str
    run_name: str
    format: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A new coordinator takes over for `service`; the record's `epoch` is its token."""

    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A training group begins. `after` is the previous session, `resumed_from` the restored checkpoint.

    `service` and `owner` identify the checkpoint service of a cluster, and the launcher (driver or
    controller) in it that opened the session; `opened_by` is the epoch of the coordinator that began it.
    `retention` is the session's policy as `ray_ckpt.core.retention` writes it. For the last three fields see
    `LaunchTimes`.
    """

    session: int
    service: str
    after: int | None
    resumed_from: str | None
    world_size: int
    num_nodes: int
    opened_by: int = 0
    owner: str = ""
    retention: str = ""
    noticed_at_s: float | None = None
    previous_ended_at_s: float | None = None
    started_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint exists from this record on, at `level`, with `replicas` copies on other nodes.

    Only older versions write this op: `root_digest` covers all files (`root_of`).
    """

    root_of: ClassVar[RootOf] = "files"

    session: int
    step: int
    attempt: str
    level: Level
    replicas: int
    world_size: int
    num_nodes: int
    size_bytes: int
    root_digest: str
    metrics: Mapping[str, float]
    mesh: str | None = None  # for the fields from `mesh` to `local_s` see `SaveFacts`
    stall_s: float | None = None
    capture_s: float | None = None
    local_s: float | None = None
    replicate_s: float | None = None  # after `local_s`, until the level was reached or the wait ended
    suspect: str | None = None  # replicas whose bytes differed at this save
    shared_bytes: int | None = None  # see `SaveFacts`
    parity: str | None = None  # parity groups that `replicas` counts in place of copies, such as `6+2`


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit2(Commit):
    """A `Commit` whose `root_digest` covers the fragments. Older versions refuse this op as a newer one."""

    root_of: ClassVar[RootOf] = "fragments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """A committed checkpoint has reached a higher level, or more replicas."""

    attempt: str
    level: Level
    replicas: int
    parity: str | None = None  # as in `Commit`


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The storage path has some items of a checkpoint, in a directory of their own; the level is the same.

    `root_digest` covers the fragments there. `items` are joined by commas.
    """

    attempt: str
    items: str
    root_digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """No intact copy of a committed checkpoint is left."""

    attempt: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """Retention has decided to delete a checkpoint; final."""

    attempt: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The bytes of a retired checkpoint are gone."""

    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """`owner` keeps a checkpoint until Unix time `expires_at_s` (null: until the unpin)."""

    attempt: str
    owner: str
    expires_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    """`owner` no longer keeps a checkpoint."""

    attempt: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A scrub has read every copy of a checkpoint; all copies are intact, some perhaps after a repair."""

    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """These fragments of a checkpoint are damaged on the storage path, or could not be read there.

    `fragments` are their indices, joined by commas; empty if none is damaged any more. The latest such record
    of a checkpoint counts. See MAX_DAMAGED.
    """

    attempt: str
    fragments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """Metrics are added to a checkpoint; for each name the latest value counts. See MAX_METRICS."""

    attempt: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """All ranks of a session have the state of the checkpoint from which the session resumes or begins.

    `seconds` is the time of the slowest rank, `read_bytes` the bytes that all ranks read, by tier.
    `origin_step` is the step of another run's checkpoint from which training continues. `connected_at_s` is
    the Unix time at which the last rank was connected, by the clock of its node.
    """

    session: int
    seconds: float
    read_bytes: Mapping[str, float]
    origin_step: int | None = None
    connected_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A session is over; see `SessionEnd`. The last of several such records of a session counts."""

    session: int
    cause: EndCause
    step: int
    first_at_s: float | None
    last_at_s: float | None
    stalled_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    """A recovery drill has read a checkpoint from the copies that remain in `scenario`.

    `read_bytes` are the bytes read, by tier; `text` names missing and damaged parts.
    """

    attempt: str
    scenario: str
    passed: bool
    seconds: float
    read_bytes: Mapping[str, float]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A remark for readers of the log, without an effect."""

    text: str


Op: TypeAlias = (
    Create
    | Epoch
    | Session
    | Commit
    | Commit2
    | Promote
    | Exported
    | Lost
    | Retired
    | Collected
    | Pin
    | Unpin
    | Verified
    | Damaged
    | Annotated
    | Restored
    | Ended
    | Drilled
    | Note
)

OPS: Mapping[str, type[Op]] = {kind.__name__.lower(): kind for kind in get_args(Op)}
_WHAT = "The log record"
_MAX_WRITER = 64  # characters of a writer's name: a uuid, sometimes with a prefix
_LONG_TIME_S = 1.7976931348623157e-308  # a time with the largest number of digits


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A record of the log. `prev` is the digest of the bytes of record seq - 1, empty for record 0.

    `time_s` is Unix time in seconds by the writer's clock, for display and for ages
    (retention, pins, scrub), never for order.
    """

    seq: int
    epoch: int
    writer: str
    prev: str
    time_s: float
    op: Op


def encode_record(record: LogRecord) -> bytes:
    """Return `record` as one line of sealed JSON; equal records give equal bytes.

    Raise FormatError if readers would refuse the record.
    """
    name = type(record.op).__name__.lower()
    if OPS.get(name) is not type(record.op):
        raise FormatError(f"{type(record.op).__name__} is not an op of the log.")
    document = {
        "seq": record.seq,
        "epoch": record.epoch,
        "writer": record.writer,
        "prev": record.prev,
        "time_s": record.time_s,
        "op": name,
        **{name: _to_json(value) for name, value in _set_fields(record.op)},
    }
    data = jsontext.dumps_sealed(document, what=_WHAT, max_bytes=MAX_RECORD_BYTES)
    _record(jsontext.loads(data, what=_WHAT, max_bytes=MAX_RECORD_BYTES))
    return data


def check_op(op: Op) -> None:
    """Raise FormatError unless a record can contain `op` at any position in the log, with any writer."""
    writer, prev = "f" * _MAX_WRITER, "f" * 32
    encode_record(
        LogRecord(seq=MAX_SEQ, epoch=jsontext.MAX_INT, writer=writer, prev=prev, time_s=-_LONG_TIME_S, op=op)
    )


def _set_fields(op: Op) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an op that are set."""
    for field in fields(op):
        value = getattr(op, field.name)
        if value is not None or field.default is MISSING:
            yield field.name, value


def decode_record(data: bytes) -> LogRecord:
    """Return the record in `data`. Raise FormatError if any byte of `encode_record` was changed."""
    return _record(jsontext.loads_if_sealed(data, what=_WHAT, max_bytes=MAX_RECORD_BYTES, known=_KNOWN))


def _record(document: Mapping[str, Any]) -> LogRecord:
    """Return the record in a JSON document. Raise FormatError."""
    seq = jsontext.integer(document.get("seq"), "seq", high=MAX_SEQ)
    return LogRecord(
        seq=seq,
        epoch=jsontext.integer(document.get("epoch"), "epoch"),
        writer=jsontext.text(document.get("writer"), "writer", pattern=_NOT_EMPTY),
        prev=_prev(document.get("prev"), seq),
        time_s=read_time(document.get("time_s"), "time_s"),
        op=_op(document),
    )


def _prev(value: object, seq: int) -> str:
    if seq:
        return jsontext.hex_digest(value, "prev")
    if value != "":
        raise FormatError("Record 0 has no record before it; prev must be empty.")
    return ""


def _op(document: Mapping[str, Any]) -> Op:
    name = jsontext.text(document.get("op"), "op")
    if name not in OPS:
        raise jsontext.newer(f"Record {document['seq']}", f"its op is {name[:80]!r}", op=name)
    kind: Callable[..., Op] = OPS[name]
    return kind(**{field.name: _read(document, field) for field in fields(OPS[name])})


def _read(document: Mapping[str, Any], field: Field[Any]) -> Any:
    name = field.name
    if name in document:
        return FIELDS[name](document[name], name)
    if field.default is MISSING:
        raise FormatError(f"Record {document['seq']} ({document['op']}) has no field {name!r}.")
    return field.default  # the log is older than the field


def _to_json(value: Any) -> Any:
    if isinstance(value, Level):
        return value.label
    return jsontext.metrics_json(value) if isinstance(value, Mapping) else value


def _metrics(value: object, name: str) -> dict[str, float]:
    found = jsontext.metrics(value, name)
    if len(found) > MAX_COMMITTED_METRICS:
        raise FormatError(f"{len(found)} {name}; the format allows {MAX_COMMITTED_METRICS}.")
    return found


def _run_uid(value: object, name: str) -> str:
    return check_run_uid(jsontext.text(value, name))


def _run_name(value: object, name: str) -> str:
    try:
        return check_run_name(jsontext.text(value, name))
    except ConfigError as error:
        raise FormatError(f"{name}: {error.message}") from error


def _format(value: object, name: str) -> int:
    jsontext.check_version(value, "The run")
    return jsontext.integer(value, name)


def _one_of(values: Mapping[str, T]) -> Callable[[object, str], T]:
    def read(value: object, name: str) -> T:
        if type(value) is not str or value not in values:
            raise FormatError(f"{name} must be one of {', '.join(values)}.")
        return values[value]

    return read


def optional(read: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
    return lambda value, name: None if value is None else read(value, name)


read_time = partial(jsontext.bounded, most=MAX_TIME_S)
"""Return Unix time or a time span, in seconds."""
_seconds = optional(read_time)
_count = partial(jsontext.integer, low=1, high=MAX_RANKS)  # of ranks or nodes of a group
_copies = partial(jsontext.integer, high=MAX_RANKS)
_step = partial(jsontext.integer, high=MAX_STEP)
_attempt = partial(jsontext.text, pattern=_ATTEMPT)


def _items(value: object, name: str) -> str:
    return check_items(jsontext.text(value, name))


def read_fragments(value: object, name: str) -> str:
    """Return indices of at most MAX_DAMAGED fragments, joined by commas. Raise FormatError."""
    text = jsontext.text(value, name, pattern=_INDICES)
    if text.count(",") >= MAX_DAMAGED:
        raise FormatError(f"{name} has {text.count(',') + 1} indices; the format allows {MAX_DAMAGED}.")
    return text


_level = _one_of({level.label: level for level in Level})
_cause: Callable[[object, str], EndCause] = _one_of({cause: cause for cause in END_CAUSES})
FIELDS: Mapping[str, Callable[[object, str], Any]] = {
    "run_uid": _run_uid,
    "run_name": _run_name,
    "format": _format,
    "session": jsontext.integer,
    "service": jsontext.text,
    "opened_by": jsontext.integer,
    "owner": jsontext.text,
    "retention": jsontext.text,
    "expires_at_s": _seconds,
    "after": optional(jsontext.integer),
    "resumed_from": optional(_attempt),
    "world_size": _count,
    "num_nodes": _count,
    "step": _step,
    "origin_step": optional(_step),
    "attempt": _attempt,
    "items": _items,
    "fragments": read_fragments,
    "level": _level,
    "replicas": _copies,
    "size_bytes": jsontext.integer,
    "root_digest": jsontext.hex_digest,
    "metrics": _metrics,
    "read_bytes": jsontext.metrics,
    "seconds": read_time,
    "mesh": optional(jsontext.text),
    "stall_s": _seconds,
    "capture_s": _seconds,
    "local_s": _seconds,
    "replicate_s": _seconds,
    "stalled_s": _seconds,
    "first_at_s": _seconds,
    "last_at_s": _seconds,
    "noticed_at_s": _seconds,
    "previous_ended_at_s": _seconds,
    "started_at_s": _seconds,
    "connected_at_s": _seconds,
    "scenario": jsontext.text,
    "passed": jsontext.boolean,
    "cause": _cause,
    "reason": jsontext.text,
    "text": jsontext.text,
    "suspect": optional(jsontext.text),
    "shared_bytes": optional(jsontext.integer),
    "parity": optional(jsontext.text),
}
"""Readers of the fields of ops; a name has the same meaning in every op."""
_KNOWN = FIELDS.keys() | {"seq", "epoch", "writer", "prev", "time_s", "op"}
"""Fields that a record without a digest may have: all fields of the versions that wrote no digest."""
