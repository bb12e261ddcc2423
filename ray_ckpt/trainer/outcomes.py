"""Outcomes of a rank's saves, checked between steps without waiting, and awaited on request.

A save that fails never stops training by itself. With `unprotected_after` training ends when it has
continued without a new checkpoint for the given time or number of failed saves, so that a failure does not
cost more than the user accepts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import SessionKey
from ray_ckpt.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    RunConflict,
    Unavailable,
    Unprotected,
    text_of,
)
from ray_ckpt.trainer.link import SaveLink
from ray_ckpt.types import AttemptId, CheckpointInfo, Level

log = logging.getLogger("ray_ckpt")

OUTCOME_SLACK_S = 5.0  # for the transfer of the answer, beyond the wait of the coordinator
MAX_COUNTED = 10_000  # failed saves; a higher limit of them is lowered to this number
MAX_PENDING = 16  # outcomes watched at a time; older outcomes were answered or are lost


@dataclass(slots=True)
class SaveStats:
    """Counts and seconds of this rank's saves by this Checkpointer."""

    saved: int = 0
    skipped: int = 0
    dropped: int = 0
    blocked_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # of the newest saves
    waited_s: float = 0.0  # total time that optimizer steps waited for captures


@dataclass(slots=True)
class PendingSave:
    """A captured save; the agent reports the outcome of the save."""

    attempt: AttemptId
    metrics: Mapping[str, float]
    outcome: Future[SaveOutcome]
    is_checked: bool = False  # the outcome has been logged or raised


class UnprotectedGuard:
    """Counts failed saves, and time since the last checkpoint, on one rank after the restore."""

    def __init__(self, limit: timedelta | int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the option `unprotected_after` as `limit`."""
        self._limit = limit
        self._clock = clock
        self._failed: deque[int] = deque(maxlen=MAX_COUNTED)
        self._reason = ""
        self.renew()

    def renew(self, step: int = 0) -> None:
        """Restart the time: the save of `step` has become a checkpoint, or training begins."""
        self._since_s = self._clock()
        self._failed = deque((s for s in self._failed if s > step), MAX_COUNTED)
        self._has_warned = False

    def failed(self, step: int, reason: str) -> None:
        """Count the save of `step`, which was skipped or dropped. Calls may come late and in any order."""
        self._failed.append(step)
        self._reason = reason

    def check(self, step: int) -> None:
        """Warn once when half of the limit is used up; raise Unprotected at the limit. Call between steps."""
        if self._limit is None:
            return
        used = self._used()
        if used < 0.5:
            return
        what = f"{len(self._failed)} saves have failed and {self._clock() - self._since_s:.0f} s have passed"
        what += " since the newest checkpoint"
        why = f"; the last one: {self._reason}" if self._failed else ""
        if used >= 1.0:
            raise Unprotected(
                f"Training ends at step {step}: {what}, and unprotected_after is {self._limit}{why}.",
                hint="Remove the cause that keeps checkpoints from being saved (see the warnings in this "
                "log), then start again: training continues from the newest checkpoint.",
                step=step,
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s; training ends when unprotected_after (%s) is over%s", what, self._limit, why)

    def _used(self) -> float:
        """Return the fraction of the limit that is used up."""
        if isinstance(self._limit, timedelta):
            return (self._clock() - self._since_s) / self._limit.total_seconds()
        assert self._limit is not None
        return len(self._failed) / min(self._limit, MAX_COUNTED)


class Outcomes:
    """Follows the saves of one rank until they are committed or dropped.

    Misuse, and the loss of the run to another launcher, are raised in the training thread. All other failures
    are counted and logged.
    """

    def __init__(self, link: SaveLink, guard: UnprotectedGuard, stats: SaveStats) -> None:
        self._link = link
        self._guard = guard
        self._stats = stats
        self.pending: deque[PendingSave] = deque(maxlen=MAX_PENDING)
        self.newest: tuple[AttemptId, Mapping[str, float]] | None = None  # committed, and the metrics
        self._restored: CheckpointInfo | None = None
        self._requested: PendingSave | str | None = None  # the last one, or why it has not begun
        self._ended: Future[CheckpointError] | None = None

    def begin(self, session_key: SessionKey, restored: CheckpointInfo | None) -> None:
        """Begin a session; `restored` is a checkpoint of this run, not one that the run begins with."""
        self._restored = restored
        self._ended = self._link.ended(session_key)
        self._guard.renew()

    @property
    def restored_step(self) -> int:
        """The step of the run's own checkpoint that was restored; 0 without one."""
        return self._restored.step if self._restored else 0

    @property
    def newest_text(self) -> str:
        """Name the newest checkpoint of the run whose commit was reported to this rank."""
        newest = self.newest[0] if self.newest else self._restored.id if self._restored else None
        return "none" if newest is None else f"that of step {newest.step}"

    def refuse(self, reason: str) -> None:
        """Note why the last requested save has not begun."""
        self._requested = reason

    def skip(self, attempt: AttemptId, reason: str) -> None:
        """Report that this rank does not take part in an attempt."""
        self._requested = f"step {attempt.step} was not saved: {reason}"
        self._guard.failed(attempt.step, reason)
        log.warning("step %d is not saved: %s", attempt.step, reason)
        self._link.skip(attempt, reason)

    def add(self, attempt: AttemptId, metrics: Mapping[str, float]) -> None:
        """Follow an attempt that was captured."""
        outcome = self._link.outcome(attempt, Level.LOCAL)
        if len(self.pending) == MAX_PENDING and not self.pending[0].outcome.done():
            self._guard.failed(self.pending[0].attempt.step, "its outcome was never reported")
        self._requested = PendingSave(attempt=attempt, metrics=metrics, outcome=outcome)
        self.pending.append(self._requested)
        self._stats.saved += 1

    def warn_if_unsaved(self, step: int, *, since: int, begun: int) -> None:
        """Warn if the last whole `step` after step `since` has no save; the loop was left in `begun`."""
        if step <= since or self.captured(step) is not None:
            return
        if step == begun:
            log.warning("the loop was left in step %d, before the save of that step", step)
        else:
            log.warning(
                "the loop was left in step %d; step %d, the last whole one, is not saved", begun, step
            )

    def captured(self, step: int) -> PendingSave | None:
        """Return the newest save of this rank if that is one of `step`."""
        return self.pending[-1] if self.pending and self.pending[-1].attempt.step == step else None

    def request(self, captured: PendingSave) -> None:
        """Note that a save which has begun before is the last one requested."""
        self._requested = captured

    def has_ended(self, pending: PendingSave, limit_s: float) -> bool:
        """Return True if the outcome of a save is known within `limit_s`."""
        return bool(wait([pending.outcome], limit_s).done)

    def in_flight(self, step: int) -> AttemptId | None:
        """Return this rank's newest save of `step` whose outcome is open; for any thread."""
        found = (p.attempt for p in reversed(tuple(self.pending)) if not p.outcome.done())
        return next((attempt for attempt in found if attempt.step == step), None)

    def count_wait(self, seconds: float) -> None:
        """Count the time that an optimizer step waited for a capture."""
        self._stats.waited_s += seconds

    def check(self) -> None:
        """Handle saves that have ended, without waiting. Raise misuse, and RunConflict if the run is lost."""
        self._check_ended()
        ended = [pending for pending in self.pending if not pending.is_checked and pending.outcome.done()]
        for pending in ended:
            pending.is_checked = True
            self._check_one(pending)

    def _check_ended(self) -> None:
        if self._ended is None or not self._ended.done():
            return
        ended, self._ended = self._ended, None
        try:
            error = ended.result(0)
        except Exception:  # the agent died; the new agent and the next save find the conflict again
            return
        raise error

    def _check_one(self, pending: PendingSave) -> None:
        step = pending.attempt.step
        try:
            error = pending.outcome.result(0).error
        except Exception as lost:
            text = text_of(lost)
            self._guard.failed(step, text)
            log.warning("step %d: the agent did not report the outcome of its save: %s", step, text)
            return
        if isinstance(error, CollectiveError | RunConflict):
            raise error
        if error is not None:
            self._stats.dropped += 1
            self._guard.failed(step, str(error))
            log.warning("step %d was not saved: %s", step, error)
        else:
            self._guard.renew(step)
            self.newest = (pending.attempt, pending.metrics)

    def is_committed(self, pending: PendingSave, limit_s: float | None = None) -> bool | None:
        """Wait for the outcome of a save. Return None if it is not known in time: it may still be committed.

        The default limit has room for files that are written for minutes, and then for the coordinator, which
        waits for missing nodes and for copies.
        """
        if limit_s is None:
            options = self._link.options
            commit_s = options.attempt_timeout_s + options.goal_timeout_s + OUTCOME_SLACK_S
            limit_s = max(commit_s, options.finish_timeout_s)
        try:
            return pending.outcome.result(limit_s).error is None
        except Exception as error:  # the time is up, or the agent died
            is_late = isinstance(error, TimeoutError)
            text = f"no report for {limit_s:.0f} s" if is_late else text_of(error)
            log.warning("step %d: the outcome of its save is unknown: %s", pending.attempt.step, text)
            return None if is_late else False

    def problem(self) -> str:
        """Return why the last requested save is no checkpoint; "" if it is one, or without a request."""
        requested = self._requested
        if requested is None or isinstance(requested, str):
            return requested or ""
        if not requested.outcome.done() or requested.outcome.exception() is not None:
            return "the outcome of its save was not reported"
        return str(requested.outcome.result().error or "")

    @property
    def has_failed(self) -> bool:
        """Whether the last requested save is known to be no checkpoint."""
        requested = self._requested
        is_known = requested is None or isinstance(requested, str) or requested.outcome.done()
        return is_known and bool(self.problem())

    def waiter(self) -> Callable[[Level, float], None]:
        """Return a function that waits until the save requested last is at a level, for any thread.

        Before the first save, it waits for the restored checkpoint. The function takes the level and a limit
        in seconds. It raises Unavailable with the reason if the level cannot be reached, or when the time is
        up; ConfigError for `replicated` in a run that makes neither copies nor parity.
        """
        return partial(self._wait, self._requested)

    def _wait(self, requested: PendingSave | str | None, level: Level, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        if isinstance(requested, str):
            raise Unavailable(f"There is no checkpoint to wait for: {requested}.")
        if requested is not None:
            attempt = requested.attempt
        elif self._restored is None:
            raise Unavailable("There is no checkpoint to wait for: no save has been requested yet.")
        elif self._restored.level >= level:
            return
        else:
            attempt = self._restored.id
        if level is Level.REPLICATED and self._link.options.max_losses == 0:
            raise ConfigError(
                "replicas is 0, so no save becomes replicated.",
                hint='Wait for "local" or "durable", or set replicas or parity.',
                option="replicas",
            )
        try:
            if requested is not None:
                self._wait_for(attempt, Level.LOCAL, timeout_s)
            left_s = deadline_s - time.monotonic()
            if level is Level.DURABLE:
                self._link.make_durable(attempt, left_s).result(left_s)
            elif level > Level.LOCAL:
                self._wait_for(attempt, level, left_s)
        except CheckpointError:
            raise
        except Exception as error:  # the time is up, or the agent died
            raise Unavailable(
                f"Step {attempt.step} did not become {level.label} within {timeout_s:.0f} s.",
                hint="See the log of the coordinator for the reason; raise timeout_s if it is just slow.",
            ) from error

    def _wait_for(self, attempt: AttemptId, level: Level, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            outcome = self._link.outcome(attempt, level)
            try:
                error = outcome.result(max(0.0, deadline_s - time.monotonic())).error
                break
            except TimeoutError:
                if not outcome.done():  # else only the limit of the call is over
                    raise
        if isinstance(error, CollectiveError | RunConflict):
            raise error
        if error is not None:
            raise Unavailable(f"Step {attempt.step} was not saved: {error}")


def warn_of_annotation(step: int, done: Future[None]) -> None:
    """Log the error of a call that added metrics to a step, if there is one."""
    if (error := done.exception()) is not None:
        log.warning("step %d was not annotated: %s", step, text_of(getattr(error, "cause", None) or error))
