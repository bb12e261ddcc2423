"""Jobs with torchft through ray_ckpt: `ReplicaCheckpointer`; see docs/guides/torchft.md."""

from __future__ import annotations

from ray_ckpt.interop.torchft import ReplicaCheckpointer

__all__ = ["ReplicaCheckpointer"]
