"""The run as its log tells it: replay of records into sessions and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ray_ckpt.errors import FormatError
from ray_ckpt.format.records import (
    Collected,
    Commit,
    Create,
    Epoch,
    LogRecord,
    Lost,
    Note,
    Pin,
    Promote,
    Retired,
    Session,
    Unpin,
    Verified,
)
from ray_ckpt.types import AttemptId, CheckpointInfo, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """One training group's tenure; `parent` and `resumed_from` give the branch of the lineage it is on."""

    session: int
    parent: int | None
    resumed_from: str | None
    world_size: int
    num_nodes: int
    opened_at_s: float
    service: str = ""
    owner: str = ""
    retention: str = ""


class RunHistory:
    """State of one run after records 0..seq. `apply` is the only door."""

    def __init__(self) -> None:
        self.run_uid = ""
        self.run_name = ""
        self.next_seq = 0
        self.last_digest = ""
        self.epoch = 0
        self.writer = ""
        self.service = ""  # of the coordinator that wrote the last epoch
        self.sessions: dict[int, SessionInfo] = {}
        self.checkpoints: dict[str, CheckpointInfo] = {}  # by attempt, in log order

    @property
    def session(self) -> SessionInfo | None:
        """The current session: the last one in the log."""
        return self.sessions[max(self.sessions)] if self.sessions else None

    def apply(self, record: LogRecord, record_digest: str) -> None:
        """Add the next record. FormatError, and no change, if it does not continue this history (P3)."""
        self._check(record)
        match record.op:
            case Create(run_uid=uid, run_name=name):
                self.run_uid, self.run_name = uid, name
            case Epoch(service=service):
                self.service = service
            case Note():
                pass
            case Session() as op:
                self.sessions[op.session] = SessionInfo(
                    session=op.session,
                    parent=op.after,
                    resumed_from=op.resumed_from,
                    world_size=op.world_size,
                    num_nodes=op.num_nodes,
                    opened_at_s=record.time_s,
                    service=op.service,
                    owner=op.owner,
                    retention=op.retention,
                )
            case Commit() as op:
                self.checkpoints[op.attempt] = _committed(op, record, self.run_uid)
            case Promote(attempt=attempt, level=level, replicas=copies):
                old = self.checkpoints[attempt]
                self.checkpoints[attempt] = replace(
                    old, level=max(old.level, level), replicas=max(old.replicas, copies)
                )
            case Pin(attempt=attempt, owner=owner, expires_at_s=expires_at_s):
                old = self.checkpoints[attempt]
                self.checkpoints[attempt] = replace(old, pins={**old.pins, owner: expires_at_s})
            case Unpin(attempt=attempt, owner=owner):
                old = self.checkpoints[attempt]
                pins = {name: end for name, end in old.pins.items() if name != owner}
                self.checkpoints[attempt] = replace(old, pins=pins)
            case Verified(attempt=attempt):
                old = self.checkpoints[attempt]
                self.checkpoints[attempt] = replace(old, verified_at_s=record.time_s)
            case Lost(attempt=attempt):
                self._set_state(attempt, "lost")
            case Retired(attempt=attempt):
                self._set_state(attempt, "retired")
            case Collected(attempt=attempt):
                self._set_state(attempt, "collected")
        self.next_seq = record.seq + 1
        self.last_digest = record_digest
        self.epoch, self.writer = record.epoch, record.writer

    def live(self) -> tuple[CheckpointInfo, ...]:
        """Checkpoints that are neither lost nor retired, in log order."""
        return tuple(c for c in self.checkpoints.values() if c.state == "live")

    def lineage(self) -> tuple[CheckpointInfo, ...]:
        """Live checkpoints of the session and its ancestors up to their branch points, in log order."""
        chosen: list[CheckpointInfo] = []
        session, last_seq = self.session, self.next_seq
        while session is not None:
            number = session.session
            chosen += [
                c
                for c in self.checkpoints.values()
                if c.id.session == number and c.seq <= last_seq and c.state == "live"
            ]
            branch = self.checkpoints.get(session.resumed_from) if session.resumed_from else None
            session = self.sessions[branch.id.session] if branch else None
            last_seq = branch.seq if branch else 0
        return tuple(sorted(chosen, key=lambda c: c.seq))

    def _set_state(self, attempt: str, state: Literal["lost", "retired", "collected"]) -> None:
        self.checkpoints[attempt] = replace(self.checkpoints[attempt], state=state)

    def _check(self, record: LogRecord) -> None:
        where = f"Log record {record.seq}"
        if record.seq != self.next_seq or record.prev != self.last_digest:
            raise FormatError(f"{where} does not follow record {self.next_seq - 1}.", seq=record.seq)
        if record.epoch < self.epoch:
            raise FormatError(f"{where} has the stale epoch {record.epoch}.", seq=record.seq)
        if isinstance(record.op, Create) != (record.seq == 0):
            raise FormatError(f"{where}: a log starts with one create record.", seq=record.seq)
        match record.op:
            case (
                Promote(attempt=name)
                | Lost(attempt=name)
                | Retired(attempt=name)
                | Collected(attempt=name)
                | Pin(attempt=name)
                | Unpin(attempt=name)
                | Verified(attempt=name)
            ):
                if name not in self.checkpoints:
                    raise FormatError(f"{where} names the unknown checkpoint {name}.", seq=record.seq)
            case Commit() as op:
                if op.session not in self.sessions or op.attempt in self.checkpoints:
                    raise FormatError(f"{where} commits twice or without a session.", seq=record.seq)
            case Session() as op:
                if op.session in self.sessions or (op.resumed_from or "") not in {"", *self.checkpoints}:
                    raise FormatError(f"{where} opens an impossible session.", seq=record.seq)
            case _:
                return


def _committed(op: Commit, record: LogRecord, run_uid: str) -> CheckpointInfo:
    return CheckpointInfo(
        id=AttemptId(run_uid=run_uid, session=op.session, step=op.step, attempt=op.attempt),
        seq=record.seq,
        level=Level(op.level),
        world_size=op.world_size,
        num_nodes=op.num_nodes,
        size_bytes=op.size_bytes,
        root_digest=op.root_digest,
        committed_at_s=record.time_s,
        metrics=op.metrics,
        replicas=op.replicas,
    )
