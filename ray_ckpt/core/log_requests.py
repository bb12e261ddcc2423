"""Requests for a log record about one checkpoint: pins, drills, and metrics that are added after the save.

Because retirement is final, a request is decided only while no record is pending: one record at a time, in
the order of the requests. Metrics for an open save wait until the save has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.history import RunHistory, has_room
from ray_ckpt.core.open_attempts import OpenAttempts
from ray_ckpt.errors import CheckpointError, ConfigError, FormatError, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.texts import nearest_steps
from ray_ckpt.types import CheckpointInfo

MAX_WAITING = 64  # annotations that wait for saves: 8 for each save that may be open; the oldest ones fail
MAX_OWNER = 200  # characters; limited because owners appear in the log and in tables
_NOT_THERE = {"live": "off the lineage", "collected": "retired"}  # state -> text in messages to users

Requested: TypeAlias = m.PinRequested | m.UnpinRequested | m.AnnotateRequested | m.DrillEnded


def check_pin(owner: Any, expires_in_s: Any) -> None:
    """Raise ConfigError unless a new pin can have this owner and lifetime; None: without end."""
    if not isinstance(owner, str) or not 0 < len(owner) <= MAX_OWNER or not owner.isprintable():
        raise ConfigError(
            "The owner is not a valid name.",
            hint=f"Give as owner a printable text of at most {MAX_OWNER} characters.",
        )
    if expires_in_s is None:
        return
    is_number = isinstance(expires_in_s, Real) and not isinstance(expires_in_s, bool)
    if not is_number or not 0 < expires_in_s < math.inf:
        raise ConfigError(
            f"expires_in_s is {expires_in_s!r}.",
            hint="Set it to a number of seconds above 0, or to None for a pin without end.",
        )


def cannot_hold(error: FormatError) -> ConfigError:
    """Return the error for a record that the log cannot hold."""
    return ConfigError(
        f"The log cannot hold that: {error.message}",
        hint="Use texts without lone surrogates, finite numbers, and times within the calendar.",
    )


def checkpoint_to_pin(history: RunHistory, step: int) -> CheckpointInfo:
    """Return the newest live checkpoint of a step, to which a pin of that step applies.

    If there is none, raise ConfigError with the state of the step's checkpoint and the nearest live steps.
    """
    known = [c for c in history.checkpoints.values() if c.step == step]
    live = [c for c in known if c.state == "live"]
    if live:
        return live[-1]
    raise _not_live(history, step, known)


def checkpoint_to_unpin(history: RunHistory, step: int, owner: str) -> CheckpointInfo:
    """Return the checkpoint of a step to which an unpin by `owner` applies.

    Checkpoints that `owner` has pinned come before others, then live ones before others, then newer ones.
    Raise ConfigError if the step has never had a checkpoint.
    """
    known = [c for c in history.checkpoints.values() if c.step == step]
    if not known:
        raise _not_live(history, step, known)
    return max(known, key=lambda c: (owner in c.pins, c.state == "live", c.seq))


def _not_live(history: RunHistory, step: int, known: Sequence[CheckpointInfo]) -> ConfigError:
    there = nearest_steps((c.step for c in history.live()), step)
    if not known:
        return ConfigError(f"Run {history.run_name} has no live checkpoint of step {step}.", hint=there)
    state = known[-1].state
    final = "" if state == "lost" else "Retirement is final. "
    return ConfigError(
        f"Run {history.run_name} has no live checkpoint of step {step}: it is {state}.", hint=final + there
    )


def _writable(decision: r.Op | CheckpointError) -> r.Op | CheckpointError:
    """Return ConfigError instead of a record that cannot be encoded and would block the log forever."""
    if isinstance(decision, CheckpointError):
        return decision
    try:
        r.check_op(decision)
    except FormatError as error:
        return cannot_hold(error)
    return decision


@dataclass(frozen=True, slots=True)
class _Request:
    event: Requested
    attempt: str | None = None  # the save that was open when an annotation arrived


class Requests:
    """The requests that have no answer yet."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requests: list[_Request] = []  # at most one per waiting caller; annotations: MAX_WAITING
        self._logging: Requested | None = None  # the request whose record is being written

    def __bool__(self) -> bool:
        """Return True if a request is not decided yet."""
        return bool(self._requests)

    @property
    def waiting(self) -> tuple[Requested, ...]:
        """The requests without an answer, in the order of their arrival."""
        logging = () if self._logging is None else (self._logging,)
        return (*logging, *(request.event for request in self._requests))

    def add(self, event: Requested, attempts: OpenAttempts) -> Iterator[m.Effect]:
        attempt = attempts.open_at(event.step) if isinstance(event, m.AnnotateRequested) else None
        self._requests.append(_Request(event, attempt))
        waiting = [request for request in self._requests if request.attempt is not None]
        for request in waiting[:-MAX_WAITING]:
            self._requests.remove(request)
            error = Unavailable(f"More than {MAX_WAITING} annotations wait for saves that have not ended.")
            yield m.Fail(token=request.event.token, error=error)

    def decide(self, attempts: OpenAttempts) -> Iterator[m.Effect]:
        """Append the record of the first request that can be decided; call while no record is pending."""
        for request in list(self._requests):
            if request.attempt is not None and attempts.is_open(request.attempt):
                continue
            self._requests.remove(request)
            decision = _writable(self._decide(request))
            if not isinstance(decision, CheckpointError):
                self._logging = request.event
                self._context.ledger.append(decision)
                return
            yield m.Fail(token=request.event.token, error=decision)

    def logged(self) -> Iterator[m.Effect]:
        """Answer the request whose record was confirmed."""
        assert self._logging is not None, "only one is written at a time"
        event, self._logging = self._logging, None
        yield m.Reply(token=event.token, value=None)

    def _decide(self, request: _Request) -> r.Op | CheckpointError:
        match request.event:
            case m.AnnotateRequested() as event:
                return self._annotate(event, request.attempt)
            case m.DrillEnded(result=result):
                return self._drilled(result)
            case m.PinRequested() | m.UnpinRequested() as event:
                return self._pin(event)

    def _pin(self, event: m.PinRequested | m.UnpinRequested) -> r.Op | CheckpointError:
        checkpoint = self._context.history.checkpoints.get(event.attempt)
        if isinstance(event, m.UnpinRequested) and checkpoint is not None:
            return r.Unpin(attempt=event.attempt, owner=event.owner)
        if isinstance(event, m.PinRequested) and checkpoint is not None and checkpoint.state == "live":
            return r.Pin(attempt=event.attempt, owner=event.owner, expires_at_s=event.expires_at_s)
        state = f"is {checkpoint.state}" if checkpoint else "does not exist"
        return ConfigError(
            f"Checkpoint {event.attempt} cannot be pinned: it {state}.",
            hint="Retirement is final; pin one that `ray-ckpt ls` shows as live.",
        )

    def _drilled(self, result: r.Drilled) -> r.Op | CheckpointError:
        if result.attempt not in self._context.history.checkpoints:
            return ConfigError(f"The log does not know the checkpoint {result.attempt} that was drilled.")
        self._context.measure(telemetry.DRILLS, outcome="passed" if result.passed else "failed")
        self._context.measure(telemetry.DRILL_SECONDS, result.seconds)
        return result

    def _annotate(self, event: m.AnnotateRequested, attempt: str | None) -> r.Op | CheckpointError:
        checkpoint = self._to_annotate(event.step, attempt)
        if checkpoint is None and attempt is not None:
            return Unavailable(f"The save of step {event.step} came to nothing, so it has no metrics.")
        if checkpoint is None:
            return self._nothing_there(event.step)
        if not has_room(checkpoint, event.metrics):
            return ConfigError(
                f"Step {event.step} would have more than {r.MAX_METRICS} metrics.",
                hint="Use names again: of one name the later value counts.",
            )
        return r.Annotated(attempt=checkpoint.id.attempt, metrics=event.metrics)

    def _to_annotate(self, step: int, attempt: str | None) -> CheckpointInfo | None:
        history = self._context.history
        if attempt is not None:
            checkpoint = history.checkpoints.get(attempt)
            return checkpoint if checkpoint is not None and checkpoint.state == "live" else None
        return next((c for c in reversed(history.lineage()) if c.step == step), None)

    def _nothing_there(self, step: int) -> ConfigError:
        history = self._context.history
        why, advice = "the run has no checkpoint of it", "Annotate steps that are saved."
        for checkpoint in history.checkpoints.values():
            if checkpoint.step == step:
                why = f"its checkpoint is {_NOT_THERE.get(checkpoint.state, checkpoint.state)}"
                advice = "Retention must keep a checkpoint as long as its validation takes."
        there = nearest_steps((c.step for c in history.lineage()), step)
        return ConfigError(
            f"Step {step} cannot be annotated: {why}.",
            hint=f"{there} {advice}",
        )
