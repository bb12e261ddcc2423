"""Trainings with Lightning that resume at the end of an epoch, or with schedulers that watch a metric."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import ray_ckpt
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.shared_copy import SharedCopy
from ray_ckpt.capture.wrappers import unwrap
from ray_ckpt.config import RunOptions
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*ended before the epoch ended"),
]
EPOCH, TOTAL = 4, 12


@pytest.fixture(autouse=True)
def disconnect() -> Iterator[None]:
    yield
    set_connection(Connection())


def new_run(every_steps: int) -> LocalLink:
    return LocalLink(RunOptions(memory="single", max_block_s=10.0, every_steps=every_steps))


class Rows(Logger):  # type: ignore[misc]
    """Keeps what is logged, with its step."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Watched(pl.LightningModule):  # type: ignore[misc]
    """A model whose rate falls at each look at a metric; `seen` has what happened, with the rate."""

    def __init__(self, interval: str, monitor: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net: Any = nn.Linear(2, 1)
        self.interval, self.monitor = interval, monitor
        self.seen: list[tuple[Any, ...]] = []

    def note(self, what: str, *values: Any) -> None:
        self.seen.append((self.global_step, what, self.current_epoch, *values))

    def on_train_epoch_start(self) -> None:
        self.note("begin")

    def on_train_epoch_end(self) -> None:
        self.note("end")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.note("train", batch_idx, float(loss.detach()), self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("val_loss", loss)
        self.note("validate", float(loss))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        watched = {"scheduler": scheduler, "interval": self.interval, "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": watched}


def fit(
    link: LocalLink,
    *,
    interval: str = "epoch",
    monitor: str = "val_loss",
    data: Any = None,
    kind: type[Watched] = Watched,
    also: tuple[Any, ...] = (),
    **args: Any,
) -> tuple[Watched, list[tuple[int | None, dict[str, float]]]]:
    set_connection(Connection(link=link))
    rows: Any = list(torch.randn(2 * EPOCH, 2, generator=torch.Generator().manual_seed(7)))
    stops = [EarlyStopping("val_loss", patience=99)] if interval == "epoch" else []
    logger, model = Rows(), kind(interval, monitor)
    pl.Trainer(
        **args,
        accelerator="cpu",
        devices=1,
        use_distributed_sampler=False,
        callbacks=[ray_ckpt.lightning.CheckpointCallback(), *stops, *also],
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=logger,
    ).fit(model, data or DataLoader(rows, batch_size=2), DataLoader(rows[:2], batch_size=2))
    return model, logger.rows


@pytest.mark.parametrize("length", [{"max_epochs": TOTAL // EPOCH}, {"max_steps": TOTAL}], ids=str)
def test_a_save_of_the_last_step_of_an_epoch_follows_its_end(tmp_path: Path, length: dict[str, Any]) -> None:
    first = new_run(EPOCH)
    whole, logged = fit(first, **length)
    assert [sealed.attempt.step for sealed in first.sealed] == [EPOCH, 2 * EPOCH, TOTAL]
    assert all({"val_loss", "loss_epoch"} <= set(sealed.metrics or ()) for sealed in first.sealed)
    resumed, rest = fit(first.resumed(tmp_path, EPOCH), **length)
    begin = whole.seen.index((EPOCH, "begin", 1))
    assert resumed.seen == whole.seen[begin:], "with the same rates, and each hook once"
    assert rest == [row for row in logged if row[0] is not None and row[0] >= EPOCH]


def test_a_run_that_ended_with_an_epoch_is_extended_by_the_next_one(tmp_path: Path) -> None:
    whole, logged = fit(new_run(99), max_epochs=3)
    first = new_run(99)
    fit(first, max_epochs=1)
    resumed, rest = fit(first.resumed(tmp_path, EPOCH), max_epochs=3)
    assert resumed.seen == whole.seen[whole.seen.index((EPOCH, "begin", 1)) :]
    assert rest == [row for row in logged if row[0] is not None and row[0] >= EPOCH]


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("limit", [EPOCH, EPOCH - 1])
def test_a_stateful_loader_begins_the_epoch_after_the_one_that_was_saved(tmp_path: Path, limit: int) -> None:
    """Lightning stops at the length of the loader, whose state is that of an iteration with nothing left."""

    def data() -> Any:
        return StatefulDataLoader(list(torch.randn(2 * EPOCH, 2)), batch_size=2)

    first = new_run(99)
    fit(first, data=data(), max_epochs=1, limit_train_batches=limit)
    resumed, _ = fit(first.resumed(tmp_path, limit), data=data(), max_epochs=3, limit_train_batches=limit)
    steps = [each[2:4] for each in resumed.seen if each[1] == "train"]
    assert steps == [(epoch, batch) for epoch in (1, 2) for batch in range(limit)]


def test_a_run_that_ended_within_an_epoch_is_extended_in_this_epoch(tmp_path: Path) -> None:
    first = new_run(99)
    watch: dict[str, Any] = {"interval": "step", "monitor": "loss_step"}
    fit(first, max_steps=2, **watch)
    resumed, _ = fit(first.resumed(tmp_path, 2), max_steps=2 * EPOCH, **watch)
    steps = [(step, epoch) for step, what, epoch, *_ in resumed.seen if what == "train"]
    assert steps == [(2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 1)]


@pytest.mark.parametrize("monitor", ["loss_step", "val_loss"])
def test_a_scheduler_that_watches_each_step_is_moved_once_for_each(tmp_path: Path, monitor: str) -> None:
    def data() -> Any:
        rows: Any = list(torch.randn(8, 2, generator=torch.Generator().manual_seed(7)))
        sampler = ray_ckpt.GlobalBatchSampler(8, global_batch=2, rank=0, world_size=1, num_batches=TOTAL)
        return sampler.batches(DataLoader(rows, batch_sampler=sampler))

    args: dict[str, Any] = {"interval": "step", "monitor": monitor, "max_steps": TOTAL}
    args |= {"val_check_interval": 1} if monitor == "val_loss" else {"limit_val_batches": 0}
    first = new_run(3)
    whole, _ = fit(first, data=data(), **args)
    resumed, _ = fit(first.resumed(tmp_path, 3), data=data(), **args)
    trained = [[each for each in model.seen if each[1] == "train"] for model in (whole, resumed)]
    assert trained[1] == trained[0][3:]


class Restless(EMAWeightAveraging):  # type: ignore[misc]
    """Notes whether the weights that a validation replaces are still being captured."""

    def __init__(self) -> None:
        super().__init__(decay=0.5)
        self.are_copied: list[bool] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        ours: Any
        (ours,) = (c for c in trainer.callbacks if isinstance(c, ray_ckpt.lightning.CheckpointCallback))
        running = ours._checkpointer._saver._snapshot
        self.are_copied += [] if running is None else [running.host_copied.is_set()]
        super().on_validation_epoch_start(trainer, pl_module)


def test_averaged_weights_are_resumed_and_the_last_step_has_those_that_are_trained(tmp_path: Path) -> None:
    whole, _ = fit(new_run(99), max_epochs=3, also=(Restless(),))
    first = new_run(99)
    begun, _ = fit(first, max_epochs=2, also=(Restless(),))
    assert not torch.equal(first.tensors(2 * EPOCH)["model.net.weight"], begun.net.weight), (
        "averaged at the end"
    )
    resumed, _ = fit(first.resumed(tmp_path, 2 * EPOCH), max_epochs=3, also=(Restless(),))
    assert resumed.seen == whole.seen[whole.seen.index((2 * EPOCH, "begin", 2)) :]
    assert torch.equal(resumed.net.weight, whole.net.weight)


def capture_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(copy: SharedCopy) -> None:
        time.sleep(0.2)
        run(copy)

    run = SharedCopy.run
    monkeypatch.setattr(SharedCopy, "run", slowly)


def test_a_validation_that_replaces_weights_waits_for_their_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_slowly(monkeypatch)
    averages = Restless()
    fit(new_run(1), max_steps=2, accumulate_grad_batches=2, val_check_interval=3, also=(averages,))
    assert averages.are_copied == [True], "the validation is within an accumulation window"


class Scheduled(Watched):
    """With a norm of batches, for which averages need one more epoch, and a scheduler that they replace."""

    def __init__(self, interval: str, monitor: str) -> None:
        super().__init__(interval, monitor)
        self.net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def test_averaged_weights_that_end_an_epoch_wait_for_the_capture_of_its_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture_slowly(monkeypatch)
    link = new_run(EPOCH)
    averages = StochasticWeightAveraging(0.005, swa_epoch_start=1)
    fit(link, kind=Scheduled, max_epochs=2, also=(averages,))
    assert 2 * EPOCH in link.files and not link.skipped


def test_a_fast_dev_run_neither_restores_nor_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = new_run(EPOCH)
    fit(first, max_epochs=1)
    dry = first.resumed(tmp_path, EPOCH)
    model, _ = fit(dry, fast_dev_run=True)
    assert model.seen[0][0] == 0 and not dry.files
    assert "fast_dev_run: nothing is restored, and no checkpoint is saved" in caplog.messages


class Prunes(Watched):
    """Leaves a part of the model out of Lightning's own checkpoints, and adds a value."""

    loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "bias" not in k}
        checkpoint["mine"] = 3

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"], sorted(checkpoint["state_dict"])


def test_hooks_get_the_state_dict_of_the_model_which_is_saved_once(tmp_path: Path) -> None:
    first = new_run(EPOCH)
    fit(first, max_epochs=1, kind=Prunes)
    assert sorted(key for key in first.tensors(EPOCH) if "net" in key) == [
        "model.net.bias",
        "model.net.weight",
    ]
    resumed, _ = fit(first.resumed(tmp_path, EPOCH), max_epochs=2, kind=Prunes)
    assert isinstance(resumed, Prunes) and resumed.loaded == (3, ["net.bias", "net.weight"])


def test_a_module_of_fabric_is_unwrapped() -> None:
    inner = nn.Linear(2, 2)
    model = Fabric(accelerator="cpu", devices=1).setup_module(inner)
    assert unwrap(model) is inner
    optimizer = torch.optim.SGD(model.parameters())
    (group,) = adapt("o", optimizer, {"m": model}).tree()["param_groups"]
    assert group["params"] == list(adapt("m", model, {}).tree()) == ["weight", "bias"]


def test_parameters_are_shared_under_the_names_that_the_module_saves() -> None:
    item = adapt("m", nn.Sequential(Fabric(accelerator="cpu", devices=1).setup_module(nn.Linear(2, 2))), {})
    shared = [name for name in item.tree() if item.is_shared((name,))]
    assert shared == ["0.weight", "0.bias"]


class SteppedAtEpochEnd(pl.LightningModule):  # type: ignore[misc]
    """Applies what is left of an accumulation window at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self.net(batch).square().mean())
        if index == 2:
            self.on_train_epoch_end()

    def on_train_epoch_end(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def fit_stepped(link: LocalLink, num_rows: int, **length: int) -> SteppedAtEpochEnd:
    set_connection(Connection(link=link))
    model, rows = SteppedAtEpochEnd(), cast(Any, list(torch.ones(num_rows, 2)))
    pl.Trainer(
        **length,
        accelerator="cpu",
        devices=1,
        callbacks=[ray_ckpt.lightning.CheckpointCallback()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    ).fit(model, DataLoader(rows, batch_size=2))
    return model


def test_the_last_step_has_what_a_hook_of_the_module_has_stepped_at_the_end_of_its_epoch() -> None:
    link = new_run(99)
    model = fit_stepped(link, 6, max_epochs=2)
    (sealed,) = link.sealed
    assert torch.equal(link.tensors(sealed.attempt.step)["model.net.weight"], model.net.weight)


def test_steps_after_the_last_save_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    link = new_run(1)
    fit_stepped(link, 8, max_steps=1)
    assert [sealed.attempt.step for sealed in link.sealed] == [1]
    assert "the state at the end is not saved: an optimizer has stepped since step 1" in caplog.text
