"""Ray Train: the callback that hooks saves and restores into a trainer, and what opens Ray's checkpoints."""

from ray_ckpt.train.callback import CheckpointCallback, check_storage_path
from ray_ckpt.train.pointers import open_checkpoint

__all__ = ["CheckpointCallback", "check_storage_path", "open_checkpoint"]
