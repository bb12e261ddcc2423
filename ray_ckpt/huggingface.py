"""Transformers, TRL and PEFT through ray_ckpt; see docs/guides/huggingface.md."""

from __future__ import annotations

from ray_ckpt.interop.packages import require

require("transformers", extra="huggingface")  # a better error than that of the imports below

from ray_ckpt.interop.huggingface.files import FilesItem as ModelFiles  # noqa: E402
from ray_ckpt.interop.huggingface.hub import tensors  # noqa: E402
from ray_ckpt.interop.huggingface.trainer import prepare_trainer  # noqa: E402

__all__ = ["ModelFiles", "prepare_trainer", "tensors"]
