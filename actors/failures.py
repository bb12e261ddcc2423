"""Failures of calls to actors, as the engine sees them."""

from __future__ import annotations

import ray

from ray_ckpt.engine.ports import Failure
from ray_ckpt.errors import CheckpointError, CorruptionError, Fenced, text_of


def reason(error: Exception) -> str:
    """Return the cause of a failed call to an agent, in one line."""
    return text_of(getattr(error, "cause", None) or error).splitlines()[0]


def failure_of(error: Exception) -> Failure:
    """Return the failure of a call, or of work in a thread."""
    cause = getattr(error, "cause", None) or error
    return Failure(
        text=reason(error),
        error=cause if isinstance(cause, CheckpointError) else error,
        epoch=cause.fields["epoch"] if isinstance(cause, Fenced) else None,
        is_damage=isinstance(cause, CorruptionError | EOFError),
        is_dead=isinstance(error, ray.exceptions.ActorDiedError),
    )
