"""Fine-tune a small causal language model with the Trainer of Transformers, under Ray Train and ray_ckpt.

    python -m jobs.train_transformers --steps 40

The model is a small GPT-2 over two workers, with DDP or, with --fsdp, FSDP2. Run it again with more --steps,
or kill a worker: it goes on from its newest checkpoint. docs/guides/huggingface.md shows what differs from
the same script without ray_ckpt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer

import ray_ckpt
from jobs.model.text import cut_blocks, read_text
from ray_ckpt.train import CheckpointCallback

CONTEXT = 32  # tokens of a sample
NUM_SAMPLES = 256  # so that an epoch is 16 steps


def train_loop(config: dict[str, Any]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    args = TrainingArguments(
        output_dir=mkdtemp(),
        max_steps=config["steps"],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=5,
        save_steps=config["every"],
        save_total_limit=3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]} if config["fsdp"] else None,
        fsdp="full_shard" if config["fsdp"] else None,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model=model, args=args, train_dataset=samples())
    ray_ckpt.huggingface.prepare_trainer(trainer)
    trainer.train()
    write_results(trainer, Path(config["out"]))


def samples() -> list[dict[str, torch.Tensor]]:
    """Return blocks of text as samples of a causal language model, input_ids and labels: int64 [CONTEXT]."""
    blocks = cut_blocks(read_text(max_bytes=NUM_SAMPLES * CONTEXT + 1), CONTEXT).long()
    return [{"input_ids": block[:CONTEXT], "labels": block[:CONTEXT]} for block in blocks]


def write_results(trainer: Any, out: Path) -> None:
    """Write each step's loss to losses.json, and the trained tensors to model.pt; every rank calls this."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        (out / "losses.json").write_text(json.dumps(losses))
        torch.save({name: tensor.cpu() for name, tensor in state.items()}, out / "model.pt")


def build_trainer(args: argparse.Namespace) -> TorchTrainer:
    return TorchTrainer(
        train_loop,
        train_loop_config={**vars(args), "out": str(Path(args.out).absolute())},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(
            name=args.name,
            storage_path=args.storage_path,
            callbacks=[CheckpointCallback(keep_last=3)],
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_transformers",
        description="Fine-tuning with the Trainer of Transformers through ray_ckpt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--name", default="transformers", help="run name")
    parser.add_argument(
        "--storage-path",
        type=absolute,
        default="~/ray_ckpt_runs",
        help="folder that all nodes share, or s3://",
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all")
    parser.add_argument("--every", type=int, default=5, help="optimizer steps between two saves")
    parser.add_argument("--workers", type=int, default=2, help="number of workers")
    parser.add_argument("--fsdp", action="store_true", help="shard the model by FSDP2 in place of DDP")
    parser.add_argument("--out", default=".", help="folder for losses.json and model.pt")
    return parser.parse_args(argv)


def absolute(path: str) -> str:
    """Make a path absolute; a URL stays as it is."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    build_trainer(args).fit()
    print(f"{args.steps} steps; ray-ckpt ls {args.storage_path}/{args.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
