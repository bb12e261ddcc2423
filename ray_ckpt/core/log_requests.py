"""What somebody wants the log to say of one checkpoint: pins, and metrics that come after the save.

Each is decided on the whole log, since what is retired is not brought back: one record at a time, in the
order in which they came. Metrics for a save that is on its way wait until it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.history import RunHistory, has_room
from ray_ckpt.core.saves import Saves
from ray_ckpt.errors import CheckpointError, ConfigError, FormatError, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.types import CheckpointInfo

MAX_WAITING = 64  # annotations that wait for saves: 8 of each that may be open; the oldest give way
MAX_NAMED = 10  # steps in an error
_NOT_THERE = {"live": "off the lineage", "collected": "retired"}  # states, as people call them

Requested: TypeAlias = m.PinRequested | m.UnpinRequested | m.AnnotateRequested | m.DrillEnded


def checkpoint_to_pin(history: RunHistory, step: int) -> CheckpointInfo:
    """The newest live checkpoint of a step: what a pin of that step means.

    ConfigError if there is none; it says what has become of it, and which there are.
    """
    known = [c for c in history.checkpoints.values() if c.step == step]
    live = [c for c in known if c.state == "live"]
    if live:
        return live[-1]
    raise _not_live(history, step, known)


def checkpoint_to_unpin(history: RunHistory, step: int, owner: str) -> CheckpointInfo:
    """The newest checkpoint of a step that `owner` holds, a live one before others; if none, the newest.

    ConfigError if the step has never had one.
    """
    known = [c for c in history.checkpoints.values() if c.step == step]
    if not known:
        raise _not_live(history, step, known)
    return max(known, key=lambda c: (owner in c.pins, c.state == "live", c.seq))


def _not_live(history: RunHistory, step: int, known: Sequence[CheckpointInfo]) -> ConfigError:
    steps = sorted({c.step for c in history.live()}, key=lambda other: abs(other - step))[:MAX_NAMED]
    there = f"It has steps {', '.join(map(str, sorted(steps)))}." if steps else "It has none at all."
    if not known:
        return ConfigError(f"Run {history.run_name} has no live checkpoint of step {step}.", hint=there)
    state = known[-1].state
    final = "" if state == "lost" else "Retirement is final. "
    return ConfigError(
        f"Run {history.run_name} has no live checkpoint of step {step}: it is {state}.", hint=final + there
    )


def _writable(decision: r.Op | CheckpointError) -> r.Op | CheckpointError:
    """ConfigError in place of a record that cannot be written: it would hold up the log for good."""
    if isinstance(decision, CheckpointError):
        return decision
    try:
        r.check_op(decision)
    except FormatError as error:
        return ConfigError(f"The log cannot hold that: {error.message}")
    return decision


@dataclass(frozen=True, slots=True)
class _Request:
    asked: Requested
    attempt: str | None = None  # of an annotation: the save that was on its way when it came


class Requests:
    """Those that have not been answered."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requests: list[_Request] = []  # bounded by the callers that wait, and by MAX_WAITING
        self._logging: Requested | None = None  # its record is on its way

    def __bool__(self) -> bool:
        """Whether any waits to be decided."""
        return bool(self._requests)

    @property
    def waiting(self) -> tuple[Requested, ...]:
        """All that somebody waits for, in the order in which they came."""
        logging = () if self._logging is None else (self._logging,)
        return (*logging, *(request.asked for request in self._requests))

    def add(self, asked: Requested, saves: Saves) -> Iterator[m.Effect]:
        attempt = saves.open_at(asked.step) if isinstance(asked, m.AnnotateRequested) else None
        self._requests.append(_Request(asked, attempt))
        waiting = [request for request in self._requests if request.attempt is not None]
        for request in waiting[:-MAX_WAITING]:
            self._requests.remove(request)
            error = Unavailable(f"More than {MAX_WAITING} annotations wait for saves that have not ended.")
            yield m.Fail(token=request.asked.token, error=error)

    def decide(self, saves: Saves) -> Iterator[m.Effect]:
        """Append the record of the first that can be decided. Only while nothing waits for the log."""
        for request in list(self._requests):
            if request.attempt is not None and saves.is_open(request.attempt):
                continue
            self._requests.remove(request)
            decision = _writable(self._decide(request))
            if not isinstance(decision, CheckpointError):
                self._logging = request.asked
                self._context.ledger.append(decision)
                return
            yield m.Fail(token=request.asked.token, error=decision)

    def logged(self) -> Iterator[m.Effect]:
        """The record is a fact."""
        assert self._logging is not None, "only one is written at a time"
        asked, self._logging = self._logging, None
        yield m.Reply(token=asked.token, value=None)

    def _decide(self, request: _Request) -> r.Op | CheckpointError:
        match request.asked:
            case m.AnnotateRequested() as asked:
                return self._annotate(asked, request.attempt)
            case m.DrillEnded(result=result):
                return self._drilled(result)
            case m.PinRequested() | m.UnpinRequested() as asked:
                return self._pin(asked)

    def _pin(self, asked: m.PinRequested | m.UnpinRequested) -> r.Op | CheckpointError:
        checkpoint = self._context.history.checkpoints.get(asked.attempt)
        if isinstance(asked, m.UnpinRequested) and checkpoint is not None:
            return r.Unpin(attempt=asked.attempt, owner=asked.owner)
        if isinstance(asked, m.PinRequested) and checkpoint is not None and checkpoint.state == "live":
            return r.Pin(attempt=asked.attempt, owner=asked.owner, expires_at_s=asked.expires_at_s)
        state = f"is {checkpoint.state}" if checkpoint else "does not exist"
        return ConfigError(
            f"Checkpoint {asked.attempt} cannot be pinned: it {state}.",
            hint="Retirement is final; pin one that `ray-ckpt ls` shows as live.",
        )

    def _drilled(self, result: r.Drilled) -> r.Op | CheckpointError:
        if result.attempt not in self._context.history.checkpoints:
            return ConfigError(f"The log does not know the checkpoint {result.attempt} that was drilled.")
        self._context.measure(telemetry.DRILLS, outcome="passed" if result.passed else "failed")
        self._context.measure(telemetry.DRILL_SECONDS, result.seconds)
        return result

    def _annotate(self, asked: m.AnnotateRequested, attempt: str | None) -> r.Op | CheckpointError:
        checkpoint = self._meant(asked.step, attempt)
        if checkpoint is None and attempt is not None:
            return Unavailable(f"The save of step {asked.step} came to nothing, so it has no metrics.")
        if checkpoint is None:
            return self._nothing_there(asked.step)
        if not has_room(checkpoint, asked.metrics):
            return ConfigError(
                f"Step {asked.step} would have more than {r.MAX_METRICS} metrics.",
                hint="Use names again: of one name the later value counts.",
            )
        return r.Annotated(attempt=checkpoint.id.attempt, metrics=asked.metrics)

    def _meant(self, step: int, attempt: str | None) -> CheckpointInfo | None:
        history = self._context.history
        if attempt is not None:
            checkpoint = history.checkpoints.get(attempt)
            return checkpoint if checkpoint is not None and checkpoint.state == "live" else None
        return next((c for c in reversed(history.lineage()) if c.step == step), None)

    def _nothing_there(self, step: int) -> ConfigError:
        history = self._context.history
        why = "the run has no checkpoint of it"
        for checkpoint in history.checkpoints.values():
            if checkpoint.step == step:
                why = f"its checkpoint is {_NOT_THERE.get(checkpoint.state, checkpoint.state)}"
        steps = ", ".join(str(c.step) for c in history.lineage()[-MAX_NAMED:])
        return ConfigError(
            f"Step {step} cannot be annotated: {why}.",
            hint=f"The newest that can be: {steps or 'none'}. Retention must keep a checkpoint as long as "
            "its validation takes.",
        )
