"""Ray Train: callbacks that add saves and restores and keep workers warm, and opening its checkpoints."""

from ray_ckpt.train.callback import CheckpointCallback, check_storage_path
from ray_ckpt.train.pointers import open_checkpoint
from ray_ckpt.train.warm import WarmWorkers

__all__ = ["CheckpointCallback", "WarmWorkers", "check_storage_path", "open_checkpoint"]
