"""Pin and unpin in the log, without a cluster, by the rules of a rollback.

The records are those that a coordinator would write, after an `epoch` record that fences a running service.
This `epoch` record names the service of the last epoch, because a pin does not change the run's owner. If a
coordinator of that service is still running, its next write fails because the record exists; the coordinator
restarts and continues, and training does not end.
"""

from __future__ import annotations

import uuid

from ray_ckpt.admin.rollback import PIN_WRITER, write_ops
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.log_requests import checkpoint_to_pin, checkpoint_to_unpin
from ray_ckpt.format import records as r
from ray_ckpt.storage.log_store import LogStore
from ray_ckpt.types import CheckpointInfo


def pin(
    log: LogStore, history: RunHistory, *, step: int, owner: str, expires_at_s: float | None, now_s: float
) -> CheckpointInfo:
    """Keep the newest live checkpoint of `step` for `owner`, until Unix time `expires_at_s` or without end.

    `history` is the state of the log when it was read. Returns the checkpoint with the pin. Raises
    ConfigError if the step has no checkpoint, or the checkpoint was retired or lost; and the errors of
    `rollback.write_ops`.
    """
    attempt = checkpoint_to_pin(history, step).id.attempt
    op = r.Pin(attempt=attempt, owner=owner, expires_at_s=expires_at_s)
    return _write(log, history, op, now_s)


def unpin(log: LogStore, history: RunHistory, *, step: int, owner: str, now_s: float) -> CheckpointInfo:
    """Remove the pin of `owner`. Writes nothing if there is no such pin.

    Raises ConfigError if the step has never had a checkpoint; and the errors of `rollback.write_ops`.
    """
    checkpoint = checkpoint_to_unpin(history, step, owner)
    if owner not in checkpoint.pins:
        return checkpoint
    return _write(log, history, r.Unpin(attempt=checkpoint.id.attempt, owner=owner), now_s)


def _write(log: LogStore, history: RunHistory, op: r.Pin | r.Unpin, now_s: float) -> CheckpointInfo:
    writer = f"{PIN_WRITER}{uuid.uuid4().hex}"
    ops = (r.Epoch(service=history.service), op)
    return write_ops(log, history, ops, writer=writer, now_s=now_s).checkpoints[op.attempt]
