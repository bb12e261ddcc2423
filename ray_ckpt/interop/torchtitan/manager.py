"""A checkpoint manager of torchtitan that saves and restores through ray_ckpt.

The Trainer builds it from its Config, as any other manager, calls `load` before the first step, `save` after
each step and `maybe_wait_for_staging` before each optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer import CheckpointManager as StockManager
from torchtitan.config.override import derive
from torchtitan.tools import filesystem

from ray_ckpt.capture.items import Item, StatefulItem
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import CheckpointError, ConfigError, UnsupportedItem
from ray_ckpt.interop.packages import require
from ray_ckpt.interop.torchtitan.items import (
    LOADER,
    LoaderItem,
    ModelItem,
    call_at_iteration,
    optimizer_items,
)
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.types import Level

log = logging.getLogger("ray_ckpt")

HOOKS = ("_close", "_load", "_maybe_wait_for_staging", "_save", "_wait_for_saving")
"""Private methods of BaseCheckpointManager that are overridden; `require` checks that they exist."""
LOCAL_S = 600.0  # longest wait of a blocking save until it is on disk


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and restores a training of torchtitan; the process is connected to a run of ray_ckpt.

    Saved are the model, the optimizers by the names of their parameters, the schedulers, the loader, the
    trainer's counters, further states of the trainer, and random state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options of checkpoints, and the options of the run."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """disabled: `save` returns when the checkpoint is on the disks of all nodes. Else: when the state is
        being copied."""

        options: dict[str, Any] = field(default_factory=dict)
        """Options of the run, as of `ray_ckpt.connect`, where the manager itself connects."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Register the objects of a Trainer.

        Raises ConfigError for options that cannot be honored, UnsupportedItem under pipeline parallelism,
        NotConnected outside a run.
        """
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        require("torchtitan", extra="torchtitan", owner=BaseCheckpointManager, names=HOOKS)
        _check_config(config)
        _check_parallelism(model_parts, states)
        self._config, self._model, self._optimizers = config, model_parts[0], optimizers
        self._stock_arguments = {
            "dataloader": dataloader,
            "model_parts": model_parts,
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            "sd_adapter": sd_adapter,
            "base_folder": base_folder,
        }
        objects = {"lr_scheduler": lr_schedulers, **states}
        self._items: dict[str, Item] = {
            "model": ModelItem(self._model, is_partial=bool(config.exclude_from_loading)),
            **optimizer_items(optimizers, self._model),
            **{name: StatefulItem(state) for name, state in objects.items()},
        }
        if dataloader is not None:
            self._items[LOADER] = LoaderItem(dataloader)
        checkpointer = self._checkpointer = Checkpointer()
        for name, item in self._loaded_items().items():
            checkpointer.add(name, item)
        _check_options(config, checkpointer.options)
        if dataloader is not None:
            call_at_iteration(dataloader, checkpointer.restore_random_state)

    def _loaded_items(self) -> Mapping[str, Item]:
        """Return the items that a load restores. Raises ConfigError for a wrong name to exclude."""
        excluded = set(self._config.exclude_from_loading)
        known = set(self._items) - {"model", "train_state"}
        if unknown := sorted(excluded - known):
            raise ConfigError(
                f"exclude_from_loading has {', '.join(unknown)}, which cannot be left out.",
                hint=f"There are {', '.join(sorted(known))}.",
            )
        if "optimizer" in excluded:
            excluded |= {name for name in known if name.startswith("optimizer_")}
        return {name: item for name, item in self._items.items() if name not in excluded}

    # -- load ----------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        """Restore the newest checkpoint of the run, or in a new run the initial weights, if any.

        Raises ConfigError if `step` is another one, and the errors of `Checkpointer.restore`.
        """
        there = self._checkpointer.resume_step()
        if step not in (-1, there):
            raise ConfigError(
                f"checkpoint.load_step={step}, and the run resumes from step {there}.",
                hint=f'Give the run the option resume="step:{step}", or leave load_step out.',
                option="resume",
            )
        info = self._checkpointer.restore()
        self._checkpointer.hold(self._items, tuple(self._optimizers))
        if info is None and self._config.initial_load_in_hf:
            return bool(self._read_initial())
        return info is not None

    def _read_initial(self) -> bool:
        """Load a Hugging Face directory by torchtitan's own code, which has the names of the model."""
        stock, config = self._stock(), self._config
        where = config.initial_load_path or getattr(stock.sd_adapter, "hf_assets_path", None)
        if not where or not filesystem.isdir(where):
            raise ConfigError(
                f"There is no model directory {where}.", hint="Set --checkpoint.initial_load_path."
            )
        stock.dcp_load(stock.states["model"].state_dict(), where, True, config.initial_load_in_hf_quantized)
        return True

    def _stock(self) -> Any:
        """Return torchtitan's own manager, for files of Hugging Face; it saves no checkpoint."""
        config = derive(
            self._config,
            StockManager.Config,
            async_mode="disabled",
            keep_latest_k=0,
            folder=filesystem.join(self._config.folder, "hf"),
        )
        return config.build(states={}, **self._stock_arguments)

    # -- save ----------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if this step is due by `interval`, by the run's cadence, or is the last one.

        Returns False if nothing was saved. A save that fails is logged and does not stop training.
        """
        if self._config.load_only:
            return False
        is_due = self._checkpointer.due(curr_step, by_default=False)
        if last_step:
            return self._save_last(curr_step)
        if not is_due and not self._is_due(curr_step):
            return False
        is_saved = self._checkpointer.save(curr_step)
        self.save_future = _Saved(self._checkpointer.waiter())
        if self._config.async_mode != "disabled":
            return is_saved
        try:
            self.maybe_wait_for_saving()
        except CheckpointError as error:
            log.error("step %d was not saved: %s", curr_step, error)
            return False
        return is_saved

    def _is_due(self, step: int) -> bool:
        is_first = step == 1 and self._config.enable_first_step_checkpoint
        return bool(is_first or step % self._config.interval == 0)

    def _save_last(self, step: int) -> bool:
        """Save everything after the last step and wait until it is committed; export it if it is wanted."""
        is_saved = self._checkpointer.finish()
        self.save_future = None
        if self._config.last_save_in_hf:
            self._stock()._save_last_step(step)
        return is_saved

    def _maybe_wait_for_staging(self) -> None:
        """Wait until the capture has read what the optimizer step is about to change."""
        with self._checkpointer.lock():
            pass

    def _wait_for_saving(self) -> None:
        """Wait until the last save is on the disks of all nodes. Raises Unavailable if it failed."""
        saved, self.save_future = self.save_future, None
        if saved is not None:
            saved.result()

    def _close(self) -> None:
        """Wait until the last capture has left this process; nothing is saved."""
        with suppress(AttributeError):  # called also after an error in __init__
            self._checkpointer.close()


class _Saved(Future[None]):
    """The future of a save, whose result waits until the checkpoint is on the disks of all nodes."""

    def __init__(self, wait: Callable[[Level, float], None]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> None:
        self._wait(Level.LOCAL, LOCAL_S if timeout is None else timeout)


def _check_config(config: Any) -> None:
    """Raise ConfigError for options that a run of ray_ckpt has no meaning for."""
    if config.create_seed_checkpoint:
        raise ConfigError(
            "create_seed_checkpoint is not needed: a checkpoint of any layout is loaded into any other.",
            hint="Leave it out, or make the seed with torchtitan's own manager.",
        )
    if config.initial_load_path and not config.initial_load_in_hf:
        raise ConfigError(
            f"initial_load_path={config.initial_load_path!r} has pickles, which ray_ckpt does not load.",
            hint="For weights of Hugging Face add --checkpoint.initial_load_in_hf; for a run of ray_ckpt use "
            "the option init_from.",
        )


def _check_parallelism(model_parts: list[Any], states: Mapping[str, Any]) -> None:
    dims = getattr(states.get("train_state"), "parallel_dims", None)
    if len(model_parts) != 1 or (dims is not None and dims.pp_enabled):
        raise UnsupportedItem(
            "torchtitan runs pipeline parallelism, whose ranks hold different parameters.",
            hint="Set --parallelism.pipeline_parallel_degree 1.",
            item="model",
        )


def _check_options(config: Any, options: RunOptions) -> None:
    """Raise ConfigError if retention would be another than torchtitan's options ask for."""
    if config.keep_latest_k == 0 and options.keep_every != 1:
        raise ConfigError(
            "checkpoint.keep_latest_k=0 keeps all checkpoints, and the run does not.",
            hint="Give the run the option keep_every=1, or set --checkpoint.keep_latest_k.",
            option="keep_every",
        )
    if config.keep_latest_k and options.keep_last != config.keep_latest_k:
        raise ConfigError(
            f"checkpoint.keep_latest_k={config.keep_latest_k}, and the run keeps the last "
            f"{options.keep_last} checkpoints.",
            hint=f"Set --checkpoint.keep_latest_k {options.keep_last}, or give the run the option "
            f"keep_last={config.keep_latest_k}.",
            option="keep_last",
        )
