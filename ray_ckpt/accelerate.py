"""Loops with Accelerate through ray_ckpt: `items`; see docs/guides/huggingface.md."""

from __future__ import annotations

from ray_ckpt.interop.accelerate import items

__all__ = ["items"]
