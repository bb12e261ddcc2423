"""Save intervals of the run machine: given by the options, or (`auto`) computed from measurements.

Measurements come from the log (failed sessions, time trained) and from messages, in the order in which the
machine received the messages, so a decision can be replayed.
"""

from __future__ import annotations

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.interval_model import FailureRate, IntervalModel
from ray_ckpt.core.values import SessionKey
from ray_ckpt.types import FAILURES

COUNTED_S = 1.0  # seconds of training counted at a time, because `ticked` is called with each event


class SaveIntervals:
    """The intervals of one run machine; each session starts a new model with all logged failures."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session_key: SessionKey | None = None
        self._model: IntervalModel | None = None
        self._stalls_s: dict[int, float] = {}  # by rank: the stall of the rank's last save
        self._drains: dict[str, float] = {}  # by attempt: start of its drain; bounded by open drains
        self._drain_s = 0.0  # duration of the last drain
        self._trained_s = 0.0  # monotonic time until which training is counted

    # -- measurements ------------------------------------------------------------------------------------

    def ticked(self, *, is_training: bool) -> None:
        plan, now_s = self._context.plan, self._context.now_s
        if plan is None or not is_training:
            return
        if plan.session_key != self._session_key or self._model is None:
            options = self._context.options
            self._session_key, self._stalls_s, self._trained_s = plan.session_key, {}, now_s
            self._model = IntervalModel(
                num_nodes=len(plan.nodes),
                replicas=options.max_losses,
                budget=options.overhead_budget,
                failures=failures_in(self._context.history),
            )
        if now_s - self._trained_s >= COUNTED_S:
            self._model.trained(now_s - self._trained_s)
            self._trained_s = now_s

    def progressed(self, event: m.RanksProgressed) -> None:
        if event.session_key == self._session_key and any(p.stall_s > 0 for p in event.distinct):
            saved = {rank: p.stall_s for rank, p in event.ranks.items() if p.stall_s > 0}
            self._stalls_s |= saved

    def committed(self, latency_s: float) -> None:
        """Count a save that was due by time and committed `latency_s` after the save began.

        If ranks report the stall of a save only after its commit, the stall counts with the next save.
        """
        if self._model is not None and self._stalls_s:
            self._model.saved(max(self._stalls_s.values()), latency_s)

    def draining(self, attempts: set[str]) -> None:
        """Record the attempts that are being drained to the storage path."""
        self._drains = {name: self._drains.get(name, self._context.now_s) for name in attempts}

    def durable(self, attempt: str) -> None:
        if attempt not in self._drains:
            return
        self._drain_s = self._context.now_s - self._drains[attempt]
        self._context.measure(telemetry.PHASE, self._drain_s, phase="drain")
        if self._model is not None:
            self._model.drained(self._drain_s)

    # -- the intervals -----------------------------------------------------------------------------------

    @property
    def interval_s(self) -> float | None:
        """Seconds between saves by time; None if saves are not made by time."""
        every_s = self._context.options.every_s
        if every_s == "auto":
            return self._model.interval_s if self._model else None
        return every_s

    @property
    def remote_interval_s(self) -> float | None:
        """Seconds after which a commit is due on the storage path; None if drains are due by number only."""
        every_s = self._context.options.remote_every_s
        if every_s == "auto":
            return self._model.remote_interval_s if self._model else None
        return every_s

    @property
    def drain_s(self) -> float:
        """Seconds that the last drain took; 0 if there was none."""
        return self._drain_s


def failures_in(history: RunHistory) -> FailureRate:
    """Count failed sessions, and the node-seconds from the start of each session to its last record.

    A session also failed if it has no recorded end and a newer session follows: its coordinator failed too.
    The session of a rollback or an import cannot fail.
    """
    sessions = [session for session in history.sessions.values() if not session.is_offline]
    last_s = {session.session: session.opened_at_s for session in sessions}
    for checkpoint in history.checkpoints.values():
        if (number := checkpoint.id.session) in last_s:  # not of an import
            last_s[number] = max(last_s[number], checkpoint.committed_at_s)
    count, exposed_s = 0, 0.0
    for session in sessions:
        until_s = last_s[session.session]
        if session.ended is not None:
            until_s = max(until_s, session.ended.last_at_s or 0.0)
            count += session.ended.cause in FAILURES
        else:
            count += session is not sessions[-1]
        exposed_s += max(0.0, until_s - session.opened_at_s) * session.num_nodes
    return FailureRate(count=count, exposed_s=exposed_s)
