"""Trainers of Transformers and TRL through ray_ckpt: `prepare_trainer`; see docs/guides/huggingface.md."""

from __future__ import annotations

from ray_ckpt.interop.huggingface.trainer import prepare_trainer

__all__ = ["prepare_trainer"]
