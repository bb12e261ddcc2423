"""A storage writer and stager of DCP that saves through ray_ckpt.

The state is captured from live memory, and DCP gets an empty plan: its collectives then carry some bytes
for each rank, however many tensors there are. `async_save` calls `stage` in the training thread, where the
capture begins; what follows in DCP's thread is a save of nothing that waits for the level.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.dcp.names import flat, nested
from ray_ckpt.interop.dcp.session import current
from ray_ckpt.trainer.checkpointer import LEVELS, LevelName
from ray_ckpt.types import Level

_NUMBER = re.compile(r"(\d+)\D*\Z")


class Writer(StorageWriter):
    """Saves one state dict as the checkpoint of a step: `dcp.save(state, storage_writer=Writer(step))`.

    All ranks save the same steps, which increase. The first save of a run that has a checkpoint must come
    after a load. A tensor that is no DTensor is the same on all ranks, and one rank saves it; ranks whose
    tensors differ get an error. Values that are no tensors are saved by each rank, without pickle.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        step: int,
        *,
        level: LevelName = "local",
        metrics: Mapping[str, Any] | None = None,
        per_rank: Sequence[str] = (),
        timeout_s: float = 600.0,
    ) -> None:
        """Save the checkpoint of `step`.

        level:
            `dcp.save` returns, and the future of `dcp.async_save` is done, at this level: `local`,
            `replicated` or `durable`.
        metrics:
            Numbers of rank 0, as in `Checkpointer.save`.
        per_rank:
            Patterns of names, such as "model.*.running_mean": plain tensors of these names may differ
            between ranks, and each rank saves its own.
        timeout_s:
            Longest wait for the level, in seconds. Then the call or the future raises Unavailable.
        """
        if level not in LEVELS:
            raise ConfigError(f"{level!r} is not a level.", hint=f"Use one of {', '.join(LEVELS)}.")
        self._step, self._level, self._timeout_s = step, LEVELS[level], timeout_s
        self._metrics, self._per_rank = metrics, tuple(per_rank)
        self._wait: Callable[[Level, float], None] | None = None

    def __reduce__(self) -> Any:
        raise ConfigError(
            "ray_ckpt.dcp.Writer cannot be sent to another process.",
            hint="Use AsyncCheckpointerType.THREAD, the default: the state is copied and written by other "
            "processes already.",
        )

    # -- AsyncStager ---------------------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Capture a state dict; return an empty one, which DCP then saves."""
        self._begin(nested(*flat(state_dict)))
        return {}

    def synchronize_staging(self) -> None:
        """Do nothing: the next optimizer step waits for the capture."""

    def close(self) -> None:
        """Do nothing: the session lasts until the run ends."""

    # -- StorageWriter -------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Check that a checkpoint_id, if it is given, has the number of the step."""
        check_id(checkpoint_id, self._step)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing; DCP gives the rank only to a parameter of the name `kwargs`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, items=[], planner_data={}, storage_data=None)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Capture the planner's state unless it is staged; wait for the level."""
        if not isinstance(planner, DefaultSavePlanner) or type(planner) is not DefaultSavePlanner:
            raise ConfigError(
                f"{type(planner).__name__} may change what is saved, which ray_ckpt does not see.",
                hint="Leave out `planner`, and change the state dict itself.",
            )
        if planner._enable_plan_caching or not planner.flatten_state_dict:
            raise ConfigError(
                "DefaultSavePlanner with enable_plan_caching or without flatten_state_dict is not supported.",
                hint="Leave out `planner`: the plans are empty, so there is nothing to cache.",
            )
        if self._wait is None:
            self._begin(nested(planner.state_dict, planner.mappings))
        assert self._wait is not None
        self._wait(self._level, self._timeout_s)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the commit record in the log is the end of a save."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _NUMBER.search(os.fspath(checkpoint_id)) is not None

    def _begin(self, state: Mapping[str, Any]) -> None:
        if self._wait is not None:
            raise ConfigError("A Writer saves once.", hint="Make a Writer for each save: Writer(step).")
        self._wait = current().save(self._step, state, self._metrics, self._per_rank)


def check_id(checkpoint_id: str | os.PathLike[str] | None, step: int) -> None:
    """Raise ConfigError if a checkpoint_id does not end with the number of the step."""
    if checkpoint_id is None:
        return
    found = _NUMBER.search(os.fspath(checkpoint_id))
    if found is None or int(found[1]) != step:
        raise ConfigError(
            f"checkpoint_id={os.fspath(checkpoint_id)!r} does not end with step {step}.",
            hint="Leave checkpoint_id out: the run and the step name the checkpoint.",
        )
