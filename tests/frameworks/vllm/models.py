"""Small models of Transformers with random weights, as vLLM knows them, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.interop.huggingface.files import FilesItem
from tests.catalog.test_load import save
from tests.frameworks.vllm.prompts import NUM_TOKENS, PROMPTS
from tests.support.sample_run import RunLog

IDS: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
SMALL: dict[str, Any] = {**IDS, **SIZES, "num_hidden_layers": 2, "num_key_value_heads": 1}


def random(model: Any) -> Any:
    """Give a model weights whose greedy tokens vary."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def llama() -> Any:
    return random(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))


def qwen(**options: Any) -> Any:
    config = transformers.Qwen3Config(**{**SMALL, **options}, head_dim=32, tie_word_embeddings=True)
    return random(transformers.Qwen3ForCausalLM(config))


def gpt2() -> Any:
    config = transformers.GPT2Config(**IDS, n_embd=64, n_layer=2, n_head=2, n_positions=64)
    return random(transformers.GPT2LMHeadModel(config))


def gemma() -> Any:
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=8)
    return random(transformers.Gemma3ForCausalLM(config))


def mixtral() -> Any:
    return random(transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4)))


def qwen_mixture() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return random(
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **experts, head_dim=32))
    )


def olmo() -> Any:
    return random(transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL)))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen3, tied": qwen,
    "gpt2, tied": gpt2,
    "gemma3, sliding window": gemma,
    "mixtral": mixtral,
    "qwen3, mixture": qwen_mixture,
    "olmo2, by the classes of Transformers": olmo,
}


def expected(model: Any) -> list[list[int]]:
    """Return the greedy tokens of Transformers for each prompt."""
    return [_greedy(model, prompt) for prompt in PROMPTS]


def _greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    length = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "eos_token_id": None}
    found = model.generate(torch.tensor([prompt]), **length, do_sample=False)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def tokenizer() -> Any:
    """Return a tokenizer whose tokens are the words t2, t3 and so on."""
    words = {"<s>": 0, "</s>": 1} | {f"t{number}": number for number in range(2, SMALL["vocab_size"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="</s>"
    )


def saved(folder: Path, model: Any, *, has_files: bool = True) -> str:
    """Save a run with one checkpoint of a model, with or without its small files; return its URI."""
    items = {"model": adapt("model", model, {})}
    if has_files:
        items["files"] = FilesItem.of(model, tokenizer())
    save(RunLog(folder=folder / "gpt"), [items])
    return f"{folder / 'gpt'}@10"
