"""Find or start the service, open a run, and make calls to the coordinator; see `connecting`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray

from ray_ckpt.actors import names
from ray_ckpt.actors.messages import Joined, RunSpec
from ray_ckpt.arguments import whole_number
from ray_ckpt.catalog.uri import own_resume
from ray_ckpt.config import MAX_METRIC_NAME, RunOptions
from ray_ckpt.core.log_requests import check_pin
from ray_ckpt.engine.groups import PARTS_WAIT_S, group_nodes
from ray_ckpt.errors import (
    CheckpointError,
    ConfigError,
    ServiceError,
    Unavailable,
    text_of,
)
from ray_ckpt.format.names import check_run_name
from ray_ckpt.location import Location, storage_options
from ray_ckpt.types import (
    UNKNOWN_LAUNCH,
    CheckpointInfo,
    Exposure,
    GroupPart,
    LaunchTimes,
)

log = logging.getLogger("ray_ckpt")
T = TypeVar("T")

OPEN_S = 300.0  # time to start agents on all nodes of a cold cluster
CALL_S = 120.0  # longest wait for an answer from the coordinator or an agent
AGAIN_S = 1.0  # between calls to a coordinator that Ray is about to restart
OPEN_TRIES = 3  # of a group; a node may die while it begins


def coordinator() -> Any:
    """Return the service's coordinator; start one on the head node if there is none."""
    try:
        handle = ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE)
    except ValueError:
        handle = _start_coordinator()
    version = get_result(handle.hello.remote(), CALL_S)
    if version != names.PROTOCOL_VERSION:
        raise ServiceError(
            f"The running service speaks protocol {version}, this ray_ckpt {names.PROTOCOL_VERSION}.",
            hint="Stop the old service, or use the version of ray_ckpt that started it.",
        )
    return handle


def _start_coordinator() -> Any:
    """Start the coordinator, unless another process does so at this moment."""
    # Imported here, since it brings the whole service: a rank would load it before each restore.
    from ray_ckpt.actors.coordinator.actor import Coordinator

    options: dict[str, Any] = {
        "name": names.COORDINATOR,
        "namespace": names.NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "resources": {"node:__internal_head__": 0.001},
        "scheduling_strategy": "DEFAULT",
        "max_restarts": -1,
    }
    return names.actor_class(Coordinator).options(**options).remote()


def get_result(call: Any, timeout_s: float | None) -> Any:
    """Wait for a call to an actor; raise the call's CheckpointError as it is, other errors as Unavailable."""
    try:
        return ray.get(call, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, CheckpointError) else Unavailable(str(error))) from None
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise Unavailable(f"The checkpoint service did not answer: {text_of(error)}") from error


def open_run(name: str, storage_path: str, options: RunOptions, *, owner: str) -> RunSpec:
    """Open a run for a launcher: open its log, start an agent on each node, check every path.

    ConfigError if a path or an option is wrong; RunInUse or RunSuperseded if another launcher owns the run.
    """
    check_run_name(name)
    location = Location.parse(storage_path)
    storage_options(location, options.storage_options)
    resume = own_resume(options.resume, location / name, options.storage_options)
    options = replace(options, resume=resume)
    spec = RunSpec(name=name, storage_path=str(location), options=options)
    _of_restarted(lambda left_s: _coordinator_of(spec, owner), OPEN_S)
    return spec


def _coordinator_of(spec: RunSpec, owner: str) -> Any:
    """Return the coordinator, with the run open there: it may have been restarted since the last call."""
    handle = coordinator()
    get_result(handle.open_run.remote(spec, owner), OPEN_S)
    return handle


def open_group(
    spec: RunSpec, nodes: Sequence[str], *, owner: str, launch: LaunchTimes = UNKNOWN_LAUNCH
) -> Joined:
    """Begin a group whose rank k runs on `nodes[k]`: choose its checkpoint, log its session.

    If the coordinator dies meanwhile, the next one begins another group, which ends the one that no rank has
    joined yet.
    """
    group = group_nodes(nodes)

    def begin(left_s: float) -> Joined:
        handle = _coordinator_of(spec, owner)
        call = handle.open_group.remote(spec.key, group, spec.options.resume, owner, launch)
        joined: Joined = get_result(call, OPEN_S + spec.options.inventory_wait_s)
        return joined

    for _ in range(OPEN_TRIES - 1):
        try:
            return _of_restarted(begin, OPEN_S)
        except Unavailable as error:
            if _is_of_dead(error):
                raise
            log.warning("a group was not opened; trying again: %s", error)
    return _of_restarted(begin, OPEN_S)


def open_part(
    spec: RunSpec, parts: tuple[GroupPart, ...], part: str, nodes: Sequence[str], *, owner: str
) -> Joined:
    """Join a group of several parts, with the node of each rank of `part`; wait for the other parts.

    If the coordinator dies meanwhile, all parts join at the next one.
    """

    def join(left_s: float) -> Joined:
        handle = _coordinator_of(spec, owner)
        call = handle.open_part.remote(spec.key, parts, part, tuple(nodes), spec.options.resume, owner)
        joined: Joined = get_result(call, PARTS_WAIT_S + CALL_S)
        return joined

    return _of_restarted(join, PARTS_WAIT_S)


def finish_run(spec: RunSpec, *, owner: str = "", has_failed: bool = False) -> CheckpointInfo | None:
    """End or give up the run; return its last checkpoint once that checkpoint is on the storage path.

    RunSuperseded if another launcher than `owner` has the run; without `owner`, whoever has it is ended.
    """

    def finish(left_s: float) -> CheckpointInfo | None:
        finished = coordinator().finish.remote(spec.key, left_s, has_failed, owner)
        newest: CheckpointInfo | None = get_result(finished, left_s + CALL_S)
        return newest

    return _of_restarted(finish, spec.options.finish_timeout_s)


def salvage(spec: RunSpec) -> None:
    """Let the survivors of a group that has lost ranks save the last step, and wait until they have."""
    _of_restarted(lambda left_s: get_result(coordinator().salvage.remote(spec.key), left_s), CALL_S)


def _of_restarted(call: Callable[[float], T], limit_s: float) -> T:
    """Return `call(left_s)`; if the coordinator dies meanwhile, call the restarted one while time is left.

    A service that was stopped has no coordinator any more, and is not started again.
    """
    end_s = time.monotonic() + limit_s
    while True:
        try:
            return call(max(0.0, end_s - time.monotonic()))
        except Unavailable as error:
            if not _is_of_dead(error) or time.monotonic() + AGAIN_S > end_s:
                raise
            log.warning("the coordinator went away; asking the next one again")
            time.sleep(AGAIN_S)
            try:
                ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE)
            except ValueError:
                raise error from None


def _is_of_dead(error: Unavailable) -> bool:
    """Return whether a call has failed because the coordinator was dead, or died meanwhile."""
    return isinstance(error.__cause__, ray.exceptions.RayActorError)


def exposure(*, run: str, storage_path: str) -> tuple[Exposure, ...]:
    """Return, for each node of the run's group, the loss if that node died now.

    Unavailable if the run is not open.
    """
    key = RunSpec(name=run, storage_path=str(Location.parse(storage_path)), options=RunOptions()).key
    found: tuple[Exposure, ...] = get_result(coordinator().exposure.remote(key), CALL_S)
    return found


def pin(*, run: str, storage_path: str, step: int, owner: str, expires_in_s: float | None = None) -> None:
    """Keep a checkpoint, despite the retention policy, until the pin expires or is removed.

    ConfigError if the run has no live checkpoint of that step, or an argument is wrong; Unavailable if the
    service has not opened the run.
    """
    check_pin(owner, expires_in_s)
    _call_for_checkpoint("pin", run, storage_path, step, owner, expires_in_s)


def unpin(*, run: str, storage_path: str, step: int, owner: str) -> None:
    """Remove a pin."""
    _call_for_checkpoint("unpin", run, storage_path, step, owner)


def annotate(*, run: str, storage_path: str, step: int, metrics: Mapping[str, float]) -> None:
    """Add metrics, such as validation results, to the checkpoint of a step.

    A later value of a metric replaces the earlier one. The checkpoint is the newest live one of that step on
    the lineage; if its save is in progress, this call waits for the save. ConfigError if there is no such
    checkpoint, if a value is not a number, or if there are more than MAX_METRICS names. Unavailable if the
    save fails, or if the service has not opened the run.
    """
    _call_for_checkpoint("annotate", run, storage_path, step, _numbers(metrics))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics for the log, with long names cut as in a save."""
    try:
        return {str(name)[:MAX_METRIC_NAME]: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"A metric is not a number: {error}.", hint="Use float(...) of it.") from error


def _call_for_checkpoint(method: str, run: str, storage_path: str, step: int, *args: Any) -> None:
    step = whole_number(step, "The step", hint="Give the step of a checkpoint, such as 3000.")
    key = RunSpec(name=run, storage_path=str(Location.parse(storage_path)), options=RunOptions()).key
    get_result(getattr(coordinator(), method).remote(key, step, *args), CALL_S)
