"""What a session's ranks have told of their time, for the record that says how the session ended.

A rank tells its last step and how long ago it was completed, about once a second, so moments are known to
within the delay of a message. What was told to a coordinator that died is not known to its successor.
"""

from __future__ import annotations

from collections.abc import Collection

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.format import records as r
from ray_ckpt.types import EndCause


class SessionEnd:
    """The session of the group at work; begins anew with each one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session_key: m.SessionKey | None = None
        self._begin(None)

    def _begin(self, plan: m.SessionPlan | None) -> None:
        self._session_key = plan.session_key if plan else None
        self._base = self._step = self._first_step(plan)
        self._last_at_s: float | None = None
        self._first: tuple[int, float] | None = (
            None  # the first step that was told, and when it was completed
        )
        self._step_s = 0.0  # of late, on the slowest rank
        self._saved_step = -1
        self._stall_s = 0.0  # of that save, on the slowest rank that has told
        self._stalled_s = 0.0  # of the saves before it
        self._lost: set[str] = set()
        self._left: set[str] = set()  # nodes that were leaving; some may have stayed
        self._is_ended = False

    def _first_step(self, plan: m.SessionPlan | None) -> int:
        """That it goes on from: of its checkpoint, or of another run's, which the log tells of."""
        if plan is None or plan.resume is not None:
            return plan.resume.checkpoint.step if plan and plan.resume else 0
        known = self._context.history.sessions.get(plan.session)
        return (known.origin_step or 0) if known is not None else 0

    def _enter(self) -> None:
        plan = self._context.plan
        if plan is not None and plan.session_key != self._session_key:
            self._begin(plan)

    @property
    def is_over(self) -> bool:
        """It has been told how the session at work ended."""
        plan = self._context.plan
        return plan is not None and plan.session_key == self._session_key and self._is_ended

    def restored(self, event: m.NodeRestored) -> None:
        """Ranks that begin with another run's checkpoint say its step, before any of them makes one."""
        self._enter()
        steps = [rank.origin_step for rank in event.ranks if rank.origin_step is not None]
        if event.session_key == self._session_key and steps and self._last_at_s is None:
            self._base = self._step = max(steps)

    def progressed(self, event: m.RanksProgressed, wall_s: float) -> None:
        """`wall_s` is Unix time."""
        self._enter()
        if event.session_key != self._session_key:
            return
        furthest: m.RankProgress | None = None
        for progress in event.ranks.values():
            if furthest is None or progress.step > furthest.step:
                furthest = progress
            # Stalls of one save overlap, so the longest of its ranks counts.
            if progress.saved_step > self._saved_step:
                self._stalled_s += self._stall_s
                self._saved_step, self._stall_s = progress.saved_step, progress.stall_s
            elif progress.saved_step == self._saved_step and progress.stall_s > self._stall_s:
                self._stall_s = progress.stall_s
        if furthest is not None and furthest.step > self._base:
            self._completed(furthest, wall_s - furthest.since_s)

    def _completed(self, progress: m.RankProgress, at_s: float) -> None:
        self._step_s = progress.step_s if progress.step_s > 0 else self._step_s
        if self._first is None:
            self._first = (progress.step, at_s)
        if progress.step >= self._step:
            self._step = progress.step
            if self._last_at_s is None or at_s > self._last_at_s:
                self._last_at_s = at_s

    def nodes_seen(self, lost: Collection[str]) -> None:
        """Nodes died, or are about to leave; `Context.draining` tells the latter."""
        mine = {node.node_id for node in self._context.plan.nodes} if self._context.plan else set()
        if mine:
            self._enter()
            self._lost |= mine.intersection(lost)
            self._left |= mine & self._context.draining

    def end(self, cause: EndCause, *, live: Collection[str] | None) -> bool:
        """Append the record of how the session at work ended; False if there is none, or it is appended.

        That is `cause`, unless its nodes explain it: `live` are those that there are now, or that the next
        group finds. None: whatever has become of them.
        """
        self._enter()
        plan = self._context.plan
        if plan is None or self._is_ended:
            return False
        self._is_ended = True
        if self._has_successor(plan):
            return False
        known = self._context.history.sessions.get(plan.session)
        if known is not None and known.ended is not None:  # by a coordinator that died before what came next
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
                last_at_s=self._last_at_s if step == self._step else None,  # its own was never told
                stalled_s=self._stalled_s + self._stall_s if is_whole else None,
            )
        )
        return True

    def _has_successor(self, plan: m.SessionPlan) -> bool:
        """Return True if a newer session is in the log or on its way there: after damage one replaces it."""
        newest = self._context.ledger.projected().session
        return newest is not None and (newest.opened_by, newest.session) > plan.session_key

    def _cause_by_nodes(self, live: Collection[str]) -> EndCause | None:
        nodes = set(self._context.session_nodes())
        lost = self._lost | nodes.difference(live)
        if self._left.intersection(lost) or self._context.draining.intersection(nodes):
            return "preemption"
        return "node" if lost else None

    def _first_at_s(self) -> float | None:
        """When the first step began, by the time that a step takes; that of a compilation is not in it."""
        if self._first is None:
            return None
        step, at_s = self._first
        return at_s - (step - self._base) * self._step_s
