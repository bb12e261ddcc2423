"""Strategies of Megatron's `dist_checkpointing` that save and load through ray_ckpt.

Megatron gathers common state on rank 0, exchanges the descriptions of shards for its own checks, and then
calls the strategy of each rank with nested dicts of ShardedTensors and ShardedObjects. The strategies here
capture and fill the live tensors; no file with tensors is written to the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.dcp.session import Session, current
from ray_ckpt.interop.megatron import values
from ray_ckpt.interop.megatron.agreement import Agreement, together
from ray_ckpt.interop.megatron.folder import (
    BACKEND,
    VERSION,
    is_ours,
    step_of,
    take_common,
    write_reference,
)
from ray_ckpt.interop.megatron.pending import Pending, wait_for_end
from ray_ckpt.interop.megatron.sharded_items import (
    COMMON,
    Wanted,
    check_formats,
    described,
    items_to_save,
    saved_boxes,
)
from ray_ckpt.interop.megatron.source import Source, source_of
from ray_ckpt.interop.packages import require
from ray_ckpt.trainer.checkpointer import LEVELS, LevelName

Folder = str | os.PathLike[str]


class SaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves a sharded state dict: `dist_checkpointing.save(state, folder, sharded_strategy=SaveStrategy())`.

    The step is the number at the end of the folder's name, such as iter_0000100; steps increase, and all
    ranks save the same ones. One strategy may serve all saves, also in Megatron's training loop as
    `checkpointing_context["save_strategy"]`. The first save of a run that has a checkpoint must come after a
    load.

    A synchronous save returns, and an asynchronous one is finalized, when the checkpoint has its level.
    """

    def __init__(self, *, level: LevelName = "local", timeout_s: float = 600.0) -> None:
        """Save up to a level.

        level:
            `local`, `replicated` or `durable`.
        timeout_s:
            Longest wait for the level, in seconds. Then the save, or its finalization, raises Unavailable.
        """
        require("megatron-core", extra="megatron")
        super().__init__(BACKEND, VERSION)
        if level not in LEVELS:
            raise ConfigError(f"{level!r} is not a level.", hint=f"Use one of {', '.join(LEVELS)}.")
        self._level, self._timeout_s = LEVELS[level], timeout_s
        self._agreement = Agreement()

    def save(self, sharded_state_dict: Any, checkpoint_dir: Folder) -> None:
        """Capture the state and wait for the level.

        Raises UnsupportedItem or UnsupportedLeaf for state that cannot be stored, ConfigError for misuse,
        Unavailable if the save failed.
        """
        session = current()
        self._capture(session, sharded_state_dict, checkpoint_dir)()
        _refer(session, checkpoint_dir)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Folder) -> AsyncRequest:
        """Begin to capture the state; return a request that is done when the checkpoint has its level.

        The next step of any optimizer waits for the capture. Raises as `save`; the finalization raises
        Unavailable if the save failed.
        """
        session = current()
        pending = Pending(self._capture(session, sharded_state_dict, checkpoint_dir))

        def finish() -> None:
            pending.result()
            _refer(session, checkpoint_dir)

        return AsyncRequest(wait_for_end, (pending.path,), [finish])

    def can_handle_sharded_objects(self) -> bool:
        return True

    def _capture(self, session: Session, state: Any, folder: Folder) -> Callable[[], None]:
        step = step_of(folder)
        boxes, names, data = self._agreement.agree(lambda: (saved_boxes(state), _common(folder)))
        check_formats(values.decode(data))
        waiter = session.save_items(step, items_to_save(boxes, names, values.plain(data)))
        return lambda: waiter(self._level, self._timeout_s)


def _common(folder: Folder) -> bytes:
    """Return common state, which Megatron has written on rank 0."""
    return values.encode(take_common(folder), COMMON) if dist.get_rank() == 0 else b""


def _refer(session: Session, folder: Folder) -> None:
    if dist.get_rank() == 0:
        write_reference(folder, session.where, step_of(folder))


class LoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads a sharded state dict: `dist_checkpointing.load(state, folder, sharded_strategy=LoadStrategy())`.

    In a run, `folder` is that of `resume_folder`: the newest intact checkpoint is read from memory, local
    disk, peers or the storage path, and the group goes on from it; random state is restored too. The folder
    of another run, or one that is loaded outside a run, names a durable checkpoint.

    Sizes and dtypes must be those of the checkpoint; a dtype is never converted.
    """

    def __init__(self) -> None:
        require("megatron-core", extra="megatron")
        super().__init__()

    def load(self, sharded_state_dict: Any, checkpoint_dir: Folder) -> Any:
        """Return the state dict with loaded values; tensors with data are filled in place.

        Raises MismatchError with all differences, ConfigError for a folder that is not the one to load.
        """

        def prepare() -> tuple[Source, Wanted]:
            _refuse_wrapper(sharded_state_dict)
            source = source_of(checkpoint_dir)
            return source, Wanted.of(sharded_state_dict, source.saved())

        (source, wanted), sizes = together(prepare, lambda _: len(sharded_state_dict))
        if any(sizes):  # otherwise the wrapper that is refused requests objects, of which there are none
            source.load(wanted.items)
        return wanted.loaded(sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Folder, metadata: Any = None) -> Any:
        """Return a ShardedTensor without data for each tensor of the checkpoint, by key."""
        return described(source_of(checkpoint_dir).saved(), with_objects=False)

    def load_sharded_metadata(self, checkpoint_dir: Folder) -> Any:
        """Return a ShardedTensor or ShardedObject without data for each part of the checkpoint, by key."""
        return described(source_of(checkpoint_dir).saved(), with_objects=True)

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Raise ConfigError: checkpoints are never changed."""
        raise ConfigError(
            "A checkpoint of ray_ckpt cannot be changed.", hint="Save the state dict without these tensors."
        )

    def can_handle_sharded_objects(self) -> bool:
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise ConfigError for a folder that another strategy saved."""
        if loaded_backend != BACKEND:
            raise ConfigError(
                f"The folder has a checkpoint of the format {loaded_backend!r}, not of ray_ckpt.",
                hint="Load it with Megatron's own strategy: leave out `sharded_strategy`.",
            )


def _refuse_wrapper(state: Any) -> None:
    if any(isinstance(key, tuple) for key in state):
        raise ConfigError(
            "FullyParallelLoadStrategyWrapper divides a load into two, which ray_ckpt refuses.",
            hint="Leave the wrapper out (--ckpt-fully-parallel-load): the ranks of a node share their reads.",
        )


class CommonLoadStrategy(TorchCommonLoadStrategy):  # type: ignore[misc]
    """Loads common state of folders that refer to ray_ckpt; other folders as Megatron does.

    `metadata.json` names the backend "torch" for common state whichever strategy saved the tensors, so this
    strategy takes the place of Megatron's for that name.
    """

    def load_common(self, checkpoint_dir: Folder) -> Any:
        if not is_ours(checkpoint_dir):
            return super().load_common(checkpoint_dir)
        return values.restored(source_of(checkpoint_dir).saved().trees[COMMON])


def register() -> None:
    """Register the strategies, so that Megatron finds them by the folder's metadata.json."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, SaveStrategy())
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())
    register_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1, CommonLoadStrategy())
