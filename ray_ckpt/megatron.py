"""Megatron-core's `dist_checkpointing` through ray_ckpt; see docs/guides/megatron.md."""

from __future__ import annotations

from ray_ckpt.interop.packages import require

require("megatron-core", extra="megatron")  # a better error than that of the imports below

from ray_ckpt.interop.megatron.folder import resume_folder  # noqa: E402
from ray_ckpt.interop.megatron.strategies import LoadStrategy, SaveStrategy, register  # noqa: E402

__all__ = ["LoadStrategy", "SaveStrategy", "resume_folder"]

register()
