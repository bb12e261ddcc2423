"""A Trainer of Transformers, or of TRL, that saves and resumes through ray_ckpt.

`prepare_trainer` gives the trainer a class in which the methods that write and read checkpoint folders use a
Checkpointer instead. `train` decides on the position in the data before it wraps the model, and needs the
saved TrainerState for it: it finds that file alone in a temporary folder. All other state is restored when
model, optimizer and scheduler are built, and random state where Transformers restores it. Before it draws the
order of a restored epoch, that epoch's first random state is set.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import HubStrategy

from ray_ckpt.capture.items import Item
from ray_ckpt.capture.rng import RngItem
from ray_ckpt.catalog.load import open as open_run
from ray_ckpt.catalog.uri import CheckpointUri, uri_of
from ray_ckpt.errors import CheckpointError, ConfigError, RestoreError, UnsupportedItem
from ray_ckpt.interop.accelerate import inner, own_items
from ray_ckpt.interop.huggingface.files import FilesItem
from ray_ckpt.interop.packages import require
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.types import Level

log = logging.getLogger("ray_ckpt")

OVERRIDDEN = (
    "_determine_best_metric",
    "_finalize_training",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_prepare_for_training",
    "_run_epoch",
    "_save_checkpoint",
)
"""Private methods of Trainer that are replaced; `require` checks that they exist."""

BEST_S = 600.0  # at the end of training, the wait until the best checkpoint is on the storage path


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Make `trainer` save and resume through ray_ckpt; return it. Call this before `trainer.train()`.

    The process is a worker of a Ray Train run with the CheckpointCallback, or has called `ray_ckpt.connect`.
    May be called before or after `ray.train.huggingface.transformers.prepare_trainer`.

    - `train()` goes on from the newest checkpoint of the run, or as the run's option `resume` names.
    - `save_strategy` and `save_steps` decide when to save. A save that the coordinator announces, by time or
      before a node leaves, comes in addition, and so do the multiples of `every_steps` if it is set.
    - The options `keep_last` and `keep_best` are the retention; they must agree with `save_total_limit` and
      `load_best_model_at_end`.
    - Numbers that were logged or evaluated at a step are the metrics of its checkpoint.

    Raises ConfigError for a version of Transformers that is not known and for arguments that cannot be
    honored, UnsupportedItem under DeepSpeed, NotConnected outside a run.
    """
    require("transformers", extra="huggingface", owner=Trainer, names=OVERRIDDEN)
    require("accelerate", extra="huggingface")
    if isinstance(trainer, _ThroughRayCkpt):
        raise ConfigError("prepare_trainer was called twice.", hint="Call it once, before trainer.train().")
    checkpointer = Checkpointer()
    _check_arguments(trainer, checkpointer)
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_ThroughRayCkpt, kind), {})
    trainer._ray_ckpt = _Run(trainer, checkpointer)
    trainer.add_callback(_Cadence(trainer._ray_ckpt))
    return trainer


class _ThroughRayCkpt(Trainer):  # type: ignore[misc]
    """The methods of a Trainer that write or read checkpoints.

    All that they need is in one attribute, whose name no subclass of Trainer has.
    """

    _ray_ckpt: _Run

    # -- resume --------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train from the newest checkpoint of the run, or from the beginning, to the last step.

        True, False and None mean the same: the option `resume` decides, and `resume="never"` begins anew.
        Raises ConfigError for a folder to resume from, for a hyperparameter search, and at a second call;
        RestoreError if the newest checkpoint is damaged: at the next start, an older one is used.
        """
        state = self._ray_ckpt.begin(resume_from_checkpoint, trial)
        with TemporaryDirectory(prefix="ray_ckpt-") if state else nullcontext() as folder:
            if folder is not None:
                (Path(folder) / TRAINER_STATE_NAME).write_text(state)
            return super().train(folder, None, *args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Build model, optimizer and scheduler as ever, and restore them."""
        built = super()._prepare_for_training(*args, **kwargs)
        self._ray_ckpt.restore()
        return built

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run no epoch if the last step was restored: Transformers would make one step more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            self._ray_ckpt.begin_epoch(kwargs["steps_trained_in_current_epoch"])
            super()._run_epoch(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; `_prepare_for_training` restores the model."""

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, likewise."""

    def _load_scaler(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, likewise."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self._ray_ckpt.checkpointer.restore_random_state()

    # -- save ----------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        self._ray_ckpt.save()

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Return True also where the run's cadence asks for a save: save_strategy="best" saves if True."""
        is_best = super()._determine_best_metric(*args, **kwargs)
        return bool(is_best or self._ray_ckpt.due_step == self.state.global_step)

    # -- end -----------------------------------------------------------------------------------------

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Save the last step, load the best model if it is wanted, and end as ever."""
        self._ray_ckpt.checkpointer.finish(_metrics(self.state))
        best, state = self.state.best_model_checkpoint, self.state
        if self.args.load_best_model_at_end and best:
            self._load_best_model()
        state.best_model_checkpoint = None  # else folders of other trainings in output_dir are deleted
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            state.best_model_checkpoint = best

    def _load_best_model(self) -> None:
        self._ray_ckpt.load_best_model()


class _Run:
    """The saves and restores of a prepared trainer."""

    def __init__(self, trainer: Trainer, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self._trainer = trainer
        self._state = _StateItem(trainer)
        self._is_begun = False
        self.due_step = 0  # the last step for which the run's cadence has asked for a save
        self._requested = (0, False)  # the last step whose save was requested, and whether it was captured
        self._best: str | None = None  # the URI of the best checkpoint, of the restored state
        self._upload: threading.Thread | None = None

    def begin(self, folder: str | os.PathLike[str] | bool | None, trial: Any) -> str:
        """Return the TrainerState to resume with, as JSON; "" to begin at step 0."""
        if isinstance(folder, str | os.PathLike):
            raise ConfigError(
                f"resume_from_checkpoint is the folder {os.fspath(folder)!r}, and checkpoints are in "
                f"{self.checkpointer.where}.",
                hint="Leave it out: the newest checkpoint of the run is used. To begin with weights in a "
                "folder, build the model with from_pretrained(folder).",
            )
        if trial is not None:
            raise ConfigError("A run has one training, and a search has many.", hint="Use Ray Tune.")
        if self._is_begun:
            raise ConfigError("train was called twice.", hint="Build and prepare another Trainer.")
        self._is_begun = True
        self._trainer.args.restore_callback_states_from_checkpoint = True  # such as that of early stopping
        step = self.checkpointer.resume_step()
        saved = self.checkpointer.saved() if step else None
        if saved is None:
            return ""
        if "trainer" in saved.trees:
            state = json.loads(saved.trees["trainer"]["state"])
            self._best = state.get("best_model_checkpoint")  # Transformers would look for a folder
            return json.dumps({**state, "best_model_checkpoint": None}, sort_keys=True)
        return json.dumps({"global_step": step})  # saved by another kind of loop; `restore` compares items

    def restore(self) -> None:
        """Restore all items. Raises RestoreError if it is not the step of the TrainerState."""
        for name, obj in self._items().items():
            self.checkpointer.add(name, obj)
        info = self.checkpointer.restore()
        self._trainer.state.best_model_checkpoint = self._best
        restored, expected = info.step if info is not None else 0, self._trainer.state.global_step
        if restored != expected:
            raise RestoreError(
                f"The checkpoint of step {expected} is damaged; step {restored} is whole.",
                hint=f"Start the training again: it goes on from step {restored}.",
            )
        control = self._trainer.control  # restored as it was during the save, which is done
        control.should_save = control.should_evaluate = control.should_log = False

    def _items(self) -> dict[str, Any]:
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        return {
            "model": trainer.model_wrapped,
            "optimizer": inner(trainer.optimizer, "optimizer"),
            "scheduler": inner(trainer.lr_scheduler, "scheduler"),
            "trainer": self._state,
            "files": FilesItem.of(model, trainer.processing_class),
            **own_items(trainer.accelerator),
        }

    def begin_epoch(self, num_restored: int) -> None:
        """Keep the random state that draws the order of the data; a restored epoch gets its saved one.

        Transformers then skips the first `num_restored` batches of that epoch, and restores the random state
        of the saved step.
        """
        restored, self._state.restored = self._state.restored, None
        if not num_restored or self._trainer.args.ignore_data_skip:
            self.checkpointer.restore_random_state()
        elif restored is not None:
            RngItem().load(restored)
        self._state.epoch = RngItem().tree()

    def is_due(self, step: int, *, by_default: bool) -> bool:
        """Return True if the run's cadence asks for a save after `step`."""
        if self.checkpointer.due(step, by_default=by_default):
            self.due_step = step
        return self.due_step == step

    def save(self) -> None:
        """Request a save of this step, with the numbers logged at it as metrics.

        A second request for a step, at the end of its epoch, adds the numbers logged since the first.
        """
        state = self._trainer.state
        step, metrics, best = state.global_step, _metrics(state), state.best_model_checkpoint
        is_best = state.best_global_step == step
        if is_best:
            state.best_model_checkpoint = uri_of(self.checkpointer.where, step)
        if self._requested[0] == step:
            self.checkpointer.annotate(step, metrics=metrics)
        else:
            self._requested = (step, self.checkpointer.save(step, metrics))
        if is_best and not self._requested[1]:
            state.best_model_checkpoint = best
        elif is_best and self._trainer.args.load_best_model_at_end:
            self._keep_best()

    def _keep_best(self) -> None:
        """Bring the checkpoint just requested to the storage path, from where it can be loaded again."""
        if self._trainer.args.process_index == 0:
            wait, step = self.checkpointer.waiter(), self._trainer.state.global_step
            self._upload = threading.Thread(target=_wait_until_stored, args=(wait, step), daemon=True)
            self._upload.start()

    def load_best_model(self) -> None:
        """Fill the model with the best checkpoint. Raises CheckpointError if it is not stored."""
        if self._upload is not None:
            self._upload.join(BEST_S)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # rank 0 has waited for the upload
        uri = str(self._trainer.state.best_model_checkpoint)
        if (best := CheckpointUri.parse(uri).step) is None:
            raise RestoreError(f"The best model is {uri}, which names no step of a run.")
        log.info("loading the model of step %d, the best one", best)
        run = open_run(self.checkpointer.where, self.checkpointer.options.storage_options)
        run.load(into={"model": self._trainer.model_wrapped}, step=best)


class _StateItem(Item):
    """The TrainerState with the state of all callbacks: {"state": the JSON of trainer_state.json}.

    Transformers loads it before all other items. "epoch" is this rank's random state at the beginning of the
    epoch: samplers without a generator of their own draw the order of the data from it.
    """

    per_rank = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._log: list[Any] = []  # the entries of log_history that are written already
        self._log_text = ""  # their JSON
        self.epoch = RngItem().tree()
        self.restored: Any = None  # that of the restored epoch, until it goes on

    def tree(self) -> Any:
        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        exportable = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        state: TrainerState = dataclasses.replace(self._trainer.state, stateful_callbacks=exportable)
        fields = {name: value for name, value in vars(state).items() if name != "log_history"}
        text = json.dumps(fields, sort_keys=True)[:-1]
        return {"state": f'{text}, "log_history": [{self._log_of(state)}]}}', "epoch": self.epoch}

    def _log_of(self, state: TrainerState) -> str:
        """Return the JSON of the log's entries: they stay as they are, so each is written once."""
        num = len(self._log)
        if num > len(state.log_history) or (num and state.log_history[num - 1] is not self._log[-1]):
            self._log, self._log_text, num = [], "", 0
        added = [json.dumps(entry, sort_keys=True) for entry in state.log_history[num:]]
        self._log_text = ", ".join([self._log_text] * bool(num) + added)
        self._log += state.log_history[num:]
        return self._log_text

    def load(self, tree: Any) -> None:
        self.restored = tree.get("epoch")


class _Cadence(TrainerCallback):  # type: ignore[misc]
    """Asks for a save where the run's cadence does; after the last step of an epoch, behind its evaluation.

    Transformers goes on from such a step with the next epoch, and does not repeat the end of the last one.
    """

    def __init__(self, run: _Run) -> None:
        self._run = run

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> Any:
        is_due = self._run.is_due(state.global_step, by_default=args.save_strategy == "no")
        if is_due and not _is_at_epoch_end(state):
            control.should_save = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> Any:
        if self._run.due_step == state.global_step and _is_at_epoch_end(state):
            control.should_save = True
        return control


def _is_at_epoch_end(state: TrainerState) -> bool:
    return state.epoch is not None and state.epoch % 1 == 0


def _metrics(state: TrainerState) -> dict[str, float]:
    """Return the numbers that were logged at this step."""
    entries = (entry for entry in state.log_history if entry.get("step") == state.global_step)
    found = {name: value for entry in entries for name, value in entry.items() if name != "step"}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _wait_until_stored(wait: Any, step: int) -> None:
    try:
        wait(Level.DURABLE, BEST_S)
    except CheckpointError as error:
        log.warning("step %d, the best one, is not on the storage path: %s", step, error)


def _check_arguments(trainer: Trainer, checkpointer: Checkpointer) -> None:
    """Raise an error for what would be saved or kept otherwise than its user expects."""
    args, options = trainer.args, checkpointer.options
    if trainer.is_deepspeed_enabled:
        raise UnsupportedItem(
            "The Trainer runs DeepSpeed, whose sharded state cannot be saved yet.",
            hint="Use DDP, or FSDP2 by TrainingArguments(fsdp=...).",
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True takes SIGTERM for itself, and ray_ckpt saves at SIGTERM already.",
            hint="Leave enable_jit_checkpoint out.",
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True begins again with smaller batches, and a run is restored only once.",
            hint="Set per_device_train_batch_size, with gradient_accumulation_steps, to a size that fits.",
        )
    if args.push_to_hub and (strategy := HubStrategy(args.hub_strategy).value) != "end":
        raise ConfigError(
            f"hub_strategy={strategy!r} pushes checkpoint folders, and there are none.",
            hint='Use hub_strategy="end" and call trainer.push_to_hub() after training.',
        )
    for callback in trainer.callback_handler.callbacks:
        if any(kind.__name__ == "RayTrainReportCallback" for kind in type(callback).__mro__):
            raise ConfigError(
                "RayTrainReportCallback copies checkpoint folders, and there are none.",
                hint="Leave it out: ray_ckpt reports checkpoints and metrics to Ray Train.",
            )
    limit = args.save_total_limit
    if limit is not None and limit > 0 and options.keep_last != limit:
        raise ConfigError(
            f"save_total_limit={limit}, and the run keeps the last {options.keep_last} checkpoints.",
            hint=f"Give the run the option keep_last={limit}, as in CheckpointCallback(keep_last={limit}).",
            option="keep_last",
        )
    if args.load_best_model_at_end:
        _check_best(args, checkpointer)


def _check_best(args: Any, checkpointer: Checkpointer) -> None:
    metric = args.metric_for_best_model
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    wanted = (metric, "max" if args.greater_is_better else "min", 1)
    kept = checkpointer.options.keep_best
    if kept is None or kept[:2] != wanted[:2]:
        raise ConfigError(
            f"load_best_model_at_end needs the best checkpoint by {metric}, which the run does not keep.",
            hint=f"Give the run the option keep_best={wanted}, as in CheckpointCallback(keep_best={wanted}).",
            option="keep_best",
        )
