"""Ray Train: a callback that adds saves and restores to a trainer, and a function to open its checkpoints."""

from ray_ckpt.train.callback import CheckpointCallback, check_storage_path
from ray_ckpt.train.pointers import open_checkpoint

__all__ = ["CheckpointCallback", "check_storage_path", "open_checkpoint"]
