"""A plain training that goes on from an imported run: `python -m ... STORAGE TOTAL KILL_AT OUT`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import ray_ckpt
from tests.frameworks.deepspeed_files.train import batch, groups_of, make_model


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(batch(number, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    storage, total, kill_at, out = sys.argv[1:]
    torch.set_num_threads(1)
    ray_ckpt.connect(run="deepspeed", storage_path=storage, every_steps=1)
    model = make_model(3)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer)
    first = ckpt.resume_step()
    for number in ckpt.steps(total=int(total)):
        step(model, optimizer, number)
        ckpt.step(number)
        if number == int(kill_at):
            ckpt.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    torch.save({"first": first, "model": model.state_dict()}, Path(out))


if __name__ == "__main__":
    main()
