"""Engines on one rank in this process: the guard of a capture, windows, offload, names and refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ray_ckpt.capture import shared_copy
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.overlap_guard import background_slices, guarded_storages
from ray_ckpt.capture.torch_private import copy_all
from ray_ckpt.capture.walk import walk
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError, MismatchError, UnsupportedItem
from ray_ckpt.interop.deepspeed.adapter import REFUSED, check, parts_of
from ray_ckpt.interop.deepspeed.partitions import check_names
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink
from tests.capture.ranks import Files, items_of
from tests.frameworks.deepspeed import program

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("world")]

RUN_ON_S = 0.5  # for which a copy waits to see whether a step runs on


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("meet") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def build() -> Iterator[Callable[..., Any]]:
    """Return a function that builds an engine of a stage, with more settings of ZeRO."""
    engines: list[Any] = []

    def build(stage: int, **zero: Any) -> Any:
        engines.append(program.build_engine(program.config_of(stage, **zero)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.destroy()


def items(engine: Any) -> dict[str, Item]:
    return items_of(**parts_of("engine", engine))


def load(files: Files, into: dict[str, Item]) -> None:
    files.load(into, 0, 1)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_waits_for_the_copy_and_changes_nothing_in_it(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    engine = build(stage)
    program.train_step(engine, 1)
    link = LocalLink(options=RunOptions())
    ckpt = Checkpointer(link=link, engine=engine)
    ckpt.restore()
    program.train_step(engine, 2)
    begun, stepped, real = threading.Event(), threading.Event(), copy_all
    seen: list[bool] = []

    def late(targets: Any, sources: Any) -> None:
        begun.wait(30)
        stepped.wait(RUN_ON_S)
        seen.append(stepped.is_set())
        real(targets, sources)

    monkeypatch.setattr(shared_copy, "copy_all", late)
    assert ckpt.save(2)
    before = {live.slice.key: live.tensor.clone() for live in walked(ckpt)}
    handles = [
        register_optimizer_step_pre_hook(lambda *_: begun.set()),
        register_optimizer_step_post_hook(lambda *_: stepped.set()),
    ]
    program.train_step(engine, 3)
    for handle in handles:
        handle.remove()
    ckpt.flush()
    assert seen and not any(seen), "the step began before the copy had ended"
    assert 2 in link.files, link.skipped
    found = link.tensors(2)
    changed = {
        key for key, live in ((s.slice.key, s.tensor) for s in walked(ckpt)) if not live.equal(before[key])
    }
    assert {"model.first.weight", "optimizer.state.first.weight.exp_avg"} <= changed
    for key, tensor in before.items():
        assert torch.equal(found[key].reshape(tensor.shape), tensor), key
    ckpt.close()


def walked(ckpt: Checkpointer) -> Any:
    return walk(ckpt._require_items().items, rank=0, world_size=1).slices


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_and_moments_are_copied_beside_training(build: Callable[..., Any], stage: int) -> None:
    engine = build(stage)
    program.train_step(engine, 1)
    mine = items(engine)
    once = walk(mine, rank=0, world_size=1)
    later = background_slices(once.slices, guarded_storages([mine["optimizer"].stepped]))  # type: ignore[attr-defined]
    at_once = {live.slice.key for live in once.slices} - later
    assert at_once == {"model.frozen.weight", "model.frozen.bias", "model.seen"}
    assert not any(live.tensor.dtype == torch.bfloat16 for live in once.slices if live.slice.key in later)
    program.train_step(engine, 2)
    assert walk(mine, rank=0, world_size=1, before=once).slices is once.slices, "nothing has moved"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_in_a_window_waits_for_its_end(build: Callable[..., Any], stage: int) -> None:
    engine = build(stage)
    link = LocalLink(options=RunOptions())
    ckpt = Checkpointer(link=link, engine=engine)
    ckpt.restore()
    loss = engine(program.tokens_of(1, 0))
    engine.backward(loss)
    assert not ckpt.save(1), "between backward and step"
    engine.step()
    assert not ckpt.save(1), "in the window"
    engine.backward(engine(program.tokens_of(1, 1)))
    assert not ckpt.save(1), "the step is missing"
    engine.step()
    assert ckpt.save(1)
    ckpt.close()


def test_gradients_of_a_window_are_refused(build: Callable[..., Any]) -> None:
    ckpt = Checkpointer(link=LocalLink(options=RunOptions(partial_grads=True)), engine=build(2))
    with pytest.raises(UnsupportedItem, match="its own buffers"):
        ckpt.restore()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_to_the_cpu_and_back(build: Callable[..., Any], tmp_path: Path, stage: int) -> None:
    """With a restore into the engine that has trained on, and then into one without offload."""
    offload: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        offload["offload_param"] = {"device": "cpu"}
    config = {**program.config_of(stage, **offload), "zero_force_ds_cpu_optimizer": False}
    engine = program.build_engine(config)
    program.train_step(engine, 1)
    files = Files(tmp_path, 1)
    files.save(items(engine), 0)
    saved = program.state_of(engine)
    for step in (2, 3):
        program.train_step(engine, step)
    load(files, items(engine))
    fresh = build(stage)
    load(files, items(fresh))
    for found in (program.state_of(engine), program.state_of(fresh)):
        assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert engine.global_steps == fresh.global_steps == 1


def test_fp32_engines(build: Callable[..., Any], tmp_path: Path) -> None:
    """The weights that ZeRO 3 steps are the model's own."""
    states: list[dict[str, torch.Tensor]] = []
    files = Files(tmp_path, 1)
    for stage in (3, 1, 3):
        engine = program.build_engine({**program.config_of(stage), "bf16": {"enabled": False}})
        if states:
            load(files, items(engine))
        else:
            program.train_step(engine, 1)
            files.save(items(engine), 0)
        states.append(program.state_of(engine))
        engine.destroy()
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])


def test_the_parts_of_an_engine_are_items(build: Callable[..., Any]) -> None:
    engine = build(1)
    assert list(parts_of("engine", engine)) == list(parts_of("model", engine))
    assert list(parts_of("actor", engine)) == ["actor", "actor_optimizer", "actor_scheduler"]
    ckpt = Checkpointer(link=LocalLink(), engine=engine, optimizer=engine.optimizer)
    assert list(ckpt._objects) == ["model", "optimizer", "scheduler"]
    with pytest.raises(UnsupportedItem, match="Register the engine"):
        Checkpointer(link=LocalLink(), optimizer=engine.optimizer)


def test_names_of_two_engines_are_those_of_a_plain_loop_with_two_models(build: Callable[..., Any]) -> None:
    actor, critic = build(1), build(3)
    for engine in (actor, critic):
        program.train_step(engine, 1)
    parts = {**parts_of("actor", actor), **parts_of("critic", critic)}
    engines = items_of(**parts)
    plain_actor, plain_critic = program.Net(), program.Net()
    plain = items_of(
        actor=plain_actor,
        critic=plain_critic,
        actor_optimizer=torch.optim.AdamW(program.groups_of(plain_actor)),
        critic_optimizer=torch.optim.AdamW(program.groups_of(plain_critic)),
    )
    for name in plain:
        here, there = engines[name].tree(), plain[name].tree()
        if name in ("actor", "critic"):
            assert list(here) == list(there)
        else:
            groups = [[g["params"] for g in tree["param_groups"]] for tree in (here, there)]
            assert groups[0] == groups[1] and groups[0][0][0].startswith(name.removesuffix("optimizer")[:-1])


def test_learning_rates_that_differ_are_listed_and_may_be_kept(
    build: Callable[..., Any], tmp_path: Path
) -> None:
    engine = build(2)
    link = LocalLink(options=RunOptions())
    ckpt = Checkpointer(link=link, engine=engine)
    ckpt.restore()
    engine.optimizer.param_groups[0]["weight_decay"] = 0.3
    program.train_step(engine, 1)
    ckpt.save(1)
    ckpt.flush()
    again = Checkpointer(
        link=link.resumed(tmp_path, 1, RunOptions(keep=("optimizer.weight_decay",))), engine=build(3)
    )
    info = again.restore()
    assert info is not None
    assert [(c.name, c.built, c.saved, c.is_kept) for c in info.changed if "decay" in c.name] == [
        ("optimizer.weight_decay", (0.1, 0.0), (0.3, 0.0), True)
    ]


def test_parameters_of_one_group_with_different_steps_are_refused(
    build: Callable[..., Any], tmp_path: Path
) -> None:
    model = program.Net(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(program.groups_of(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    optimizer.state[model.second.weight]["step"] += 1
    files = Files(tmp_path, 1)
    files.save(items_of(model=model, optimizer=optimizer, scheduler={}), 0)
    engine = build(1)
    mine = items(engine)
    with pytest.raises(MismatchError, match="DeepSpeed counts the steps"):
        load(
            files, {"model": mine["model"], "optimizer": mine["optimizer"], "scheduler": items_of(s={})["s"]}
        )


class CountingAdam(torch.optim.Optimizer):
    """An Adam with the state of DeepSpeed's own, which are compiled: `step` is a number of Python."""

    adam_w_mode = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {"step": 0, "exp_avg": param * 0, "exp_avg_sq": param * 0}
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 0.1)
                state["exp_avg_sq"].lerp_(param.grad.square(), 0.001)
                param.sub_(state["exp_avg"], alpha=group["lr"])


CountingAdam.__module__ = "deepspeed.ops.adam.counting"


def test_an_adam_that_counts_in_python_exchanges_its_state_with_torchs(
    build: Callable[..., Any], tmp_path: Path
) -> None:
    def build_counting(stage: int) -> Any:
        config = {**program.config_of(stage), "zero_allow_untested_optimizer": True}
        return program.build_engine(config, CountingAdam)

    first, second, third = build_counting(1), build(3), build_counting(3)
    program.train_step(first, 1)
    program.train_step(first, 2)
    assert items(first)["optimizer"].kind is torch.optim.AdamW  # type: ignore[attr-defined]
    for folder, source, target in (("1", first, second), ("2", second, third)):
        (tmp_path / folder).mkdir()
        files = Files(tmp_path / folder, 1)
        files.save(items(source), 0)
        load(files, items(target))
        before, after = program.state_of(source), program.state_of(target)
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert {type(state["step"]) for state in second.optimizer.optimizer.state.values()} == {torch.Tensor}
    assert next(state["step"] for state in third.optimizer.optimizer.state.values()) == 2
    assert {type(state["step"]) for state in third.optimizer.optimizer.state.values()} == {int}
    program.train_step(second, 3)
    program.train_step(third, 3)


class Layers(nn.Module):
    """A layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(hidden_size=4, expert=nn.Linear(4, 4), num_experts=2, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.moe(x)[0].sum()
        return total


def test_pipelines_experts_and_stage_0_are_refused_by_name() -> None:
    config = {**program.config_of(1), "bf16": {"enabled": False}}
    pipeline = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1, loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(pipeline.parameters())
    engine, *_ = deepspeed.initialize(model=pipeline, optimizer=optimizer, config=config)
    with pytest.raises(UnsupportedItem, match="pipeline parallelism"):
        Checkpointer(link=LocalLink(), engine=engine)
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    experts = Layers()
    groups = split({"params": list(experts.parameters()), "name": "parameters"})
    engine, *_ = deepspeed.initialize(model=experts, optimizer=torch.optim.AdamW(groups), config=config)
    with pytest.raises(UnsupportedItem, match="experts"):
        Checkpointer(link=LocalLink(), engine=engine)
    with pytest.raises(UnsupportedItem, match="no optimizer of ZeRO"):
        Checkpointer(link=LocalLink(), engine=program.build_engine(program.config_of(0)))


@pytest.mark.parametrize(
    ("what", "attribute", "value"),
    [
        ("tensor parallelism (AutoTP or an mpu)", "autotp_size", 2),
        ("zero_hpz_partition_size above 1", "zero_hpz_partition_size", 2),
        ("quantized weights", "zero_quantized_weights", True),
        ("SuperOffload", "super_offload", True),
        ("DeepCompile", "is_deepcompile_enabled", True),
        ("random layer token dropping", "random_ltd_enabled", True),
    ],
)
def test_a_feature_is_refused_by_name(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, what: str, attribute: str, value: Any
) -> None:
    """The settings of an engine that does not have the devices for them."""
    engine = build(3)
    monkeypatch.setattr(engine, attribute, lambda: value)
    with pytest.raises(UnsupportedItem) as raised:
        check("engine", engine)
    assert what in str(raised.value) and what in REFUSED


def test_offload_to_nvme_is_refused_by_name(build: Callable[..., Any], tmp_path: Path) -> None:
    engine = build(3)
    nvme = DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path=str(tmp_path))
    engine._config.zero_config.offload_optimizer = nvme
    with pytest.raises(UnsupportedItem, match="NVMe offload of the optimizer"):
        check("engine", engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_version_that_lacks_a_private_name_is_refused(build: Callable[..., Any], stage: int) -> None:
    zero = build(stage).optimizer
    check_names(zero)
    name = "micro_step_id" if stage == 1 else "averaged_gradients"
    value = zero.__dict__.pop(name)
    with pytest.raises(ConfigError, match=name):
        check_names(zero)
    setattr(zero, name, value)
