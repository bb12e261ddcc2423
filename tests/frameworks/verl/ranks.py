"""Ranks with engines of verl, forked from one process that has imported verl, which takes long.

The test is the driver: it calls one role after the other, on all ranks of the role, and waits for each.
"""

from __future__ import annotations

import fcntl
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ANSWER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Processes to start: `num_ranks` with an engine for each of `roles`."""

    roles: tuple[str, ...]
    num_ranks: int
    strategy: str = "fsdp2"
    checkpoint: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    address: str  # of Ray
    model: str  # folder
    meeting: str  # a path for the ranks to find each other


class Ranks:
    """The process that forks the ranks of all groups; `start` and `call` are its commands."""

    def __init__(self) -> None:
        self._pipe, far = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=_serve, args=(far,))
        self._process.start()

    def start(self, group: Start) -> None:
        self._ask("start", group)

    def call(self, role: str, method: str, *args: Any) -> list[Any]:
        """Call a method of `_Rank` on all ranks of a role; raise the error of the first that fails."""
        found: list[Any] = self._ask("call", role, method, *args)
        return found

    def kill(self) -> None:
        """End all ranks at once."""
        self._ask("kill")

    def _ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        assert self._pipe.poll(ANSWER_S), f"no answer to {command}"
        is_good, found = self._pipe.recv()
        if not is_good:
            raise found
        return found

    def close(self) -> None:
        self.kill()
        self._pipe.send(("end",))
        self._process.join()


def _serve(pipe: Connection) -> None:
    import verl.workers.engine  # noqa: F401  # before the ranks are forked

    import tests.frameworks.verl.program  # noqa: F401

    ranks: dict[str, list[tuple[Any, Connection]]] = {}
    while (command := pipe.recv())[0] != "end":
        try:
            pipe.send((True, _answer(ranks, *command)))
        except Exception as error:
            pipe.send((False, error))


def _answer(ranks: dict[str, list[tuple[Any, Connection]]], command: str, *args: Any) -> Any:
    if command == "start":
        (group,) = args
        started = [_fork(group, rank) for rank in range(group.num_ranks)]
        ranks |= dict.fromkeys(group.roles, started)
        return [_result(*rank) for rank in started]
    if command == "call":
        role, *call = args
        for _, near in ranks[role]:
            near.send((role, *call))
        return [_result(*rank) for rank in ranks[role]]
    for process in {process for started in ranks.values() for process, _ in started}:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    ranks.clear()
    return None


def _fork(group: Start, rank: int) -> tuple[Any, Connection]:
    context = get_context("fork")
    near, far = context.Pipe()
    process = context.Process(target=_run_rank, args=(far, group, rank), daemon=True)
    process.start()
    return process, near


def _result(process: Any, near: Connection) -> Any:
    assert near in wait([near, process.sentinel], ANSWER_S), f"{process.name} does not answer, or has died"
    is_good, found = near.recv()
    if not is_good:
        raise found
    return found


def _run_rank(pipe: Connection, group: Start, rank: int) -> None:
    served = None
    while True:
        try:
            if served is None:
                served = _Rank(group, rank)
                pipe.send((True, os.getpid()))
            role, method, *args = pipe.recv()
            pipe.send((True, getattr(served, method)(role, *args)))
        except EOFError:
            return
        except Exception as error:
            traceback.print_exc()
            pipe.send((False, error))
            if served is None:
                return


class _Rank:
    """One rank; the methods are what a worker of verl does with its engine."""

    def __init__(self, group: Start, rank: int) -> None:
        import ray
        import torch.distributed as dist
        from verl.workers.engine import EngineRegistry

        from tests.frameworks.verl.program import config_of

        os.environ.update(group.environment)
        self.rank = rank
        with Path(f"{group.meeting}.lock").open("w") as turn:  # forks of one process draw the same object ids
            fcntl.flock(turn, fcntl.LOCK_EX)
            ray.init(group.address, log_to_driver=False)
        dist.init_process_group(
            "gloo", init_method=f"file://{group.meeting}", rank=rank, world_size=group.num_ranks
        )
        self.engines: dict[str, Any] = {}
        for role in group.roles:
            config = config_of(role, group.model, strategy=group.strategy, **group.checkpoint)
            config.model_config.model_type = config.model_type
            self.engines[role] = EngineRegistry.new(
                model_type=config.model_type,
                backend=config.engine_config.strategy,
                model_config=config.model_config,
                engine_config=config.engine_config,
                optimizer_config=config.optimizer_config,
                checkpoint_config=config.checkpoint_config,
            )

    def reset(self, role: str) -> None:
        self.engines[role].initialize()

    def train(self, role: str, samples: Sequence[int]) -> list[float]:
        from tests.frameworks.verl.program import train_on

        return [train_on(self.engines[role], sample, self.rank) for sample in samples]

    def state(self, role: str) -> dict[str, Any]:
        from tests.frameworks.verl.program import state_of

        return state_of(self.engines[role])

    def save(self, role: str, path: str, step: int, max_to_keep: int | None = None) -> None:
        self.engines[role].save_checkpoint(path, None, step, max_to_keep)

    def load(self, role: str, path: str) -> None:
        self.engines[role].load_checkpoint(path, None, False)

    def latest(self, role: str, path: str) -> str | None:
        from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

        found: str | None = find_latest_ckpt_path(path)
        return found

    def tracker(self, role: str, path: str) -> str:
        return Path(path, "latest_checkpointed_iteration.txt").read_text()
