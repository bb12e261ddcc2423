"""Ownership of a run: check that a service may write its log, and that its nodes know this log.

Both checks come before anything is appended, so that a rejected writer appends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray_ckpt.config import Resume
from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import RunConflict, RunSuperseded
from ray_ckpt.types import ROLLBACK_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMark:
    """The memory of a run on a node's disk: the highest epoch that has sent the node an order."""

    run_uid: str
    epoch: int


def check_claim(history: RunHistory, *, service: str, owner: str | None) -> None:
    """Raise RunSuperseded if the run belongs to another launcher or service by now.

    A restarted coordinator has no launcher (`owner` None) and may go on only with a session of its own
    service. A launcher may take over any run at its first group. A launcher that had the run and lost it does
    not get it back, or two clusters would take it from each other forever. A rollback is a person's act and
    no launcher: the launcher that had the run before it may go on with it.
    """
    current = history.session
    if current is None:
        return
    # A take-over appends an epoch and then a session; its predecessor has lost the run with the epoch.
    if owner is None:
        is_ours = history.service == current.service == service
    else:
        launched = [s for s in history.sessions.values() if not is_rollback(s.service)]
        had_it = any(s.service == service and s.owner == owner for s in launched)
        last = launched[-1] if launched else current
        is_free = history.service == last.service or is_rollback(history.service)
        is_ours = not had_it or (is_free and (last.service, last.owner) == (service, owner))
    if not is_ours:
        raise RunSuperseded(
            f"Run {history.run_name} was taken over by another launcher in session {current.session}.",
            hint="Stop one of the two, or give them different run names.",
            session=current.session,
        )


def is_rollback(service: str) -> bool:
    """Return True if a session or an epoch of this service is that of a rollback."""
    return service.startswith(ROLLBACK_PREFIX)


def check_marks(history: RunHistory, *, run_name: str, marks: Iterable[RunMark], resume: Resume) -> None:
    """Raise RunConflict if nodes hold a run of this name that the log does not have.

    The log is then absent, another run's, or an older state of itself (a wrong mount, a restored backup):
    writing to it would orphan or delete what the nodes hold. With resume="never" the user gives up what was
    there before; nodes then have a mark of the new uid too, and the mark of the old one no longer counts.
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
