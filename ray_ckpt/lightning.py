"""Lightning through ray_ckpt: `CheckpointCallback`; see docs/guides/lightning.md."""

from __future__ import annotations

from ray_ckpt.interop.lightning import CheckpointCallback

__all__ = ["CheckpointCallback"]
