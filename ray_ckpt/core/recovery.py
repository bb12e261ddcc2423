"""Phases of a recovery: the time from the last step of a session to the first step of the next session.

The moments come from several clocks: the launcher, the coordinators and the nodes of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ray_ckpt.core.history import RunHistory
from ray_ckpt.format.records import Restored
from ray_ckpt.types import SessionInfo

PHASES: Mapping[str, str] = {
    "noticed": "the launcher noticed the failure",
    "ended": "the processes of the failed group had ended",
    "started": "the processes of the new group had started",
    "opened": "the session was open",
    "connected": "the last rank was connected",
    "prepared": "the slowest rank began to restore",
    "restored": "all ranks had their state",
    "first_step": "the first step began",
}
"""The phases in their order, with the moment at which each ends. A phase begins at the previous moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """Moments of a recovery by the clocks of coordinators, as Unix times in their order, or None.

    `since_s` is a time before the recovery, at or before `last_s`, the end of the last step.
    """

    since_s: float
    last_s: float | None
    opened_s: float
    restoring_s: float | None
    ready_s: float | None
    first_s: float | None


def recovery_phases(times: RecoveryTimes, info: SessionInfo) -> dict[str, float]:
    """Return the seconds of each phase of the recovery that `info` began, in the order of PHASES.

    A phase whose end is unknown is part of the next phase; a phase whose beginning is unknown is left out. A
    moment by another clock is moved between its neighbours by the clock of the coordinators. So the phases
    add up to the time between the first and the last known moment.
    """
    moments = {
        "last_step": times.last_s,
        "noticed": info.noticed_at_s,
        "ended": info.previous_ended_at_s,
        "started": info.started_at_s,
        "opened": times.opened_s,
        "connected": info.connected_at_s,
        "prepared": times.restoring_s,
        "restored": times.ready_s,
        "first_step": times.first_s,
    }
    known = [(name, time_s) for name, time_s in moments.items() if time_s is not None]
    phases: dict[str, float] = {}
    before_s = times.since_s
    for number, (name, time_s) in enumerate(known):
        limit_s = next((later_s for later, later_s in known[number:] if later not in _OF_OTHERS), time_s)
        end_s = max(before_s, min(time_s, limit_s))
        if number:
            phases[name] = end_s - before_s
        before_s = end_s
    return phases


_OF_OTHERS = {"noticed", "ended", "started", "connected"}  # by the clocks of launchers and ranks


def phases_until_restored(history: RunHistory, restored: Restored, now_s: float) -> dict[str, float]:
    """Return the phases of a recovery whose ranks have their state at Unix time `now_s`.

    Return {} if the session is not in the log, or follows no session that trained and failed.
    """
    info = history.sessions.get(restored.session)
    previous = history.sessions.get(info.parent or 0) if info is not None else None
    if info is None or previous is None or previous.is_offline:
        return {}
    end = previous.ended
    if end is not None and end.cause == "finished":
        return {}
    times = RecoveryTimes(
        since_s=previous.opened_at_s,
        last_s=end.last_at_s if end is not None else None,
        opened_s=info.opened_at_s,
        restoring_s=now_s - restored.seconds,
        ready_s=now_s,
        first_s=None,
    )
    return recovery_phases(times, replace(info, connected_at_s=restored.connected_at_s))
