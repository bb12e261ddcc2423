"""A rank of a training by torchtitan's own Trainer, with the environment that torchrun sets.

`python -m tests.frameworks.torchtitan.program SETUP`, a JSON object of the fields of Setup. torchtitan
needs an accelerator. Here its device is the CPU, and its monitor of device memory is replaced, as torch.cpu
has no statistics; all else is torchtitan's. At each step a line goes to `journal-<rank>.jsonl`.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", torch.cpu

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402

from ray_ckpt.config import RunOptions  # noqa: E402
from ray_ckpt.trainer.connection import Connection, set_connection  # noqa: E402
from tests.capture.local import LocalLink, restored_from  # noqa: E402
from tests.frameworks.torchtitan.setups import Setup  # noqa: E402


class NoMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = NoMonitor
torchtitan.trainer.dist_utils.set_pg_timeouts = lambda **_: None  # its barrier names a device of NCCL


def build(flags: list[str]) -> Any:
    """Return the Trainer that `torchtitan.train` builds for these flags."""
    base = ["--module", "tests.frameworks.torchtitan.configs", "--config", "tiny"]
    trainer = ConfigManager().parse_args([*base, *flags]).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo multiplies no gradients while it reduces
    return trainer


def connect(setup: Setup, rank: int, world_size: int) -> LocalLink | None:
    """Connect this rank to a node in this process, with the files of all ranks of the saved group."""
    if setup.checkpoints is None:
        return None
    options = RunOptions(memory="single", max_block_s=60.0, keep_last=10, **setup.options)
    link = LocalLink(options, rank=rank, world_size=world_size)
    if setup.resume:
        folder = Path(setup.checkpoints) / str(setup.resume)
        rows = [row for path in sorted(folder.glob("*.rows")) for row in pickle.loads(path.read_bytes())]
        link = restored_from(
            folder,
            setup.resume,
            rows,
            options,
            saved_ranks=setup.saved_ranks,
            rank=rank,
            world_size=world_size,
        )
    set_connection(Connection(link=link))
    return link


def keep(link: LocalLink, checkpoints: Path, step: int) -> None:
    """Write the files of this rank's part of a checkpoint."""
    folder = checkpoints / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{link.rank}.rows").write_bytes(pickle.dumps(link.write(folder, step)))


def watch(trainer: Any, setup: Setup, link: LocalLink | None, rank: int) -> None:
    """Write a line for each step, keep each checkpoint, and end this process after that of `kill_at`."""
    log, save = trainer.metrics_processor.log, trainer.checkpointer.save

    def logged(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        with (Path(setup.folder) / f"journal-{rank}.jsonl").open("a") as file:
            print(json.dumps([step, loss, trainer.ntokens_seen]), file=file)
        log(step, loss, *args, **kwargs)

    def saved(step: int, **kwargs: Any) -> bool:
        is_saved: bool = save(step, **kwargs)
        trainer.checkpointer.maybe_wait_for_saving()
        if is_saved and link is not None and setup.checkpoints is not None:
            keep(link, Path(setup.checkpoints), step)
        if step == setup.kill_at:
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return is_saved

    trainer.metrics_processor.log, trainer.checkpointer.save = logged, saved


def whole(trainer: Any) -> dict[str, torch.Tensor]:
    """Return all weights, moments and learning rates, and the next random number; all ranks call this."""
    found: dict[str, Any] = dict(trainer.model_parts[0].named_parameters())
    names = {id(param): name for name, param in found.items()}
    for optimizer in trainer.optimizers:
        for param, state in optimizer.state.items():
            found |= {f"{names[id(param)]}.{key}": value for key, value in state.items()}
        found["lr"] = torch.tensor([group["lr"] for group in optimizer.param_groups])
    found["noise"] = torch.rand(4)
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for name, v in found.items()}


def main(setup: Setup, flags: list[str]) -> None:
    os.chdir(setup.folder)
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    link = connect(setup, rank, world_size)
    trainer = build([*setup.flags, *flags])
    watch(trainer, setup, link, rank)
    try:
        trainer.train()
        state = whole(trainer)
        if rank == 0:
            torch.save(state, Path(setup.folder) / "end.pt")
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Setup(**json.loads(sys.argv[1])), sys.argv[2:])
