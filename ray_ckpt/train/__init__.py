"""Ray Train: the callback that hooks saves and restores into a trainer."""

from ray_ckpt.train.callback import CheckpointCallback, check_storage_path

__all__ = ["CheckpointCallback", "check_storage_path"]
