"""The coordinator: one detached actor per service, many runs. Decisions are the RunMachine's.

It appends to a run's log in a thread of that run, so that a hanging store stops nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ckpt.actors import names
from ray_ckpt.actors.node_agent import NodeAgent
from ray_ckpt.actors.wire import AgentCard, Joined, OpenRun, RunSpec, RunStatus, SessionStart
from ray_ckpt.core import messages as m
from ray_ckpt.core.coordinator import RunMachine
from ray_ckpt.errors import CheckpointError, CorruptionError, Unavailable
from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.manifest import CheckpointDescription, decode_fragment, encode_checkpoint
from ray_ckpt.format.names import CHECKPOINT_JSON, fragment_file, record_file
from ray_ckpt.format.records import encode_record
from ray_ckpt.storage.log_store import LogStore, read_log
from ray_ckpt.storage.remote import RemoteTier
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, RankRestore

log = logging.getLogger("ray_ckpt.coordinator")

TICK_S = 0.5
STORE_TIMEOUT_S = 30.0  # a create that takes longer is answered "unknown"
AGENT_START_S = 120.0  # a cold node imports torch first
AGENT_CALL_S = 60.0
INVENTORY_AGAIN_S = 1.0


class Run:
    """One run: its machine, its store, and those who wait for an answer."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.remote = RemoteTier(spec.storage_path, spec.name)
        self.store: LogStore = self.remote.log
        self.machine = RunMachine(options=spec.options, writer=uuid.uuid4().hex)
        self.nonce = uuid.uuid4().hex
        self.waiting: dict[m.Token, asyncio.Future[Any]] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"ray_ckpt-log-{spec.name[:32]}")
        self.opened: set[str] = set()  # nodes whose agent knows this run
        self.changed = asyncio.Condition()

    @property
    def run_uid(self) -> str:
        return self.machine.history.run_uid


class Coordinator:
    """See the module. Methods are called by agents and by the launchers of groups."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(32)
        self._runs: dict[str, Run] = {}  # by RunSpec.key
        self._opening: dict[str, asyncio.Lock] = {}
        self._agents: dict[str, Any] = {}
        self._cards: dict[str, AgentCard] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticker: asyncio.Task[None] | None = None

    async def hello(self) -> int:
        return names.PROTOCOL_VERSION

    # -- launchers -----------------------------------------------------------------------------------

    async def open_run(self, spec: RunSpec) -> str:
        """Open the run's log, start agents on all live nodes, check every path. Returns the run uid."""
        async with self._opening.setdefault(spec.key, asyncio.Lock()):
            run = self._runs.get(spec.key)
            if run is None or not run.machine.is_open:
                run = await self._open_log(spec)
            run.spec, run.machine.options = spec, spec.options
            if self._ticker is None:
                self._ticker = asyncio.ensure_future(self._tick())
            await self._open_on_nodes(run, await _live_nodes())
            return run.run_uid

    async def open_group(self, key: str, nodes: tuple[m.GroupNode, ...], resume: Any, service: str) -> Joined:
        """A training group begins: choose its checkpoint, log its session, tell its nodes."""
        run = self._run(key)
        inventories = await self._open_on_nodes(run, await _live_nodes())
        plan = await self._ask(
            run,
            lambda token: m.GroupOpened(
                token=token, nodes=nodes, inventories=inventories, resume=resume, service=service
            ),
        )
        return Joined(
            run_uid=run.run_uid,
            spec=run.spec,
            world_size=plan.world_size,
            nodes={rank: node.node_id for node in plan.nodes for rank in node.ranks},
        )

    async def finish(self, key: str, timeout_s: float) -> CheckpointInfo | None:
        """The run is over: wait until its last checkpoint is durable, and return it."""
        run = self._run(key)
        try:
            asked = self._ask(run, lambda token: m.FinishAsked(token=token))
            newest: CheckpointInfo | None = await asyncio.wait_for(asked, timeout_s)
        except TimeoutError:
            raise Unavailable(
                f"Run {run.spec.name}: its last checkpoint is not on the storage path in {timeout_s:.0f} s.",
                hint="It stays on its nodes and is drained later; raise finish_timeout_s.",
            ) from None
        return newest

    async def status(self, key: str) -> RunStatus:
        run = self._run(key)
        history = run.machine.history
        lineage = history.lineage()
        return RunStatus(
            run_uid=history.run_uid,
            records=tuple(record for record, _ in await self._in_log_thread(run, read_log, run.store)),
            newest=lineage[-1] if lineage else None,
            holders=run.machine.holders,
            nodes=run.machine.plan.nodes if run.machine.plan else (),
            restores=run.machine.restores,
            agents=tuple(self._cards.values()),
        )

    # -- agents --------------------------------------------------------------------------------------

    async def node_stored(
        self,
        attempt: AttemptId,
        node_index: int,
        node_id: str,
        files: tuple[FileEntry, ...],
        replicated: tuple[str, ...],
        metrics: Mapping[str, float] | None,
    ) -> None:
        event = m.NodeStored(
            attempt=attempt,
            node_index=node_index,
            node_id=node_id,
            files=files,
            replicated=replicated,
            metrics=metrics,
        )
        self._handle(self._by_uid(attempt.run_uid), event)

    async def replica_ended(
        self, attempt: AttemptId, node_index: int, holder: str, error: str | None
    ) -> None:
        event = m.ReplicaEnded(attempt=attempt, node_index=node_index, holder=holder, error=error)
        self._handle(self._by_uid(attempt.run_uid), event)

    async def save_refused(self, attempt: AttemptId, ranks: tuple[int, ...], reason: str) -> None:
        self._handle(
            self._by_uid(attempt.run_uid), m.SaveRefused(attempt=attempt, ranks=ranks, reason=reason)
        )

    async def progress(self, run_uid: str, session: int, ranks: Mapping[int, m.RankProgress]) -> None:
        self._handle(self._by_uid(run_uid), m.RanksProgressed(session=session, ranks=ranks))

    async def node_restored(
        self, run_uid: str, session: int, node_id: str, ranks: tuple[RankRestore, ...]
    ) -> bool:
        """True: all ranks have their state, go. False: a new session with an older checkpoint has begun."""
        answer = await self._ask(
            self._by_uid(run_uid),
            lambda token: m.NodeRestored(token=token, session=session, node_id=node_id, ranks=ranks),
        )
        return answer is None

    async def revive(self, node: str) -> None:
        """A rank says that the agent of its node is gone: start a new one if that is so."""
        async with self._opening.setdefault(node, asyncio.Lock()):
            try:
                await asyncio.wait_for(self._agents[node].card.remote(), AGENT_CALL_S)
            except (ray.exceptions.RayError, TimeoutError, KeyError):
                self._forget(node)
                if node in await _live_nodes():
                    for run in list(self._runs.values()):
                        await self._open_on_fresh(run, (node,))

    async def make_durable(self, run_uid: str) -> None:
        await self._ask(self._by_uid(run_uid), lambda token: m.FinishAsked(token=token))

    # -- events in, effects out ------------------------------------------------------------------------

    async def _ask(self, run: Run, event: Any) -> Any:
        token = uuid.uuid4().hex
        run.waiting[token] = asyncio.get_running_loop().create_future()
        try:
            self._handle(run, event(token))
            return await run.waiting[token]
        finally:
            del run.waiting[token]

    def _handle(self, run: Run, event: m.Event) -> None:
        now = m.Ticked(now_s=time.monotonic(), wall_s=time.time())
        for effect in (*run.machine.handle(now), *run.machine.handle(event)):
            self._carry_out(run, effect)

    def _carry_out(self, run: Run, effect: m.Effect) -> None:
        match effect:
            case m.Append():
                self._spawn(self._append(run, effect))
            case m.AskInventory(group=group):
                self._spawn(self._inventory_again(run, group))
            case m.StartSession():
                self._spawn(self._start_session(run, effect))
            case m.Reply(token=token, value=value):
                if (future := run.waiting.get(token)) and not future.done():
                    future.set_result(value)
            case m.Fail(token=token, error=error):
                if (future := run.waiting.get(token)) and not future.done():
                    future.set_exception(error)
            case m.Publish(attempt=attempt, level=level, error=problem, nodes=nodes):
                for node in nodes:
                    self._send(node, "publish", run.run_uid, attempt, level, problem)
            case m.Replicate(attempt=attempt, node_index=index, source=source, holder=holder):
                if holder in self._cards:
                    self._send(
                        source, "replicate", run.run_uid, attempt, index, holder, self._cards[holder].endpoint
                    )
            case m.Drain():
                self._spawn(self._drain(run, effect))
            case m.WriteDescription(checkpoint=checkpoint):
                self._spawn(self._describe(run, checkpoint))
            case m.Delete():
                self._spawn(self._delete(run, effect))
            case m.DeleteStrays(node_id=node, directories=directories):
                self._send(node, "delete", run.run_uid, directories)
            case m.Warn(text=text):
                log.warning("%s: %s", run.spec.name, text)
            case m.StepDown(error=error):
                log.error("%s: %s This coordinator steps down.", run.spec.name, error)
                self._runs.pop(run.spec.key, None)

    async def _append(self, run: Run, effect: m.Append) -> None:
        record = effect.record
        create = self._in_log_thread(run, run.store.create, record_file(record.seq), encode_record(record))
        try:
            outcome = (await asyncio.wait_for(create, STORE_TIMEOUT_S)).value
        except (TimeoutError, OSError):
            outcome = "unknown"
        self._handle(run, m.Appended(seq=record.seq, outcome=outcome))
        async with run.changed:
            run.changed.notify_all()

    async def _inventory_again(self, run: Run, group: m.GroupOpened) -> None:
        await asyncio.sleep(INVENTORY_AGAIN_S)
        inventories = await self._open_on_nodes(run, await _live_nodes())
        self._handle(
            run,
            m.GroupOpened(
                token=group.token,
                nodes=group.nodes,
                inventories=inventories,
                resume=group.resume,
                service=group.service,
            ),
        )

    async def _start_session(self, run: Run, effect: m.StartSession) -> None:
        start = self._session_start(run, effect.plan)
        calls = [self._agents[n.node_id].start_session.remote(start) for n in effect.plan.nodes]
        try:
            await asyncio.wait_for(asyncio.gather(*calls), AGENT_CALL_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            for token in effect.tokens:
                problem = Unavailable(f"A node did not take session {effect.plan.session}: {error}")
                self._carry_out(run, m.Fail(token=token, error=problem))
            return
        for token in effect.tokens:
            self._carry_out(run, m.Reply(token=token, value=effect.plan))

    async def _drain(self, run: Run, effect: m.Drain) -> None:
        error = None
        try:
            agent = self._agents[effect.node_id]
            await agent.drain.remote(run.run_uid, effect.attempt, effect.node_index)
        except (ray.exceptions.RayError, KeyError) as failure:
            error = _reason(failure)
        self._handle(
            run,
            m.DrainEnded(
                attempt=effect.attempt, node_index=effect.node_index, node_id=effect.node_id, error=error
            ),
        )

    async def _describe(self, run: Run, checkpoint: CheckpointInfo) -> None:
        error = None
        try:
            await asyncio.to_thread(_write_description, run.remote, checkpoint)
        except (OSError, CheckpointError) as failure:
            error = str(failure)
        self._handle(run, m.DescriptionWritten(attempt=checkpoint.id, error=error))

    async def _delete(self, run: Run, effect: m.Delete) -> None:
        error = None
        try:
            if effect.place == m.REMOTE:
                await asyncio.to_thread(run.remote.delete, effect.directory)
            elif effect.place in self._agents:
                await self._agents[effect.place].delete.remote(run.run_uid, (effect.directory,))
        except (OSError, ray.exceptions.RayError) as failure:
            error = _reason(failure)
        self._handle(run, m.DeleteEnded(attempt=effect.attempt, place=effect.place, error=error))

    # -- runs and nodes --------------------------------------------------------------------------------

    async def _open_log(self, spec: RunSpec) -> Run:
        run = Run(spec)
        await self._in_log_thread(run, run.remote.probe, run.nonce)
        records = await self._in_log_thread(run, read_log, run.store)
        self._runs[spec.key] = run
        self._handle(run, m.LogOpened(records=records, run_name=spec.name, fresh_uid=uuid.uuid4().hex))
        async with run.changed:
            opened = run.changed.wait_for(lambda: run.machine.is_open or self._runs.get(spec.key) is not run)
            try:
                await asyncio.wait_for(opened, 2 * STORE_TIMEOUT_S)
            except TimeoutError:
                raise Unavailable(
                    f"The log of run {spec.name} at {run.remote.root} does not take records.",
                    hint="Check that the storage path is healthy, then start again.",
                ) from None
        return self._run(spec.key)

    async def _open_on_nodes(self, run: Run, nodes: tuple[str, ...]) -> dict[str, m.Inventory]:
        """Start missing agents, open the run on all of them, and return what each holds."""
        order = OpenRun(spec=run.spec, run_uid=run.run_uid, nonce=run.nonce)
        answers = await asyncio.gather(*(self._open_on(node, order) for node in nodes))
        inventories = {node: found for node, found in zip(nodes, answers, strict=True) if found is not None}
        run.opened = set(inventories)
        self._handle(run, m.NodesSeen(live=frozenset(inventories)))
        return inventories

    async def _open_on(self, node: str, order: OpenRun) -> m.Inventory | None:
        """None if the node is dying; errors of its configuration are raised."""
        try:
            agent = self._agent(node)
            if node not in self._cards:
                self._cards[node] = await asyncio.wait_for(agent.card.remote(), AGENT_START_S)
            inventory: m.Inventory = await asyncio.wait_for(agent.open_run.remote(order), AGENT_START_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, CheckpointError) else error from None
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.warning("node %s: its agent does not answer: %s", node[:12], error)
            self._forget(node)
            return None
        return inventory

    def _agent(self, node: str) -> Any:
        if node not in self._agents:
            self._agents[node] = (
                ray.remote(NodeAgent)
                .options(
                    name=names.agent_name(node),
                    namespace=names.NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    max_restarts=0,  # a restarted agent would have to learn its runs again: see open_run
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote(node, self._token)
            )
        return self._agents[node]

    def _forget(self, node: str) -> None:
        self._agents.pop(node, None)
        self._cards.pop(node, None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                live = frozenset(await _live_nodes())
                for node in set(self._agents) - live:
                    self._forget(node)
                for run in [run for run in self._runs.values() if run.opened]:
                    self._handle(run, m.NodesSeen(live=live & run.opened))
                    if fresh := live - run.opened:
                        run.opened |= fresh
                        self._spawn(self._open_on_fresh(run, tuple(sorted(fresh))))
            except Exception:
                log.exception("the coordinator's tick failed")

    async def _open_on_fresh(self, run: Run, nodes: tuple[str, ...]) -> None:
        """Nodes that joined, or that got a new agent in the middle of a session."""
        order = OpenRun(spec=run.spec, run_uid=run.run_uid, nonce=run.nonce)
        for node in nodes:
            try:
                if await self._open_on(node, order) is not None:
                    await self._rejoin(run, node)
            except (CheckpointError, ray.exceptions.RayError) as error:
                log.warning("node %s cannot hold checkpoints of %s: %s", node[:12], run.spec.name, error)

    async def _rejoin(self, run: Run, node: str) -> None:
        plan = run.machine.plan
        if plan is not None and any(n.node_id == node for n in plan.nodes):
            await self._agents[node].start_session.remote(self._session_start(run, plan))

    def _session_start(self, run: Run, plan: m.SessionPlan) -> SessionStart:
        endpoints = {node: card.endpoint for node, card in self._cards.items()}
        return SessionStart(plan=plan, spec=run.spec, endpoints=endpoints)

    # -- small helpers ---------------------------------------------------------------------------------

    def _run(self, key: str) -> Run:
        if key not in self._runs:
            raise Unavailable(f"The run {key} is not open here.", hint="Open it first; the callback does.")
        return self._runs[key]

    def _by_uid(self, run_uid: str) -> Run:
        for run in self._runs.values():
            if run.run_uid == run_uid:
                return run
        raise Unavailable(f"No run with uid {run_uid} is open here.")

    def _send(self, node: str, method: str, *args: Any) -> None:
        """Tell an agent, and note if it did not hear; what it missed it learns at the next session."""
        if node in self._agents:
            self._spawn(self._sent(node, method, getattr(self._agents[node], method).remote(*args)))

    async def _sent(self, node: str, method: str, call: Awaitable[Any]) -> None:
        try:
            await call
        except ray.exceptions.RayError as error:
            log.warning("node %s did not take %s: %s", node[:12], method, _reason(error))

    async def _in_log_thread(self, run: Run, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(run.thread, partial(work, *args))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work of the coordinator failed", exc_info=error)


def _write_description(remote: RemoteTier, checkpoint: CheckpointInfo) -> None:
    """Check the fragments on the storage path against the log's root digest and write checkpoint.json."""
    files: list[FileEntry] = []
    for index in range(checkpoint.num_nodes):
        name = fragment_file(index, checkpoint.num_nodes)
        data = remote.path(checkpoint.directory, name).read_bytes()
        files += [
            *decode_fragment(data).files,
            FileEntry(name=name, size_bytes=len(data), digest=digest(data)),
        ]
    if root_digest(files) != checkpoint.root_digest:
        raise CorruptionError(f"{checkpoint.directory} on the storage path is not what was committed.")
    description = CheckpointDescription(
        attempt=checkpoint.id,
        world_size=checkpoint.world_size,
        num_nodes=checkpoint.num_nodes,
        metrics=checkpoint.metrics,
        files=tuple(sorted(files, key=lambda f: f.name)),
        root_digest=checkpoint.root_digest,
    )
    remote.put(checkpoint.directory, CHECKPOINT_JSON, [encode_checkpoint(description)])


def _reason(error: Exception) -> str:
    return str(getattr(error, "cause", None) or error).splitlines()[0]


async def _live_nodes() -> tuple[str, ...]:
    nodes = await asyncio.to_thread(ray.nodes)
    return tuple(sorted(node["NodeID"] for node in nodes if node["Alive"]))
