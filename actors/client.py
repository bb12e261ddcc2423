"""Find or start the service, open a run, and link a rank to the agent of its node; see `connecting`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray

from ray_ckpt.actors import names
from ray_ckpt.actors.messages import GroupCard, Joined, RunSpec
from ray_ckpt.catalog.uri import own_resume
from ray_ckpt.config import MAX_METRIC_NAME, RunOptions
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import RankProgress, Salvage, SessionKey
from ray_ckpt.engine.groups import group_nodes
from ray_ckpt.errors import CheckpointError, ConfigError, RunConflict, ServiceError, Unavailable, text_of
from ray_ckpt.format.names import check_run_name
from ray_ckpt.location import Location, storage_options
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.trainer.link import ArenaGrant, Identity, SealedShard, StepState
from ray_ckpt.types import (
    UNKNOWN_LAUNCH,
    AttemptId,
    CheckpointInfo,
    Exposure,
    LaunchTimes,
    Level,
    RankRestore,
)

log = logging.getLogger("ray_ckpt")

OPEN_S = 300.0  # time to start agents on all nodes of a cold cluster
CALL_S = 120.0  # longest wait for an answer from the coordinator or an agent
AWAITED_S = 5.0  # longest wait for the list of missing ranks, which only an error message uses
MAX_KEEPING = 16  # such calls; a slow agent then misses states, and a salvage is not possible
OPEN_TRIES = 3  # a coordinator that dies is restarted by Ray within seconds


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
    options = replace(options, resume=own_resume(options.resume, location / name))
    spec = RunSpec(name=name, storage_path=str(location), options=options)
    get_result(coordinator().open_run.remote(spec, owner), OPEN_S)
    return spec


def open_group(
    spec: RunSpec, nodes: Sequence[str], *, owner: str, launch: LaunchTimes = UNKNOWN_LAUNCH
) -> Joined:
    """Begin a group whose rank k runs on `nodes[k]`: choose its checkpoint, log its session."""
    group = group_nodes(nodes)
    for attempt in range(OPEN_TRIES):
        try:
            handle = coordinator()
            # The coordinator may have been restarted since the run was opened, so open the run again.
            get_result(handle.open_run.remote(spec, owner), OPEN_S)
            call = handle.open_group.remote(spec.key, group, spec.options.resume, owner, launch)
            joined: Joined = get_result(call, OPEN_S + spec.options.inventory_wait_s)
            break
        except Unavailable:
            if attempt == OPEN_TRIES - 1:
                raise
            log.warning("the coordinator went away while a group was opened; trying again")
    return joined


def finish_run(spec: RunSpec, *, has_failed: bool = False) -> CheckpointInfo | None:
    """End or give up the run; return its last checkpoint once that checkpoint is on the storage path."""
    timeout_s = spec.options.finish_timeout_s
    finished = coordinator().finish.remote(spec.key, timeout_s, has_failed)
    newest: CheckpointInfo | None = get_result(finished, timeout_s + CALL_S)
    return newest


def salvage(spec: RunSpec) -> None:
    """Let the survivors of a group that has lost ranks save the last step, and wait until they have."""
    get_result(coordinator().salvage.remote(spec.key), CALL_S)


def exposure(*, run: str, storage_path: str) -> tuple[Exposure, ...]:
    """Return, for each node of the run's group, the loss if that node died now.

    Unavailable if the run is not open.
    """
    key = RunSpec(name=run, storage_path=str(Location.parse(storage_path)), options=RunOptions()).key
    found: tuple[Exposure, ...] = get_result(coordinator().exposure.remote(key), CALL_S)
    return found


def pin(*, run: str, storage_path: str, step: int, owner: str, expires_in_s: float | None = None) -> None:
    """Keep a checkpoint, despite the retention policy, until the pin expires or is removed.

    ConfigError if the run has no live checkpoint of that step; Unavailable if the service has not opened
    the run.
    """
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
    key = RunSpec(name=run, storage_path=str(Location.parse(storage_path)), options=RunOptions()).key
    get_result(getattr(coordinator(), method).remote(key, step, *args), CALL_S)


def _future_of(call: Any) -> Future[Any]:
    """Return the future of a call to an actor, with errors as `get_result` raises them."""
    answer: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
            return
        cause = getattr(error, "cause", None)
        answer.set_exception(cause if isinstance(cause, CheckpointError) else Unavailable(str(error)))

    call.future().add_done_callback(pass_on)
    return answer


def _can_open(path: str) -> bool:
    """Return whether this process may open its agent's memory, whose path is below /proc."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return path.startswith("/proc/")


class RayLink:
    """A rank's link to the agent of its node, by Ray actor calls."""

    def __init__(self, joined: Joined, rank: int, part: str = "") -> None:
        node = joined.nodes[rank]
        self.options = joined.spec.options
        self.identity = Identity(
            run_uid=joined.run_uid,
            run_name=joined.spec.name,
            storage_path=joined.spec.storage_path,
            rank=rank,
            world_size=joined.world_size,
            node_id=node,
            parts=joined.parts,
            part=part,
            node_ranks=tuple(sorted(k for k, other in joined.nodes.items() if other == node)),
        )
        self._uid, self._rank, self._node = joined.run_uid, rank, node
        self._origin = joined.origin
        self._handle: Any = None
        self._is_named: bool | None = None  # of the agent of this handle; None: not known
        self._answer: Any = None  # answer to an earlier progress report, not read yet
        self._group: GroupCard | None = None  # the group at work, at rank 0
        self._recovery: Future[None] = Future()  # the answer to the last request for a new agent
        self._keeping: list[Any] = []  # calls with states of steps that the agent has perhaps not answered
        self._missing = ""  # what is missing on the storage path, by the last answer
        self._connected_at_s = time.time()

    @property
    def _agent(self) -> Any:
        """The handle of the node's agent, found by name; Unavailable while there is no agent.

        RunConflict if no agent will come, since the run belongs to another service or run.
        """
        if self._handle is None:
            if self._recovery.done() and isinstance(error := self._recovery.exception(), RunConflict):
                raise error
            try:
                self._handle = ray.get_actor(names.agent_name(self._node), namespace=names.NAMESPACE)
            except (ValueError, ray.exceptions.RayError):
                raise Unavailable(f"Node {self._node[:12]} has no agent at the moment.") from None
        return self._handle

    def ticket(self) -> RestoreTicket:
        ticket: RestoreTicket = get_result(self._agent.get_ticket.remote(self._uid, self._named()), OPEN_S)
        return ticket

    def whole_ticket(self, session_key: SessionKey) -> RestoreTicket:
        call = self._agent.get_whole_ticket.remote(self._uid, session_key, self._named())
        ticket: RestoreTicket = get_result(call, OPEN_S)
        return ticket

    def origin(self, session_key: SessionKey) -> RestoreTicket | None:
        return None if self._origin is None else self._origin.ticket(session_key)

    def restored(self, session_key: SessionKey, report: RankRestore) -> Future[RestoreTicket | None]:
        agent, named = self._agent, self._named()
        report = replace(report, connected_at_s=self._connected_at_s)
        answer = _future_of(agent.report_restored.remote(self._uid, session_key, report, named))
        if self._rank == 0:
            answer.add_done_callback(lambda restored: self._keep_group(agent, restored))
        return answer

    def _keep_group(self, agent: Any, restored: Future[RestoreTicket | None]) -> None:
        """Request the plan of the group that begins to train, for a coordinator that knows nothing of it.

        A rank keeps the plan since ranks live as long as the group, unlike agents. One rank is enough.
        """
        if restored.exception() is None and restored.result() is None:
            _future_of(agent.describe_group.remote(self._uid)).add_done_callback(self._group_came)

    def _group_came(self, group: Future[GroupCard]) -> None:
        if group.exception() is None and group.result().run.plan is not None:
            self._group = group.result()

    def awaited(self) -> tuple[Awaited, ...]:
        found: tuple[Awaited, ...] = get_result(self._agent.awaited_ranks.remote(self._uid), AWAITED_S)
        return found

    def reach_barrier(self, session_key: SessionKey, number: int) -> Future[tuple[int, ...]]:
        return _future_of(self._agent.await_barrier.remote(self._uid, session_key, self._rank, number))

    def fetch(
        self, session_key: SessionKey, wants: Mapping[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]
    ) -> SharedRows:
        shared: SharedRows = get_result(
            self._agent.fetch.remote(self._uid, session_key, self._rank, wants, taken), CALL_S
        )
        return shared

    def reserve(self, size_bytes: int) -> None:
        get_result(self._agent.reserve.remote(self._uid, self._rank, size_bytes, self._named()), CALL_S)

    def open_arena(self, session_key: SessionKey, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        call = self._agent.open_arena.remote(self._uid, session_key, self._rank, size_bytes, named)
        grant: ArenaGrant = get_result(call, CALL_S)
        return grant

    def _named(self) -> bool:
        """Return whether the agent has to share memory by files in /dev/shm."""
        if self._is_named is None:
            self._is_named = not _can_open(self.signal_page())
        return self._is_named

    def signal_page(self, *, named: bool = False) -> str:
        path: str = get_result(self._agent.signal_page.remote(self._uid, named), CALL_S)
        return path

    def seal(self, shard: SealedShard) -> Future[None]:
        return self._agent.seal.remote(self._uid, shard).future()  # type: ignore[no-any-return]

    def outcome(self, attempt: AttemptId, level: Level) -> Future[SaveOutcome]:
        return self._agent.await_outcome.remote(self._uid, attempt, level).future()  # type: ignore[no-any-return]

    def ended(self, session_key: SessionKey) -> Future[CheckpointError]:
        return self._agent.await_session_end.remote(self._uid, session_key).future()  # type: ignore[no-any-return]

    def skip(self, attempt: AttemptId, reason: str) -> None:
        with contextlib.suppress(Unavailable):
            self._agent.skip.remote(self._uid, attempt, self._rank, reason)

    def progress(self, session_key: SessionKey, progress: RankProgress) -> None:
        """Send progress; log what an earlier answer reports as missing on the storage path."""
        with contextlib.suppress(Unavailable, ray.exceptions.RayError):
            if self._answer is None:
                self._answer = self._agent.report_progress.remote(
                    self._uid, session_key, self._rank, progress
                )
                return
            self._agent.report_progress.remote(self._uid, session_key, self._rank, progress)
            if ray.wait([self._answer], timeout=0)[0]:
                answer, self._answer = self._answer, None
                missing = ray.get(answer)
                if missing and missing != self._missing:
                    log.warning("%s: %s", self.identity.run_name, missing)
                self._missing = missing

    def notify_preemption(self, notice: Notice) -> None:
        with contextlib.suppress(CheckpointError):
            self._agent.notify_preemption.remote(notice)

    def keep(self, session_key: SessionKey, state: StepState) -> None:
        with contextlib.suppress(Unavailable, ray.exceptions.RayError):
            if len(self._keeping) >= MAX_KEEPING:
                self._keeping = list(ray.wait(self._keeping, num_returns=MAX_KEEPING, timeout=0)[1])
            if len(self._keeping) < MAX_KEEPING:
                self._keeping.append(self._agent.keep_state.remote(self._uid, session_key, state))

    def asked(self, session_key: SessionKey) -> Future[bool]:
        return _future_of(self._agent.await_question.remote(self._uid, session_key))

    def offer(self, session_key: SessionKey, steps: tuple[int, ...]) -> Future[Salvage]:
        return _future_of(self._agent.offer_survivor.remote(self._uid, session_key, self._rank, steps))

    def annotate(self, step: int, metrics: Mapping[str, float], attempt: AttemptId | None) -> Future[None]:
        return self._agent.annotate.remote(self._uid, step, metrics, attempt).future()  # type: ignore[no-any-return]

    def recover(self) -> None:
        self._handle = self._is_named = None
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            handle = ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE)
            self._recovery = _future_of(handle.restart_agent.remote(self._node, self._group))

    def make_durable(self) -> Future[None]:
        return self._agent.make_durable.remote(self._uid).future()  # type: ignore[no-any-return]
