"""A callback of Lightning that saves and restores through ray_ckpt.

Lightning restores checkpoints of its own before and after `on_fit_start`, from one dict with all tensors.
This callback restores at `on_fit_start`, when model, optimizers and schedulers stand as they will be trained,
each object in place and by its own methods. Lightning itself saves no random state; this callback does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from ray_ckpt.capture.items import Item
from ray_ckpt.errors import ConfigError, UnsupportedItem
from ray_ckpt.interop.packages import require
from ray_ckpt.trainer.checkpointer import Checkpointer

log = logging.getLogger("ray_ckpt")


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
        self._step = 0  # the last one that was passed to the Checkpointer
        self._is_deferred = False  # its save follows the validation that is due

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Go behind the other callbacks, so that a save has what they did in the same step."""
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]

    # -- restore -------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore everything. Raises ConfigError beside `fit(ckpt_path=...)` and at a second fit."""
        self._check(trainer)
        if self._checkpointer is not None:
            raise ConfigError(
                "This callback has served a fit.", hint="Give another Trainer another callback."
            )
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
        found = {"model": model, "lightning": _PositionItem(trainer, pl_module)}
        for name, objects in (("optimizer", trainer.optimizers), ("scheduler", schedulers)):
            found |= {name if k == 0 else f"{name}_{k}": obj for k, obj in enumerate(objects)}
        return found

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._checkpointer is not None:
            self._checkpointer.restore_random_state()

    # -- save ----------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a save is due; between two optimizer steps, as in accumulation, nothing is.

        If a validation is due as well, the save follows it: Lightning does not repeat or begin a validation
        of the step from which it resumes.
        """
        if self._checkpointer is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._checkpointer.due(self._step):
            self._is_deferred = _validates_next(trainer)
            if not self._is_deferred:
                self._checkpointer.save(self._step, _metrics(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._is_deferred and self._checkpointer is not None:
            self._is_deferred = False
            self._checkpointer.save(self._step, _metrics(trainer))

    # -- end -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._checkpointer is not None:
            self._checkpointer.finish(_metrics(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._checkpointer is not None:
            self._checkpointer.flush()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._checkpointer is not None and stage == "fit":
            self._checkpointer.close()


class _PositionItem(Item):
    """The state of Lightning itself, each rank's own."""

    per_rank = True

    def __init__(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._pl_module = trainer, pl_module

    def tree(self) -> Any:
        trainer = self._trainer
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        dumped: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": {key: state for key, state in callbacks.items() if state},
        }
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, self._pl_module, dumped)
        self._pl_module.on_save_checkpoint(dumped)
        return {
            "dumped": dumped,
            "precision": trainer.precision_plugin.state_dict(),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }

    def load(self, tree: Mapping[str, Any]) -> None:
        trainer, dumped = self._trainer, tree["dumped"]
        self._pl_module.on_load_checkpoint(dumped)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, self._pl_module, dumped)
            if (state := dumped["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(state)
        if tree["precision"]:
            trainer.precision_plugin.load_state_dict(tree["precision"])
        if tree["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(tree["datamodule"])
        trainer.fit_loop.load_state_dict(dumped["loops"]["fit_loop"])


def _validates_next(trainer: Any) -> bool:
    """Return whether a validation follows the batch that ends."""
    loop = trainer.fit_loop
    require("lightning", extra="lightning", owner=loop, names=("_data_fetcher",))
    require("lightning", extra="lightning", owner=loop.epoch_loop, names=("_should_check_val_fx",))
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _metrics(trainer: Any) -> dict[str, Any]:
    """Return the numbers that were logged so far."""
    return {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
