"""Translate the answers of agents and storage to events of the run machine, and bound the calls."""

from __future__ import annotations

from typing import Any

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import ScrubResult
from ray_ckpt.engine.ports import Answered, Call
from ray_ckpt.types import CheckpointInfo

DRAIN_SLACK_S = 900.0  # time of a drain beyond that of its bytes: on a poor link, parts are sent one by one
LEAST_DRAIN_BYTES_PER_S = 1 << 20  # a slower drain counts as stuck


def event_of(answer: Answered) -> m.Event | None:
    """Return the event that ends the answered effect, or None for an effect without an answer."""
    value: Any = answer.value
    failure = answer.failure
    error, is_damage = (failure.text, failure.is_damage) if failure is not None else (None, False)
    match answer.to.work if isinstance(answer.to, Call) else answer.to:
        case m.Drain(attempt=attempt, node_index=index, node_id=node, items=items):
            return m.DrainEnded(
                attempt=attempt,
                node_index=index,
                node_id=node,
                error=error,
                is_damage=is_damage,
                items=items,
                part=value if items else None,
            )
        case m.Code(attempt=attempt, node_index=index, node_id=node, is_parity=is_parity, places=places):
            return m.CodeEnded(
                attempt=attempt,
                node_index=index,
                node_id=node,
                is_parity=is_parity,
                group=places.group,
                error=error,
                is_damage=is_damage,
            )
        case m.Scrub(attempt=attempt, node_index=index, place=place):
            found = value or ScrubResult()
            return m.ScrubEnded(
                attempt=attempt,
                node_index=index,
                place=place,
                damage=found.damage,
                shared=found.shared,
                mended=found.mended,
                error=error,
            )
        case m.Delete(attempt=name, place=place):
            return m.DeleteEnded(attempt=name, place=place, error=error)
        case m.WriteDescription(checkpoint=checkpoint, exported=exported):
            return m.DescriptionWritten(
                attempt=checkpoint.id, error=error, is_damage=is_damage, exported=exported
            )
        case m.WriteSnapshot(seq=seq):
            return m.SnapshotWritten(seq=seq, error=error)
        case m.SweepRemote(number=number):
            return value or m.RemoteListed(number=number, error=error)
    return None


def drain_bound_s(checkpoint: CheckpointInfo, options: RunOptions) -> float:
    """Return the time after which another holder drains too, since the first holder may be frozen.

    Two uploads of one fragment do no harm.
    """
    rate = min(LEAST_DRAIN_BYTES_PER_S, options.drain_bytes_per_s or LEAST_DRAIN_BYTES_PER_S)
    return DRAIN_SLACK_S + checkpoint.size_bytes / rate
