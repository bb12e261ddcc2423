"""ray.train.report with a checkpoint folder: one worker, storage on the same disk.

The worker writes the state with torch.save, as Ray's guides do, and reports the folder. SYNC uploads it
before report() returns, ASYNC in a thread. The worker itself answers the bench.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from ray.train.v2.api.report_config import CheckpointUploadMode

from jobs.bench.peers.child import RETURNED, Live, Peer, connect, parser, serve

POLL_S = 0.005
WAIT_S = 240.0


class RayTrain(Peer):
    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.mode = folder, CheckpointUploadMode[mode]

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        local = self.folder / f"local-{step}"
        local.mkdir()
        torch.save(live.state_dict(), local / "state.pt")
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint(str(local)),
            checkpoint_dir_name=f"step-{step}",
            checkpoint_upload_mode=self.mode,
            delete_local_checkpoint_after_upload=True,
        )
        yield RETURNED
        deadline_s = time.monotonic() + WAIT_S
        while local.exists():  # Ray deletes the folder when the upload is complete
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"step {step} was not uploaded within {WAIT_S:.0f} s")
            time.sleep(POLL_S)

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        (path,) = self.folder.glob(f"run/**/step-{step}/state.pt")
        live.load_state_dict(torch.load(path, mmap=True, weights_only=True))
        for old in self.folder.glob("run/**/step-*"):
            if old != path.parent:
                shutil.rmtree(old)


def work(config: dict[str, Any]) -> None:
    """Serve requests in the worker process of Ray Train."""
    chosen = argparse.Namespace(**config)
    make = lambda live: RayTrain(chosen.folder, chosen.mode)  # noqa: E731
    serve(connect(chosen.socket), make, chosen.size, chosen.folder)


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("mode", choices=("SYNC", "ASYNC"))
    chosen = arguments.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    TorchTrainer(
        work,
        train_loop_config=vars(chosen),
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name="run", storage_path=str(chosen.folder)),
    ).fit()
    sys.stdout.flush()
    os._exit(0)
