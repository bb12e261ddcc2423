"""Functions that ranks run in the tests of Megatron-core.

`dist_checkpointing` calls torch.cuda.synchronize, and its queue of saves torch.cuda.current_device; both fail
in a build of torch for the CPU, so they are replaced. The forward of a GPTModel needs CUDA: steps take
gradients that are a function of each weight and the step, the same for any layout.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ray_ckpt
from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.dcp.session import Session

CPU: Any = torch.device("cpu")
torch.cuda.synchronize = lambda *args, **kwargs: None
torch.cuda.current_device = lambda: CPU


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Import Megatron without the warnings of packages for GPUs that are not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


with quiet():
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as groups
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
    )
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

HAS_WRAPPERS = not version("megatron-core").startswith("0.15.")  # they call numpy.product, gone in numpy 2
LAYERS, WIDTH, VOCABULARY = 2, 16, 64
STAGE_S = 2.0  # in which the other rank has captured its part


def build_gpt(tp: int, *, seed: int, vocabulary: int = VOCABULARY) -> Any:
    """Return a model with gated MLPs, of which Megatron makes ShardedTensorFactories."""
    set_tensor_parallelism(tp)
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        params_dtype=torch.float32,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=vocabulary, max_sequence_length=8)


def set_tensor_parallelism(tp: int) -> None:
    if groups.model_parallel_is_initialized():
        if groups.get_tensor_model_parallel_world_size() == tp:
            return
        groups.destroy_model_parallel()
    groups.initialize_model_parallel(tensor_model_parallel_size=tp)


def connect(run: str, storage: str, options: dict[str, Any]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ray_ckpt.connect(
        run=run, storage_path=storage, rank=rank, world_size=world_size, **{"every_steps": 1000, **options}
    )


class Training:
    """A tiny GPT with AdamW, as Megatron's training loop saves and loads it."""

    def __init__(self, tp: int, *, seed: int) -> None:
        self.tp, self.rank = tp, dist.get_rank()
        self.model = build_gpt(tp, seed=seed)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)
        for param in self.parameters:  # as Megatron does before a load
            zeros = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            self.optimizer.state[param] = {"step": torch.tensor(0.0), **zeros}

    def step(self, number: int) -> None:
        for param in self.parameters:
            param.grad = torch.sin(3 * param.detach() + number)
        self.optimizer.step()

    def sharded(self, step: int) -> dict[str, Any]:
        """Return Megatron's sharded state dict, with common data, objects and a local object."""
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.state_dict()
        ids = get_param_id_to_sharded_param_map(model, self.parameters)
        optim_state_to_sharding_state(optimizer, ids, exclude_keys="step")
        optimizer["state"]["common_step"] = self.optimizer.state[self.parameters[0]]["step"]
        rank, replica = groups.get_tensor_model_parallel_rank(), groups.get_data_parallel_rank()
        generator = {"torch": torch.get_rng_state(), "rank": rank, "pair": (rank, b"x")}
        return {
            "model": model,
            "optimizer": optimizer,
            "rng_state": ShardedObject("rng_state", [generator], (self.tp,), (rank,), replica),
            "local": LocalNonpersistentObject(f"of rank {rank}"),
            "args": Namespace(lr=0.1, dtype=torch.bfloat16, backend=AttnBackend.auto, betas=(0.9, 0.99)),
            "iteration": step,
            "tp": self.tp,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        common_step = state["optimizer"]["state"].pop("common_step")
        for values in state["optimizer"]["state"].values():
            values["step"] = common_step.clone()
        self.optimizer.load_state_dict(state["optimizer"])


def whole(run: str, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of model and optimizer in a durable checkpoint, by full name."""
    return dict(ray_ckpt.open(run).load(["model.*", "optimizer.*"], step=step))


def train(
    run: str, storage: str, folders: str, tp: int, last: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Go on from the newest checkpoint to step `last`, which is saved durably; return what was loaded."""
    connect(run, storage, options)
    training = Training(tp, seed=0)
    seen: dict[str, Any] = {"step": 0}
    if folder := ray_ckpt.megatron.resume_folder(folders):
        seen = resume(training, folder)
    strategy = ray_ckpt.megatron.SaveStrategy()
    for step in range(seen["step"] + 1, last + 1):
        training.step(step)
        if step % 2 == 0 and step < last:
            save(training, folders, step, strategy)
    save(training, folders, last, ray_ckpt.megatron.SaveStrategy(level="durable"))
    return {**seen, "draw": float(torch.rand(1)), "files": files_of(folders, last)}


def die_in_a_save(run: str, storage: str, folders: str, options: dict[str, Any]) -> None:
    """Save step 2, and step 4 while step 5 is made. Of step 6, rank 0 saves its part, and rank 1 dies."""
    connect(run, storage, options)
    training = Training(2, seed=0)
    assert ray_ckpt.megatron.resume_folder(folders) is None
    strategy = ray_ckpt.megatron.SaveStrategy()
    for step in (1, 2):
        training.step(step)
    save(training, folders, 2, strategy)
    for step in (3, 4):
        training.step(step)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(save(training, folders, 4, strategy, asynchronous=True))
    training.step(5)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert files_of(folders, 4) == {"metadata.json", "ray_ckpt.json"}
    training.step(6)
    if training.rank == 1:
        Session.save_items = die_later  # type: ignore[method-assign, assignment]
    save(training, folders, 6, strategy)


def die_later(*args: Any) -> None:
    """Die where this rank begins its capture, when the other rank has made its own."""
    time.sleep(STAGE_S)
    os._exit(1)


def files_of(folders: str, step: int) -> set[str]:
    return {path.name for path in Path(folders, f"iter_{step:07d}").iterdir()}


def resume(training: Training, folder: str) -> dict[str, Any]:
    """Load a folder as Megatron's training loop does; return common state and the values of objects."""
    common = dist_checkpointing.load_common_state_dict(folder)
    state = training.sharded(0)
    if common["tp"] != training.tp:
        del state["rng_state"]  # Megatron, too, has no random state for another layout
    loaded = dist_checkpointing.load(state, folder, sharded_strategy=ray_ckpt.megatron.LoadStrategy())
    training.load(loaded)
    seen = {key: loaded.get(key) for key in ("args", "local", "rng_state", "content_metadata")}
    return {**seen, "step": loaded["iteration"], "folder": folder}


def save(training: Training, folders: str, step: int, strategy: Any, *, asynchronous: bool = False) -> Any:
    folder = Path(folders, f"iter_{step:07d}")
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return dist_checkpointing.save(
        training.sharded(step),
        str(folder),
        sharded_strategy=strategy,
        async_sharded_save=asynchronous,
        content_metadata={"distrib_optim_sharding_type": "fully_reshardable"},
    )


def misuse(run: str, storage: str, folders: str, options: dict[str, Any]) -> dict[str, str]:
    """Return the error of each misuse in a run with checkpoints of steps 2 and 4."""
    connect(run, storage, options)
    training = Training(2, seed=1)
    strategy, loader = ray_ckpt.megatron.SaveStrategy(), ray_ckpt.megatron.LoadStrategy()
    errors: dict[str, str] = {}

    def note(what: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            errors[what] = f"{type(error).__name__}: {error}"
        dist.barrier()

    folder = ray_ckpt.megatron.resume_folder(folders)
    assert folder is not None
    model = {"model": training.model.sharded_state_dict()}
    note("unloaded", lambda: save(training, folders, 9, strategy))
    older = str(Path(folders, "iter_0000002"))
    note("older", lambda: dist_checkpointing.load(dict(model), older, sharded_strategy=loader))
    if HAS_WRAPPERS:
        wrapper = FullyParallelLoadStrategyWrapper(loader)
        note("wrapped load", lambda: dist_checkpointing.load(dict(model), folder, sharded_strategy=wrapper))
    other = {"other": ShardedTensor.from_rank_offsets("other", torch.zeros(2), replica_id=training.rank)}
    note("missing", lambda: dist_checkpointing.load(other, folder, sharded_strategy=loader))
    for _ in ("from memory", "again, from the storage path"):
        training.step(9)
        assert resume(training, folder)["step"] == 4
        loaded = training.model.embedding.position_embeddings.weight
        assert torch.equal(loaded, whole(f"{storage}/{run}", 4)["model.embedding.position_embeddings.weight"])
    note("removal", lambda: dist_checkpointing.remove_sharded_tensors(folder, "optimizer"))

    def save_with(more: Any, name: str = "iter_9") -> None:
        path = Path(folders, name)
        path.mkdir(exist_ok=True)
        dist_checkpointing.save({**model, **more}, str(path), sharded_strategy=strategy)

    note("unnumbered", lambda: save_with({}, "newest"))
    old_format = {"optimizer": {"param_state_sharding_type": "fully_sharded_model_space"}}
    note("format", lambda: save_with(old_format))
    bad = ShardedObject("bad", object() if training.rank == 1 else "good", (2,), (training.rank,))
    note("object", lambda: save_with({"bad": bad}))
    note("common", lambda: save_with({"x": {"made": torch.nn.Identity}}))
    return errors


def wrap_and_describe(run: str, storage: str, folders: str, options: dict[str, Any]) -> dict[str, Any]:
    """Save with Megatron's parallel save over two replicas; describe and load by Megatron's registry."""
    connect(run, storage, options)
    training = Training(1, seed=2)
    strategy = ray_ckpt.megatron.SaveStrategy(level="durable")
    if HAS_WRAPPERS:
        strategy = FullyParallelSaveStrategyWrapper(strategy)
    training.step(1)
    save(training, folders, 1, strategy)
    folder = str(Path(folders, "iter_0000001"))
    described = load_sharded_metadata(folder)
    tensors = dist_checkpointing.load_plain_tensors(folder)
    state = {"model": training.model.sharded_state_dict()}
    _, missing, unexpected = dist_checkpointing.load(state, folder, strict="return_all")
    assert not unexpected
    return {"shapes": {k: v.global_shape for k, v in described.items()}, "plain": tensors, "left": missing}


def pad(run: str, storage: str, folders: str, vocabulary: int, options: dict[str, Any]) -> list[Any]:
    """Save, or load if there is a checkpoint, a model with a vocabulary of this size; return its rows."""
    connect(run, storage, options)
    model = build_gpt(dist.get_world_size(), seed=4, vocabulary=vocabulary)
    strategy = ray_ckpt.megatron.LoadStrategy()
    if folder := ray_ckpt.megatron.resume_folder(folders):
        state = dist_checkpointing.load(model.sharded_state_dict(), folder, sharded_strategy=strategy)
        model.load_state_dict(state)
    else:
        folder = str(Path(folders, "iter_0000001"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(
            model.sharded_state_dict(), folder, sharded_strategy=ray_ckpt.megatron.SaveStrategy()
        )
    return [model.embedding.word_embeddings.weight.detach(), model.output_layer.weight.detach()]


def keep_stock(folder: str) -> bool:
    """Save and load with Megatron's own strategies, whose common state is read as ever."""
    set_tensor_parallelism(1)
    Path(folder).mkdir(parents=True)
    tensor = torch.arange(6.0)

    def state(data: torch.Tensor) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", data), "plain": {"step": 3}}

    dist_checkpointing.save(state(tensor), folder)
    loaded = dist_checkpointing.load(state(torch.zeros(6)), folder)
    try:
        dist_checkpointing.load(state(tensor), folder, sharded_strategy=ray_ckpt.megatron.LoadStrategy())
    except ConfigError as error:
        assert "torch_dist" in str(error)
    return torch.equal(loaded["w"], tensor) and loaded["plain"] == {"step": 3}
