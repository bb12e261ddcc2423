"""torchtitan through ray_ckpt; see docs/guides/torchtitan.md.

`--override.imports ray_ckpt.torchtitan.manager` on its command line replaces the checkpoint manager.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_ckpt.interop.packages import require

require("torchtitan", extra="torchtitan")  # a better error than that of the imports below

import ray  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.components.checkpointer import BaseCheckpointManager  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager as StockManager  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.tools import filesystem  # noqa: E402

from ray_ckpt.actors.connecting import connect  # noqa: E402
from ray_ckpt.config import from_json  # noqa: E402
from ray_ckpt.errors import ConfigError, ServiceError  # noqa: E402
from ray_ckpt.interop.torchtitan import manager as interop  # noqa: E402
from ray_ckpt.trainer.connection import get_connection  # noqa: E402

__all__ = ["CheckpointManager", "manager"]


class CheckpointManager(interop.CheckpointManager):
    """The manager for a Trainer: without a connection, it connects to the run `<dump_folder>/<folder>`."""

    @dataclass(kw_only=True, slots=True)
    class Config(interop.CheckpointManager.Config):
        """torchtitan's options of checkpoints, and the options of the run."""

    def __init__(self, config: Any, *, base_folder: str = "", **objects: Any) -> None:
        """Connect, if the process belongs to no run, and register the objects of the Trainer."""
        if config.enable and get_connection().link is None:
            _connect(config, base_folder)
        super().__init__(config, base_folder=base_folder, **objects)


@override(target=BaseCheckpointManager.Config, description="through ray_ckpt")  # type: ignore[untyped-decorator]
def manager(config: Any, **options: Any) -> Any:
    """Return the Config of ray_ckpt's manager with the options of torchtitan's, and `options` of the run.

    Raises ConfigError for the Config of a manager other than torchtitan's default.
    """
    if type(config) not in (StockManager.Config, CheckpointManager.Config):
        raise ConfigError(
            f"The manager is {type(config).__qualname__}, whose checkpoints may have other state.",
            hint="Use torchtitan's default CheckpointManager in the configuration.",
        )
    return derive(config, CheckpointManager.Config, options=options)


def _connect(config: Any, base_folder: str) -> None:
    where = filesystem.join(base_folder, config.folder)
    if not filesystem.is_remote(where):
        where = str(Path(where).absolute())
    storage_path, _, run = where.rstrip("/").rpartition("/")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world_size > 1 and not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ServiceError(
                f"Rank {rank} of {world_size} finds no Ray cluster.",
                hint="Run `ray start --head` on one node and `ray start --address=...` on the others first.",
            ) from error
    connect(run=run, storage_path=storage_path, rank=rank, world_size=world_size, **_options(config))


def _options(config: Any) -> dict[str, Any]:
    """Return the options of a run that mean the same as torchtitan's, and those that the flag has."""
    options: dict[str, Any] = {"every_steps": config.interval}
    options |= {"keep_last": config.keep_latest_k} if config.keep_latest_k else {"keep_every": 1}
    if config.load_step >= 0:
        options["resume"] = f"step:{config.load_step}"
    return {**options, **from_json(config.options)}
