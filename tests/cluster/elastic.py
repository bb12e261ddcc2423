"""The regression under an elastic Ray Train: `python -m tests.cluster.elastic STORAGE_PATH FOLDER`.

It trains until the step that FOLDER/total names, once that file is there. Each worker process writes a
file of its own in FOLDER, one JSON line at its restore and one per step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

import ray_ckpt
from ray_ckpt.core.values import SessionKey
from ray_ckpt.train import CheckpointCallback
from tests.cluster.regression import Regression

RUN = "elastic"
MAX_WORKERS = 4
EVERY_STEPS = 4
STEP_S = 0.15
MAX_FAILURES = 50  # a group that dies while it starts counts as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event of one rank. kind "restored": it begins after `step`; "stepped": it has done `step`."""

    kind: str
    time_s: float  # Unix time
    session: int  # of its group
    rank: int
    world_size: int
    step: int
    samples: list[int] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)


def train_loop(config: dict[str, Any]) -> None:
    training = Regression()
    ckpt = ray_ckpt.Checkpointer(model=training.model, optimizer=training.optimizer, batches=training.batches)
    info = ckpt.restore()
    step = info.step if info else 0
    record = _recorder(Path(config["folder"]), training, ckpt._session_key)
    record("restored", step, tiers=sorted(info.bytes_by_tier()) if info else [])
    batches = iter(training.batches)
    while step < _total(Path(config["folder"])):
        step += 1
        share = next(batches)
        training.step(share)
        record("stepped", step, samples=list(share))
        time.sleep(STEP_S)
        ckpt.step(step)


def _recorder(folder: Path, training: Regression, session_key: SessionKey | None) -> Callable[..., None]:
    path = folder / f"{training.rank}-{os.getpid()}.jsonl"

    def record(kind: str, step: int, **fields: Any) -> None:
        entry = Entry(
            kind=kind,
            time_s=time.time(),
            session=session_key[1] if session_key is not None else 0,
            rank=training.rank,
            world_size=training.world_size,
            step=step,
            **fields,
        )
        with path.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    return record


def _total(folder: Path) -> float:
    try:
        return int((folder / "total").read_text())
    except FileNotFoundError:
        return float("inf")


def set_total(folder: Path, total: int) -> None:
    """Set the last step at once for all, far enough ahead for every rank to read it in time."""
    (folder / "total.new").write_text(str(total))
    (folder / "total.new").rename(folder / "total")


def read(folder: Path) -> list[Entry]:
    """Return all complete lines of all ranks, in the order of time."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    entries = [Entry(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(entries, key=lambda entry: entry.time_s)


def main(storage_path: str, folder: str) -> None:
    ray.init(logging_level="warning")
    TorchTrainer(
        train_loop,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, MAX_WORKERS), elastic_resize_monitor_interval_s=1.0
        ),
        run_config=ray.train.RunConfig(
            name=RUN,
            storage_path=storage_path,
            callbacks=[CheckpointCallback(replicas=1, every_steps=EVERY_STEPS, remote_every=5)],
            failure_config=ray.train.FailureConfig(max_failures=MAX_FAILURES),
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
