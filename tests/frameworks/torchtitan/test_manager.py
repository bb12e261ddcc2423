"""The manager in one process: the flag, the order of calls, retention, loaders, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer import CheckpointManager as StockManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.trainer import Trainer

from jobs.demo.free_ports import free_port
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError, NotConnected, UnsupportedItem
from ray_ckpt.interop.torchtitan.items import LoaderItem, ModelItem
from ray_ckpt.interop.torchtitan.manager import HOOKS, CheckpointManager
from ray_ckpt.torchtitan import _options, manager
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink
from tests.frameworks.torchtitan import program
from tests.frameworks.torchtitan.configs import tiny
from tests.frameworks.torchtitan.setups import make_assets

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(600),
]
FLAG = "ray_ckpt.torchtitan.manager"
SEQ, BATCH = 32, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("titan")
    make_assets(found)
    return found


@pytest.fixture(autouse=True)
def one_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**rank, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)
    yield
    set_connection(Connection())
    if dist.is_initialized():
        dist.destroy_process_group()


def connect(**options: Any) -> LocalLink:
    link = LocalLink(RunOptions(**{"memory": "single", "max_block_s": 60.0, "keep_last": 10, **options}))
    set_connection(Connection(link=link))
    return link


def loader(dataset: IterableDataset[Any] | None = None, *, rank: int = 0, ranks: int = 1) -> Any:
    if dataset is not None:
        return ParallelAwareDataloader(dataset, rank, ranks, batch_size=BATCH)
    return tiny().dataloader.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=HuggingFaceTokenizer(tokenizer_path="assets"),
        seq_len=SEQ,
        local_batch_size=BATCH,
    )


def objects(states: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what a Trainer gives to its manager, of torchtitan's classes."""
    config = tiny()
    model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizers = config.optimizer.build(model_parts=[model])
    return {
        "dataloader": loader(),
        "model_parts": [model],
        "optimizers": optimizers,
        "lr_schedulers": config.lr_scheduler.build(optimizers=optimizers, training_steps=8),
        "states": states or {"train_state": SimpleState()},
        "sd_adapter": None,
    }


class SimpleState:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def build(states: dict[str, Any] | None = None, **config: Any) -> Any:
    given = CheckpointManager.Config(**{"enable": True, "interval": 4, **config})
    return given.build(**objects(states))


# -- the flag --------------------------------------------------------------------------------------------


def test_the_flag_replaces_the_manager_and_keeps_its_options() -> None:
    config = tiny()
    config.checkpoint = StockManager.Config(enable=True, interval=7, keep_latest_k=5, async_mode="disabled")
    apply_overrides(OverrideConfig(imports=[(FLAG, {"replicas": 0})]), config)
    found = config.checkpoint
    assert type(found)._owner.__module__ == "ray_ckpt.torchtitan"
    assert (found.enable, found.interval, found.keep_latest_k, found.async_mode) == (True, 7, 5, "disabled")
    assert _options(found) == {"every_steps": 7, "keep_last": 5, "replicas": 0}
    found.keep_latest_k, found.load_step = 0, 14
    assert _options(found) == {"every_steps": 7, "keep_every": 1, "resume": "step:14", "replicas": 0}
    found.options = {"parity": [6, 2], "keep_every": None}  # from JSON
    assert RunOptions.parse(**_options(found)).parity == (6, 2)


def test_the_config_of_another_manager_is_refused() -> None:
    with pytest.raises(ConfigError, match="whose checkpoints may have other state"):
        manager(BaseCheckpointManager.Config())


def test_the_hooks_exist_and_no_public_method_is_overridden() -> None:
    assert set(HOOKS) == BaseCheckpointManager.__abstractmethods__
    public = {name for name in vars(BaseCheckpointManager) if not name.startswith("_")}
    assert public & set(vars(CheckpointManager)) == {"Config"}


def test_a_manager_that_is_not_enabled_needs_no_run() -> None:
    disabled = CheckpointManager.Config().build(**objects())
    assert not disabled.load() and not disabled.save(1) and disabled.close() is None
    with pytest.raises(NotConnected):
        build()


# -- the Trainer -----------------------------------------------------------------------------------------


def test_the_trainer_loads_saves_and_waits_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    link, calls = connect(), []
    for name in HOOKS:
        hook = getattr(CheckpointManager, name)

        def noted(self: Any, *args: Any, name: str = name, hook: Any = hook, **kwargs: Any) -> Any:
            done = hook(self, *args, **kwargs)
            calls.append((name, done, sorted(link.files)))
            return done

        monkeypatch.setattr(CheckpointManager, name, noted)
    checkpoint = ["--checkpoint.interval", "2", "--checkpoint.enable_first_step_checkpoint"]
    mode = ["--checkpoint.async_mode", "disabled"]  # a save returns when its files are there
    flags = ["--checkpoint.enable", "--training.steps", "3", "--override.imports", FLAG]
    trainer = program.build([*flags, *checkpoint, *mode])
    assert isinstance(trainer, Trainer)
    trainer.train()
    trainer.close()
    wait, saved = "_maybe_wait_for_staging", "_wait_for_saving"
    assert calls == [
        ("_load", False, []),
        (wait, None, []),
        (saved, None, [1]),
        ("_save", True, [1]),
        (wait, None, [1]),
        (saved, None, [1, 2]),
        ("_save", True, [1, 2]),
        (wait, None, [1, 2]),
        ("_save", True, [1, 2, 3]),
        ("_close", None, [1, 2, 3]),
    ]


def test_the_weights_are_the_live_ones_and_not_those_of_hooks(tmp_path: Path) -> None:
    first = connect()
    one = build()
    one.load()
    (model,) = one._stock_arguments["model_parts"]
    assert any(".wq." in name for name in model.state_dict()), "a hook divides the fused weights"
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    one._optimizers.step()
    assert one.save(4)
    one.maybe_wait_for_saving()
    names = {name for name, _ in model.named_parameters()}
    assert {f"model.{name}" for name in names} <= set(first.tensors(4))
    assert {f"optimizer.state.{name}.exp_avg" for name in names} <= set(first.tensors(4))
    set_connection(Connection(link=first.resumed(tmp_path, 4)))
    two = build()
    (other,) = two._stock_arguments["model_parts"]
    assert not torch.equal(
        other.layers["0"].attention.qkv_linear.wqkv.weight, model.layers["0"].attention.qkv_linear.wqkv.weight
    )
    assert two.load()
    for name, param in other.named_parameters():
        assert torch.equal(param, dict(model.named_parameters())[name]), name
    for mine, theirs in zip(one._optimizers, two._optimizers, strict=True):
        pairs = zip(mine.state.values(), theirs.state.values(), strict=True)
        assert all(torch.equal(a[key], b[key]) for a, b in pairs for key in a)
    one.close()
    two.close()


def test_extra_state_is_refused() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1}

    with pytest.raises(UnsupportedItem, match=r"Extra.*has extra state"):
        ModelItem(torch.nn.Sequential(Extra(2, 2)))


# -- loaders ---------------------------------------------------------------------------------------------


def test_a_loader_continues_at_its_place_without_a_saved_pickle() -> None:
    before, expected = loader(), []
    for number, (inputs, _) in enumerate(before):
        if number == 2:
            saved = LoaderItem(before).tree()
        if number > 2:
            expected.append(inputs["input"])
        if number == 5:
            break
    assert "unpickled" in saved["dp_rank_0"] and b"\x80" not in repr(saved).encode()
    after = loader()
    item = LoaderItem(after)
    assert item.problems(saved) == []
    item.load(saved)
    found = [inputs["input"] for (inputs, _), _ in zip(after, range(3), strict=False)]
    assert all(map(torch.equal, found, expected)) and len(expected) == 3


class Stateful(IterableDataset[int]):
    def __init__(self, state: Any) -> None:
        self.state = state

    def __iter__(self) -> Iterator[int]:
        yield from range(8)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.state}

    def load_state_dict(self, state: Any) -> None:
        pass


RAN: list[str] = []


class Hostile:
    def __reduce__(self) -> Any:
        return RAN.append, ("ran",)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (Hostile(), "builtins.getattr|list.append"),
        (torch.zeros(2), "torch"),
        (b"raw", "bytes"),
        (Path("x"), "pathlib"),
    ],
)
def test_objects_in_the_state_of_a_loader_are_refused_and_nothing_of_them_runs(
    state: Any, named: str
) -> None:
    with pytest.raises(UnsupportedItem, match=f"cannot be saved without pickle: .*({named})") as caught:
        LoaderItem(loader(Stateful(state))).tree()
    assert "plain values" in str(caught.value.hint) and RAN == []


def test_bytes_in_a_checkpoint_are_never_given_to_pickle() -> None:
    item = LoaderItem(loader())
    hostile = {"dp_rank_0": pickle.dumps(Hostile()), "world_size": 1}
    assert item.problems(hostile) == ["has bytes in the checkpoint, which are not taken for a pickle"]
    assert RAN == []


def test_a_loader_of_another_rank_is_refused_with_the_remedy() -> None:
    saved = LoaderItem(loader(rank=0, ranks=2)).tree()
    (problem,) = LoaderItem(loader(rank=1, ranks=3)).problems(saved)
    assert "dp_rank_0 of 2 in the checkpoint, of dp_rank_1 of 3 here" in problem
    assert "--checkpoint.exclude_from_loading dataloader" in problem


# -- options ---------------------------------------------------------------------------------------------


def test_retention_is_that_of_the_run_or_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        CheckpointManager.Config(keep_latest_k=1)
    connect(keep_last=3)
    with pytest.raises(ConfigError, match="keep_latest_k=10, and the run keeps the last 3"):
        build()
    build(keep_latest_k=3)
    with pytest.raises(ConfigError, match="keep_latest_k=0 keeps all"):
        build(keep_latest_k=0)
    connect(keep_every=1)
    build(keep_latest_k=0)


REFUSED = [
    ({"create_seed_checkpoint": True}, "create_seed_checkpoint is not needed"),
    ({"initial_load_path": "/old"}, "initial_load_path='/old' has pickles"),
    ({"exclude_from_loading": ["train_state"]}, "train_state, which cannot be left out"),
    ({"exclude_from_loading": ["other"]}, "other, which cannot be left out"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_options_without_a_meaning_are_refused(config: dict[str, Any], message: str) -> None:
    connect()
    with pytest.raises(ConfigError, match=message):
        build(**config)


def test_pipelines_and_other_optimizers_are_refused() -> None:
    connect()
    state = SimpleState()
    state.parallel_dims = SimpleNamespace(pp_enabled=True)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedItem, match="pipeline parallelism"):
        build({"train_state": state})


def test_a_step_to_load_must_be_that_of_the_run(tmp_path: Path) -> None:
    first = connect()
    one = build()
    one.load()
    assert not one.save(3) and one.save(4)
    one.maybe_wait_for_saving()
    set_connection(Connection(link=first.resumed(tmp_path, 4)))
    two = build()
    with pytest.raises(ConfigError, match=r"load_step=3, and the run resumes from step 4") as caught:
        two.load(3)
    assert 'resume="step:3"' in str(caught.value.hint)
    assert two.load(4)
    one.close()
    two.close()


def test_excluded_items_begin_anew_and_are_saved(tmp_path: Path) -> None:
    first = connect()
    one = build()
    one.load()
    one._items["lr_scheduler"].obj.step()
    one.save(4)
    one.maybe_wait_for_saving()
    second = first.resumed(tmp_path, 4)
    set_connection(Connection(link=second))
    two = build(exclude_from_loading=["lr_scheduler", "dataloader"])
    assert two.load()
    assert two._items["lr_scheduler"].obj.state_dict() == {"last_epoch": 0}
    assert two.save(8)
    two.maybe_wait_for_saving()
    saved: Any = second.state(8)
    assert {"lr_scheduler", "dataloader", "optimizer", "train_state"} <= saved["items"].keys()
    one.close()
    two.close()


def test_only_loads_are_made_with_load_only() -> None:
    link = connect()
    one = build(load_only=True)
    one.load()
    assert not one.save(4) and not one.save(8, last_step=True)
    one.close()
    assert not link.files
