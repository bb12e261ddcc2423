"""Trainers of other packages in one process: what is refused, which versions are known, and a resume."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from accelerate import Accelerator
from ray.train.huggingface.transformers import RayTrainReportCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ray_ckpt
from ray_ckpt.catalog.uri import Origin
from ray_ckpt.config import RunOptions
from ray_ckpt.data import GlobalBatchSampler
from ray_ckpt.errors import ConfigError, NotConnected, UnsupportedItem
from ray_ckpt.interop import packages
from ray_ckpt.interop.accelerate import PREPARED
from ray_ckpt.interop.huggingface.trainer import OVERRIDDEN
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink
from tests.catalog.test_load import save
from tests.support.sample_run import RunLog

AT, TOTAL = 4, 8
OPTIONS = RunOptions(every_steps=100, memory="single", max_block_s=10.0)
SMALL = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of the packages


@dataclass(slots=True)
class Resumed(LocalLink):
    """The run has what `save` has written below `storage`."""

    storage: str = ""

    def ticket(self) -> RestoreTicket:
        attempt = ray_ckpt.open(f"{self.storage}/gpt").choose(AT).info.id
        ref = RemoteRef(storage_path=self.storage, run_name="gpt")
        return Origin(uri=f"{self.storage}/gpt", storage=ref, attempt=attempt).ticket(2, 1)


@pytest.fixture(autouse=True)
def connected() -> Iterator[None]:
    set_connection(Connection(link=LocalLink(OPTIONS)))
    yield
    set_connection(Connection())


def build(out: Path, kind: type[transformers.Trainer] = transformers.Trainer, **args: Any) -> Any:
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0)  # with dropout
    )
    data = [{"input_ids": ids, "labels": ids} for ids in torch.arange(256).reshape(32, 8) * 7 % 31]
    settings = {"max_steps": TOTAL, "save_strategy": "no", "report_to": "none", "use_cpu": True, **args}
    arguments = transformers.TrainingArguments(str(out), per_device_train_batch_size=4, **settings)
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"enable_jit_checkpoint": True}, "takes SIGTERM for itself"),
        ({"save_total_limit": 7}, r"save_total_limit=7, and the run keeps the last 3.*keep_last=7"),
        (
            {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"},
            r"best checkpoint by eval_loss.*keep_best=\('eval_loss', 'min', 1\)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_honored_are_refused(
    tmp_path: Path, args: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        ray_ckpt.huggingface.prepare_trainer(build(tmp_path, **args))


def test_a_push_of_folders_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.args.push_to_hub, trainer.args.hub_strategy = True, "every_save"
    with pytest.raises(ConfigError, match="pushes checkpoint folders"):
        ray_ckpt.huggingface.prepare_trainer(trainer)


def test_a_second_copy_of_each_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.add_callback(RayTrainReportCallback())
    with pytest.raises(ConfigError, match="RayTrainReportCallback copies checkpoint folders"):
        ray_ckpt.huggingface.prepare_trainer(trainer)


def test_deepspeed_is_refused_by_name(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(UnsupportedItem, match="DeepSpeed"):
        ray_ckpt.huggingface.prepare_trainer(trainer)
    accelerator: Any = SimpleNamespace(
        distributed_type=SimpleNamespace(value="DEEPSPEED"), **dict.fromkeys(PREPARED.values())
    )
    with pytest.raises(UnsupportedItem, match="DEEPSPEED"):
        ray_ckpt.accelerate.items(accelerator)


def test_other_ways_to_train_are_refused_before_training(tmp_path: Path) -> None:
    trainer = ray_ckpt.huggingface.prepare_trainer(build(tmp_path))
    with pytest.raises(ConfigError, match="prepare_trainer was called twice"):
        ray_ckpt.huggingface.prepare_trainer(trainer)
    with pytest.raises(ConfigError, match=r"the folder 'checkpoint-3'.*Leave it out"):
        trainer.train(resume_from_checkpoint="checkpoint-3")
    with pytest.raises(ConfigError, match="Use Ray Tune"):
        trainer.train(trial=object())
    trainer.train()
    with pytest.raises(ConfigError, match="train was called twice"):
        trainer.train()


def test_outside_a_run_there_is_nothing_to_connect(tmp_path: Path) -> None:
    set_connection(Connection())
    with pytest.raises(NotConnected):
        ray_ckpt.huggingface.prepare_trainer(build(tmp_path))
    with pytest.raises(ConfigError, match="has prepared no model"):
        ray_ckpt.accelerate.items(Accelerator(cpu=True))


# -- versions ----------------------------------------------------------------------------------------


VERSION = importlib.metadata.version


def uses(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    return {
        "transformers": lambda: ray_ckpt.huggingface.prepare_trainer(build(tmp_path)),
        "accelerate": lambda: ray_ckpt.accelerate.items(Accelerator(cpu=True)),
        "lightning": ray_ckpt.lightning.CheckpointCallback,
    }


@pytest.mark.parametrize("package", ["transformers", "accelerate", "lightning"])
@pytest.mark.parametrize("version", ["1.0", "99.0"])
def test_an_unknown_version_is_refused_with_those_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    installed = VERSION
    monkeypatch.setattr(packages, "version", lambda name: version if name == package else installed(name))
    with pytest.raises(ConfigError, match=rf"{package} {version} is not supported; {package}.*pip install"):
        uses(tmp_path)[package]()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages, "version", version)
    with pytest.raises(ConfigError, match=r"lightning is not installed.*ray_ckpt\[lightning\]"):
        ray_ckpt.lightning.CheckpointCallback()


def test_a_private_name_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(tmp_path)
    monkeypatch.delattr(transformers.Trainer, "_load_scaler")
    with pytest.raises(ConfigError, match="has no _load_scaler"):
        ray_ckpt.huggingface.prepare_trainer(trainer)


def test_the_private_names_are_those_of_the_packages() -> None:
    assert all(callable(getattr(transformers.Trainer, name)) for name in OVERRIDDEN)
    accelerator = Accelerator(cpu=True)
    assert all(isinstance(getattr(accelerator, name), list) for name in PREPARED.values())


# -- resume ------------------------------------------------------------------------------------------


def keep(checkpointer: Any, folder: Path) -> None:
    """Write what a save would have now as step AT of a run."""
    save(RunLog(folder=folder / "gpt"), [dict(checkpointer._require_items().items)], step=AT)


def twice(train: Callable[[], tuple[Any, int]], storage: Path) -> tuple[Any, Any]:
    """Train from the beginning, and again from step AT; return the weights of both."""
    whole, steps = train()
    set_connection(Connection(link=Resumed(OPTIONS, storage=str(storage))))
    resumed, steps_again = train()
    assert (steps, steps_again) == (TOTAL, TOTAL - AT)
    return whole, resumed


def assert_equal(whole: Any, resumed: Any) -> None:
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


class Busy(transformers.Trainer):  # type: ignore[misc]
    """A trainer with attributes of its own, such as TRL's have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics, self._items, self._checkpointer, self._upload = {"train": 1}, [1], "mine", None


class KeepAt(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: Any, folder: Path) -> None:
        self._trainer, self._folder, self.steps = trainer, folder, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if state.global_step == AT and not (self._folder / "gpt").exists():
            keep(self._trainer._ray_ckpt.checkpointer, self._folder)


def test_a_trainer_of_transformers_resumes_exactly(tmp_path: Path) -> None:
    def train() -> Any:
        trainer = ray_ckpt.huggingface.prepare_trainer(build(tmp_path / "out", Busy))
        steps = KeepAt(trainer, tmp_path)
        trainer.add_callback(steps)
        trainer.train()
        assert trainer.state.global_step == TOTAL and trainer._metrics == {"train": 1}
        return trainer.model.state_dict(), steps.steps

    whole, resumed = twice(train, tmp_path)
    assert_equal(whole, resumed)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_loop_with_accelerate_resumes_exactly(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))

    def train() -> Any:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4))
        ckpt = ray_ckpt.Checkpointer(**ray_ckpt.accelerate.items(accelerator))
        info = ckpt.restore()
        first = step = info.step if info is not None else 0
        for (batch,) in accelerator.skip_first_batches(loader, step):
            ckpt.restore_random_state()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if ckpt.due(step):
                ckpt.save(step)
            if step == AT and not (tmp_path / "gpt").exists():
                keep(ckpt, tmp_path)
        ckpt.finish()
        return model.state_dict(), step - first

    whole, resumed = twice(train, tmp_path)
    assert_equal(whole, resumed)


class Small(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class KeepBatch(pl.Callback):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        self._folder, self.steps = folder, 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.steps += 1
        if trainer.global_step == AT and not (self._folder / "gpt").exists():
            keep(trainer.callbacks[-1]._checkpointer, self._folder)


def test_lightning_resumes_exactly(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))

    def train() -> Any:
        sampler = GlobalBatchSampler(32, global_batch=4, rank=0, world_size=1, num_batches=TOTAL)
        steps = KeepBatch(tmp_path)
        trainer = pl.Trainer(
            max_steps=TOTAL,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ray_ckpt.lightning.CheckpointCallback(), steps],
        )
        model = Small()
        trainer.fit(model, sampler.batches(DataLoader(data, batch_sampler=sampler)))
        assert trainer.global_step == TOTAL
        return model.state_dict(), steps.steps

    whole, resumed = twice(train, tmp_path)
    assert_equal(whole, resumed)


def test_lightning_with_a_path_or_a_second_fit_is_refused(tmp_path: Path) -> None:
    callback = ray_ckpt.lightning.CheckpointCallback()
    with pytest.raises(ConfigError, match="Leave ckpt_path out"):
        callback.on_fit_start(SimpleNamespace(ckpt_path="last.ckpt"), None)
