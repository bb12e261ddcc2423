"""Ray Train: the callback that hooks saves and restores into a trainer."""

from ray_ckpt.train.callback import CheckpointCallback

__all__ = ["CheckpointCallback"]
