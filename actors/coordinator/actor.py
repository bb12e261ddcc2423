"""The coordinator: one detached actor per service, many runs. Decisions are the RunMachine's.

It appends to a run's log in a thread of that run, so that a hanging store stops nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import ray

import ray_ckpt
from ray_ckpt import telemetry
from ray_ckpt.actors import names
from ray_ckpt.actors import ray_cluster as ray_state
from ray_ckpt.actors.agent.priority import trim_heaps
from ray_ckpt.actors.coordinator.agents import AGENT_CALL_S, CARD_S, Agents, reason
from ray_ckpt.actors.coordinator.draining_nodes import DrainingNodes
from ray_ckpt.actors.coordinator.effects import STORE_TIMEOUT_S, Effects, Work
from ray_ckpt.actors.coordinator.overview import Seen, disk_samples, goodput_samples, objections, run_view
from ray_ckpt.actors.coordinator.run import ComingParts, PastRun, Run
from ray_ckpt.actors.messages import (
    DrillSources,
    Joined,
    OpenedRun,
    OpenRun,
    PutAwayRun,
    RunSpec,
    RunStatus,
    RunView,
    ServiceView,
    SessionStart,
)
from ray_ckpt.actors.metrics import GAUGES_EVERY_S, Meters
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.catalog.uri import Origin, find_origin
from ray_ckpt.config import RunOptions, is_encrypted
from ray_ckpt.core import messages as m
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.log_requests import checkpoint_to_pin, checkpoint_to_unpin
from ray_ckpt.core.loss_scenarios import live_checkpoints
from ray_ckpt.core.ownership import RunMark, check_claim, check_marks
from ray_ckpt.core.run_machine import CLOCK_S
from ray_ckpt.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    RunConflict,
    RunSuperseded,
    ServiceError,
    StorageNotShared,
    StoragePathError,
    Unavailable,
)
from ray_ckpt.format.names import record_file
from ray_ckpt.format.records import Drilled
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.storage.log_store import (
    read_run,
)
from ray_ckpt.telemetry import Sample
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.types import (
    AttemptId,
    CheckpointInfo,
    Exposure,
    FileEntry,
    GroupPart,
    Level,
    RankRestore,
    SaveFacts,
)

log = logging.getLogger("ray_ckpt.coordinator")

TICK_S = 0.5
REPORT_FINISHED_S = 1200.0  # an alert looks back by a quarter of an hour, to see who has fallen silent
FINISHED = 2.0  # of the metric run_active
TAKE_OVER_AGAIN_S = 5.0
PARTS_WAIT_S = 300.0  # for the other parts of a group, whose processes may still be starting
OWNER_GONE_S = 10.0  # a launcher that ends is dead for Ray within seconds; one that lives longer has the run
LOOK_EVERY_S = 10.0  # between looks at the nodes' file systems, and at launchers
OWNER_DEAD_S = 30.0  # until its session has ended; a node that died with it is noticed within 14 s
INVENTORY_AGAIN_S = 1.0
CONTROL_THREADS = 2  # questions to Ray
GOODPUT_EVERY_S = 60.0  # between two looks at the whole log for it
OPEN_LOG_TRIES = 3  # races with the last words of a coordinator that died
LAST_RECORDS_S = 10.0  # for records on their way when the service is to end; the next one finds them anyway
MAX_PAST = 100  # finished runs that were put away and of which `status` still tells; they are found again
MAX_REQUESTED = 64  # agents, each time that somebody looks
ENDING_S = 120.0  # until whoever asked for the end kills me; else I go on, as Ray starts me again


class Coordinator:
    """See the module. Methods are called by agents and by the launchers of groups."""

    def __init__(self) -> None:
        self._problem: ConfigError | None = None  # of this node's environment; told to launchers
        encrypt = True
        try:
            encrypt = is_encrypted()
        except ConfigError as error:
            self._problem = error
        # Apart from each other and from the logs, so that what hangs stops none of the others.
        self._control_io = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="ray_ckpt-control")
        self._goodput_io = ThreadPoolExecutor(1, thread_name_prefix="ray_ckpt-goodput")
        self._agents = Agents(ServiceKeys.make(datetime.now(UTC), encrypt=encrypt), self._control_io)
        self._effects = Effects(self._agents, lambda node: self._spawn(self.restart_agent(node)))
        self._draining = DrainingNodes()
        self._looked_s = 0.0  # at disks and launchers
        self._runs: dict[str, Run] = {}  # by RunSpec.key
        self._past: OrderedDict[str, PastRun] = OrderedDict()  # by RunSpec.key, those put away last
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._meters = Meters()
        self._gauges_s = 0.0  # when they are to be set again (monotonic)
        self._ticker: asyncio.Task[None] | None = None
        self._found: asyncio.Task[None] | None = None
        self._began_s = time.time()
        self._users = Counter[str]()  # calls that are about to have a run, by its name
        self._is_ending = False

    async def hello(self) -> int:
        if self._problem is not None:
            raise self._problem
        self._check_goes_on()
        await self._ready()
        return names.PROTOCOL_VERSION

    # -- coming back after a crash -----------------------------------------------------------------------

    async def _ready(self) -> None:
        """Wait until this coordinator has looked for agents that an earlier one left behind."""
        if self._found is None:
            self._found = asyncio.ensure_future(self._find_agents())
        await asyncio.shield(self._found)

    async def _find_agents(self) -> None:
        runs: dict[str, OpenedRun] = {}
        for card in await self._agents.find():
            for run in card.runs:
                known = runs.get(run.spec.key)
                newest = max((r for r in (known, run) if r is not None), key=_session_key)
                epoch = max(known.epoch, run.epoch) if known is not None else run.epoch
                runs[run.spec.key] = replace(newest, epoch=epoch)
        for run in runs.values():
            self._spawn(self._take_over(run))

    async def _take_over(self, found: OpenedRun) -> None:
        """Claim the log of a run that was open, and go on with the group that is at work."""
        log.warning("%s: this coordinator takes over from one that died", found.spec.name)
        with self._in_use(found.spec.name):
            await self._go_on_with(found)

    async def _go_on_with(self, found: OpenedRun) -> None:
        while found.spec.key not in self._runs:
            try:
                await self._open(found.spec, owner=None, is_wanted=False)
            except RunSuperseded as error:
                log.error("%s", error)
                await self._end_group(found, error)
                return
            except RunConflict as error:
                log.error("%s The run is left alone.", error)
                return
            except (CheckpointError, OSError) as error:
                log.warning("%s: cannot take over yet: %s", found.spec.name, error)
                await asyncio.sleep(TAKE_OVER_AGAIN_S)
        run = self._run(found.spec.key)
        if found.plan is not None and run.run_uid == found.run_uid:
            inventories = await self._open_on_nodes(run, await self._agents.live_nodes())
            self._handle(run, m.GroupRecovered(plan=found.plan, inventories=inventories))
            for node in inventories:
                self._send(run, node, "coordinator_returned", run.run_uid, run.machine.epoch)

    async def _end_group(self, found: OpenedRun, error: CheckpointError) -> None:
        """Another service has the run: tell the group that is at work here."""
        if found.plan is None:
            return
        for node in {n.node_id for n in found.plan.nodes} & self._agents.nodes:
            with contextlib.suppress(ray.exceptions.RayError):
                order = (found.run_uid, found.plan.session_key, error, found.epoch)
                await self._agents.call(node, "end_session", *order)

    # -- launchers -----------------------------------------------------------------------------------

    async def open_run(self, spec: RunSpec, owner: str) -> str:
        """Open the run's log, start agents on all live nodes, check every path. Returns the run uid.

        RunInUse or RunSuperseded if `owner` may not have it.
        """
        self._check_goes_on()
        with self._in_use(spec.name):
            await self._ready()
            uid = await self._open(spec, owner=owner)
            run = self._run(spec.key)
            dead_owner = await self._await_dead(run, owner)
            if (objection := run.machine.objection(owner, dead_owner)) is not None:
                raise objection
            return uid

    async def _await_dead(self, run: Run, owner: str) -> str:
        """The launcher that has the run, once it is found dead; "" if nobody has it or it lives on."""
        deadline_s = time.monotonic() + OWNER_GONE_S
        while (rival := run.machine.owner) not in ("", owner):
            if not await in_thread(self._control_io, ray_state.is_alive, rival):
                return rival
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(TICK_S)
        return ""

    def _turn(self, what: str) -> asyncio.Lock:
        """Held while a run is opened, or the agent of a node looked for."""
        return self._opening.setdefault(what, asyncio.Lock())

    async def _open(self, spec: RunSpec, *, owner: str | None, is_wanted: bool = True) -> str:
        """`is_wanted`: somebody waits for it, so it is not put away at once if it has finished."""
        async with self._turn(spec.key):
            run = self._runs.get(spec.key)
            if self._ticker is None:
                self._ticker = asyncio.ensure_future(self._tick())
            if run is not None and is_wanted:
                self._handle(run, m.RunWanted())
            is_new = run is None or not run.machine.is_open or run.machine.is_closing
            is_new = is_new or (run is not None and await self._is_overtaken(run))
            if run is None or is_new:
                run = await self._open_log(spec, owner, is_wanted)
            elif run.spec.storage != spec.storage:
                await in_thread(self._effects.remote_io, _check_same_log, run, spec)
                run.remote = spec.storage.open()
            run.spec, run.machine.options = spec, spec.options
            await self._open_on_nodes(run, await self._agents.live_nodes(), checks_storage=is_new)
            return run.run_uid

    async def _is_overtaken(self, run: Run) -> bool:
        """Nobody trains, and somebody else has written to the log: a rollback, or another cluster."""
        if not run.machine.is_idle:
            return False
        name = record_file(run.machine.history.next_seq)
        try:
            found = await asyncio.wait_for(run.log_threads.run(run.store.read, name), STORE_TIMEOUT_S)
        except (OSError, TimeoutError):
            return False
        return found is not None and run.machine.is_idle

    async def open_group(self, key: str, nodes: tuple[m.GroupNode, ...], resume: Any, owner: str) -> Joined:
        """A training group begins: choose its checkpoint, log its session, tell its nodes."""
        self._check_goes_on()
        run = self._run(key)
        with self._in_use(run.spec.name):
            return await self._open_group(run, nodes, resume, owner)

    async def _open_group(self, run: Run, nodes: tuple[m.GroupNode, ...], resume: Any, owner: str) -> Joined:
        self._draining.forget_signals({n.node_id for n in nodes})
        inventories = await self._open_on_nodes(run, await self._agents.live_nodes())
        dead_owner = await self._await_dead(run, owner)
        origin = await self._find_origin(run)
        self._check_goes_on()  # no agent has answered then, and nothing would seem to be left
        plan = await self._ask(
            run,
            lambda token: m.GroupOpened(
                token=token,
                nodes=nodes,
                inventories=inventories,
                resume=resume,
                owner=owner,
                dead_owner=dead_owner,
            ),
        )
        return Joined(
            run_uid=run.run_uid,
            spec=run.spec,
            world_size=plan.world_size,
            nodes={rank: node.node_id for node in plan.nodes for rank in node.ranks},
            origin=origin if plan.resume is None else None,
        )

    async def _find_origin(self, run: Run) -> Origin | None:
        """What a run without a checkpoint begins with. ConfigError or StoragePathError if it is not there."""
        spec = run.spec
        if run.machine.history.lineage() and spec.options.resume != "never":
            return None
        return await in_thread(self._effects.remote_io, find_origin, spec.options, spec.storage)

    async def open_part(
        self,
        key: str,
        parts: tuple[GroupPart, ...],
        part: str,
        nodes: tuple[str, ...],
        resume: Any,
        owner: str,
    ) -> Joined:
        """One of several worker groups that are to be one group, with the node of each of its ranks.

        They open it together when all have come; one that comes again takes its earlier place.
        """
        run = self._run(key)
        if run.coming is None or run.coming.parts != parts or run.coming.joined.done():
            run.coming = ComingParts(parts, {}, asyncio.get_running_loop().create_future())
        coming = run.coming
        coming.nodes[part] = nodes
        if len(coming.nodes) == len(parts):
            run.coming = None
            group = group_nodes([node for p in parts for node in coming.nodes[p.name]])
            try:
                joined = await self.open_group(key, group, resume, owner)
                coming.joined.set_result(replace(joined, parts=parts))
            except Exception as error:
                coming.joined.set_exception(error)
        try:
            return await asyncio.wait_for(asyncio.shield(coming.joined), PARTS_WAIT_S)
        except TimeoutError:
            missing = ", ".join(p.name for p in parts if p.name not in coming.nodes)
            coming.nodes.pop(part, None)  # or the others would open a group with ranks that have given up
            raise Unavailable(f"Run {run.spec.name}: the parts {missing} have not come.") from None

    async def finish(self, key: str, timeout_s: float, has_failed: bool = False) -> CheckpointInfo | None:
        """The run is over, or given up: wait until its last checkpoint is durable, and return it."""
        run = await self._reach(key)
        try:
            asked = self._ask(
                run, lambda token: m.FinishRequested(token=token, ends_group=True, has_failed=has_failed)
            )
            newest: CheckpointInfo | None = await asyncio.wait_for(asked, timeout_s)
        except TimeoutError:
            raise _unfinished(run, timeout_s) from None
        return newest

    async def status(self, key: str) -> RunStatus:
        run = await self._reach(key)
        history = run.machine.history
        lineage = history.lineage()
        return RunStatus(
            run_uid=history.run_uid,
            records=tuple(
                record for record, _ in (await in_thread(self._control_io, read_run, run.store))[1]
            ),
            newest=lineage[-1] if lineage else None,
            holders=run.machine.holders,
            nodes=run.machine.plan.nodes if run.machine.plan else (),
            restores=run.machine.restores,
            agents=tuple(self._agents.cards.values()),
            exposure=await self.exposure(key),
            copies_missing=run.machine.copies_missing,
        )

    async def exposure(self, key: str) -> tuple[Exposure, ...]:
        return (await self._reach(key)).machine.exposure()

    async def overview(self) -> ServiceView:
        """All that people see of this service."""
        await self._ready()
        await self._agents.read_cards()
        return ServiceView(
            version=ray_ckpt.__version__,
            protocol=names.PROTOCOL_VERSION,
            ray_version=ray.__version__,
            coordinator_node=ray.get_runtime_context().get_node_id(),
            coordinator_host=ray.util.get_node_ip_address(),
            up_s=time.time() - self._began_s,
            is_encrypted=self._agents.keys.encrypt,
            nodes=await self._agents.live_nodes(),
            agents=tuple(card for _, card in sorted(self._agents.cards.items())),
            leaving=self._draining.views(),
            runs=(
                *await asyncio.gather(*(self._view(run) for run in list(self._runs.values()))),
                *(past.view_at(time.time()) for past in self._past.values()),
            ),
        )

    async def _view(self, run: Run) -> RunView:
        owner = run.machine.owner
        lives = not owner or await in_thread(self._control_io, ray_state.is_alive, owner)
        return self._view_of(run, owner_lives=lives, sent_bytes=await self._sent_bytes(run))

    def _view_of(self, run: Run, *, owner_lives: bool, sent_bytes: Mapping[str, int]) -> RunView:
        text, at_s = run.warning
        seen = Seen(
            disks=self._disks(run),
            warning=text,
            warned_at_s=at_s,
            owner_lives=owner_lives,
            sent_bytes=sent_bytes,
        )
        return run_view(run.spec, run.machine, seen, wall_s=time.time())

    async def _sent_bytes(self, run: Run) -> dict[str, int]:
        """Of fragments on their way to the storage path, as far as few nodes tell: of many, one is little."""
        nodes = {node for drain in run.machine.drains_underway for node in drain.nodes} & self._agents.nodes
        if len(nodes) > MAX_REQUESTED:
            return {}
        calls = (asyncio.wait_for(self._agents.call(n, "uploads", run.run_uid), CARD_S) for n in nodes)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        sent = Counter[str]()
        for answer in answers:
            sent.update(answer if isinstance(answer, dict) else {})
        return dict(sent)

    async def shut_down(self, force: bool) -> ServiceView:
        """End all agents; whoever asked kills this actor then. Returns what there was.

        ServiceError, and nothing has changed, if a group is at work or a checkpoint that is needed is nowhere
        but on the nodes' disks, unless `force`. Nothing is deleted: the next service finds what is there.
        """
        view = await self.overview()
        if (reasons := objections(view) or self._newcomers(view)) and not force:
            raise ServiceError(
                f"The service is in use: {'; '.join(reasons)}.",
                hint="End the training and wait for its drains (`ray-ckpt status`), or give --force: files "
                "stay on the nodes' disks, and the next service finds them there.",
            )
        self._is_ending = True
        self._agents.close()
        asyncio.get_running_loop().call_later(ENDING_S, os._exit, 1)
        if self._ticker is not None:
            self._ticker.cancel()
        until_s = time.monotonic() + LAST_RECORDS_S
        while any(run.machine.records_waiting for run in self._runs.values()) and time.monotonic() < until_s:
            await asyncio.sleep(TICK_S)
        self._agents.end_all()
        return view

    def _newcomers(self, view: ServiceView) -> tuple[str, ...]:
        """Who has come since the runs were looked at, or is on the way."""
        owners = {run.where: run.owner for run in view.runs}
        came = {
            r.spec.name for r in self._runs.values() if r.machine.owner not in ("", owners.get(r.spec.key))
        }
        came |= {r.spec.name for r in self._runs.values() if r.coming is not None and r.coming.nodes}
        return tuple(f"run {name} is being opened" for name in sorted(came | self._users.keys()))

    @contextlib.contextmanager
    def _in_use(self, run_name: str) -> Iterator[None]:
        """Meanwhile the service is not to be stopped."""
        self._users[run_name] += 1
        try:
            yield
        finally:
            self._users[run_name] -= 1
            self._users = +self._users

    def _check_goes_on(self) -> None:
        if self._is_ending:
            raise Unavailable("The service is being stopped.", hint="Start it again with `ray-ckpt up`.")

    async def pin(self, key: str, step: int, owner: str, expires_in_s: float | None) -> CheckpointInfo:
        """Keep the newest checkpoint of a step for `owner`; ConfigError if there is no live one.

        Returns what the log says of it then; so does `unpin`.
        """
        run = await self._reach(key)
        end_s = None if expires_in_s is None else time.time() + expires_in_s
        attempt = checkpoint_to_pin(run.machine.history, step).id.attempt
        await self._ask(
            run, lambda token: m.PinRequested(token=token, attempt=attempt, owner=owner, expires_at_s=end_s)
        )
        return run.machine.history.checkpoints[attempt]

    async def unpin(self, key: str, step: int, owner: str) -> CheckpointInfo:
        run = await self._reach(key)
        attempt = checkpoint_to_unpin(run.machine.history, step, owner).id.attempt
        await self._ask(run, lambda token: m.UnpinRequested(token=token, attempt=attempt, owner=owner))
        return run.machine.history.checkpoints[attempt]

    async def drain(self, key: str, attempt: str) -> None:
        """Bring a checkpoint to the storage path, due or not; does not wait for that."""
        await self._ask(await self._reach(key), lambda token: m.DrainRequested(token=token, attempt=attempt))

    async def drill_sources(self, key: str) -> DrillSources:
        """What a recovery drill of the run reads, and how. Unavailable if it is not open."""
        await self._ready()
        run = await self._reach(key)
        now = await in_thread(self._control_io, ray_state.nodes_now, run.spec.options.failure_domain)
        machine = run.machine
        return DrillSources(
            live=live_checkpoints(machine.history, machine.holders, machine.plan),
            endpoints=self._agents.endpoints,
            domains=now.domains,
            credentials=self._agents.keys.credentials(run.run_uid),
            storage=run.spec.storage,
            last_step=machine.last_step,
        )

    async def drilled(self, key: str, result: Drilled) -> None:
        """A drill has read a checkpoint; replied when that is in the log."""
        await self._ask(await self._reach(key), lambda token: m.DrillEnded(token=token, result=result))

    async def annotate(self, key: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the newest live checkpoint of a step; see `m.AnnotateRequested`."""
        await self._annotate(await self._reach(key), step, metrics)

    async def _annotate(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        await self._ask(run, lambda token: m.AnnotateRequested(token=token, step=step, metrics=metrics))

    # -- agents --------------------------------------------------------------------------------------

    async def node_stored(
        self,
        attempt: AttemptId,
        node_index: int,
        node_id: str,
        files: tuple[FileEntry, ...],
        replicated: tuple[str, ...],
        metrics: Mapping[str, float] | None,
        epoch: int,
        facts: SaveFacts,
    ) -> None:
        event = m.NodeStored(
            attempt=attempt,
            node_index=node_index,
            node_id=node_id,
            files=files,
            replicated=replicated,
            metrics=metrics,
            epoch=epoch,
            facts=facts,
        )
        self._handle(self._by_uid(attempt.run_uid), event)

    async def replica_ended(self, event: m.ReplicaEnded) -> None:
        self._handle(self._by_uid(event.attempt.run_uid), event)

    async def save_refused(self, attempt: AttemptId, ranks: tuple[int, ...], reason: str) -> None:
        self._handle(
            self._by_uid(attempt.run_uid), m.SaveRefused(attempt=attempt, ranks=ranks, reason=reason)
        )

    async def progress(
        self,
        run_uid: str,
        session_key: m.SessionKey,
        ranks: Mapping[int, m.RankProgress],
        captured: tuple[m.Captured, ...],
        met: int,
    ) -> tuple[Awaited, ...]:
        """Where the ranks of a node are. Returns whom the group waits for."""
        await self._ready()
        run = self._by_uid(run_uid)
        self._handle(run, m.RanksProgressed(session_key=session_key, ranks=ranks, captured=captured, met=met))
        return run.machine.awaited()

    async def ranks_restored(
        self, run_uid: str, session_key: m.SessionKey, node_id: str, ranks: tuple[int, ...]
    ) -> tuple[Awaited, ...]:
        """These ranks of a node wait for others with their restore. Returns whom the group waits for."""
        await self._ready()
        run = self._by_uid(run_uid)
        self._handle(run, m.RanksRestored(session_key=session_key, node_id=node_id, ranks=ranks))
        return run.machine.awaited()

    async def ranks_met(
        self, run_uid: str, session_key: m.SessionKey, number: int, ranks: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Ranks have come to a barrier: wait for the others. Returns who did not come, () if all have."""
        await self._ready()
        answer: m.BarrierAnswer = await self._ask(
            self._by_uid(run_uid),
            lambda token: m.BarrierReached(token=token, session_key=session_key, number=number, ranks=ranks),
        )
        return answer.missing

    async def node_restored(
        self, run_uid: str, session_key: m.SessionKey, node_id: str, ranks: tuple[RankRestore, ...]
    ) -> bool:
        """True: all ranks have their state, go. False: a new session with an older checkpoint has begun."""
        answer = await self._ask(
            self._by_uid(run_uid),
            lambda token: m.NodeRestored(token=token, session_key=session_key, node_id=node_id, ranks=ranks),
        )
        return answer is None

    async def rank_annotates(self, run_uid: str, step: int, metrics: Mapping[str, float]) -> None:
        await self._ready()
        await self._annotate(self._by_uid(run_uid), step, metrics)

    async def restart_agent(self, node: str) -> None:
        """The agent of a node is said to be gone: start a new one if that is so."""
        async with self._turn(node):
            if not await self._agents.is_alive(node):
                self._agents.forget(node)
                if node in await self._agents.live_nodes():
                    for run in list(self._runs.values()):
                        if run.machine.end_cause is None:
                            await self._open_on_fresh(run, (node,))

    async def node_preempted(self, node: str, notice: Notice) -> None:
        """A node is about to go, as its cloud or a signal says; said again as long as it is so."""
        self._draining.hear(node, notice)

    async def make_durable(self, run_uid: str) -> None:
        await self._ask(self._by_uid(run_uid), lambda token: m.FinishRequested(token=token))

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
        self._advance(run)
        for effect in run.machine.handle(event):
            self._carry_out(run, effect)
        for sample in run.machine.take_samples():
            self._meters.record(run.spec.name, sample)

    def _advance(self, run: Run) -> None:
        """Time passes before an event, so that the machine needs no clock."""
        now_s = time.monotonic()
        if now_s - run.ticked_s < CLOCK_S:
            return
        run.ticked_s = now_s
        for effect in run.machine.handle(m.Ticked(now_s=now_s, wall_s=time.time())):
            self._carry_out(run, effect)

    def _carry_out(self, run: Run, effect: m.Effect) -> None:
        epoch = run.machine.epoch
        match effect:
            case m.RequestInventory(token=token):
                self._spawn(self._inventory_again(run, token))
            case m.StartSession():
                self._spawn(self._start_session(run, effect))
            case m.Reply(token=token, value=value):
                if (future := run.waiting.get(token)) and not future.done():
                    future.set_result(value)
            case m.Fail(token=token, error=error):
                if (future := run.waiting.get(token)) and not future.done():
                    future.set_exception(error)
            case m.NotifyOutcome(attempt=attempt, level=level, error=problem, nodes=nodes, epoch=epoch):
                for node in nodes:
                    self._send(run, node, "publish", run.run_uid, attempt, level, problem, epoch)
            case m.AnnounceSaveStep(session_key=session_key, signal=signal, nodes=nodes):
                for node in nodes:
                    self._send(run, node, "announce_save_step", run.run_uid, session_key, signal, epoch)
            case m.Replicate(attempt=attempt, node_index=index, source=source, holder=holder):
                if (card := self._agents.cards.get(holder)) is not None:
                    order = (run.run_uid, attempt, index, holder, card.endpoint, epoch)
                    self._send(run, source, "replicate", *order)
            case m.DeleteLocalOrphans(node_id=node, directories=directories):
                self._send(run, node, "delete", run.run_uid, directories, epoch)
            case m.Evict(attempt=attempt, node_id=node):
                self._send(run, node, "delete", run.run_uid, (attempt.directory,), epoch)
            case m.PutAway(kept=kept):
                self._spawn(self._put_away(run, kept))
            case m.CloseRun():
                self._close(run)
            case m.Supersede(nodes=nodes, session_key=session_key, error=problem):
                for node in nodes:
                    self._send(run, node, "end_session", run.run_uid, session_key, problem, epoch)
            case m.Warn(text=text, is_expected=True):
                log.info("%s: %s", run.spec.name, text)
            case m.Warn(text=text):
                log.warning("%s: %s", run.spec.name, text)
                run.warning = (text, time.time())
            case m.StepDown(error=error, is_foreign=is_foreign):
                log.error("%s This coordinator steps down.", error)
                if self._runs.get(run.spec.key) is run:
                    del self._runs[run.spec.key]
                if run.is_fenced_in and not is_foreign:
                    # A newer coordinator of this service has the name. If it is me who has it, Ray starts me
                    # again, and I take over by the book; a zombie ends here.
                    asyncio.get_running_loop().call_later(TICK_S, os._exit, 1)
            case _:
                self._spawn(self._perform(run, effect))

    async def _perform(self, run: Run, work: Work) -> None:
        event = await self._effects.perform(run, work)
        if event is not None:
            self._handle(run, event)
        run.is_fenced_in = run.is_fenced_in or run.machine.is_open
        async with run.changed:
            run.changed.notify_all()

    async def _put_away(self, run: Run, kept: tuple[str, ...]) -> None:
        """Ask every live node that may have something of the run; its agent is started if need be."""
        order = PutAwayRun(spec=run.spec, run_uid=run.run_uid, kept=kept, epoch=run.machine.epoch)
        nodes = (run.opened | run.opening | self._agents.nodes) & {*await self._agents.live_nodes()}
        error = None
        for node, done in zip(nodes, await self._request_all(nodes, "put_away", order), strict=True):
            if isinstance(done, Fenced):
                log.info("%s: a newer coordinator has the run on node %s", run.spec.name, node[:12])
            elif done is not True and node in await self._agents.live_nodes():
                said = reason(done) if isinstance(done, Exception) else "its agent does not answer"
                error = f"node {node[:12]}: {said}"
        self._handle(run, m.PutAwayEnded(error=error))

    async def _request_all(self, nodes: Iterable[str], method: str, *args: Any) -> list[Any]:
        """The answers of the nodes' agents, or their errors."""
        calls = (self._agents.ask(node, method, *args) for node in nodes)
        return await asyncio.gather(*calls, return_exceptions=True)

    def _close(self, run: Run) -> None:
        """Give up all that there is of a run, but for what people ask for later."""
        if self._runs.get(run.spec.key) is not run:
            return  # it has been opened again
        del self._runs[run.spec.key]
        view = replace(self._view_of(run, owner_lives=True, sent_bytes={}), is_put_away=True, nodes=())
        finished_s = min(run.finished_s, time.monotonic())
        self._past[run.spec.key] = PastRun(
            spec=run.spec, view=view, put_away_s=time.time(), finished_s=finished_s
        )
        while len(self._past) > MAX_PAST:
            self._past.popitem(last=False)
        log.info("%s: the run has finished and is put away", run.spec.name)
        self._spawn(in_thread(self._control_io, trim_heaps))

    async def _inventory_again(self, run: Run, token: m.Token) -> None:
        await asyncio.sleep(INVENTORY_AGAIN_S)
        inventories: dict[str, m.Inventory] = {}
        try:
            inventories = await self._open_on_nodes(run, await self._agents.live_nodes())
        except (CheckpointError, ray.exceptions.RayError) as error:
            log.warning("%s: a node could not take inventory: %s", run.spec.name, error)
        self._handle(run, m.InventoryTaken(token=token, inventories=inventories))

    async def _start_session(self, run: Run, effect: m.StartSession) -> None:
        start = self._session_start(run, effect.plan)
        try:
            calls = [self._agents.call(n.node_id, "start_session", start) for n in effect.plan.nodes]
            await asyncio.wait_for(asyncio.gather(*calls), AGENT_CALL_S)
        except (ray.exceptions.RayError, TimeoutError, KeyError) as error:
            problem = Unavailable(f"A node did not take session {effect.plan.session}: {reason(error)}")
            for token in effect.tokens:
                self._carry_out(run, m.Fail(token=token, error=problem))
            return
        for token in effect.tokens:
            self._carry_out(run, m.Reply(token=token, value=effect.plan))

    # -- runs and nodes --------------------------------------------------------------------------------

    async def _open_log(self, spec: RunSpec, owner: str | None, is_wanted: bool) -> Run:
        """Read the run's log to its tail and put this coordinator's fence there, if it may."""
        marks = await self._survey(spec)
        for _ in range(OPEN_LOG_TRIES):
            run = Run(spec, self._agents.service)
            await run.log_threads.run(run.remote.probe_log)
            history, records = await run.log_threads.run(read_run, run.store)
            read = history.copy()
            for record, record_digest in records:
                read.apply(record, record_digest)
            check_marks(read, run_name=spec.name, marks=marks, resume=spec.options.resume)
            check_claim(read, service=self._agents.service, owner=owner)
            await run.log_threads.run(run.remote.leave_nonce, run.nonce)  # others' stays until here
            self._runs[spec.key] = run
            event = m.LogOpened(
                records=records, history=history, run_name=spec.name, fresh_uid=uuid.uuid4().hex
            )
            self._handle(run, event)
            if is_wanted:
                self._handle(run, m.RunWanted())
            async with run.changed:
                is_settled = run.changed.wait_for(partial(self._is_settled, run))
                try:
                    await asyncio.wait_for(is_settled, 2 * STORE_TIMEOUT_S)
                except TimeoutError:
                    del self._runs[spec.key]
                    break
            if run.machine.is_open:
                self._past.pop(spec.key, None)
                return run
        raise Unavailable(
            f"The log of run {spec.name} at {run.remote.where} does not take records.",
            hint="Check that the storage path is healthy and that no other cluster runs it, then try again.",
        )

    async def _survey(self, spec: RunSpec) -> tuple[RunMark, ...]:
        """What the nodes' disks remember of this run."""
        nodes = await self._agents.live_nodes()
        answers = await asyncio.gather(*(self._survey_on(node, spec) for node in nodes))
        return tuple(mark for found in answers for mark in found)

    async def _survey_on(self, node: str, spec: RunSpec) -> tuple[RunMark, ...]:
        found: tuple[RunMark, ...] | None = await self._agents.ask(node, "survey", spec)
        return found or ()

    def _is_settled(self, run: Run) -> bool:
        """The fence is in the log, or somebody else's is."""
        return run.machine.is_open or self._runs.get(run.spec.key) is not run

    async def _open_on_nodes(
        self, run: Run, nodes: tuple[str, ...], *, checks_storage: bool = False
    ) -> dict[str, m.Inventory]:
        """Start missing agents, open the run on all of them, and return what each holds.

        Raises what is wrong with a node's configuration. That a new agent does not find the storage path
        counts only when the run is opened; later the path may be away for a while, and the node is left out.
        """
        order = OpenRun(spec=run.spec, run_uid=run.run_uid, nonce=run.nonce, epoch=run.machine.history.epoch)
        answers = await asyncio.gather(
            *(self._agents.ask(node, "open_run", order) for node in nodes), return_exceptions=True
        )
        for node, answer in zip(nodes, answers, strict=True):
            is_away = isinstance(answer, StorageNotShared | StoragePathError) and not checks_storage
            if isinstance(answer, BaseException) and not is_away:
                raise answer
            if is_away:
                log.warning("node %s is left out for now: %s", node[:12], answer)
        inventories = {
            node: found
            for node, found in zip(nodes, answers, strict=True)
            if found is not None and not isinstance(found, BaseException)
        }
        run.opened, run.opening, run.is_ready = set(inventories), set(), True
        now = await in_thread(self._control_io, ray_state.nodes_now, run.spec.options.failure_domain)
        self._handle(run, self._seen(now, frozenset(inventories)))
        return inventories

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                for run in list(self._runs.values()):
                    domain = run.spec.options.failure_domain
                    nodes = await in_thread(self._control_io, ray_state.nodes_now, domain)
                    self._tick_run(run, nodes)
                live = frozenset(await self._agents.live_nodes())
                for node in self._agents.nodes - live:
                    self._agents.forget(node)
                self._draining.expire(live)
                self._end_idle_agents()
                self._set_gauges()
                if time.monotonic() - self._looked_s > LOOK_EVERY_S:
                    self._looked_s = time.monotonic()
                    self._spawn(self._check_disks())
                    self._spawn(self._check_owners())
            except Exception:
                log.exception("the coordinator's tick failed")

    def _set_gauges(self) -> None:
        now_s = time.monotonic()
        if now_s < self._gauges_s:
            return
        self._gauges_s = now_s + GAUGES_EVERY_S
        for past in self._past.values():
            self._report_finished(past.spec.name, now_s - past.finished_s)
        for run in list(self._runs.values()):
            if not run.machine.is_open:
                continue
            if run.machine.end_cause == "finished":
                run.finished_s = min(run.finished_s, now_s)
                self._report_finished(run.spec.name, now_s - run.finished_s)
                continue
            run.finished_s = math.inf
            if now_s >= run.goodput_s:
                run.goodput_s = math.inf  # until this look has ended
                self._spawn(self._update_goodput(run))
            for sample in (
                *run.machine.gauges(),
                *disk_samples(self._disks(run), run.spec.options),
                *run.goodput,
            ):
                self._meters.record(run.spec.name, sample)

    def _report_finished(self, name: str, since_s: float) -> None:
        if since_s < REPORT_FINISHED_S:
            self._meters.record(name, Sample(metric=telemetry.ACTIVE, value=FINISHED))

    async def _update_goodput(self, run: Run) -> None:
        """Beside the ticks: of a long log it takes seconds."""
        try:
            history = run.machine.history.copy()
            run.goodput = await in_thread(self._goodput_io, goodput_samples, history)
        finally:
            run.goodput_s = time.monotonic() + GOODPUT_EVERY_S

    def _tick_run(self, run: Run, nodes: ray_state.NodesNow) -> None:
        if not run.is_ready:  # its log is still being opened: time passes, nodes come later
            self._advance(run)
            return
        live = frozenset(nodes.live)
        disks, run.disks = run.disks, {}  # told once per look
        self._handle(run, replace(self._seen(nodes, live & run.opened), disks=disks))
        if (is_over := run.machine.end_cause is not None) != run.is_resting:
            run.is_resting = is_over
            for node in run.opened if is_over else ():
                self._send(run, node, "rest", run.run_uid, run.machine.end_cause == "finished")
        if is_over:
            return
        if fresh := live - run.opened - run.opening:
            run.opening |= fresh
            self._spawn(self._open_on_fresh(run, tuple(sorted(fresh))))

    def _seen(self, nodes: ray_state.NodesNow, live: frozenset[str]) -> m.NodesSeen:
        """Placement goes by all of it, so it is told as a whole each time."""
        return m.NodesSeen(
            live=live,
            draining=nodes.draining | self._draining.nodes,
            left_s=self._draining.left_s(nodes.left_s),
            domains=nodes.domains,
        )

    async def _open_on_fresh(self, run: Run, nodes: tuple[str, ...]) -> None:
        """Nodes that joined, or that got a new agent in the middle of a session."""
        order = OpenRun(spec=run.spec, run_uid=run.run_uid, nonce=run.nonce, epoch=run.machine.history.epoch)
        for node in nodes:
            try:
                inventory = await self._agents.ask(node, "open_run", order)
                if inventory is not None:
                    run.opened.add(node)
                    run.opening.discard(node)
                    self._handle(run, m.NodesJoined(inventories={node: inventory}))
                    await self._rejoin(run, node)
            except (CheckpointError, ray.exceptions.RayError) as error:  # tried again by the next group
                log.warning("node %s cannot hold checkpoints of %s: %s", node[:12], run.spec.name, error)

    async def _check_disks(self) -> None:
        runs = list(self._runs.values())
        for run in runs:
            run.seen_disks = self._disks(run)
        looks = (self._check_disk(r, node) for r in runs for node in r.opened & self._agents.nodes)
        await asyncio.gather(*looks)

    async def _check_disk(self, run: Run, node: str) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, KeyError):
            disk = self._agents.call(node, "disk", run.run_uid)
            run.disks[node] = run.seen_disks[node] = await asyncio.wait_for(disk, AGENT_CALL_S)

    async def _check_owners(self) -> None:
        """A run whose launcher died may stay as it is for hours; people are to see what happened.

        Only of one that says when its run is over, as Ray Train's controller does. A job may end well before
        its detached actors do.
        """
        for run in list(self._runs.values()):
            owner = run.machine.owner
            if not ray_state.is_controller(owner):
                continue
            if await in_thread(self._control_io, ray_state.is_alive, owner):
                run.dead = ("", math.inf)
            elif run.dead[0] != owner:
                run.dead = (owner, time.monotonic())
                plan = run.machine.plan  # its processes got a signal; their nodes may stay
                self._draining.forget_signals({node.node_id for node in plan.nodes} if plan else set())
            elif time.monotonic() - run.dead[1] >= OWNER_DEAD_S:
                self._handle(run, m.OwnerDied(owner=owner))

    def _disks(self, run: Run) -> dict[str, m.DiskSpace]:
        """The last look at those of nodes that have an agent."""
        return {node: disk for node, disk in run.seen_disks.items() if node in self._agents.nodes}

    def _end_idle_agents(self) -> None:
        needed = {node for run in self._runs.values() for node in run.machine.needed_nodes()}
        runs = [run.spec.options for run in self._runs.values()] or [RunOptions()]
        idle = self._agents.end_idle(needed, max(options.agent_idle_s for options in runs))
        for run in self._runs.values():
            run.opened.difference_update(idle)
            run.opening.update(idle)  # or the next tick would start them again; the next group may

    async def _rejoin(self, run: Run, node: str) -> None:
        """Give a new agent the session at work, and its peers the new agent's address."""
        plan = run.machine.plan
        if plan is None:
            return
        start = self._session_start(run, plan)
        for peer in {n.node_id for n in plan.nodes} - {node}:
            self._send(run, peer, "meet", run.run_uid, start.endpoints)
        if any(n.node_id == node for n in plan.nodes):
            await self._agents.call(node, "start_session", start)
            await self._agents.call(node, "coordinator_returned", run.run_uid, run.machine.epoch)

    def _session_start(self, run: Run, plan: m.SessionPlan) -> SessionStart:
        return SessionStart(
            plan=plan, spec=run.spec, endpoints=self._agents.endpoints, epoch=run.machine.epoch
        )

    # -- small helpers ---------------------------------------------------------------------------------

    async def _reach(self, key: str) -> Run:
        """The run; opened again for a while if it was put away, or is about to be."""
        run, past = self._runs.get(key), self._past.get(key)
        closing = run if run is not None and run.machine.is_closing else None
        if closing is not None or (run is None and past is not None):
            spec = (closing or past).spec  # type: ignore[union-attr]
            self._check_goes_on()
            with self._in_use(spec.name):
                await self._open(spec, owner=None)
        return self._run(key)

    def _run(self, key: str) -> Run:
        if key not in self._runs:
            raise Unavailable(f"The run {key} is not open here.", hint="Open it first; the callback does.")
        return self._runs[key]

    def _by_uid(self, run_uid: str) -> Run:
        for run in self._runs.values():
            if run.run_uid == run_uid:
                return run
        raise Unavailable(f"No run with uid {run_uid} is open here.")

    def _send(self, run: Run, node: str, method: str, *args: Any) -> None:
        """Tell an agent, and note if it did not hear; what it missed it learns at the next session."""
        if node in self._agents.nodes:
            self._spawn(self._sent(run, node, method, self._agents.call(node, method, *args)))

    async def _sent(self, run: Run, node: str, method: str, call: Awaitable[Any]) -> None:
        try:
            await call
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Fenced):
                self._handle(run, m.OrderRefused(epoch=cause.fields["epoch"]))
            log.warning("node %s did not take %s: %s", node[:12], method, reason(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work of the coordinator failed", exc_info=error)


def _check_same_log(run: Run, spec: RunSpec) -> None:
    """With other storage options, as with the ones before, the run's own log is found. RunConflict."""
    tier = spec.storage.open()
    tier.probe_log()
    history, records = read_run(tier.log)
    for record, record_digest in records:
        history.apply(record, record_digest)
    known = run.machine.history
    if (history.run_uid, history.next_seq >= known.next_seq) != (known.run_uid, True):
        raise RunConflict(
            f"With its new storage_options run {spec.name} is not at {tier.where}, where its log has been.",
            hint="Give the options with which the run was begun, or another run name.",
        )
    tier.leave_nonce(run.nonce)


def _unfinished(run: Run, timeout_s: float) -> Unavailable:
    newest = next(reversed(run.machine.history.lineage()), None)
    if run.machine.records_waiting:
        what = "its log takes no records"
        hint = "What is saved stays on its nodes; check that the storage path is healthy."
    elif run.machine.saves_underway:
        what = "its last save has not ended"
        hint = "See the coordinator's log for what it waits for; raise finish_timeout_s."
    elif newest is not None and newest.level < Level.DURABLE:
        what = "its last checkpoint is not on the storage path"
        hint = "It stays on its nodes and is drained later; raise finish_timeout_s."
    else:
        what, hint = "its end is not answered", "Nothing is lost; raise finish_timeout_s."
    return Unavailable(f"Run {run.spec.name}: {what} in {timeout_s:.0f} s.", hint=hint)


def group_nodes(nodes: Sequence[str]) -> tuple[m.GroupNode, ...]:
    """Ranks by node, where rank k runs on `nodes[k]`."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    return tuple(m.GroupNode(node_id=node, ranks=tuple(ranks)) for node, ranks in by_node.items())


def _session_key(run: OpenedRun) -> tuple[int, int]:
    return run.plan.session_key if run.plan else (0, 0)
