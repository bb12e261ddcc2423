"""CheckpointCallback: one object for the driver, the controller and the workers of Ray Train.

Hooks of the controller run on its event loop, and an exception in one ends the run. So errors that must
stop a run before time is lost (a wrong path, a full disk, nothing intact to restore) are raised, and all
others are logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray.train

from ray_ckpt.actors.ray_state import owner_here
from ray_ckpt.actors.service import RayLink, finish_run, open_group, open_run
from ray_ckpt.actors.wire import Joined, RunSpec
from ray_ckpt.client import close_all
from ray_ckpt.config import RunOptions
from ray_ckpt.connection import Connection, set_connection
from ray_ckpt.errors import CheckpointError, ConfigError, Fenced, ServiceError
from ray_ckpt.storage.remote import RemoteRef
from ray_ckpt.train.ray_compat import ControllerCallback, WorkerCallback, WorkerGroupCallback
from ray_ckpt.train.report import PointerReporter

log = logging.getLogger("ray_ckpt")


class CheckpointCallback(ControllerCallback, WorkerGroupCallback, WorkerCallback):  # type: ignore[misc]
    """Protects a Ray Train run: `RunConfig(callbacks=[CheckpointCallback(replicas=1, keep_last=3)])`.

    Options are those of `ray_ckpt.config.RunOptions`. ConfigError on an unknown or impossible one.
    Checkpoints go below the storage path of the RunConfig, or below `storage_path` if that is given.
    """

    def __init__(self, *, storage_path: str | None = None, **options: Any) -> None:
        self._options = RunOptions.parse(**options)
        self._storage_path = storage_path
        self._spec: RunSpec | None = None
        self._owner = ""
        self._joined: Joined | None = None
        self._problem: CheckpointError | None = None

    # -- in the controller -----------------------------------------------------------------------------

    def after_controller_start(self, train_run_context: Any) -> None:
        """Open the run: log, agents, paths. Raised errors end the run before any worker starts."""
        config = train_run_context.run_config
        self._owner = owner_here(by_job=False)
        path = self._storage_path or config.storage_path
        if self._storage_path is None and config.storage_filesystem is not None:
            raise ConfigError(
                "RunConfig(storage_filesystem=...) may hold credentials, so it is not handed to the nodes.",
                hint="Give the URL as storage_path instead, in RunConfig or in CheckpointCallback.",
            )
        self._spec = open_run(config.name, path, self._options, owner=self._owner)

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """The group exists: choose its checkpoint, log its session; this object carries it to workers.

        What a new try may mend (a node died just now, the store is slow) goes to the workers, where it
        counts as their failure and is retried; other errors end the run here, also that it belongs to another
        launcher by now: two of them that both retried would take it from each other forever.
        """
        assert self._spec is not None
        ranks = sorted(workers, key=lambda w: w.distributed_context.world_rank)
        nodes = [w.metadata.node_id for w in ranks]
        self._joined, self._problem = None, None
        try:
            self._joined = open_group(self._spec, nodes, owner=self._owner)
        except (ServiceError, Fenced) as error:
            log.warning("the group cannot start: %s", error)
            self._problem = error
        else:
            # What `resume` asks for holds for the first group; after it the run goes on from its own newest.
            self._spec = replace(self._spec, options=replace(self._spec.options, resume="auto"))
        return {}

    async def before_controller_shutdown(self) -> None:
        """The run is over: its last checkpoint goes to the storage path."""
        if self._spec is None or self._joined is None:
            return
        try:
            newest = await asyncio.to_thread(finish_run, self._spec)
        except CheckpointError as error:
            log.warning("the last checkpoint is not on the storage path: %s", error)
        else:
            if newest is not None:
                log.info("step %d is on the storage path", newest.step)

    # -- in the workers --------------------------------------------------------------------------------

    def after_init_train_context(self) -> None:
        if self._joined is None:
            set_connection(Connection(problem=self._problem))
            return
        try:
            link = RayLink(self._joined, ray.train.get_context().get_world_rank())
            set_connection(Connection(link=link, reporter=PointerReporter()))
        except CheckpointError as error:
            set_connection(Connection(problem=error))

    def before_worker_shutdown(self) -> None:
        close_all()
        set_connection(Connection())


def check_storage_path(
    storage_path: str, name: str, storage_options: Mapping[str, str] | None = None
) -> None:
    """ConfigError unless this machine can write the run's folder and keep a commit log in it.

    The callback checks that too, on every node; but Ray Train touches the path before any callback, and ends
    with a trace of its own if it cannot be written. Call this first for an error that says what to do.
    """
    RemoteRef(
        storage_path=storage_path, run_name=name, options=tuple(sorted((storage_options or {}).items()))
    ).open().probe_log()
