"""Training loops with the Trainer of Transformers, which the tests run under Ray Train and break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray.data
import ray.train
import torch
from ray.train.huggingface.transformers import prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import ray_ckpt
from jobs.train_transformers import samples, write_results
from ray_ckpt.train import CheckpointCallback
from tests.cluster.killing import end_once

SMALL = {"vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
LARGER = {**SMALL, "n_embd": 256}  # a frozen base that is worth a shard of its own
FSDP = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}
RAY_FIRST, RAY_LAST = "ray first", "ray last"
SMALL_IDS = {"bos_token_id": 0, "eos_token_id": 0}


class Adapted(nn.Module):
    """A frozen projection with an adapter of low rank, as LoRA makes them."""

    def __init__(self, base: nn.Module, *, inner: int = 4) -> None:
        super().__init__()
        self.base = base
        assert isinstance(base.weight, torch.Tensor)
        rows, columns = base.weight.shape  # of GPT-2's Conv1D
        self.down = nn.Parameter(torch.randn(rows, inner) / rows)
        self.up = nn.Parameter(torch.zeros(inner, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up  # type: ignore[no-any-return]


def with_adapters(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Freeze a model and add adapters to its attention."""
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn)
    return model


class KillOnce(TrainerCallback):  # type: ignore[misc]
    """Ends rank 1 at a step, once."""

    def __init__(self, marker: Path, step: int, *, with_node: bool) -> None:
        self._marker, self._step, self._with_node = marker, step, with_node

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step and args.process_index == 1:
            end_once(self._marker, with_node=self._with_node)


class Losses(TrainerCallback):  # type: ignore[misc]
    """Writes each step's loss and learning rate to a file; those of a step done twice are both there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs and args.process_index == 0:
            with self._path.open("a") as file:
                print(json.dumps([state.global_step, logs["loss"], logs["learning_rate"]]), file=file)


def plain_trainer(model: GPT2LMHeadModel, args: dict[str, Any]) -> Trainer:
    data = samples()[:128]  # 8 steps of an epoch
    return Trainer(model=model, args=TrainingArguments(**args), train_dataset=data, eval_dataset=data[:8])


def masking_trainer(model: GPT2LMHeadModel, args: dict[str, Any]) -> Trainer:
    """Build a trainer whose collator hides random labels, from a seed that each sample has."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows])
        draws = [torch.rand(ids.shape[1], generator=torch.Generator().manual_seed(row["k"])) for row in rows]
        return {"input_ids": ids, "labels": ids.masked_fill(torch.stack(draws) < 0.5, -100)}

    data = [{"input_ids": row["input_ids"], "k": k} for k, row in enumerate(samples()[:128])]
    arguments = TrainingArguments(**args, remove_unused_columns=False)
    return Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)


def ray_data_trainer(model: GPT2LMHeadModel, args: dict[str, Any]) -> Trainer:
    """Build a trainer that evaluates with Ray Data, which it cannot without Ray's own `prepare_trainer`."""
    rows = ray.train.get_dataset_shard("eval").iter_torch_batches(batch_size=4)
    return Trainer(
        model=model, args=TrainingArguments(**args), train_dataset=samples()[:128], eval_dataset=rows
    )


def sft_trainer(model: GPT2LMHeadModel, args: dict[str, Any]) -> Trainer:
    """Build a trainer of TRL, with a tokenizer of words."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<end>": 1, **{f"w{k}": k + 2 for k in range(100)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    texts = [" ".join(f"w{(k * j) % 97}" for j in range(5 + k % 20)) for k in range(128)]
    return SFTTrainer(
        model=model,
        args=SFTConfig(**args, max_length=32, bf16=False),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=processing,
    )


BUILDERS = {
    "sft": sft_trainer,
    "masking": masking_trainer,
    RAY_FIRST: ray_data_trainer,
    RAY_LAST: ray_data_trainer,
}


def train_loop(config: dict[str, Any]) -> None:
    out = Path(config["out"])
    set_seed(0)
    args = {
        "output_dir": str(out / "hf"),
        "max_steps": config["steps"],
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "logging_first_step": True,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **(FSDP if config["kind"] == "fsdp2" else {}),
        **config["args"],
    }
    is_lora = config["kind"] == "lora"
    model = GPT2LMHeadModel(GPT2Config(**(LARGER if is_lora else SMALL), **SMALL_IDS))  # with dropout
    if is_lora:
        model = with_adapters(model)
    trainer = BUILDERS.get(config["kind"], plain_trainer)(model, args)
    trainer.add_callback(Losses(out / "losses.jsonl"))
    if config["kill_at"]:
        trainer.add_callback(KillOnce(out / "killed", config["kill_at"], with_node=config["kills_node"]))
    if config["kind"] == RAY_FIRST:
        prepare_trainer(trainer)
    ray_ckpt.huggingface.prepare_trainer(trainer)
    if config["kind"] == RAY_LAST:
        prepare_trainer(trainer)
    trainer.train()
    write_results(trainer, out)
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(out / "state.json"))


def run(
    name: str,
    storage: str,
    out: Path,
    *,
    steps: int = 12,
    kill_at: int = 0,
    kills_node: bool = False,
    kind: str = "ddp",
    args: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train on two workers to the end; return the trained tensors."""
    out.mkdir()
    config = {
        "steps": steps,
        "kill_at": kill_at,
        "kills_node": kills_node,
        "kind": kind,
        "out": str(out),
        "args": {"save_steps": 3, **(args or {})},
    }
    TorchTrainer(
        train_loop,
        train_loop_config=config,
        datasets={
            "eval": ray.data.from_items([{k: t.numpy() for k, t in row.items()} for row in samples()[:16]])
        }
        if kind in (RAY_FIRST, RAY_LAST)
        else None,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            callbacks=[CheckpointCallback(**options)],
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    trained: dict[str, torch.Tensor] = torch.load(out / "model.pt", weights_only=True)
    return trained


def losses(out: Path) -> dict[int, set[tuple[float, float]]]:
    """Return the losses and learning rates of each step: one pair, if a step done twice was the same."""
    found: dict[int, set[tuple[float, float]]] = {}
    for line in (out / "losses.jsonl").read_text().splitlines():
        step, loss, rate = json.loads(line)
        found.setdefault(step, set()).add((loss, rate))
    return found
