"""Roll back: open the next session of a run from an older checkpoint, on a new branch of its lineage.

A rollback changes only the log, without a cluster. It writes two records: an `epoch`, which fences the
service of the run, and a `session` without training. The next group that opens the run continues from the
checkpoint of that session, which is then the newest checkpoint of the lineage. Later checkpoints stay live
but leave the lineage; after the first commit of that group, retention retires these checkpoints unless they
are pinned. A log cannot prove that no training is running; `is_at_work` only checks the age of the last
record.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.core.history import RunHistory, SessionInfo
from ray_ckpt.core.log_requests import cannot_hold
from ray_ckpt.core.ownership import is_offline
from ray_ckpt.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    FormatError,
    StoragePathError,
    Unavailable,
)
from ray_ckpt.format import names
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.location import StoragePath, locate
from ray_ckpt.storage.checkpoint_files import readable
from ray_ckpt.storage.log_store import CreateResult, LogStore, create_record, read_run
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.texts import nearest_steps
from ray_ckpt.types import ROLLBACK_PREFIX, CheckpointInfo, Level

QUIET_S = 120.0  # without a record, until a run counts as idle; most trainings save more often
PIN_WRITER = "pin-"  # prefix of writers of offline pins, which are no sign of a training
CREATE_TRIES = 5  # attempts to create a record while the store does not answer
CREATE_PAUSE_S = 2.0  # between attempts, as in a coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    """A run's log as it was read. `last_s` is the Unix time of the last record, None if it is trimmed.

    Records of pins that were written without a cluster are ignored.
    """

    history: RunHistory
    last_s: float | None

    def is_at_work(self, now_s: float, quiet_s: float = QUIET_S) -> bool:
        """Return True if training may be running: the last record is younger than `quiet_s`.

        Records of rollbacks and imports do not count. A training that saves less often is not detected. A
        record with a time in the future, from a wrong clock, counts as young.
        """
        if self.last_s is None or is_offline(self.history.service):
            return False
        return now_s - self.last_s < quiet_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The plan of a rollback for a log as it was read. Checkpoints in `left_aside` will leave the lineage."""

    history: RunHistory
    checkpoint: CheckpointInfo
    left_aside: tuple[CheckpointInfo, ...]
    is_done: bool  # the last session is a rollback to this checkpoint
    reason: str  # a text in the log, for users
    first_suspect: CheckpointInfo | None  # the oldest with differing replicas that the target descends from

    @property
    def session(self) -> int:
        """The number of the session that will continue from the checkpoint."""
        last = self.history.session.session if self.history.session else 0
        return last if self.is_done else last + 1

    def notes(self) -> Iterator[str]:
        """Yield warnings about the plan for the user."""
        found = self.checkpoint
        damage = f"damaged on the storage path (fragments {found.damaged})" if found.damaged else ""
        if risk := "in the cluster only" if found.level < Level.DURABLE else damage:
            yield (
                f"Step {found.step} is {risk}: if its nodes lose it before the run is opened, "
                "an older one is restored."
            )
        if first := self.first_suspect:
            yield (
                f"Data-parallel replicas had drifted apart at step {first.step} already: the state of step "
                f"{found.step} may be wrong."
            )
        if found.id.attempt not in {c.id.attempt for c in self.history.lineage()}:
            yield f"Step {found.step} is of session {found.id.session}, on another branch of the lineage."


def open_log(
    path: StoragePath, storage_options: Mapping[str, str] | None = None
) -> tuple[RemoteTier, LogTail]:
    """Open the run at `path`, `<storage_path>/<run>`, and read its log. Raises the errors of `Catalog`."""
    where = locate(Catalog(path, storage_options).where)  # the run exists; its log has no gap
    tier = RemoteTier(where, storage_options)
    with readable(where):
        return tier, read_tail(tier.log)


def read_tail(log: LogStore) -> LogTail:
    """Read a log that has records. Raises FormatError if it is damaged, OSError if it cannot be read."""
    history, found = read_run(log)
    for record, record_digest in found:
        history.apply(record, record_digest)
    counted = [record for record, _ in found if not record.writer.startswith(PIN_WRITER)]
    last = counted[-1] if counted else None
    before = names.record_file(history.next_seq - 1 - len(found))  # a record that the snapshot covers
    if last is None and (data := log.read(before)):
        last = r.decode_record(data)
    return LogTail(history=history, last_s=last.time_s if last else None)


def plan_rollback(history: RunHistory, *, before: int | None = None, to: int | None = None) -> Rollback:
    """Plan a rollback to the newest checkpoint of the lineage with a step below `before`, or to step `to`.

    `to` selects the newest checkpoint of that step on the lineage, or else on another branch, which undoes a
    rollback. If a checkpoint of that step was just imported, another one of the same step is meant, which
    undoes the import. Only live checkpoints are considered. Raises ConfigError if there is no such
    checkpoint, or unless exactly one of `before` and `to` is given.
    """
    lineage = history.lineage()
    if (before is None) == (to is None):
        raise ConfigError("A rollback needs one target.", hint="Give --before STEP or --to STEP.")
    if before is not None:
        found = [c for c in lineage if c.step < before]
        what, reason = f"before step {before} on its lineage", f"ray-ckpt rollback --before {before}"
        known = {c.step for c in lineage}
    else:
        every = [c for c in history.live() if c.step == to]
        found = [c for c in lineage if c.step == to] or every
        if history.session is not None and history.session.is_import and found[-1:] == list(lineage[-1:]):
            found = [c for c in every if c != found[-1]] or found
        what, reason = f"of step {to}", f"ray-ckpt rollback --to {to}"
        known = {c.step for c in history.live()}
    if not found:
        raise ConfigError(
            f"Run {history.run_name} has no live checkpoint {what}.",
            hint=nearest_steps(known, before or to or 0),
        )
    chosen, session = found[-1], history.session
    after = history.copy()
    for _ in _records(after, _ops(after, chosen, ROLLBACK_PREFIX, reason), writer=ROLLBACK_PREFIX, now_s=0.0):
        pass
    stays = {c.id.attempt for c in after.lineage()}
    return Rollback(
        history=history,
        checkpoint=chosen,
        left_aside=tuple(c for c in lineage if c.id.attempt not in stays),
        is_done=session is not None and session.is_rollback and session.resumed_from == chosen.id.attempt,
        reason=reason,
        first_suspect=after.first_suspect,
    )


def roll_back(
    log: LogStore, rollback: Rollback, *, now_s: float, pause: Callable[[float], None] = time.sleep
) -> SessionInfo:
    """Write the plan to the log at Unix time `now_s`; return the session that the next group continues from.

    The new records directly follow the last record that the plan is based on, so no other writer can have
    written in between. Writes nothing if the rollback is done already. Raises Fenced if another writer was
    faster, Unavailable if the store does not answer CREATE_TRIES times (a second call then finds the result),
    StoragePathError if the storage path cannot hold a log.
    """
    after = rollback.history
    if not rollback.is_done:
        service = f"{ROLLBACK_PREFIX}{uuid.uuid4().hex}"
        ops = _ops(after, rollback.checkpoint, service, rollback.reason)
        after = write_ops(log, after, ops, writer=service, now_s=now_s, pause=pause)
    session = after.session
    assert session is not None
    return session


def write_ops(
    log: LogStore,
    history: RunHistory,
    ops: Iterable[r.Op],
    *,
    writer: str,
    now_s: float,
    pause: Callable[[float], None] = time.sleep,
) -> RunHistory:
    """Append an `epoch` and then the operations to the log, directly after `history`; return the result.

    The `epoch` fences the service of the run. Raises ConfigError, before anything is written, for an
    operation that the log cannot hold; and the errors of `roll_back`.
    """
    ops, after = checked(ops), history.copy()
    for number, (seq, data) in enumerate(_records(after, ops, writer=writer, now_s=now_s)):
        outcome = _create(log, seq, data, pause)
        if outcome is not CreateResult.OK:
            raise _error(outcome, seq, after.run_name, ops[:number])
    return after


def checked(ops: Iterable[r.Op]) -> tuple[r.Op, ...]:
    """Return the operations. Raise ConfigError for one that the log cannot hold, such as a text or a time."""
    found = tuple(ops)
    try:
        for op in found:
            r.check_op(op)
    except FormatError as error:
        raise cannot_hold(error) from error
    return found


def _ops(history: RunHistory, checkpoint: CheckpointInfo, service: str, reason: str) -> tuple[r.Op, r.Op]:
    """Return the operations that a rollback writes after `history`."""
    last = history.session
    session = r.Session(
        session=history.next_session,
        opened_by=history.epoch + 1,
        service=service,
        owner=reason,
        retention=last.retention if last else "",
        after=last.session if last else None,
        resumed_from=checkpoint.id.attempt,
        world_size=checkpoint.world_size,  # a required field, although this session has no training
        num_nodes=checkpoint.num_nodes,
    )
    return r.Epoch(service=service), session


def _records(
    history: RunHistory, ops: Iterable[r.Op], *, writer: str, now_s: float
) -> Iterator[tuple[int, bytes]]:
    """Encode `ops` as records of the next epoch, and apply them to `history`. Yields numbers and bytes."""
    epoch = history.epoch + 1
    for op in ops:
        record = r.LogRecord(
            seq=history.next_seq, epoch=epoch, writer=writer, prev=history.last_digest, time_s=now_s, op=op
        )
        data = r.encode_record(record)
        history.apply(record, digest(data))
        yield record.seq, data


def _create(log: LogStore, seq: int, data: bytes, pause: Callable[[float], None]) -> CreateResult:
    """Create a record; after an unknown outcome repeat the call, whose result shows the existing record."""
    for _ in range(CREATE_TRIES - 1):
        outcome = create_record(log, seq, data)
        if outcome is not CreateResult.UNKNOWN:
            return outcome
        pause(CREATE_PAUSE_S)
    return create_record(log, seq, data)


def _error(outcome: CreateResult, seq: int, run_name: str, written: Sequence[r.Op]) -> CheckpointError:
    """Return the error for the unwritten record `seq`, before which the records of `written` were written."""
    so_far = _so_far(outcome, written)
    if outcome is CreateResult.EXISTS:
        return Fenced(
            f"Another writer has written record {seq} of run {run_name} in the meantime. {so_far}",
            hint="Check `ray-ckpt ls`, then run the command again if it is still wanted.",
            seq=seq,
        )
    if outcome is CreateResult.UNSUPPORTED:
        return StoragePathError(
            f"The log of run {run_name} cannot be written: its store cannot create a file exclusively.",
            hint="Run it where the training can write its log.",
        )
    return Unavailable(
        f"The store does not answer whether it has record {seq} of run {run_name}. {so_far}",
        hint="Run the command again when the storage path answers: it finds the outcome.",
        seq=seq,
    )


def _so_far(outcome: CreateResult, written: Sequence[r.Op]) -> str:
    """Return what a command has changed whose next record had this outcome."""
    is_unknown = outcome is CreateResult.UNKNOWN
    if not written:
        return "It is unknown if anything was changed." if is_unknown else "Nothing was changed."
    if len(written) == 1 and isinstance(written[0], r.Epoch):
        more = "it is unknown if more was changed" if is_unknown else "nothing else was changed"
        return f"The training that had it is fenced, and {more}."
    names = ", ".join(type(op).__name__.lower() for op in written)
    return f"Its records {names} are written{', and perhaps this one' if is_unknown else ''}."
