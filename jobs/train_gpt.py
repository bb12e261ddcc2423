"""Train a small GPT on bytes of text with Ray Train and ray_ckpt: the example to copy.

    python -m jobs.train_gpt --steps 200
    ray job submit --working-dir . -- python -m jobs.train_gpt --steps 200

It trains under DDP, FSDP2, or FSDP2 with tensor parallelism (`--parallel`). Checkpoints need the
`Checkpointer`, `ckpt.steps` and `ckpt.step` in `train_loop`, and the `CheckpointCallback` in `build_trainer`.
Kill a worker, or stop it all and run the same command again: the run goes on from its newest checkpoint, on
the trajectory it would have had. More --steps prolong a run at the lowest learning rate, since the schedule
is part of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import ray_ckpt
from jobs.model.gpt import GPT, WarmupCosine, next_byte_loss, tensor_parallel
from jobs.model.text import Batch, ByteLoader, as_batch, cut_blocks, read_text, split_text
from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.train import CheckpointCallback, check_storage_path

log = logging.getLogger(__name__)  # Ray Train shows each line once; what workers print it shows twice

PARALLEL = ("ddp", "fsdp2", "2d")  # 2d: FSDP2 over groups of tensor-parallel ranks
MAX_GRADIENT_NORM = 1.0
EVAL_BLOCKS = 64  # held-out samples per evaluation, over all ranks


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Train on one rank. Return its last step and the loss of that step, None if no step was left to do."""
    make_deterministic(config["seed"])
    device, rank = get_device(), dist.get_rank()
    mesh = build_mesh(config, device)
    model = build_model(config, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    total = config["steps"]
    scheduler = LambdaLR(optimizer, WarmupCosine(warmup=max(1, min(100, total // 10)), total=total))
    text, held_out_text = split_text(read_text(config["data"]))
    loader = ByteLoader(
        cut_blocks(text, config["context"]),
        batch_size=config["batch"],
        rank=mesh["data"].get_local_rank(),
        world_size=mesh["data"].size(),
        seed=config["seed"],
    )
    held_out = cut_blocks(held_out_text, config["context"])[:EVAL_BLOCKS]
    # Seed for dropout: masks differ between data ranks and are equal on tensor ranks with the same data.
    torch.manual_seed(config["seed"] + mesh["data"].get_local_rank())

    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    steps = ckpt.steps(total=total)  # restores the newest checkpoint, if there is one
    batches = iter(loader)  # after the restore, so the loader starts at the restored position
    journal = Journal(config, rank, mesh["data"].size())
    result: dict[str, Any] = {"step": total, "loss": None}
    for step in steps:
        started = time.perf_counter()
        lr = float(scheduler.get_last_lr()[0])
        loss = train_step(model, optimizer, batches, config["accumulate"], device)
        scheduler.step()
        evaluates = step % config["eval_every"] == 0 or step == total
        eval_loss = evaluate(model, held_out, device, mesh["data"]) if evaluates else None
        journal.write(step, loss, lr, eval_loss)
        time.sleep(max(0.0, config["step_time_s"] - (time.perf_counter() - started)))
        result = {"step": step, "loss": loss}
        ckpt.step(step, metrics={"loss": loss})
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in result.items()}


def make_deterministic(seed: int) -> None:
    """Make each step give the same bits for the same seed and the same ranks."""
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        torch.set_num_threads(1)  # workers share the machine, and sums depend on the number of threads
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # all ranks build the same weights


def build_mesh(config: dict[str, Any], device: torch.device) -> DeviceMesh:
    """Build a mesh of all ranks: along "data" batches differ, along "tensor" ranks share one batch."""
    ranks, tensor = dist.get_world_size(), config["tensor"] if config["parallel"] == "2d" else 1
    if ranks % tensor:
        raise ValueError(f"{ranks} workers cannot be split into groups of {tensor} (--tensor)")
    return init_device_mesh(device.type, (ranks // tensor, tensor), mesh_dim_names=("data", "tensor"))


def build_model(config: dict[str, Any], device: torch.device, mesh: DeviceMesh) -> nn.Module:
    """Build the model, distributed over the mesh; FSDP2 computes in bfloat16 on a GPU."""
    sizes = {name: config[name] for name in ("layers", "width", "heads", "context", "dropout")}
    model = GPT(**sizes).to(device)
    if config["parallel"] == "ddp":
        return with_final_buckets(DistributedDataParallel(model), device)
    if config["parallel"] == "2d":
        tensor_parallel(model, mesh["tensor"])
    compute = torch.bfloat16 if device.type == "cuda" else None
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["data"], mp_policy=precision)
    return model


def with_final_buckets(model: DistributedDataParallel, device: torch.device) -> DistributedDataParallel:
    """Run one backward pass, so that DDP adds gradients in the same order before and after a restore.

    DDP puts gradients into other buckets after its first backward pass, which changes the order in which
    three or more ranks add them.
    """
    tokens = torch.zeros(1, 1, dtype=torch.long, device=device)
    next_byte_loss(model, tokens, tokens).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return model


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    accumulate: int,
    device: torch.device,
) -> Tensor:
    """Run one optimizer step over `accumulate` micro-batches; return their mean loss over all ranks."""
    model.train()
    window_loss = torch.zeros((), device=device)
    for micro_batch in range(accumulate):
        inputs, targets = next(batches)
        with gradients_synced(model, micro_batch == accumulate - 1):
            loss = next_byte_loss(model, inputs.to(device), targets.to(device)) / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
        window_loss += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(window_loss)
    return window_loss / dist.get_world_size()


def gradients_synced(model: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """Let a backward pass add gradients over the ranks if `wanted`; only the last of a step must."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if wanted else model.no_sync()
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(wanted)
    return nullcontext()


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor, device: torch.device, data: DeviceMesh) -> Tensor:
    """Return the mean loss over the held-out blocks, shared by the ranks of `data`. Uses no random number."""
    model.eval()
    inputs, targets = as_batch(held_out[data.get_local_rank() :: data.size()])
    loss = next_byte_loss(model, inputs.to(device), targets.to(device), reduction="sum")
    if isinstance(model, FSDPModule):
        model.reshard()  # without a backward pass, the root would keep the full parameters
    dist.all_reduce(loss, group=data.get_group())
    return loss / held_out[:, 1:].numel()


class Journal:
    """The log of rank 0: a line now and then, and with `history` one JSON line per step.

    The loss in a JSON line is hexadecimal, to compare two runs bit for bit. A step that is repeated after a
    restart has one line per repetition.
    """

    def __init__(self, config: dict[str, Any], rank: int, data_ranks: int) -> None:
        self.log_every: int = config["log_every"] if rank == 0 else 0
        self.history = Path(config["history"]) if config["history"] and rank == 0 else None
        self.step_tokens = config["batch"] * config["context"] * config["accumulate"] * data_ranks
        self.tokens = 0
        self.since = time.perf_counter()

    def write(self, step: int, loss: Tensor, lr: float, eval_loss: Tensor | None) -> None:
        self.tokens += self.step_tokens
        if self.history:
            value = float(loss)
            line: dict[str, Any] = {
                "step": step,
                "loss": value.hex(),
                "loss_value": value,
                "lr": lr,
                "time": time.time(),
            }
            if eval_loss is not None:
                line["eval_loss"] = float(eval_loss)
            self.history.parent.mkdir(parents=True, exist_ok=True)
            with self.history.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if self.log_every and step % self.log_every == 0:
            held_out = "" if eval_loss is None else f"  held out {eval_loss.item():.4f}"
            loss_value, now = loss.item(), time.perf_counter()  # in this order: a GPU finishes the step first
            rate = self.tokens / (now - self.since)
            log.info(f"step {step}  loss {loss_value:.4f}  lr {lr:.2e}  {rate:,.0f} tokens/s{held_out}")
            self.tokens, self.since = 0, now


def build_trainer(args: argparse.Namespace) -> TorchTrainer:
    """Build the trainer of one run. Ray must be connected, since the defaults depend on the cluster."""
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0))
    workers = args.workers or num_gpus or max(1, min(2, int(resources.get("CPU", 1))))
    use_gpu = 0 < workers <= num_gpus
    check_storage_path(args.storage_path, args.name)  # raises an error with a hint
    callback = CheckpointCallback(
        replicas=args.replicas,
        keep_last=args.keep_last,
        keep_every=args.keep_every,
        every_steps=args.every_steps,
        remote_every=args.remote_every,
        staging=args.staging,
    )
    return TorchTrainer(
        train_loop,
        train_loop_config=vars(args),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=ray.train.RunConfig(
            name=args.name,
            storage_path=args.storage_path,
            callbacks=[callback],
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_gpt",
        description="Train a small GPT on bytes of text with Ray Train and ray_ckpt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--name", default="gpt", help="run name; with the same storage path it resumes")
    run.add_argument(
        "--storage-path",
        type=absolute,
        default="~/ray_ckpt_runs",
        help="folder of runs that all nodes share, or s3://...",
    )
    run.add_argument("--steps", type=positive, default=200, help="optimizer steps in all")
    run.add_argument("--workers", type=positive, help="ranks; else one per GPU, or up to two on CPUs")
    run.add_argument("--parallel", choices=PARALLEL, default="fsdp2", help="how the ranks share the model")
    run.add_argument("--tensor", type=positive, default=2, help="ranks that share one batch, with 2d")
    run.add_argument("--data", type=absolute, help="text file or folder; else the standard library's sources")
    run.add_argument("--log-every", type=positive, default=10, help="steps between lines of progress")
    run.add_argument("--eval-every", type=positive, default=50, help="steps between evaluations")
    run.add_argument("--history", type=absolute, help="file to which rank 0 appends one JSON line per step")
    run.add_argument("--step-time-s", type=float, default=0.0, help="sleep until a step took this long")

    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument("--every-steps", type=positive, default=20, help="steps between checkpoints")
    checkpoints.add_argument("--remote-every", type=positive, default=5, help="copy every n-th to storage")
    checkpoints.add_argument("--keep-last", type=positive, default=3, help="checkpoints to keep")
    checkpoints.add_argument("--keep-every", type=positive, help="keep one of each so many steps as well")
    checkpoints.add_argument("--replicas", type=int, default=1, help="copies on other nodes")
    checkpoints.add_argument("--staging", type=absolute, help="local folder of each node, best on NVMe")

    size = parser.add_argument_group("model and optimizer")
    size.add_argument("--layers", type=positive, default=4, help="transformer blocks")
    size.add_argument("--width", type=positive, default=128, help="features per position")
    size.add_argument("--heads", type=positive, default=4, help="attention heads")
    size.add_argument("--context", type=positive, default=64, help="bytes per sample")
    size.add_argument("--dropout", type=float, default=0.1, help="share of activations dropped")
    size.add_argument("--batch", type=positive, default=4, help="samples per rank and micro-batch")
    size.add_argument("--accumulate", type=positive, default=2, help="micro-batches per optimizer step")
    size.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    size.add_argument("--seed", type=int, default=0, help="of weights, dropout and the order of the data")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def absolute(path: str) -> str:
    """Make a path absolute in the driver, since workers have another current folder. A URI stays as it is."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def find_config_error(error: BaseException | None) -> ConfigError | None:
    """Return the ConfigError behind an error of `trainer.fit`, of the controller or a worker."""
    if error is None or isinstance(error, ConfigError):
        return error
    causes = [*getattr(error, "worker_failures", {}).values()]
    causes += [getattr(error, name, None) for name in ("controller_failure", "cause", "__cause__")]
    return next(filter(None, map(find_config_error, causes)), None)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if not ray.is_initialized():
        ray.init()
    if sum(node["Alive"] for node in ray.nodes()) == 1:
        print("one node: checkpoints are `local`, they survive a crash but have no copy on a second machine")
    try:
        result = build_trainer(args).fit()
    except Exception as error:
        if (cause := find_config_error(error)) is None:
            raise
        print("error:", " ".join(str(cause).split()), file=sys.stderr)
        return 1
    done = result.return_value
    loss = "nothing left to do" if done["loss"] is None else f"loss {done['loss']:.4f}"
    print(f"step {done['step']}: {loss}")
    print("checkpoint:", result.checkpoint.path if result.checkpoint else "none reported to Ray Train")
    print("list them:  ray-ckpt ls", shlex.quote(str(Location.parse(args.storage_path) / args.name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
