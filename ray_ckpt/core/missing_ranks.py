"""The ranks that an attempt lacks, and the proof that some of these ranks will never take part.

A rank that is only slow, however slow, never counts as absent; PROTOCOL.md section 4 lists the proofs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ray_ckpt.core.attempts import Attempt
from ray_ckpt.core.awaited import AWAITED_AFTER_S, Awaited, awaited_save, ranks_text, where_text
from ray_ckpt.core.context import Context
from ray_ckpt.core.open_attempts import OpenAttempts
from ray_ckpt.core.progress import SessionProgress
from ray_ckpt.errors import CheckpointError, SaveNotCollective, Unavailable
from ray_ckpt.types import AttemptId

STAYS_OUT_S = 30.0  # time for which a rank may stay in its first step, two or more steps behind the others


class MissingRanks:
    """A comparison of the open attempts with the progress of the ranks."""

    def __init__(self, context: Context, *, progress: SessionProgress, attempts: OpenAttempts) -> None:
        self._context, self._progress, self._attempts = context, progress, attempts

    def of(self, attempt: AttemptId) -> tuple[int, ...]:
        """Return the ranks of the group that have not reported the capture of an attempt."""
        plan, known = self._context.plan, self._attempts.get(attempt.attempt)
        stored = known.stored if known is not None else {}
        captured = self._progress.captures.ranks_of(attempt.attempt)
        return tuple(
            sorted(
                rank
                for node in (plan.nodes if plan is not None else ())
                if node.node_index not in stored
                for rank in node.ranks
                if rank not in captured and not self._progress.has_saved(rank, attempt.step)
            )
        )

    def awaited(self) -> Iterator[Awaited]:
        """Yield the ranks that an attempt has lacked for AWAITED_AFTER_S or longer."""
        for attempt, since_s, missing in self._lacking():
            if since_s >= AWAITED_AFTER_S:
                yield awaited_save(attempt.step, missing, since_s, self._progress.by_rank())

    def _lacking(self) -> Iterator[tuple[AttemptId, float, tuple[int, ...]]]:
        """Yield attempts that only some ranks have captured: id, age in seconds, and the missing ranks."""
        now_s, captures = self._context.now_s, self._progress.captures
        started_s = {a.id: a.started_s for a in self._attempts if a.state == "writing" and not a.is_salvage}
        found = {attempt: now_s for attempt in captures.fresh(now_s) if self._attempts.may_open(attempt)}
        for attempt, since_s in sorted((found | started_s).items(), key=lambda item: item[0].step):
            if missing := self.of(attempt):
                yield attempt, now_s - captures.since_s(attempt.attempt, since_s), missing

    def never_come(self) -> Iterator[tuple[AttemptId, list[int]]]:
        """Yield attempts and the ranks that will never take part in them, by the ranks' own reports."""
        lacking, now_s = list(self._lacking()), self._context.now_s
        self._progress.note_idle(  # for all attempts together, because a node forgets old attempts
            {
                k: now_s - since_s
                for _, since_s, missing in lacking
                for k in missing
                if self._progress.is_idle(k)
            }
        )
        for attempt, _, missing in lacking:
            if found := [k for k in missing if self._never_comes(k, attempt.step)]:
                yield attempt, found

    def _never_comes(self, rank: int, step: int) -> bool:
        """Return True if a rank has passed `step`, or was idle too long (STAYS_OUT_S if far behind)."""
        if self._progress.has_passed(rank, step):
            return True
        since_s = self._progress.idle_s(rank)
        if since_s <= STAYS_OUT_S:
            return False
        is_far_behind = self._progress.reports()[rank].progress.step + 2 <= step
        return is_far_behind or since_s > self._context.options.attempt_timeout_s

    # -- errors --------------------------------------------------------------------------------------

    def why_missed(self, attempt: AttemptId, missed: Sequence[int]) -> CheckpointError:
        """Return the error of an attempt that ranks have missed: misuse, unless its step was announced.

        If ranks miss an announced step, they had passed this step when they saw the announcement.
        """
        ranks = ", ".join(map(str, missed))
        if self._may_be_announced(attempt):
            return Unavailable(f"Rank(s) {ranks} had passed step {attempt.step} when it was announced.")
        where = where_text(missed[0], self._progress.by_rank())
        return SaveNotCollective(
            f"Step {attempt.step} was saved by some ranks only: rank(s) {ranks} did not save it; {where}.",
            hint="Call save (or step) on every rank, with the same number; "
            "do not put it under `if rank == 0`.",
            step=attempt.step,
            missing_ranks=tuple(missed),
        )

    def _may_be_announced(self, attempt: AttemptId) -> bool:
        """Return True if this coordinator has announced the step or its predecessor may have announced it."""
        context, session_key = self._context, (attempt.epoch, attempt.session)
        every = context.options.steps_between_saves
        is_by_number = every is not None and attempt.step % every == 0
        return (session_key, attempt.step) in context.save_signals or (
            session_key == context.found_session_key and not is_by_number
        )

    def why_incomplete(self, attempt: Attempt, limit_s: float) -> CheckpointError:
        """Return the error of an attempt that is too old: misuse only if missing ranks are idle."""
        missing = () if attempt.is_salvage else self.of(attempt.id)
        if idle := [k for k in missing if self._progress.is_idle(k)]:
            return self.why_missed(attempt.id, idle)
        where = f"; {where_text(missing[0], self._progress.by_rank())}" if missing else ""
        ranks = ranks_text(missing or attempt.missing_ranks)
        return Unavailable(f"Rank(s) {ranks} did not finish it within {limit_s:.0f} s{where}.")
