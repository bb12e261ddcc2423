"""Lightning through ray_ckpt: `CheckpointCallback`; see docs/guides/lightning.md."""

from __future__ import annotations

from ray_ckpt.interop.packages import require

require("lightning", extra="lightning")  # a better error than that of the import below

from ray_ckpt.interop.lightning import CheckpointCallback  # noqa: E402

__all__ = ["CheckpointCallback"]
