"""Tiny models for the engines of verl, on the CPU, and what a test does with an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)

TYPES = {"actor": "language_model", "critic": "value_model"}
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def write_model(folder: Path) -> str:
    """Write a tiny Llama with dropout, as `save_pretrained` does; return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def train_on(engine: Any, sample: int, rank: int) -> float:
    """Make an optimizer step of an engine on a batch of `sample`; return the loss of this rank."""
    with engine.train_mode():
        output = engine.train_batch(_batch(sample, rank), loss_function=_loss)
    engine.lr_scheduler_step()
    return float(output["loss"][0])


def state_of(engine: Any) -> dict[str, Any]:
    """Return whole tensors of model and optimizer (rank 0 alone), the learning rate, and random state."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model: Any
    optimizer: Any
    model, optimizer = get_state_dict(engine.module, engine.optimizer, options=options)
    moments = {
        f"{name}.{kind}": value.clone()
        for name, values in optimizer.get("state", {}).items()
        for kind, value in values.items()
    }
    return {
        "model": {name: value.clone() for name, value in model.items()},
        "moments": moments,
        "rate": engine.lr_scheduler.get_last_lr(),
        "steps": engine.lr_scheduler.last_epoch,
        "random": torch.get_rng_state(),
        "manager": type(engine.checkpoint_manager).__module__,
    }


def _batch(sample: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * sample + rank)
    ids = [torch.randint(0, 64, (length,), generator=generator) for length in (5, 7)]

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    return tensordict_utils.get_tensordict(
        {
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(len(each)) for each in ids]),
            "loss_mask": nested([torch.ones(len(each)) for each in ids]),
        },
        non_tensor_dict={
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "temperature": 1.0,
            "use_remove_padding": False,
            "pad_mode": "no_padding",
            "global_token_num": [12],
        },
    )


def _loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    found = model_output["log_probs" if "log_probs" in model_output else "values"]
    return (found.values().float() - 1).square().mean(), {}


def config_of(role: str, model: str, *, strategy: str, **checkpoint: Any) -> TrainingWorkerConfig:
    return TrainingWorkerConfig(
        model_type=TYPES[role],
        model_config=HFModelConfig(
            path=model,
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy, use_torch_compile=False, mixed_precision=FP32, use_remove_padding=False
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2, total_training_steps=40, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.1
        ),
        checkpoint_config=CheckpointConfig(**checkpoint),
    )
