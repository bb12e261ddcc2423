"""Functions that ranks run in the tests of DCP: they save and load a model in FSDP2 with DCP's functions."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as _dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ray_ckpt
from jobs.train_dcp import App

dcp: Any = _dcp  # its functions have no stable types
STAGE_S = 2.0  # in which rank 0 has staged its part


class Training:
    """A small model over all ranks of the group."""

    def __init__(self, run: str, storage: str, *, seed: int, connects: bool = True, **options: Any) -> None:
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        if connects:
            ray_ckpt.connect(run=run, storage_path=storage, rank=self.rank, world_size=world_size, **options)
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 3))
        for layer in (0, 2):
            fully_shard(self.model[layer])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

        self.beside = dist.new_group(backend="gloo")  # for async_save, beside training's collectives

    def step(self, number: int) -> None:
        batch = torch.arange(16.0).view(2, 8).sin() * number
        self.model(batch).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, torch.Tensor]:
        """Return all tensors of model and optimizer, unsharded; every rank calls this."""
        state = dict(self.model.state_dict())
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                state[f"{name}.{key}"] = value
        return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def train_and_save(run: str, storage: str, options: dict[str, Any]) -> dict[str, Any]:
    """Save step 2 with `save`, and step 4 with `async_save` while training goes on to step 5."""
    training = Training(run, storage, seed=0, **options)
    assert ray_ckpt.dcp.Reader().step == 0
    app = App(training.model, training.optimizer)
    more: dict[str, Any] = {"losses": [1.5, 2.5], "pair": (1, "two"), "table": torch.arange(6.0)}
    for step in (1, 2):
        training.step(step)
    dcp.save({"app": app, "more": more, "step": 2}, storage_writer=ray_ckpt.dcp.Writer(2))
    for step in (3, 4):
        training.step(step)
    at_4 = training.whole()
    writer = ray_ckpt.dcp.Writer(4, level="replicated", metrics={"loss": 0.5})
    state = {"app": app, "more": {**more, "losses": [4.5]}, "step": 4}
    saved: Any = dcp.async_save(
        state, storage_writer=writer, checkpoint_id="run/step-4", process_group=training.beside
    )
    training.step(5)
    saved.result()
    return {"at_4": at_4, "draw": float(torch.rand(1))}


def load_and_go_on(run: str, storage: str, options: dict[str, Any]) -> dict[str, Any]:
    """Load the newest checkpoint into a model that was built otherwise; train one step."""
    training = Training(run, storage, seed=1, **options)
    training.step(1)  # so that the optimizer has state, and another one
    app = App(training.model, training.optimizer)
    reader = ray_ckpt.dcp.Reader()
    state: dict[str, Any] = {
        "app": app,
        "more": {"losses": [], "pair": (), "table": torch.zeros(6)},
        "step": 0,
    }
    dcp.load(state, storage_reader=reader)
    loaded = training.whole()
    training.step(5)
    dcp.save(
        {"app": app, **{k: v for k, v in state.items() if k != "app"}}, storage_writer=ray_ckpt.dcp.Writer(5)
    )
    return {"loaded": loaded, "state": {k: v for k, v in state.items() if k != "app"}, "step": reader.step}


def die_in_a_save(run: str, storage: str, options: dict[str, Any]) -> None:
    """Save step 2; rank 0 stages step 4 too, and rank 1 dies before it does."""
    training = Training(run, storage, seed=0, **options)
    state: dict[str, Any] = {"app": App(training.model, training.optimizer), "step": 2}
    training.step(1)
    dcp.save(state, storage_writer=ray_ckpt.dcp.Writer(2))
    training.step(2)
    if training.rank == 1:
        time.sleep(STAGE_S)
        os._exit(1)
    writer = ray_ckpt.dcp.Writer(4)
    dcp.async_save({**state, "step": 4}, storage_writer=writer, process_group=training.beside).result()


def load_step(run: str, storage: str, options: dict[str, Any]) -> tuple[int, int]:
    """Load the newest checkpoint; return the steps that the Reader and the state have."""
    training = Training(run, storage, seed=1, **options)
    training.step(1)
    state: dict[str, Any] = {"app": App(training.model, training.optimizer), "step": 0}
    reader = ray_ckpt.dcp.Reader()
    dcp.load(state, storage_reader=reader)
    return reader.step, state["step"]


def load_natively(run: str, storage: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Restore a checkpoint of DCP with a Checkpointer, and save the next step with it."""
    training = Training(run, storage, seed=2, **options)
    ckpt = ray_ckpt.Checkpointer(model=training.model, optimizer=training.optimizer)
    info = ckpt.restore()
    assert info is not None and info.step == 2
    restored = training.whole()
    training.step(3)
    ckpt.save(3)
    ckpt.wait("local")
    ckpt.close()
    return restored


def save_flat(run: str, storage: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save model and optimizer as top-level entries, durably."""
    training = Training(run, storage, seed=0, **options)
    for step in (1, 2):
        training.step(step)
    state = App(training.model, training.optimizer).state_dict()
    dcp.save(state, storage_writer=ray_ckpt.dcp.Writer(2, level="durable"))
    return training.whole()


def load_of_uri(uri: str) -> dict[str, torch.Tensor]:
    """Load a checkpoint by its URI in processes that belong to no run."""
    training = Training("", "", seed=3, connects=False)
    training.step(1)
    state = App(training.model, training.optimizer).state_dict()
    dcp.load(state, storage_reader=ray_ckpt.dcp.Reader(uri))
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return training.whole()


def misuse(run: str, storage: str, options: dict[str, Any]) -> dict[str, str]:
    """Return the error of each misuse in a run that has a checkpoint."""
    training = Training(run, storage, seed=0, **options)
    errors: dict[str, str] = {}

    def note(what: str, call: Any) -> None:
        try:
            call()
        except BaseException as error:  # DCP's own errors are no Exceptions
            errors[what] = str(error)

    model = App(training.model, training.optimizer).state_dict()["model"]
    note("unloaded", lambda: dcp.save({"model": model}, storage_writer=ray_ckpt.dcp.Writer(9)))
    halves = {"model": {name: value.to(torch.float16) for name, value in model.items()}}
    note("missing", lambda: dcp.load({"other": 1}, storage_reader=ray_ckpt.dcp.Reader()))
    dcp.load({"model": model}, storage_reader=ray_ckpt.dcp.Reader())
    note("twice", lambda: dcp.load({"model": model}, storage_reader=ray_ckpt.dcp.Reader()))
    note("dtype", lambda: dcp.load(halves, storage_reader=ray_ckpt.dcp.Reader(f"{storage}/{run}")))
    note("pickle", lambda: dcp.save({"model": model, "x": object()}, storage_writer=ray_ckpt.dcp.Writer(9)))
    return errors
