"""One state through four kinds of loops: Transformers, a plain loop with FSDP2, DCP, Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import ray.train
import torch
import torch.distributed as dist
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from jobs.train_transformers import samples
from ray_ckpt.train import CheckpointCallback

dcp: Any = checkpoint
MODEL = {"vocab_size": 256, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 2}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build_model() -> Any:
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(**MODEL, bos_token_id=0, eos_token_id=0))


def build_optimizer(model: Any) -> torch.optim.Optimizer:
    """AdamW with the groups of Transformers: with weight decay, and without."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.0}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def keep(model: Any, optimizer: torch.optim.Optimizer, file: str) -> None:
    """Write the whole tensors of a model and its optimizer by name; all ranks call this."""
    both: Any = get_state_dict(model, optimizer, options=WHOLE)
    weights, moments = both
    if dist.get_rank() == 0:
        found: dict[str, Any] = {f"model.{name}": tensor for name, tensor in weights.items()}
        for name, state in moments["state"].items():
            found |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in state.items()}
        torch.save({name: tensor.clone() for name, tensor in found.items()}, file)


def train_transformers(config: dict[str, Any]) -> None:
    args = TrainingArguments(
        config["out"],
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=build_model(), args=args, train_dataset=samples()[:64])
    ray_ckpt.huggingface.prepare_trainer(trainer)
    trainer.train()
    keep(trainer.model_wrapped, trainer.optimizer.optimizer, f"{config['out']}/transformers.pt")


def build_sharded() -> tuple[Any, torch.optim.Optimizer]:
    """Build a model with FSDP2 over all ranks, and its optimizer."""
    model = build_model()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    return model, build_optimizer(model)


def train_fsdp2(config: dict[str, Any]) -> None:
    """Go on in a plain loop on other ranks."""
    model, optimizer = build_sharded()
    ray_ckpt.open(f"{config['storage']}/transformers").load(into={"model": model, "optimizer": optimizer})
    keep(model, optimizer, f"{config['out']}/fsdp2.pt")
    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer)
    for step in ckpt.steps(total=2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(256, (4, 32), generator=generator)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
    keep(model, optimizer, f"{config['out']}/trained.pt")


def pass_on(config: dict[str, Any]) -> None:
    """Load with DCP, on as many ranks as Lightning has, and save with DCP."""
    model, optimizer = build_sharded()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=ray_ckpt.dcp.Reader(f"{config['storage']}/fsdp2"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    keep(model, optimizer, f"{config['out']}/dcp.pt")
    dcp.save(state, storage_writer=ray_ckpt.dcp.Writer(1))


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, out: str) -> None:
        super().__init__()
        self.net, self._out = build_model(), out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0], labels=batch[0]).loss

    def on_train_start(self) -> None:
        keep(self.net, self.optimizers().optimizer, f"{self._out}/lightning.pt")

    def configure_optimizers(self) -> Any:
        return build_optimizer(self.net)


def train_lightning(config: dict[str, Any]) -> None:
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[ray_ckpt.lightning.CheckpointCallback("net")],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    ids = torch.arange(64 * 32).reshape(64, 32) % 251
    prepare_trainer(trainer).fit(Module(config["out"]), DataLoader(TensorDataset(ids), batch_size=4))


def run(
    train: Callable[..., None], storage: str, out: Path, *, ranks: int, name: str, **options: Any
) -> None:
    TorchTrainer(
        train,
        train_loop_config={"storage": storage, "out": str(out)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=ranks),
        run_config=ray.train.RunConfig(
            name=name, storage_path=storage, callbacks=[CheckpointCallback(**options)]
        ),
    ).fit()


@pytest.mark.slow
def test_every_tensor_survives_a_change_of_hook(cluster: LocalCluster, storage: str, tmp_path: Path) -> None:
    run(train_transformers, storage, tmp_path, ranks=2, name="transformers")
    run(train_fsdp2, storage, tmp_path, ranks=3, name="fsdp2")
    run(pass_on, storage, tmp_path, ranks=2, name="dcp")
    start = {"init_from": f"{storage}/dcp", "init_items": ("model", "optimizer")}
    run(train_lightning, storage, tmp_path, ranks=2, name="lightning", **start)
    names = ("transformers", "fsdp2", "trained", "dcp", "lightning")
    found = {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in names}
    for before, after in (("transformers", "fsdp2"), ("trained", "dcp"), ("dcp", "lightning")):
        assert found[before].keys() == found[after].keys()
        differing = [n for n, tensor in found[before].items() if not torch.equal(tensor, found[after][n])]
        assert not differing, f"{before} -> {after}"
    for key in ("exp_avg", "exp_avg_sq", "step"):
        states = [name for name in found["trained"] if name.endswith(f".{key}")]
        assert len(states) == len(list(build_model().parameters()))
        assert not any(torch.equal(found["fsdp2"][name], found["trained"][name]) for name in states)
