"""The configuration of a small training: `--module tests.frameworks.torchtitan.configs --config tiny`.

A llama of torchtitan with two layers and dropout. Attention is torchtitan's class for scaled dot products,
since FlexAttention has no backward pass on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import dropout
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

LAYERS, WARMUP = 2, 2


class NoisyAttention(ScaledDotProductAttention):  # type: ignore[misc]
    """Attention with dropout, so that a resume needs the random state."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):  # type: ignore[misc]
        pass

    def forward(  # torchtitan passes the arguments by these names
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return dropout(super().forward(q_BLNH, k_BLNH, v_BLNH, **kwargs), 0.1)


def tiny() -> Any:
    config = llama3_debugmodel()
    model = config.model_spec.model
    del model.layers[LAYERS:]
    for _, _, parent, attribute in list(model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, NoisyAttention.Config())
    config.training.seq_len, config.training.local_batch_size = 32, 2
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = (
        "partial_dtensor"  # the default needs a newer FSDP2 than that of torch 2.13
    )
    config.hf_assets_path = "assets"
    config.validator.enable = False
    config.debug.seed = 7  # without it, each run draws its own
    config.checkpoint = CheckpointManager.Config(interval=4, last_save_model_only=False)
    return config
