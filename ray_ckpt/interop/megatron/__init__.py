"""Megatron-core's `dist_checkpointing` through ray_ckpt; see docs/guides/megatron.md."""
