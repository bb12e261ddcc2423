"""History of a run: the sessions and checkpoints that result from the records of the run's log."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from ray_ckpt.errors import FormatError
from ray_ckpt.format.records import (
    MAX_METRICS,
    Annotated,
    Collected,
    Commit,
    Create,
    Damaged,
    Drilled,
    Ended,
    Epoch,
    Exported,
    LogRecord,
    Lost,
    Note,
    Pin,
    Promote,
    Restored,
    Retired,
    Session,
    Unpin,
    Verified,
)
from ray_ckpt.format.snapshot import LogSnapshot
from ray_ckpt.types import AttemptId, CheckpointInfo, Level, SessionEnd, SessionInfo

__all__ = ["RunHistory", "SessionInfo"]

_Found: TypeAlias = tuple[tuple[CheckpointInfo, ...], tuple[CheckpointInfo, ...]]  # live ones, the lineage


class RunHistory:
    """State of one run after records 0 to `next_seq` - 1. Only `apply` changes this state.

    The time of `apply` does not grow with the log; the time of `live` and `lineage` grows only with the
    number of live checkpoints, and only at the first call after a record.
    """

    def __init__(self) -> None:
        self.run_uid = ""
        self.run_name = ""
        self.next_seq = 0
        self.last_digest = ""
        self.epoch = 0
        self.writer = ""
        self.service = ""  # the service of the coordinator that wrote the last epoch record
        self.sessions: dict[int, SessionInfo] = {}  # by number, in log order
        self.checkpoints: dict[str, CheckpointInfo] = {}  # by attempt, in log order
        self.drilled_at_s: float | None = None  # Unix time of the last passed drill of any checkpoint
        self._suspects: dict[str, CheckpointInfo] = {}  # entries of `checkpoints` with replicas that differed
        self._live: dict[str, CheckpointInfo] = {}  # the live entries of `checkpoints`
        self._lost: dict[str, CheckpointInfo] = {}  # the lost entries of `checkpoints`
        self._found: _Found | None = None  # results of `live` and `lineage`, until the next record

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_found": None}

    @classmethod
    def from_snapshot(cls, snapshot: LogSnapshot) -> RunHistory:
        """Return the history from which `to_snapshot` made the snapshot."""
        history = cls()
        history.run_uid, history.run_name = snapshot.run_uid, snapshot.run_name
        history.next_seq, history.last_digest = snapshot.seq + 1, snapshot.last_digest
        history.epoch, history.writer, history.service = snapshot.epoch, snapshot.writer, snapshot.service
        history.sessions = {s.session: s for s in snapshot.sessions}
        history.checkpoints = {c.id.attempt: c for c in snapshot.checkpoints}
        history._live = {name: c for name, c in history.checkpoints.items() if c.state == "live"}
        history._lost = {name: c for name, c in history.checkpoints.items() if c.state == "lost"}
        for checkpoint in (c for c in snapshot.checkpoints if c.drilled_at_s is not None):
            history._note_drill(checkpoint)
        history._suspects = {name: c for name, c in history.checkpoints.items() if c.suspect}
        return history

    def to_snapshot(self, time_s: float) -> LogSnapshot:
        """Return a snapshot of this history at Unix time `time_s`; the history has at least one record."""
        return LogSnapshot(
            seq=self.next_seq - 1,
            last_digest=self.last_digest,
            time_s=time_s,
            run_uid=self.run_uid,
            run_name=self.run_name,
            epoch=self.epoch,
            writer=self.writer,
            service=self.service,
            sessions=tuple(self.sessions.values()),
            checkpoints=tuple(self.checkpoints.values()),
        )

    def copy(self) -> RunHistory:
        """Return an independent copy: a record applied to one does not change the other."""
        other = copy.copy(self)
        other.sessions, other.checkpoints = dict(self.sessions), dict(self.checkpoints)
        other._live, other._lost = dict(self._live), dict(self._lost)
        other._suspects = dict(self._suspects)
        return other

    @property
    def session(self) -> SessionInfo | None:
        """The current session: the last session in the log; None if there is no session."""
        return next(reversed(self.sessions.values()), None)

    @property
    def suspect(self) -> CheckpointInfo | None:
        """The newest checkpoint on the lineage with replicas that differed, also if it is lost or retired.

        None if there is none. Later checkpoints may have bytes of both sides, and after a restore of one of
        them no replica differs any more.
        """
        return next(reversed(self._lineage_suspects()), None)

    @property
    def first_suspect(self) -> CheckpointInfo | None:
        """The oldest checkpoint on the lineage with replicas that differed, also if it is lost or retired."""
        return next(iter(self._lineage_suspects()), None)

    def _lineage_suspects(self) -> list[CheckpointInfo]:
        ends = self.branch_points() if self._suspects else {}
        return [c for c in self._suspects.values() if c.seq <= ends.get(c.id.session, -1)]

    @property
    def suspect_text(self) -> str:
        """The step and the finding of `suspect`, and the step of `first_suspect`; "" without a finding."""
        if (newest := self.suspect) is None:
            return ""
        first = self.first_suspect or newest
        since = f"; first at step {first.step}" if first.id != newest.id else ""
        return f"step {newest.step}: {newest.suspect}{since}"

    @property
    def next_session(self) -> int:
        """The number of a session that begins now.

        The last session may have a lower number than one before it: two clusters may open sessions at the
        same time, of which one is logged late because the store was away.
        """
        return max(self.sessions, default=0) + 1

    def apply(self, record: LogRecord, record_digest: str) -> None:
        """Add the next record; if it does not continue the log, raise FormatError and change nothing (P3).

        A record that changes a live checkpoint, such as `promote` or `damaged`, may have waited in the queue
        behind the one that retired this checkpoint; then it changes nothing.
        """
        self._check(record)
        match record.op:
            case Create(run_uid=uid, run_name=name):
                self.run_uid, self.run_name = uid, name
            case Epoch(service=service):
                self.service = service
            case Session() as op:
                self.sessions[op.session] = _opened(op, record.time_s)
            case Commit() as op:
                self._put(_committed(op, record, self.run_uid, self.sessions[op.session]))
            case Restored() | Ended() as op:
                self.sessions[op.session] = _updated(self.sessions[op.session], op, record.time_s)
            case Note():
                pass
            case op:
                self._put(_changed(self.checkpoints[op.attempt], op, record.time_s))
        self.next_seq = record.seq + 1
        self.last_digest = record_digest
        self._found = None
        self.epoch, self.writer = record.epoch, record.writer

    def live(self) -> tuple[CheckpointInfo, ...]:
        """Return the checkpoints that are neither lost nor retired, in log order."""
        return self._find()[0]

    def lost(self) -> tuple[CheckpointInfo, ...]:
        """Return the lost checkpoints that are not retired, in log order."""
        return tuple(sorted(self._lost.values(), key=lambda c: c.seq))

    @property
    def exported(self) -> CheckpointInfo | None:
        """The newest checkpoint, live or lost, on any branch, with items alone on the storage path."""
        known = (c for c in (*self.live(), *self.lost()) if c.exported)
        return max(known, key=lambda c: c.seq, default=None)

    def lost_exported(self) -> tuple[CheckpointInfo, ...]:
        """Return the lost checkpoints of which the storage path still has some items, in log order."""
        return tuple(c for c in self.lost() if c.exported)

    def lineage(self) -> tuple[CheckpointInfo, ...]:
        """Return the live checkpoints on the lineage, in log order.

        They are those of the current session, and those of its ancestors up to the branch points.
        """
        return self._find()[1]

    def _find(self) -> _Found:
        if self._found is None:
            live, ends = tuple(self._live.values()), self.branch_points()
            self._found = live, tuple(c for c in live if c.seq <= ends.get(c.id.session, -1))
        return self._found

    def branch_points(self) -> dict[int, int]:
        """Map the current session and each ancestor to the number of its last record on the lineage."""
        ends: dict[int, int] = {}
        session, last_seq = self.session, self.next_seq
        while session is not None:
            ends[session.session] = last_seq
            branch = self.checkpoints[session.resumed_from] if session.resumed_from else None
            session = self.sessions[branch.id.session] if branch else None
            last_seq = branch.seq if branch else 0
        return ends

    def _put(self, checkpoint: CheckpointInfo) -> None:
        name = checkpoint.id.attempt
        self.checkpoints[name] = checkpoint
        self._note_drill(checkpoint)
        if checkpoint.suspect:
            self._suspects[name] = checkpoint
        if checkpoint.state == "live":
            self._live[name] = checkpoint
        else:
            self._live.pop(name, None)
        if checkpoint.state == "lost":
            self._lost[name] = checkpoint
        else:
            self._lost.pop(name, None)

    def _note_drill(self, checkpoint: CheckpointInfo) -> None:
        if checkpoint.drilled_at_s is not None and checkpoint.drill.startswith("passed"):
            self.drilled_at_s = max(self.drilled_at_s or 0.0, checkpoint.drilled_at_s)

    def _check(self, record: LogRecord) -> None:
        where = f"Log record {record.seq}"
        if record.seq != self.next_seq:
            raise FormatError(f"Log record {self.next_seq} has the number {record.seq}.", seq=self.next_seq)
        if record.prev != self.last_digest:
            raise FormatError(f"{where} does not follow record {self.next_seq - 1}.", seq=record.seq)
        if record.epoch < self.epoch:
            raise FormatError(f"{where} has the stale epoch {record.epoch}.", seq=record.seq)
        if isinstance(record.op, Create) != (record.seq == 0):
            raise FormatError(f"{where}: a log starts with one create record.", seq=record.seq)
        match record.op:
            case Create() | Epoch() | Note():
                return
            case Commit() as op:
                if op.session not in self.sessions or op.attempt in self.checkpoints:
                    raise FormatError(f"{where} commits twice or without a session.", seq=record.seq)
            case Session() as op:
                taken = op.session in self.sessions
                if taken or (op.resumed_from and op.resumed_from not in self.checkpoints):
                    raise FormatError(f"{where} opens an impossible session.", seq=record.seq)
            case Restored() | Ended() as op:
                if op.session not in self.sessions:
                    raise FormatError(f"{where} names the unknown session {op.session}.", seq=record.seq)
            case op:
                self._check_change(op, where, record.seq)

    def _check_change(self, op: _Change, where: str, seq: int) -> None:
        """Check a checkpoint's states: live or lost, then retired, then collected; pins only while live."""
        checkpoint = self.checkpoints.get(op.attempt)
        if checkpoint is None:
            raise FormatError(f"{where} names the unknown checkpoint {op.attempt}.", seq=seq)
        if checkpoint.state not in _STATES_BEFORE.get(type(op), (checkpoint.state,)):
            raise FormatError(
                f"{where}: a {checkpoint.state} checkpoint cannot be {_PARTICIPLES[type(op)]}.", seq=seq
            )
        if isinstance(op, Annotated) and not has_room(checkpoint, op.metrics):
            raise FormatError(f"{where} gives a checkpoint more than {MAX_METRICS} metrics.", seq=seq)


def has_room(checkpoint: CheckpointInfo, metrics: Mapping[str, float]) -> bool:
    """Return True if `metrics` may be added: known names always, new names up to MAX_METRICS in total."""
    old = checkpoint.metrics
    return len(old.keys() | metrics.keys()) <= max(MAX_METRICS, len(old))


_Change: TypeAlias = (
    Promote | Exported | Lost | Retired | Collected | Pin | Unpin | Verified | Damaged | Annotated | Drilled
)
_STATES_BEFORE: dict[type[_Change], tuple[str, ...]] = {
    Retired: ("live", "lost"),
    Collected: ("retired",),
    Pin: ("live",),
}
_PARTICIPLES: dict[type[_Change], str] = {Retired: "retired", Collected: "collected", Pin: "pinned"}


def _changed(old: CheckpointInfo, op: _Change, time_s: float) -> CheckpointInfo:
    """Return `old` changed by `op`, which `_check` has accepted."""
    match op:
        case Retired():
            return replace(old, state="retired")
        case Collected():
            return replace(old, state="collected")
        case Unpin(owner=owner):
            return replace(old, pins={name: end for name, end in old.pins.items() if name != owner})
        case Exported(items=items, root_digest=root, size_bytes=size):
            if old.state not in ("live", "lost"):
                return old
            return replace(old, exported=items, exported_root=root, exported_bytes=size, exported_at_s=time_s)
        case _ if old.state != "live":
            return old
        case Promote(level=level, replicas=copies, parity=parity):
            durable_s = old.durable_at_s
            if level is Level.DURABLE and durable_s is None:
                durable_s = time_s
            replicated_s = time_s if copies and not old.replicas else old.replicated_at_s
            return replace(
                old,
                level=max(old.level, level),
                replicas=max(old.replicas, copies),
                parity=(parity or "") if copies > old.replicas else old.parity,
                durable_at_s=durable_s,
                replicated_at_s=replicated_s,
            )
        case Lost():
            return replace(old, state="lost")
        case Pin(owner=owner, expires_at_s=expires_at_s):
            return replace(old, pins={**old.pins, owner: expires_at_s})
        case Verified():
            return replace(old, verified_at_s=time_s)
        case Damaged(fragments=fragments):
            return replace(old, damaged=fragments)
        case Annotated(metrics=metrics):
            return replace(old, metrics={**old.metrics, **metrics})
        case Drilled(scenario=scenario, passed=passed):
            return replace(old, drilled_at_s=time_s, drill=f"{'passed' if passed else 'failed'}: {scenario}")


def _opened(op: Session, time_s: float) -> SessionInfo:
    return SessionInfo(
        session=op.session,
        parent=op.after,
        resumed_from=op.resumed_from,
        world_size=op.world_size,
        num_nodes=op.num_nodes,
        opened_at_s=time_s,
        opened_by=op.opened_by,
        service=op.service,
        owner=op.owner,
        retention=op.retention,
        noticed_at_s=op.noticed_at_s,
        previous_ended_at_s=op.previous_ended_at_s,
        started_at_s=op.started_at_s,
    )


def _updated(old: SessionInfo, op: Restored | Ended, time_s: float) -> SessionInfo:
    if isinstance(op, Restored):
        return replace(
            old,
            restored_at_s=time_s,
            restore_s=op.seconds,
            read_bytes=op.read_bytes,
            origin_step=op.origin_step,
            connected_at_s=op.connected_at_s,
        )
    end = SessionEnd(
        cause=op.cause,
        step=op.step,
        first_at_s=op.first_at_s,
        last_at_s=op.last_at_s,
        stalled_s=op.stalled_s,
    )
    return replace(old, ended=end)


def _committed(op: Commit, record: LogRecord, run_uid: str, session: SessionInfo) -> CheckpointInfo:
    return CheckpointInfo(
        id=AttemptId(
            run_uid=run_uid, session=op.session, step=op.step, attempt=op.attempt, epoch=session.opened_by
        ),
        seq=record.seq,
        level=Level(op.level),
        world_size=op.world_size,
        num_nodes=op.num_nodes,
        size_bytes=op.size_bytes,
        root_digest=op.root_digest,
        root_of=op.root_of,
        committed_at_s=record.time_s,
        metrics=op.metrics,
        replicas=op.replicas,
        parity=op.parity or "",
        replicated_at_s=record.time_s if op.replicas else None,
        mesh=op.mesh or "",
        stall_s=op.stall_s,
        capture_s=op.capture_s,
        local_s=op.local_s,
        replicate_s=op.replicate_s,
        suspect=op.suspect or "",
        shared_bytes=op.shared_bytes or 0,
    )
