"""Engines of vLLM for small models, and what they hold and generate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tests.frameworks.vllm.prompts import NUM_TOKENS, PROMPTS

OPTIONS: dict[str, Any] = {
    "compilation_config": {"custom_ops": ["none"]},
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 4 << 20,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
}


@contextmanager
def engine(model: object, **options: Any) -> Iterator[LLM]:
    """Start an engine with the configuration in the folder `model`."""
    llm = None
    try:
        llm = LLM(model=str(model), **{**OPTIONS, **options})
        yield llm
    finally:
        stop(llm)


def stop(llm: LLM | None) -> None:
    """Stop an engine, or what one that has failed has left, so that another can start in this process."""
    if llm is not None:
        llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def from_checkpoint(uri: str, **config: Any) -> dict[str, Any]:
    """Return vLLM's options for the weights of a checkpoint."""
    return {"load_format": "ray_ckpt", "model_loader_extra_config": {"checkpoint": uri, **config}}


def generate(llm: LLM) -> list[list[int]]:
    """Return the greedy tokens for each prompt."""
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, use_tqdm=False)]


def parameters(llm: LLM) -> dict[str, torch.Tensor]:
    """Return copies of the parameters of an engine in this process."""
    found: dict[str, torch.Tensor] = llm.apply_model(_copies)[0]
    return found


def _copies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
