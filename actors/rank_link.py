"""A rank's link to the agent of its node, by Ray actor calls."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray

from ray_ckpt.actors import names
from ray_ckpt.actors.client import CALL_S, OPEN_S, get_result
from ray_ckpt.actors.messages import GroupCard, Joined
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import RankProgress, Salvage, SessionKey
from ray_ckpt.errors import AgentLost, CheckpointError, RunConflict, Unavailable
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.trainer.link import ArenaGrant, Identity, SealedShard, StepState
from ray_ckpt.trainer.waiting import Recovering
from ray_ckpt.types import AttemptId, Level, RankRestore

log = logging.getLogger("ray_ckpt")

AWAITED_S = 5.0  # longest wait for the list of missing ranks, which only an error message uses
RECOVERY_S = 15.0  # for an answer to a request for a new agent; then the request is repeated
MAX_KEEPING = 16  # such calls; a slow agent then misses states, and a salvage is not possible


def _future_of(call: Any) -> Future[Any]:
    """Return the future of a call to an actor, with errors as `get_result` raises them."""
    answer: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
            return
        cause = getattr(error, "cause", None)
        unavailable = AgentLost if isinstance(error, ray.exceptions.RayActorError) else Unavailable
        answer.set_exception(cause if isinstance(cause, CheckpointError) else unavailable(str(error)))

    call.future().add_done_callback(pass_on)
    return answer


def _result(call: Any, timeout_s: float) -> Any:
    """Wait for a call to the agent, as `get_result`; raise AgentLost if the agent has died."""
    try:
        return get_result(call, timeout_s)
    except Unavailable as error:
        if isinstance(error.__cause__, ray.exceptions.RayActorError):
            raise AgentLost(str(error)) from error
        raise


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
        self._session_key = joined.session_key
        self._origin = joined.origin
        self._handle: Any = None
        self._is_named: bool | None = None  # of the agent of this handle; None: not known
        self._answer: Any = None  # answer to an earlier progress report, not read yet
        self._group: GroupCard | None = None  # the group at work, at rank 0
        self._recovery: Future[None] = Future()  # the answer to the last request for a new agent
        self._recovery_s = -RECOVERY_S  # monotonic time of that request
        self._keeping: list[Any] = []  # calls with states of steps that the agent has perhaps not answered
        self._missing = ""  # what is missing on the storage path, by the last answer
        self._connected_at_s = time.time()

    @property
    def _agent(self) -> Any:
        """The handle of the node's agent, found by name; AgentLost while there is no agent.

        RunConflict if no agent will come, since the run belongs to another service or run; Unavailable after
        `ray.shutdown()`, since any call would start a cluster.
        """
        if not ray.is_initialized():
            raise Unavailable(
                "This process has left its Ray cluster.",
                hint="Close the Checkpointer before ray.shutdown(), and build another one after ray.init().",
            )
        if self._handle is None:
            if self._recovery.done() and isinstance(error := self._recovery.exception(), RunConflict):
                raise error
            try:
                self._handle = ray.get_actor(names.agent_name(self._node), namespace=names.NAMESPACE)
            except (ValueError, ray.exceptions.RayError):
                raise AgentLost(f"Node {self._node[:12]} has no agent at the moment.") from None
        return self._handle

    def _ask(self, call: Callable[[Any], Any], limit_s: float) -> Any:
        """Return the answer of the agent to a call for a restore; if the agent dies, that of the next one."""
        recovering = Recovering(self)
        while True:
            try:
                return _result(call(self._agent), limit_s)
            except AgentLost as error:
                recovering.wait(error)

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        ticket: RestoreTicket = self._ask(
            lambda agent: agent.get_ticket.remote(self._uid, self._session_key, self._named(), early), OPEN_S
        )
        return ticket

    def whole_ticket(self, session_key: SessionKey) -> RestoreTicket:
        ticket: RestoreTicket = self._ask(
            lambda agent: agent.get_whole_ticket.remote(self._uid, session_key, self._named()), OPEN_S
        )
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
        found: tuple[Awaited, ...] = _result(self._agent.awaited_ranks.remote(self._uid), AWAITED_S)
        return found

    def reach_barrier(self, session_key: SessionKey, number: int) -> Future[tuple[int, ...]]:
        return _future_of(self._agent.await_barrier.remote(self._uid, session_key, self._rank, number))

    def fetch(
        self, session_key: SessionKey, wants: Mapping[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]
    ) -> SharedRows:
        shared: SharedRows = _result(
            self._agent.fetch.remote(self._uid, session_key, self._rank, wants, taken), CALL_S
        )
        return shared

    def reserve(self, size_bytes: int) -> None:
        key, rank = self._session_key, self._rank
        self._ask(lambda agent: agent.reserve.remote(self._uid, key, rank, size_bytes, self._named()), CALL_S)

    def open_arena(self, session_key: SessionKey, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        call = self._agent.open_arena.remote(self._uid, session_key, self._rank, size_bytes, named)
        grant: ArenaGrant = _result(call, CALL_S)
        return grant

    def _named(self) -> bool:
        """Return whether the agent has to share memory by files in /dev/shm."""
        if self._is_named is None:
            self._is_named = not _can_open(self.signal_page())
        return self._is_named

    def signal_page(self, *, named: bool = False) -> str:
        path: str = _result(self._agent.signal_page.remote(self._uid, named), CALL_S)
        return path

    def seal(self, shard: SealedShard) -> Future[bool]:
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
            self._agent.notify_preemption.remote(self._uid, self._session_key, notice)

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
        now_s = time.monotonic()
        is_asked = not self._recovery.done() and now_s - self._recovery_s < RECOVERY_S
        if is_asked or not ray.is_initialized():
            return
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            handle = ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE)
            self._recovery = _future_of(handle.restart_agent.remote(self._node, self._group))
            self._recovery_s = now_s

    def make_durable(self, attempt: AttemptId, timeout_s: float) -> Future[None]:
        return self._agent.make_durable.remote(self._uid, attempt, timeout_s).future()  # type: ignore[no-any-return]
