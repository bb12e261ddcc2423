"""A callback of Lightning that saves and restores through ray_ckpt.

Lightning restores checkpoints of its own before and after `on_fit_start`, from one dict with all tensors.
This callback restores at `on_fit_start`, when model, optimizers and schedulers stand as they will be trained,
each object in place and by its own methods. Lightning itself saves no random state; this callback does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback

from ray_ckpt.capture.items import Item
from ray_ckpt.errors import ConfigError, UnsupportedItem
from ray_ckpt.interop.packages import require
from ray_ckpt.trainer.checkpointer import Checkpointer

log = logging.getLogger("ray_ckpt")

LIVE = "ray_ckpt.live_model"
"""Stands for the state dict of the live model, which is the item `model`, in what hooks add."""


class CheckpointCallback(Callback):  # type: ignore[misc]
    """Saves and restores a training with Lightning: `Trainer(callbacks=[CheckpointCallback()])`.

    All ranks have the callback; each process is a worker of a Ray Train run with
    `ray_ckpt.train.CheckpointCallback`, or has called `ray_ckpt.connect`. `trainer.fit` goes on from the
    newest checkpoint of the run. A save follows the optimizer steps that the run's options choose. Saved are
    the model (`model`), all optimizers and schedulers (`optimizer`, `optimizer_1`, `scheduler`, and so on),
    random state, and as `lightning` the loops with the positions of stateful loaders, the states of callbacks
    and of the data module, the precision plugin, and what `on_save_checkpoint` of the module adds.

    `module` names the attribute of the LightningModule that is the model. The checkpoint then has the
    parameter names of that module, as other kinds of loops save it; parameters elsewhere cannot be optimized.
    """

    def __init__(self, module: str | None = None) -> None:
        require("lightning", extra="lightning")
        self._module = module
        self._checkpointer: Checkpointer | None = None
        self._position: _PositionItem | None = None
        self._step = 0  # the last one that was passed to the Checkpointer
        self._is_saved = True  # the last step was restored, or a save of it has begun
        self._deferred: Literal["", "validation", "epoch"] = ""  # the end of which its save follows

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Go behind the other callbacks, so that a save has what they did in the same step."""
        others = [each for each in trainer.callbacks if each is not self and not isinstance(each, _Between)]
        trainer.callbacks = [_Between(self), *others, self]

    # -- restore -------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore everything. Raises ConfigError beside `fit(ckpt_path=...)` and at a second fit."""
        self._check(trainer)
        if trainer.fast_dev_run:
            log.warning("fast_dev_run: nothing is restored, and no checkpoint is saved")
            return
        if self._checkpointer is not None:
            raise ConfigError(
                "This callback has served a fit.", hint="Give another Trainer another callback."
            )
        self._position = _PositionItem(trainer, pl_module)
        self._checkpointer = Checkpointer(**self._items(trainer, pl_module))
        info = self._checkpointer.restore()
        self._step = info.step if info is not None else 0

    def _check(self, trainer: Any) -> None:
        if trainer.ckpt_path is not None:
            raise ConfigError(
                f"trainer.fit has ckpt_path={trainer.ckpt_path!r}, and this callback restores too.",
                hint="Leave ckpt_path out: the newest checkpoint of the run is restored.",
            )
        if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__):
            raise UnsupportedItem(
                "Lightning runs DeepSpeed, whose sharded state cannot be saved yet.",
                hint="Use a strategy of DDP, or FSDP2 by ModelParallelStrategy.",
            )

    def _items(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        model = trainer.strategy.model if self._module is None else getattr(pl_module, self._module)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        found = {"model": model, "lightning": self._position}
        for name, objects in (("optimizer", trainer.optimizers), ("scheduler", schedulers)):
            found |= {name if k == 0 else f"{name}_{k}": obj for k, obj in enumerate(objects)}
        return found

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._position is not None:
            self._position.complete_load()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._checkpointer is not None:
            self._checkpointer.restore_random_state()

    # -- save ----------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a save is due; between two optimizer steps, as in accumulation, nothing is.

        If a validation or the end of an epoch comes next, the save follows it: Lightning does not repeat or
        begin these for the step from which it resumes.
        """
        if self._checkpointer is None or trainer.global_step == self._step:
            return
        self._step, self._deferred, self._is_saved = trainer.global_step, "", False
        if self._checkpointer.due(self._step):
            self._deferred = _next(trainer)
            if not self._deferred:
                self._save(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._save_behind("validation", trainer)

    def _save_behind(self, what: str, trainer: Any) -> None:
        """Save the last step if its save was to follow `what`. After the last epoch, `finish` saves it."""
        if self._deferred == what and self._checkpointer is not None:
            self._deferred = ""
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        if self._checkpointer is not None:
            self._is_saved = self._checkpointer.save(self._step, _metrics(trainer))

    def _settle(self) -> None:
        """Wait for a capture that reads the weights: callbacks may put averaged ones in their place."""
        if self._checkpointer is not None:
            with self._checkpointer.lock():
                pass

    # -- end -----------------------------------------------------------------------------------------

    def _finish(self, trainer: Any) -> None:
        if self._checkpointer is not None:
            if not self._is_saved:  # hooks at the end of the epoch may have stepped an optimizer
                self._checkpointer.due(self._step)
            self._checkpointer.finish(_metrics(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._checkpointer is not None:
            self._checkpointer.flush()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._checkpointer is not None and stage == "fit":
            self._checkpointer.close()


class _Between(Callback):  # type: ignore[misc]
    """Stands before the other callbacks: saves between epochs, and at the end before they change weights."""

    def __init__(self, saves: CheckpointCallback) -> None:
        self._saves = saves

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._saves._save_behind("epoch", trainer)
        self._saves._settle()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._saves._settle()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._saves._finish(trainer)


class _Dumped(dict[str, Any]):
    """A checkpoint as hooks of Lightning get it; `state_dict` of the live model is made at its first use."""

    def __init__(self, values: Mapping[str, Any], pl_module: Any) -> None:
        super().__init__(
            {k: pl_module.state_dict() if isinstance(v, str) and v == LIVE else v for k, v in values.items()}
        )
        self._pl_module = pl_module
        self._live: dict[str, Any] | None = None

    def __missing__(self, key: str) -> Any:
        if key != "state_dict":
            raise KeyError(key)
        self._live = self[key] = self._pl_module.state_dict()
        return self._live

    def plain(self) -> dict[str, Any]:
        """Return what hooks have added, without a `state_dict` of tensors that the item `model` has."""
        if self._live is None:
            return dict(self)
        found = {k: LIVE if v is self._live else v for k, v in self.items()}
        state, live = self.get("state_dict"), set(map(id, self._live.values()))
        if isinstance(state, Mapping) and set(map(id, state.values())) <= live:
            del found["state_dict"]
        return found


class _PositionItem(Item):
    """The state of Lightning itself, each rank's own."""

    per_rank = True

    def __init__(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._pl_module = trainer, pl_module
        self._metrics: Mapping[str, float] | None = None  # restored; None: none were saved
        self._is_step_open = False  # the restored step has not moved its schedulers on plateaus

    def tree(self) -> Any:
        trainer, fit_loop = self._trainer, self._trainer.fit_loop.state_dict()
        is_cut = not fit_loop["epoch_loop.batch_progress"]["is_last_batch"]  # as by max_steps
        for counts in fit_loop["epoch_progress"].values():
            counts["ready"] = counts["started"]  # between two epochs, the next one is ready
            if is_cut and 0 < counts["started"] == counts["completed"]:
                counts["processed"] = counts["completed"] = counts["started"] - 1
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        values = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "loops": {"fit_loop": fit_loop},
            "callbacks": {key: state for key, state in callbacks.items() if state},
        }
        dumped = _Dumped(values, self._pl_module)
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, self._pl_module, dumped)
        self._pl_module.on_save_checkpoint(dumped)
        return {
            "dumped": dumped.plain(),
            "precision": trainer.precision_plugin.state_dict(),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "metrics": {name: float(value) for name, value in _metrics(trainer).items()},
        }

    def load(self, tree: Mapping[str, Any]) -> None:
        trainer, dumped = self._trainer, _Dumped(tree["dumped"], self._pl_module)
        self._pl_module.on_load_checkpoint(dumped)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, self._pl_module, dumped)
            if (state := dumped["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(state)
        if tree["precision"]:
            trainer.precision_plugin.load_state_dict(tree["precision"])
        if tree["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(tree["datamodule"])
        loop, saved = trainer.fit_loop, dumped["loops"]["fit_loop"]
        loop.load_state_dict(saved)
        self._metrics = tree.get("metrics")
        epochs, batches = saved["epoch_progress"]["total"], saved["epoch_loop.batch_progress"]
        if epochs["completed"] == epochs["started"] and batches["is_last_batch"]:
            loop._restarting = True  # else Lightning does not load the states of loaders between epochs
            loop.epoch_loop.restarting = False  # else the next epoch is taken for the last one, and is over
            for state in saved["state_dict"].get("combined_loader") or ():
                if isinstance(state, dict) and "_iterator_finished" in state:  # of a StatefulDataLoader
                    state["_iterator_finished"] = True  # Lightning stops at its length, not behind it
        self._is_step_open = batches["total"]["completed"] < batches["total"]["processed"]

    def complete_load(self) -> None:
        """Load what Lightning clears when it begins: the metrics that schedulers and callbacks watch.

        With them the end of a resumed epoch is as that of any other, plateaus included.
        """
        if self._metrics is not None:
            trainer, metrics, self._metrics = self._trainer, self._metrics, None
            connector, device = trainer._logger_connector, trainer.strategy.root_device
            require("lightning", extra="lightning", owner=connector, names=("_callback_metrics",))
            require("lightning", extra="lightning", owner=trainer.fit_loop, names=("_restarting",))
            for name, value in metrics.items():
                connector._callback_metrics.setdefault(name, torch.tensor(value, device=device))
            trainer.fit_loop._restarting = False  # its last use is to leave out schedulers on plateaus
            if self._is_step_open:
                trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def _next(trainer: Any) -> Literal["", "validation", "epoch"]:
    """Return what ends after the batch that ends: its epoch, or a validation within the epoch."""
    loop = trainer.fit_loop
    require("lightning", extra="lightning", owner=loop, names=("_data_fetcher",))
    names = ("_num_ready_batches_reached", "_should_check_val_fx")
    require("lightning", extra="lightning", owner=loop.epoch_loop, names=names)
    if loop.epoch_loop._num_ready_batches_reached():
        return "epoch"
    return "validation" if loop.epoch_loop._should_check_val_fx(loop._data_fetcher) else ""


def _metrics(trainer: Any) -> dict[str, Any]:
    """Return the numbers that were logged so far."""
    return {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
