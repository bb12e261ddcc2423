"""Transformers, TRL and PEFT through ray_ckpt; see docs/guides/huggingface.md."""

from __future__ import annotations

from ray_ckpt.interop.huggingface.files import FilesItem as ModelFiles
from ray_ckpt.interop.huggingface.hub import tensors
from ray_ckpt.interop.huggingface.trainer import prepare_trainer

__all__ = ["ModelFiles", "prepare_trainer", "tensors"]
