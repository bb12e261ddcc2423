"""The end of a session: the times that its ranks reported, and the record of the cause.

A rank reports its last step and the seconds since that step about once a second, so times are exact to
within the delay of a message. Reports to a coordinator that died are lost for the next coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.values import RankProgress, SessionKey, SessionPlan
from ray_ckpt.format import records as r
from ray_ckpt.types import EndCause


class SessionEnd:
    """The times and the end of the current session; reset for each session."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session_key: SessionKey | None = None
        self._begin(None)

    def _begin(self, plan: SessionPlan | None) -> None:
        self._session_key = plan.session_key if plan else None
        self._base = self._step = self._first_step(plan)
        self._last_at_s: float | None = None
        self._first: tuple[int, float] | None = None  # the first reported step, and its end (Unix time)
        self._step_s = 0.0  # duration of a recent step, on the slowest rank
        self._saved_step = -1
        self._stall_s = 0.0  # stall of the save at `_saved_step`, on the slowest rank
        self._stalled_s = 0.0  # sum of the stalls of earlier saves
        self._lost: set[str] = set()
        self._draining: set[str] = set()  # nodes that were draining; some may have stayed
        self._ended_s: float | None = None  # monotonic time of the call of `end`

    def _first_step(self, plan: SessionPlan | None) -> int:
        """Return the step from which the session continues, in a checkpoint of this or another run."""
        if plan is None:
            return 0
        if plan.resume is not None:
            return plan.resume.checkpoint.step
        known = self._context.history.sessions.get(plan.session)
        return (known.origin_step or 0) if known is not None else 0

    def _enter(self) -> None:
        plan = self._context.plan
        if plan is not None and plan.session_key != self._session_key:
            self._begin(plan)

    @property
    def is_over(self) -> bool:
        """Return True if `end` was called for the current session."""
        plan = self._context.plan
        is_current = plan is not None and plan.session_key == self._session_key
        return is_current and self._ended_s is not None

    def since_s(self) -> float:
        """Return the seconds since the end of the current session; infinity before it and without one."""
        return self._context.now_s - self._ended_s if self._ended_s is not None and self.is_over else math.inf

    def restored(self, event: m.NodeRestored) -> None:
        """Record the step of another run's checkpoint that ranks restored, before their first step."""
        self._enter()
        steps = [rank.origin_step for rank in event.ranks if rank.origin_step is not None]
        if event.session_key == self._session_key and steps and self._last_at_s is None:
            self._base = self._step = max(steps)

    def progressed(self, event: m.RanksProgressed, wall_s: float) -> None:
        """Record the steps and stalls that ranks report at Unix time `wall_s`."""
        self._enter()
        if event.session_key != self._session_key:
            return
        furthest: RankProgress | None = None
        for progress in event.distinct:
            if furthest is None or progress.step > furthest.step:
                furthest = progress
            # Stalls of one save overlap, so the longest stall of all ranks counts.
            if progress.saved_step > self._saved_step:
                self._stalled_s += self._stall_s
                self._saved_step, self._stall_s = progress.saved_step, progress.stall_s
            elif progress.saved_step == self._saved_step and progress.stall_s > self._stall_s:
                self._stall_s = progress.stall_s
        if furthest is not None and furthest.step > self._base:
            self._completed(furthest, wall_s - furthest.since_s)

    def _completed(self, progress: RankProgress, at_s: float) -> None:
        self._step_s = progress.step_s if progress.step_s > 0 else self._step_s
        if self._first is None:
            self._first = (progress.step, at_s)
        if progress.step >= self._step:
            self._step = progress.step
            if self._last_at_s is None or at_s > self._last_at_s:
                self._last_at_s = at_s

    def nodes_seen(self, lost: Collection[str]) -> None:
        """Record which nodes of the group died, and which are draining by `Context.draining`."""
        mine = {node.node_id for node in self._context.plan.nodes} if self._context.plan else set()
        if mine:
            self._enter()
            self._lost |= mine.intersection(lost)
            self._draining |= mine & self._context.draining

    def end(self, cause: EndCause, *, live: Collection[str] | None) -> bool:
        """Append the record of the end of the current session; return False if no record is due.

        If nodes of the group are lost or draining, the record names this as the cause instead of `cause`.
        `live` are the nodes that are alive now, or that the next group finds; if None, nodes do not affect
        the cause.
        """
        self._enter()
        plan = self._context.plan
        if plan is None or self._ended_s is not None:
            return False
        self._ended_s = self._context.now_s
        if self._has_successor(plan):
            return False
        known = self._context.history.sessions.get(plan.session)
        if known is not None and known.ended is not None:  # by an earlier coordinator that died afterwards
            return False
        if live is not None:
            cause = self._cause_by_nodes(live) or cause
        if cause != "finished":
            self._context.measure(telemetry.INTERRUPTIONS, cause=cause)
        is_whole = plan.session_key != self._context.found_session_key
        saved = [c.step for c in self._context.history.lineage()[-1:] if c.id.session == plan.session]
        step = max((self._step, *saved))
        self._context.ledger.append(
            r.Ended(
                session=plan.session,
                cause=cause,
                step=step,
                first_at_s=self._first_at_s() if is_whole else None,
                last_at_s=self._last_at_s if step == self._step else None,  # None: no rank reported `step`
                stalled_s=self._stalled_s + self._stall_s if is_whole else None,
            )
        )
        return True

    def _has_successor(self, plan: SessionPlan) -> bool:
        """Return True if a newer session is in the log or waits to be logged, as after a damaged restore."""
        newest = self._context.ledger.projected().session
        return newest is not None and (newest.opened_by, newest.session) > plan.session_key

    def _cause_by_nodes(self, live: Collection[str]) -> EndCause | None:
        nodes = set(self._context.session_nodes())
        lost = self._lost | nodes.difference(live)
        if self._draining.intersection(lost) or self._context.draining.intersection(nodes):
            return "preemption"
        return "node" if lost else None

    def _first_at_s(self) -> float | None:
        """Return the start of the first step, computed from a later step to exclude compilation, or None."""
        if self._first is None:
            return None
        step, at_s = self._first
        return at_s - (step - self._base) * self._step_s
