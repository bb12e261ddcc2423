"""Ownership of a run: check that a service may write the run's log, and that the nodes agree with this log.

Both checks come before anything is appended, so that a rejected writer appends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray_ckpt.config import Resume
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.messages import LogOpened
from ray_ckpt.errors import RunConflict, RunSuperseded
from ray_ckpt.types import IMPORT_PREFIX, ROLLBACK_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMark:
    """The record of a run on a node's disk: the highest epoch from which the node received an order."""

    run_uid: str
    epoch: int


def check_log(
    event: LogOpened, *, service: str, owner: str | None, marks: Iterable[RunMark], resume: Resume
) -> None:
    """Raise RunConflict or RunSuperseded unless a coordinator may write the log that it has read."""
    history = event.history.copy() if event.history is not None else RunHistory()
    for record, record_digest in event.records:
        history.apply(record, record_digest)
    check_marks(history, run_name=event.run_name, marks=marks, resume=resume)
    check_claim(history, service=service, owner=owner)


def check_claim(history: RunHistory, *, service: str, owner: str | None) -> None:
    """Raise RunSuperseded if the run now belongs to another launcher or service.

    A restarted coordinator has no launcher (`owner` None) and may continue only a session of its service. A
    launcher may take over any run with its first group. A launcher that lost the run to another does not
    get the run back; otherwise two clusters would take it from each other forever. A rollback or an import is
    made by a person, not by a launcher: the launcher that had the run before it may continue the run.
    """
    current = history.session
    if current is None:
        return
    # A take-over appends an epoch, then a session; the previous owner loses the run with that epoch.
    if owner is None:
        is_ours = history.service == current.service == service
    else:
        launched = [s for s in history.sessions.values() if not s.is_offline]
        had_it = any(s.service == service and s.owner == owner for s in launched)
        last = launched[-1] if launched else current
        is_free = history.service == last.service or is_offline(history.service)
        is_ours = not had_it or (is_free and (last.service, last.owner) == (service, owner))
    if not is_ours:
        raise RunSuperseded(
            f"Run {history.run_name} was taken over by another launcher in session {current.session}.",
            hint="Stop one of the two, or give them different run names.",
            session=current.session,
        )


def is_offline(service: str) -> bool:
    """Return True if `service` is the name under which a rollback or an import writes its records."""
    return service.startswith((ROLLBACK_PREFIX, IMPORT_PREFIX))


def is_rollback(service: str) -> bool:
    """Return True if `service` is the name under which a rollback writes its session and epoch."""
    return service.startswith(ROLLBACK_PREFIX)


def check_marks(history: RunHistory, *, run_name: str, marks: Iterable[RunMark], resume: Resume) -> None:
    """Raise RunConflict if nodes hold a run of this name that the log does not have.

    Then the log is absent, belongs to another run, or is an older state of this run's log (a wrong mount, a
    restored backup); writing to it would orphan or delete the checkpoints on the nodes. With resume="never"
    the user gives up those checkpoints; nodes then have a mark of the new uid too, and the old mark no longer
    counts.
    """
    marks = tuple(marks)
    is_known = any(mark.run_uid == history.run_uid for mark in marks)
    hint = "Check that the right storage is mounted; nothing is deleted."
    for mark in marks:
        if mark.run_uid != history.run_uid:
            if is_known or resume == "never":
                continue
            hint = (
                "Check that the right storage is mounted. To start over on purpose use resume='never' "
                "or another run name; nothing is deleted."
            )
            found = f"run {history.run_uid}" if history.run_uid else "no log"
            problem = f"nodes hold checkpoints of run {mark.run_uid}, and there is {found}"
        elif mark.epoch > history.epoch:
            problem = f"nodes have seen epoch {mark.epoch}, and the log ends in epoch {history.epoch}"
        else:
            continue
        raise RunConflict(
            f"The log of run {run_name} on the storage path is not the one that its nodes know: {problem}.",
            hint=hint,
            run_uid=mark.run_uid,
        )
