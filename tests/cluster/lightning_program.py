"""Training loops with Lightning, which the tests run under Ray Train and break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import ray_ckpt
from ray_ckpt.train import CheckpointCallback
from tests.cluster.killing import end_once

WIDTH = 8


class RayModelParallelStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2 on the workers of Ray Train, which has no such strategy."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")


class Small(pl.LightningModule):  # type: ignore[misc]
    """A model with dropout, and a value of its own in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.seen = 0  # samples

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (data,) = batch
        self.seen += len(data)
        loss: Tensor = (self.net(data) - data.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Journal(pl.Callback):  # type: ignore[misc]
    """Writes what each batch saw to a file, and ends rank 1 once after a batch."""

    def __init__(self, out: Path, kill_at: int, *, with_node: bool) -> None:
        self._out, self._kill_at, self._with_node = out, kill_at, with_node

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rank, step = trainer.global_rank, trainer.global_step
        seen = [step, batch_idx, trainer.current_epoch, float(batch[0].sum()), float(outputs["loss"])]
        with (self._out / f"journal-{rank}.jsonl").open("a") as file:
            print(json.dumps([*seen, pl_module.seen]), file=file)
        if rank == 1 and step == self._kill_at:
            end_once(self._out / "killed", with_node=self._with_node)


def train_loop(config: dict[str, Any]) -> None:
    out = Path(config["out"])
    data = TensorDataset(torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(7)))
    loader = build_loader(data, config["steps"])
    is_fsdp = config["fsdp"]
    strategy = (
        RayModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if is_fsdp
        else RayDDPStrategy()
    )
    journal = Journal(out, config["kill_at"], with_node=config["kills_node"])
    kept = pl.callbacks.ModelCheckpoint(dirpath=out / "pl", monitor="val_loss", save_top_k=2)
    trainer = pl.Trainer(
        max_steps=config["steps"],
        accelerator="cpu",
        devices="auto",
        strategy=strategy,
        plugins=[RayLightningEnvironment()],
        accumulate_grad_batches=2,
        val_check_interval=8,
        use_distributed_sampler=False,
        callbacks=[ray_ckpt.lightning.CheckpointCallback("net"), journal, kept],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    if not is_fsdp:
        trainer = prepare_trainer(trainer)
    model = Small()
    trainer.fit(model, loader, DataLoader(data, batch_size=8))
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.net.state_dict().items()}
    if trainer.global_rank == 0:
        torch.save(state, out / "model.pt")
        (out / "best.json").write_text(json.dumps([len(kept.best_k_models), trainer.global_step, model.seen]))


def build_loader(data: TensorDataset, steps: int) -> Any:
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    sampler = ray_ckpt.GlobalBatchSampler(
        len(data), global_batch=8, rank=rank, world_size=world_size, seed=3, num_batches=2 * steps
    )
    return sampler.batches(DataLoader(data, batch_sampler=sampler))


def run(
    name: str,
    storage: str,
    out: Path,
    *,
    steps: int = 14,
    kill_at: int = 0,
    kills_node: bool = False,
    fsdp: bool = False,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train on two workers to the end; return the trained tensors."""
    out.mkdir()
    TorchTrainer(
        train_loop,
        train_loop_config={
            "steps": steps,
            "kill_at": kill_at,
            "kills_node": kills_node,
            "fsdp": fsdp,
            "out": str(out),
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            callbacks=[CheckpointCallback(**{"every_steps": 2, **options})],
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    trained: dict[str, torch.Tensor] = torch.load(out / "model.pt", weights_only=True)
    return trained


def journal(out: Path, rank: int) -> set[tuple[Any, ...]]:
    """Return what each batch saw; a batch done twice is there once if it saw the same."""
    lines = (out / f"journal-{rank}.jsonl").read_text().splitlines()
    return {tuple(json.loads(line)) for line in lines}
