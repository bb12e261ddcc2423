"""A training group whose processes a test may kill: what its ranks see goes into the journal.

The training is a function of step and rank alone, so a state after step k has one digest, however often
the group died on the way there.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
import xxhash
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ckpt.errors import Unavailable
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.cluster.ranks import CALL_S, Training
from tests.fault.journal import Journal

LEVELS = ("local", "replicated", "durable")
LOOK_S = 0.1  # between two looks for a file
ACK_S = 10.0  # how long rank 0 waits for a level; then it goes on without an acknowledgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The run that a group trains, and the effort of its ranks to see acknowledgements."""

    run: str
    storage: str
    journal: str
    total: int = 1_000_000
    pace_s: float = 0.1
    waits: tuple[int, int, int] = (8, 2, 0)  # of ten saves, how many wait for local, replicated, durable
    ack_s: float = ACK_S  # for which such a save waits
    options: dict[str, Any] = field(default_factory=dict)


class FaultRank:
    """One rank: runs the functions that a test sends, and returns its process id."""

    def join(self, rank: int, world_size: int, meeting: str) -> int:
        """Meet the others at a file, which unlike a port cannot be taken by somebody else meanwhile."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
        return os.getpid()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Group:
    """`len(nodes)` ranks, rank k on `nodes[k]`; each dies by itself, and the group with it."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = tuple(nodes)
        self.calls: list[Any] = []
        self.actors = [
            ray.remote(FaultRank)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote()
            for node in nodes
        ]
        meeting = Path(tempfile.gettempdir(), f"ray_ckpt-group-{uuid.uuid4().hex}")
        joins = [actor.join.remote(k, len(nodes), str(meeting)) for k, actor in enumerate(self.actors)]
        try:
            self.pids: list[int] = ray.get(joins, timeout=CALL_S)
        except BaseException:
            self.stop()
            raise
        finally:
            meeting.unlink(missing_ok=True)

    def start(self, job: Job) -> None:
        """Begin to train; returns at once."""
        self.calls = [actor.run.remote(train, job) for actor in self.actors]

    def ended(self) -> bool:
        """Return whether a rank has ended, died or raised."""
        return bool(ray.wait(self.calls, timeout=0)[0])

    def result(self, *, timeout_s: float | None = CALL_S) -> list[int]:
        """Return the step that each rank has reached; raise the error of a rank."""
        return self._get(self.calls, timeout_s)

    def restore(self, job: Job, *, until: Path | None = None) -> list[tuple[int, str]]:
        """Restore without training; return step and digest of each rank. Rank 1 waits for `until`."""
        call = partial(restore, until=until)
        return self._get([actor.run.remote(call, job) for actor in self.actors], CALL_S)

    def _get(self, calls: list[Any], timeout_s: float | None) -> list[Any]:
        try:
            return list(ray.get(calls, timeout=timeout_s))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def train(job: Job) -> int:
    """Restore, and train; each state that is saved is in the journal before it is saved."""
    training = Training(job.run, job.storage, **job.options)
    journal = Journal(Path(job.journal), training.rank)
    ckpt = training.ckpt
    first = True
    step = 0
    for step in ckpt.steps(total=job.total):
        if first:
            journal.write("restored", step - 1, digest=state_digest(training), session=session_of(ckpt))
            first = False
        training.step()
        if ckpt.due(step):
            journal.write("reached", step, digest=state_digest(training))
        ckpt.step(step)
        if ckpt.due(step) and training.rank == 0:
            _await_ack(ckpt, journal, step, job)
        time.sleep(job.pace_s)
    ckpt.close()
    return step


def session_of(ckpt: Checkpointer) -> int:
    """Return the number of the session in which a rank trains."""
    assert ckpt._session_key is not None
    return ckpt._session_key[1]


def restore(job: Job, *, until: Path | None = None) -> tuple[int, str]:
    """Return the step and the digest of the newest checkpoint; the group does not train.

    Rank 1 begins only when `until` exists.
    """
    training = Training(job.run, job.storage, **job.options)
    while training.rank == 1 and until is not None and not until.exists():
        time.sleep(LOOK_S)
    info = training.ckpt.restore()
    step, digest = info.step if info else 0, state_digest(training)
    journal = Journal(Path(job.journal), training.rank)
    journal.write("restored", step, digest=digest, session=session_of(training.ckpt))
    training.ckpt.close()
    return step, digest


def _await_ack(ckpt: Any, journal: Journal, step: int, job: Job) -> None:
    choice = random.Random(step).randrange(10)  # not the module's own state, which belongs to the training
    bounds = [sum(job.waits[: k + 1]) for k in range(len(LEVELS))]
    level = next((name for name, bound in zip(LEVELS, bounds, strict=True) if choice < bound), None)
    if level is None or not ckpt._outcomes.pending:
        return
    attempt = ckpt._outcomes.pending[-1].attempt
    try:
        ckpt.wait(level, timeout_s=job.ack_s)
    except Unavailable:
        return
    journal.write("acked", attempt.step, session=attempt.session, attempt=attempt.attempt, level=level)


def state_digest(training: Training) -> str:
    """Digest of everything of this rank that a restore must bring back."""
    state = {
        "model": _locals(training.model.state_dict()),
        "optimizer": _locals(training.optimizer.state_dict()),
        "scheduler": training.scheduler.state_dict(),
        "extra": _locals(training.extra),
        "torch": _locals(torch.get_rng_state()),
        "python": random.getstate(),
    }
    return str(xxhash.xxh3_128_hexdigest(repr(state).encode()))


def _locals(value: Any) -> Any:
    """Tensors as the bytes that this rank holds, in containers that print the same every time."""
    if isinstance(value, torch.Tensor):
        tensor = value.to_local() if hasattr(value, "to_local") else value
        return str(tensor.dtype), tuple(tensor.shape), tensor.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return [(str(key), _locals(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_locals(item) for item in value]
    return value
