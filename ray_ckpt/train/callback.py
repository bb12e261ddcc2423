"""CheckpointCallback: one object for the driver, the controller and the workers of Ray Train.

Hooks of the controller run on its event loop, and an exception in one ends the run (Ray 2.60,
`train/v2/_internal/callback_manager.py`). So a hook raises only errors that the user must fix before time is
lost (a wrong path, a full disk, no intact checkpoint). An error that a retry may fix, or an unexpected error,
is passed to the workers, where it counts as a worker failure and is retried. All other errors are logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray.train

from ray_ckpt.actors.client import finish_run, open_group, open_run, salvage
from ray_ckpt.actors.messages import Joined, RunSpec
from ray_ckpt.actors.rank_link import RayLink
from ray_ckpt.actors.ray_cluster import owner_here
from ray_ckpt.config import RunOptions, from_json, is_uri
from ray_ckpt.errors import CheckpointError, ConfigError, Fenced, RunConflict, ServiceError, named_text
from ray_ckpt.location import Location
from ray_ckpt.preemption.sigterm import TermSignal
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.train.ray_compat import (
    ControllerCallback,
    WorkerCallback,
    WorkerGroupCallback,
    has_failed,
    has_groups,
    has_validation,
)
from ray_ckpt.train.report import PointerReporter
from ray_ckpt.trainer.connection import Connection, close_all, set_connection
from ray_ckpt.trainer.probe import ProbeSpec, ResumeProbe
from ray_ckpt.types import UNKNOWN_LAUNCH

log = logging.getLogger("ray_ckpt")

OPTIONS_ENV = "RAY_CKPT_OPTIONS"  # a JSON object: default options of every CheckpointCallback in the driver


class CheckpointCallback(ControllerCallback, WorkerGroupCallback, WorkerCallback):  # type: ignore[misc]
    """Protects a Ray Train run: `RunConfig(callbacks=[CheckpointCallback(replicas=1, keep_last=3)])`.

    The options are the fields of `ray_ckpt.config.RunOptions`. Checkpoints go below the storage path of the
    RunConfig, or below `storage_path` if it is given. Raises ConfigError for an unknown or invalid option,
    and for a storage path that is relative, empty or holds a secret.

    To use the callback without a change to the driver, set these environment variables of the driver:

        RAY_TRAIN_CALLBACKS=ray_ckpt.train.CheckpointCallback
        RAY_CKPT_OPTIONS='{"replicas": 1, "keep_last": 3}'

    RAY_CKPT_OPTIONS sets defaults for every callback, `storage_path` included. If a trainer has several
    callbacks, only one is active: a callback in the RunConfig takes precedence over the callback from the
    environment, then a callback with arguments over one without, then a later callback over an earlier one.

    `probe` is for `check_resume`.
    """

    def __init__(
        self, *, storage_path: str | None = None, probe: ProbeSpec | None = None, **options: Any
    ) -> None:
        defaults = _defaults()
        default_path = defaults.pop("storage_path", None)
        try:
            self._options = RunOptions.parse(**{**defaults, **options})
        except ConfigError as error:
            if error.fields.get("option") in defaults.keys() - options.keys():
                raise ConfigError(
                    f"{OPTIONS_ENV}: {error.message}", hint=error.hint, **error.fields
                ) from None
            raise
        self._storage_path = default_path if storage_path is None else storage_path
        _check_path(self._storage_path, option="storage_path" if storage_path is not None else OPTIONS_ENV)
        self._probe = probe
        self._uid = uuid.uuid4().hex  # identifies this callback, because Ray copies each callback
        self._has_arguments = storage_path is not None or probe is not None or bool(options)
        # Set by hooks of the controller, and copied to the workers:
        self._is_passive = False
        self._run: tuple[str, str] | None = None  # name, storage path
        self._owner = ""
        self._spec: RunSpec | None = None
        self._joined: Joined | None = None
        self._has_had_group = False
        self._has_failed = False  # the controller has given the run up
        self._launch = UNKNOWN_LAUNCH  # of the next group
        self._problem: CheckpointError | None = None
        self._term_signal: TermSignal | None = None  # set in a worker; not copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_term_signal": None}

    # -- in the controller -----------------------------------------------------------------------------

    def after_controller_start(self, train_run_context: Any) -> None:
        """Open the run: log, agents, paths. An exception ends the run before any worker starts."""
        with _guarded("the run could not be opened", self._note_problem, may_end_run=True):
            config = train_run_context.run_config
            self._is_passive = self._gives_way(config.callbacks or ())
            if self._is_passive:
                log.warning("a CheckpointCallback of this trainer does nothing: another one comes before it")
                return
            if has_groups(train_run_context):
                raise _groups_refused()
            if self._storage_path is None and config.storage_filesystem is not None:
                raise ConfigError(
                    "RunConfig(storage_filesystem=...) may hold credentials, so the nodes do not get it.",
                    hint="Give the URL as storage_path instead, in RunConfig or in CheckpointCallback.",
                )
            path = config.storage_path if self._storage_path is None else os.fspath(self._storage_path)
            self._run = (config.name, path)
            self._open()

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Note when the first failure was noticed, in Unix time, and let survivors save the last step."""
        if self._launch.noticed_at_s is None:
            self._launch = replace(self._launch, noticed_at_s=time.time())
            self._save_last()

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Let the ranks of a group that trains, and gets another size, save the last step."""
        if self._launch.noticed_at_s is None:  # else it has failed
            self._save_last()

    def _save_last(self) -> None:
        """Let the ranks of the group that are there save the last step, with the option `salvage`."""
        if self._spec is not None and self._joined is not None and self._spec.options.salvage:
            with _guarded("the last step is not saved"):
                salvage(self._spec)

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Note when the processes of the last opened group had ended, in Unix time."""
        if self._launch.previous_ended_at_s is None:
            self._launch = replace(self._launch, previous_ended_at_s=time.time())

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Open the group: choose its checkpoint and log its session; copies of this object go to the workers.

        A node that has just died, or a slow store, counts as a worker failure and is retried. If another
        launcher has taken the run over, the run ends, because two launchers that retry would take the run
        from each other forever. This method blocks the controller, which calls it; each wait has a limit.
        """
        self._joined = None
        self._launch = replace(self._launch, started_at_s=time.time())
        if self._run is None:  # another callback is active, or `_problem` has the reason
            return {}
        self._problem = None
        with _guarded("the group cannot start", self._note_problem, may_end_run=True):
            spec = self._open()
            ranks = sorted(workers, key=lambda w: w.distributed_context.world_rank)
            if any(w.distributed_context.world_size != len(ranks) for w in ranks):
                raise _groups_refused()
            nodes = [w.metadata.node_id for w in ranks]
            self._joined = open_group(spec, nodes, owner=self._owner, launch=self._launch)
            self._launch, self._has_had_group = UNKNOWN_LAUNCH, True
            # `resume` chooses among this run's own checkpoints for the first group only; later groups
            # continue from the newest.
            if not is_uri(spec.options.resume):
                self._spec = replace(spec, options=replace(spec.options, resume="auto"))
        return {}

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        self._has_failed = self._has_failed or has_failed(current_state)

    async def before_controller_shutdown(self) -> None:
        """Copy the last checkpoint to the storage path, because the run has ended or failed.

        Also if its last restart has failed, unless another launcher has the run.
        """
        has_lost_run = isinstance(self._problem, RunConflict) and not isinstance(self._problem, Fenced)
        if self._spec is None or not self._has_had_group or has_lost_run:
            return
        has_failed = self._has_failed or self._joined is None
        with _guarded("the last checkpoint is not on the storage path"):
            newest = await asyncio.to_thread(finish_run, self._spec, owner=self._owner, has_failed=has_failed)
            if newest is not None:
                log.info("step %d is on the storage path", newest.step)

    def _open(self) -> RunSpec:
        """Open the run unless it is open already."""
        assert self._run is not None
        if self._spec is None:
            name, path = self._run
            self._owner = owner_here(by_job=False)
            self._spec = open_run(name, path, self._options, owner=self._owner)
        return self._spec

    def _gives_way(self, of_run_config: Sequence[object]) -> bool:
        """Return True if another callback of this trainer is active."""
        ours = [each for each in of_run_config if isinstance(each, CheckpointCallback)]
        if not ours:  # this callback comes from the environment
            return False
        chosen = max(reversed(ours), key=lambda each: each._has_arguments)
        return chosen._uid != self._uid

    def _note_problem(self, problem: CheckpointError) -> None:
        self._problem = problem

    # -- in the workers --------------------------------------------------------------------------------

    def after_init_train_context(self) -> None:
        """Set the connection of this worker's Checkpointers, or the reason why there is none."""
        if self._is_passive:
            return
        with _guarded("this worker has no checkpoints", lambda e: set_connection(Connection(problem=e))):
            set_connection(Connection(problem=self._problem))
            if self._joined is not None:
                self._connect(self._joined)

    def _connect(self, joined: Joined) -> None:
        rank = ray.train.get_context().get_world_rank()
        link = RayLink(joined, rank)
        set_connection(
            Connection(
                link=link,
                reporter=PointerReporter(joined.spec, validates=has_validation()),
                probe=None if self._probe is None else ResumeProbe(self._probe, rank),
            )
        )
        with _guarded("SIGTERM is not watched"):
            self._term_signal = TermSignal.install(link.notify_preemption)

    def before_worker_shutdown(self) -> None:
        if self._is_passive:
            return
        with _guarded("checkpoints were not closed"):
            close_all()
        with _guarded("SIGTERM stays watched"):
            if self._term_signal is not None:
                self._term_signal.uninstall()
        set_connection(Connection())


def _groups_refused() -> ConfigError:
    return ConfigError(
        "Ray Train replaces single workers of a group here, as it does for torchft.",
        hint="Leave CheckpointCallback out; use ray_ckpt.torchft.ReplicaCheckpointer in the training loop.",
    )


@contextmanager
def _guarded(
    what: str, keep: Callable[[CheckpointError], None] | None = None, *, may_end_run: bool = False
) -> Iterator[None]:
    """Pass errors to `keep` and log them as `what`; with `may_end_run` raise those that the user must fix."""
    try:
        yield
    except Exception as error:
        is_known = isinstance(error, CheckpointError)
        if (
            may_end_run
            and isinstance(error, CheckpointError)
            and not isinstance(error, ServiceError | Fenced)
        ):
            if keep is not None:
                keep(error)
            raise
        log.warning("%s: %s", what, error, exc_info=not is_known)
        if keep is not None:
            hint = "This is not supposed to happen; the log has a traceback."
            unexpected = ServiceError(f"{what}: {named_text(error)}", hint=hint)
            keep(error if isinstance(error, CheckpointError) else unexpected)


def _defaults() -> dict[str, Any]:
    """Read options from the environment. Raises ConfigError unless the value is a JSON object."""
    text = os.environ.get(OPTIONS_ENV)
    if not text:
        return {}
    hint = f"""Set it to an object such as {OPTIONS_ENV}='{{"replicas": 1, "keep_last": 3}}', or unset it."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{OPTIONS_ENV} is not JSON: {error}", hint=hint, option=OPTIONS_ENV) from None
    if not isinstance(options, dict):
        raise ConfigError(f"{OPTIONS_ENV} is not an object of options.", hint=hint, option=OPTIONS_ENV)
    return from_json(options)


def _check_path(path: Any, *, option: str) -> None:
    """Raise ConfigError unless `path` is None or a storage path; `option` names where it was given."""
    if path is None:
        return
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(
            f"{option} has {path!r} as the storage path.",
            hint="Give a folder that all nodes share, or a URL; without it, the RunConfig's is used.",
            option=option,
        )
    try:
        Location.parse(path)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error.message}", hint=error.hint, option=option) from None


def check_storage_path(
    storage_path: str, name: str, storage_options: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError unless this machine can write the run's folder and keep a commit log in it.

    The callback checks the same on every node, but Ray Train writes to the path before it calls any callback,
    and ends with a traceback if the path is not writable. Call this function first to get an error with a
    hint.
    """
    RemoteRef(
        storage_path=storage_path, run_name=name, options=tuple(sorted((storage_options or {}).items()))
    ).open().probe_log()
