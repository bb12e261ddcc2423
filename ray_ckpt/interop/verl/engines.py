"""The trained engines of one process, which are saved and restored together.

verl calls its worker groups one after the other: the actor saves, then the critic. Both are in the same
processes, unless the user gives the critic a group of its own. In the same processes they are items of one
Checkpointer, which saves when the last role is called. In groups of their own they are parts of one
checkpoint, which commits when all parts have saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from ray_ckpt.errors import CheckpointError, ConfigError, RestoreError
from ray_ckpt.interop.huggingface.files import FilesItem
from ray_ckpt.interop.verl.parts import PartLink
from ray_ckpt.interop.verl.resume import committed_steps
from ray_ckpt.interop.verl.settings import ENV, Settings, StepFolder, write_tracker
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import get_connection
from ray_ckpt.types import Level

log = logging.getLogger("ray_ckpt")

ORDER = ("actor", "critic")  # of verl's calls
COMMIT_S = 600.0  # longest wait for a commit, and for the capture before
PARTS_HINT = f'Name all groups with their ranks in {ENV}, as in "parts": {{"actor": 8, "critic": 2}}'


class TrainedEngines:
    """Saves and restores the engines of this process by one Checkpointer, made at the first save or load."""

    def __init__(self, settings: Settings, connect: Callable[..., Callable[[], None]]) -> None:
        self._settings = settings
        self._connect = connect
        self._complete: Callable[[], None] | None = None  # of the connection of a part that has begun
        self._engines: dict[str, Any] = {}  # by role
        self._checkpointer: Checkpointer | None = None
        self._part: PartLink | None = None
        self._run: tuple[str, str] | None = None  # storage path and name
        self._restored: int | None = None  # step
        self._step = 0  # of the save for which some roles have been called
        self._called: set[str] = set()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="ray_ckpt-verl")

    # -- engines -------------------------------------------------------------------------------------

    def begin(self, role: str) -> None:
        """Begin to connect the part `role`, if there are parts; all ranks of its group call this.

        No call waits for other parts, since verl builds one group after the other.
        """
        parts, run = self._settings.parts, self._settings.run_of(Path())
        if not parts:
            return
        ordered = {name: parts[name] for name in ORDER if name in parts}
        if ordered.keys() != parts.keys() or role not in parts or self._complete is not None:
            raise ConfigError(
                f"{ENV} has the parts {', '.join(parts)}, which are not groups of their own.",
                hint=f"{PARTS_HINT}, and leave roles of the same processes out.",
            )
        self._complete = self._begin_connect(run, part=role, parts=ordered)

    def add(self, role: str, engine: Any) -> None:
        """Register a built engine. Raises ConfigError after the first save or load."""
        if self._checkpointer is not None:
            raise ConfigError(
                f"The {role} was built again after the first save or load.",
                hint="Start the worker group again instead.",
            )
        self._engines[role] = engine

    # -- restore -------------------------------------------------------------------------------------

    def load(self, role: str, folder: StepFolder) -> None:
        """Restore all engines at the first call; at the others, check that the same step is meant.

        Raises RestoreError if the step cannot be restored. If an older step was restored in its place, the
        run's log names that step now, so the next start of the driver goes on from there.
        """
        if self._checkpointer is None:
            self._start(folder, is_resumed=True)
        if self._restored != folder.step:
            raise RestoreError(
                f"verl resumes from step {folder.step}, and step {self._restored or 0} was restored.",
                hint="Start again: the newest step that can be restored is taken from the log of the run.",
                step=folder.step,
            )

    def _start(self, folder: StepFolder, *, is_resumed: bool) -> None:
        """Connect, and restore the step of `folder`, or begin a run whose driver resumes from nothing."""
        self._check_roles()
        run = self._settings.run_of(folder.root)
        if self._complete is None:
            resume = self._resume(folder) if is_resumed else "never"
            self._complete = self._begin_connect(run, resume=resume)
        self._complete()
        link = get_connection().link
        if self._settings.parts and link is not None:
            link = self._part = PartLink(link)
        checkpointer = Checkpointer(link=link, **self._items(is_only=not folder.role))
        wanted = folder.step if is_resumed else 0
        if (found := checkpointer.resume_step()) != wanted:
            checkpointer.close()
            raise RestoreError(
                f"verl resumes from step {wanted}, and the run {run[1]} from step {found}.",
                hint="Start again to go on from there, or begin another trainer.experiment_name.",
                step=wanted,
            )
        info = checkpointer.restore()
        self._checkpointer, self._run = checkpointer, run
        self._restored = info.step if info is not None else None

    def _check_roles(self) -> None:
        if "critic" in self._engines and len(self._engines) == 1 and not self._settings.parts:
            raise ConfigError(
                "The critic has a worker group of its own.",
                hint=f"{PARTS_HINT}.",
            )

    def _resume(self, folder: StepFolder) -> str:
        """Return the run's option `resume` for a step that the driver has chosen."""
        steps = committed_steps(self._settings, folder.root) if dist.get_rank() == 0 else ()
        return "auto" if steps and steps[0] == folder.step else f"step:{folder.step}"

    def _begin_connect(self, run: tuple[str, str], **options: Any) -> Callable[[], None]:
        return self._connect(
            storage_path=run[0],
            run=run[1],
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            **{"max_block_s": COMMIT_S, **self._settings.options, **options},
        )

    def _items(self, *, is_only: bool) -> dict[str, Any]:
        """Return the items of all engines; a model that is trained alone has the usual names."""
        found: dict[str, Any] = {}
        for role in sorted(self._engines):
            model, prefix = ("model", "") if is_only else (role, f"{role}_")
            own = _items_of(self._engines[role])
            found[model] = own.pop("model")
            found |= {f"{prefix}{name}": obj for name, obj in own.items()}
        return found

    # -- save ----------------------------------------------------------------------------------------

    def save(self, role: str, folder: StepFolder, max_ckpt_to_keep: int | None) -> None:
        """Save all engines when the last of their roles is called with a step.

        verl's driver writes its tracker file when this returns, unless the actor's `checkpoint.async_save`
        is set: so this waits for the commit. With async_save the tracker is written here, later, once the
        step has committed. Raises Unavailable if the step for which verl waits is no checkpoint.
        """
        if self._checkpointer is None:
            self._start(folder, is_resumed=False)
        checkpointer = self._checkpointer
        assert checkpointer is not None
        self._check_save(checkpointer, role, folder, max_ckpt_to_keep)
        if self._called != self._engines.keys():
            return
        self._called = set()
        if self._part is not None and not self._part.is_last:
            if self._part.is_answered:
                self._capture(checkpointer, folder.step)
            else:  # in a new run the last part restores in its own call, which waits for this capture
                self._background.submit(self._capture_later, self._part, checkpointer, folder.step)
            return
        self._capture(checkpointer, folder.step)
        if not self._is_async(folder):
            checkpointer.wait("local", timeout_s=COMMIT_S)
        if dist.get_rank() == 0:
            tracked = self._background.submit(self._track, checkpointer.waiter(), folder)
            if not self._is_async(folder):
                tracked.result()

    def _capture(self, checkpointer: Checkpointer, step: int) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # an engine offloads to the CPU in the background
        if self._part is not None:
            self._part.check()
        checkpointer.save(step)
        with checkpointer.lock(moves=True):  # verl moves and merges weights outside of optimizer steps
            pass

    def _capture_later(self, part: PartLink, checkpointer: Checkpointer, step: int) -> None:
        try:
            part.wait()
            self._capture(checkpointer, step)
        except Exception:  # the last part, which waits for the commit, raises
            log.exception("step %d could not be captured", step)

    def _check_save(
        self, checkpointer: Checkpointer, role: str, folder: StepFolder, max_ckpt_to_keep: int | None
    ) -> None:
        """Note the call. Raises ConfigError if another run, retention or order of calls is meant."""
        run, keep_last = self._settings.run_of(folder.root), checkpointer.options.keep_last
        if run != self._run:
            raise ConfigError(
                f"verl saves to {'/'.join(run)}, and this process belongs to {checkpointer.where}.",
                hint=f"To go on under another name, set storage_path and run in {ENV}.",
            )
        if max_ckpt_to_keep and max_ckpt_to_keep != keep_last:
            raise ConfigError(
                f"verl keeps {max_ckpt_to_keep} checkpoints of the {role}, and the run keeps {keep_last}.",
                hint=f'Set "keep_last": {max_ckpt_to_keep} in {ENV}, or leave max_{role}_ckpt_to_keep out.',
            )
        if self._called and self._step != folder.step:
            raise ConfigError(
                f"Step {self._step} was saved by the {', '.join(sorted(self._called))} alone.",
                hint="Save all trained models at the same steps.",
            )
        self._step = folder.step
        self._called.add(role)

    def _is_async(self, folder: StepFolder) -> bool:
        """Return whether verl leaves its tracker file to us, which the ranks of a critic alone cannot know.

        The trainer of supervised training always writes it.
        """
        if not folder.role or self._part is not None:
            return False
        return bool(self._engines["actor"].checkpoint_config.async_save)

    def _track(self, wait: Callable[[Level, float], None], folder: StepFolder) -> None:
        """Write the tracker once the step has committed; a failure is logged."""
        try:
            wait(Level.LOCAL, COMMIT_S)
            write_tracker(folder.root, folder.step)
        except (CheckpointError, OSError) as error:
            log.warning("verl's tracker does not name step %d: %s", folder.step, error)


def _items_of(engine: Any) -> dict[str, Any]:
    """Return the items of an engine that its `checkpoint.save_contents` names, and its small files."""
    contents, module = engine.checkpoint_config.save_contents, engine.module
    inner = module.module if isinstance(module, FullyShardedDataParallel) else module
    found = {"model": module, "files": FilesItem.of(inner, engine.model_config.get_processor())}
    if "optimizer" in contents:
        found["optimizer"] = engine.optimizer
    if "extra" in contents:
        found |= {"scheduler": engine.lr_scheduler, "scaler": engine.scaler}
    return {name: obj for name, obj in found.items() if obj is not None}
