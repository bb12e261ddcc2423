"""A storage reader of DCP that restores through ray_ckpt, with an empty plan in DCP's collectives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from ray_ckpt.capture.load import SavedState
from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.catalog.uri import CheckpointUri
from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.dcp.metadata import metadata_of
from ray_ckpt.interop.dcp.names import as_bytes, nested
from ray_ckpt.interop.dcp.session import Session, current
from ray_ckpt.interop.dcp.state import items_of
from ray_ckpt.interop.dcp.writer import check_id


class Reader(StorageReader):
    """Loads into a state dict: `dcp.load(state, storage_reader=Reader())`.

    Without `checkpoint`, in a run: the newest intact checkpoint of the run, the same on all ranks, from
    memory, local disk, peers or the storage path. Random state is restored too. Ask `step` first: in a new
    run it is 0, and there is nothing to load.

    With `checkpoint`, anywhere: the durable checkpoint that a URI names, such as
    "s3://bucket/runs/gpt@3000", or without a step the newest one of that run.

    Sizes and dtypes must be those of the checkpoint; a dtype is never converted.
    """

    def __init__(
        self, checkpoint: str | None = None, *, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self._source: Session | OpenedCheckpoint = (
            current() if checkpoint is None else _opened(checkpoint, storage_options)
        )
        self._saved: SavedState | None = None
        self._plan = LoadPlan([])

    @property
    def step(self) -> int:
        """The step of the checkpoint that a load restores; 0 in a new run."""
        return self._source.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Check that a checkpoint_id, if it is given, has the number of the step."""
        check_id(checkpoint_id, self.step)

    def read_metadata(self) -> Metadata:
        """Return the names, sizes and dtypes in the checkpoint; ConfigError in a new run."""
        self._saved = self._source.saved()
        if self._saved is None:
            raise ConfigError(
                "The run has no checkpoint to load.", hint="Load only `if reader.step:`, as in the guide."
            )
        return metadata_of(self._saved)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan, and return an empty one for the collectives."""
        self._plan = plan
        return replace(plan, items=[], planner_data=None, storage_data=None)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the tensors of the planner's state dict in place, and hand over all other values."""
        if not isinstance(planner, DefaultLoadPlanner) or not _keeps_data(planner):
            raise ConfigError(
                f"{type(planner).__name__} may change what is loaded, which ray_ckpt does not see.",
                hint="Use a DefaultLoadPlanner that flattens the state dict, and change the loaded state.",
            )
        assert self._saved is not None, "DCP reads the metadata first"
        values = {item.dest_index.fqn: item for item in self._plan.items if item.type is LoadItemType.BYTE_IO}
        names = dict.fromkeys(item.dest_index.fqn for item in self._plan.items)
        state = nested({name: planner.state_dict[name] for name in names}, planner.mappings)
        items = items_of(
            state,
            saved=self._saved.trees.keys(),
            put=lambda name, value: planner.load_bytes(values[name], as_bytes(value)),
        )
        if isinstance(self._source, Session):
            self._source.load(items)
        else:
            self._source.load(into=items)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _opened(checkpoint: str, storage_options: Mapping[str, str] | None) -> OpenedCheckpoint:
    uri = CheckpointUri.parse(checkpoint)
    opened = uri.open(storage_options)
    return opened if uri.step is not None else opened.run.agreed()


def _keeps_data(planner: DefaultLoadPlanner) -> bool:
    """Return whether a planner takes tensors and values as they are."""
    kind, stock = type(planner), DefaultLoadPlanner
    methods = ("load_bytes", "resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
    return planner.flatten_state_dict and all(getattr(kind, m) is getattr(stock, m) for m in methods)
