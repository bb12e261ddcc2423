"""The training job that `recover` interrupts, on ray_ckpt or on `ray.train.report`.

    python -m jobs.bench.recover_job ray_ckpt FOLDER BYTES

`warm` is ray_ckpt with processes that wait for the next group.

Every process writes the Unix times of its phases to one journal, so the slowest rank of each phase is known.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchTrainer

from ray_ckpt.train import CheckpointCallback, WarmWorkers
from ray_ckpt.train.ray_compat import ControllerCallback, WorkerCallback, WorkerGroupCallback

WORKERS = 2
STEP_S = 0.1
NEVER = 10**9  # steps between saves by themselves
FILL = 0.5  # value of all weights before a restore, as a cheap initialization
STOP = "stop"  # a file beside the journal; the job ends when it exists
OWN, WARM, REPORT = "ray_ckpt", "warm", "ray.train.report"


class Journal:
    """Lines of JSON, written by several processes; each line is one write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, what: str, **fields: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"what": what, "at_s": time.time(), **fields}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


class Stamps(ControllerCallback, WorkerGroupCallback, WorkerCallback):  # type: ignore[misc]
    """Notes the times of Ray Train's hooks; one object before and one after the callback of ray_ckpt."""

    def __init__(self, journal: Path, *, is_first: bool) -> None:
        self._journal = Journal(journal)
        self._is_first = is_first

    def after_controller_start(self, train_run_context: Any) -> None:
        self._write("controller", "run opened")

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        self._write("noticed", "")

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        self._write("ended", "")

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        self._write("started", "opened")
        return {}

    def after_init_train_context(self) -> None:
        if not self._is_first:
            import torch  # noqa: F401  # as the job does it a moment later, to see its time alone

            import ray_ckpt.trainer.checkpointer  # noqa: F401

            self._write("", "imported")

    def _write(self, first: str, second: str) -> None:
        if what := first if self._is_first else second:
            self._journal.write(what)


def trainer(system: str, folder: Path, size_bytes: int) -> TorchTrainer:
    """Make the trainer of a job of WORKERS ranks, whose data-parallel ranks hold the same state each."""
    journal, storage = folder / "journal.jsonl", folder / "storage"
    own: list[Any] = []
    worker_env: dict[str, Any] = {}
    if system != REPORT:
        own = [
            CheckpointCallback(
                replicas=1, keep_last=1, every_steps=NEVER, remote_every=NEVER, memory="single"
            )
        ]
    if system == WARM:
        warm = WarmWorkers("jobs.bench.state")
        own.append(warm)
        worker_env = warm.runtime_env()
    return TorchTrainer(
        train_loop,
        train_loop_config={"system": system, "journal": str(journal), "size_bytes": size_bytes},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, placement_strategy="STRICT_SPREAD"),
        run_config=ray.train.RunConfig(
            name="recover",
            storage_path=str(storage),
            worker_runtime_env=worker_env,
            callbacks=[Stamps(journal, is_first=True), *own, Stamps(journal, is_first=False)],
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
        ),
    )


def train_loop(config: dict[str, Any]) -> None:
    """Restore, do a step, save it, and go on without saves until the job is killed or told to stop."""
    import os

    import torch
    import torch.distributed as dist

    from jobs.bench.state import make_state, tensors

    journal, rank = Journal(Path(config["journal"])), dist.get_rank()
    torch.set_num_threads(1)  # the ranks share the machine
    journal.write("entered", rank=rank, pid=os.getpid(), node=ray.get_runtime_context().get_node_id())
    model, optimizer = make_state(config["size_bytes"], fill=FILL)
    journal.write("built", rank=rank)
    steps = _report_steps if config["system"] == REPORT else _own_steps
    for step in steps(model, optimizer, journal, rank):
        total = torch.ones(1)
        dist.all_reduce(total)
        for tensor in tensors(model, optimizer):
            tensor.view(-1)[:1] = float(step)
        journal.write("step", rank=rank, step=step)
        time.sleep(STEP_S)


def _own_steps(model: Any, optimizer: Any, journal: Journal, rank: int) -> Iterator[int]:
    import ray_ckpt

    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer)
    info = ckpt.restore()
    step = 0 if info is None else info.step
    journal.write("restored", rank=rank, step=step)
    _check(model, optimizer, step)
    yield (step := step + 1)
    while ckpt.setup_s is None:  # a job that has just begun has no memory for saves yet
        time.sleep(STEP_S)
    ckpt.save(step)
    ckpt.wait("replicated")
    journal.write("saved", rank=rank, step=step)
    for later in _until_stopped(step, journal):
        ckpt.step(later)
        yield later


def _report_steps(model: Any, optimizer: Any, journal: Journal, rank: int) -> Iterator[int]:
    import torch

    step, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as path:
            state = torch.load(Path(path) / "state.pt", weights_only=True)  # mapped, a step would read it
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
    journal.write("restored", rank=rank, step=step)
    _check(model, optimizer, step)
    yield (step := step + 1)
    if rank == 0:
        with tempfile.TemporaryDirectory(dir=journal.path.parent) as path:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(path) / "state.pt")
            ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(path))
    else:
        ray.train.report({"step": step})
    journal.write("saved", rank=rank, step=step)
    yield from _until_stopped(step, journal)


def _check(model: Any, optimizer: Any, step: int) -> None:
    """Raise AssertionError unless the restored state is that after `step`."""
    from jobs.bench.state import tensors

    for tensor in tensors(model, optimizer):
        flat = tensor.view(-1)
        assert float(flat[0]) == (step or FILL) or tensor.dim() == 0, "another state was restored"
        assert float(flat[-1]) == FILL or flat.numel() == 1, "other bytes were restored"


def _until_stopped(step: int, journal: Journal) -> Iterator[int]:
    while not (journal.path.parent / STOP).exists():
        yield (step := step + 1)


if __name__ == "__main__":
    trainer(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])).fit()
