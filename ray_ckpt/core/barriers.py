"""Barriers of all ranks before a barrier of another library, such as a report to Ray Train.

A rank that has entered the other library's barrier cannot leave that barrier. So the ranks first meet at a
barrier here: if a rank does not come in time, this barrier is given up for all ranks, including ranks that
come later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ray_ckpt.core import messages as m
from ray_ckpt.core.awaited import AWAITED_AFTER_S, Awaited, awaited_report, ranks_text
from ray_ckpt.core.context import Context
from ray_ckpt.core.values import RankProgress, SessionKey, Token
from ray_ckpt.errors import CheckpointError, RunSuperseded

BARRIER_S = 20.0  # longest wait for the last rank; if a rank evaluates for longer, a report is skipped
MAX_ENDED = 32  # answers kept for late ranks: enough, as each failed barrier doubles the steps to the next


@dataclass(slots=True)
class _Barrier:
    since_s: float
    ranks: set[int] = field(default_factory=set)
    tokens: list[Token] = field(default_factory=list)


class Barriers:
    """Barriers of the group at work."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session_key: SessionKey = (0, 0)
        self._open: dict[int, _Barrier] = {}
        self._ended: deque[tuple[int, m.BarrierAnswer]] = deque(maxlen=MAX_ENDED)

    def met(self, event: m.BarrierReached) -> Iterator[m.Effect]:
        """Note that ranks of a node have reached a barrier; answer all ranks when none is missing."""
        plan = self._context.plan
        if plan is None or event.session_key != plan.session_key:
            yield m.Fail(token=event.token, error=RunSuperseded("A newer session owns this run."))
            return
        yield from self._enter_session()
        known = next((answer for number, answer in self._ended if number == event.number), None)
        if known is not None:
            yield m.Reply(token=event.token, value=known)
            return
        barrier = self._open.setdefault(event.number, _Barrier(since_s=self._context.now_s))
        barrier.ranks.update(event.ranks)
        barrier.tokens.append(event.token)
        if len(barrier.ranks) >= plan.world_size:
            yield from self._end(event.number, ())

    def progressed(self, event: m.RanksProgressed) -> Iterator[m.Effect]:
        """Let all ranks enter a barrier that the previous coordinator let some ranks enter."""
        plan = self._context.plan
        if plan is not None and event.session_key == plan.session_key and event.met in self._open:
            yield from self._end(event.met, ())

    def ticked(self) -> Iterator[m.Effect]:
        yield from self._enter_session()
        for number, barrier in list(self._open.items()):
            if self._context.now_s - barrier.since_s > BARRIER_S:
                missing = self._missing(barrier)
                yield m.Warn(
                    text=f"Step {number} is not reported to Ray Train: rank(s) {ranks_text(missing)} did not "
                    f"come to it within {BARRIER_S:.0f} s."
                )
                yield from self._end(number, missing)

    def awaited(self, progress: dict[int, RankProgress]) -> Iterator[Awaited]:
        for number, barrier in self._open.items():
            since_s = self._context.now_s - barrier.since_s
            if since_s >= AWAITED_AFTER_S and (missing := self._missing(barrier)):
                yield awaited_report(number, missing, since_s, progress)

    def _missing(self, barrier: _Barrier) -> tuple[int, ...]:
        plan = self._context.plan
        ranks = sorted(rank for node in plan.nodes for rank in node.ranks) if plan is not None else ()
        return tuple(rank for rank in ranks if rank not in barrier.ranks)

    def _end(self, number: int, missing: tuple[int, ...]) -> Iterator[m.Effect]:
        answer = m.BarrierAnswer(missing=missing)
        self._ended.append((number, answer))
        for token in self._open.pop(number).tokens:
            yield m.Reply(token=token, value=answer)

    def _enter_session(self) -> Iterator[m.Effect]:
        """Forget the barriers of an older session when a new session opens; fail the callers that wait."""
        plan = self._context.plan
        session_key = plan.session_key if plan is not None else (0, 0)
        if session_key == self._session_key:
            return
        yield from self.fail(RunSuperseded("A newer training group has opened this run."))
        self._session_key = session_key
        self._ended.clear()

    def fail(self, error: CheckpointError) -> Iterator[m.Effect]:
        """Fail all callers that wait at a barrier."""
        waiting, self._open = self._open, {}
        for barrier in waiting.values():
            for token in barrier.tokens:
                yield m.Fail(token=token, error=error)
