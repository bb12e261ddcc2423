"""The coordinator: one detached actor per service, many runs. Decisions are the RunMachine's.

It appends to a run's log in a thread of that run, so that a hanging store stops nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_ckpt
from ray_ckpt.actors import names, ray_state
from ray_ckpt.actors.meters import GAUGES_EVERY_S, Meters
from ray_ckpt.actors.node_agent import NodeAgent
from ray_ckpt.actors.overview import Seen, disk_samples, goodput_samples, objections, run_view
from ray_ckpt.actors.remote_work import delete_all, list_remote, write_description
from ray_ckpt.actors.wire import (
    AgentCard,
    DrillSources,
    Joined,
    LeavingView,
    OpenedRun,
    OpenRun,
    RunSpec,
    RunStatus,
    RunView,
    ServiceCard,
    ServiceView,
    SessionStart,
)
from ray_ckpt.config import RunOptions, is_encrypted
from ray_ckpt.core import messages as m
from ray_ckpt.core.claim import RunMark, check_claim, check_marks
from ray_ckpt.core.coordinator import RunMachine
from ray_ckpt.core.drill import live_checkpoints
from ray_ckpt.core.requests import checkpoint_to_pin
from ray_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    Fenced,
    RunConflict,
    RunSuperseded,
    ServiceError,
    StorageNotShared,
    StoragePathError,
    Unavailable,
)
from ray_ckpt.format.names import record_file
from ray_ckpt.format.records import encode_record
from ray_ckpt.notices import Notice
from ray_ckpt.origin import Origin, find_origin
from ray_ckpt.storage.log_store import (
    LogStore,
    Outcome,
    create_record,
    read_run,
    trim_log,
    write_snapshot,
)
from ray_ckpt.telemetry import Sample
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.types import AttemptId, CheckpointInfo, Exposure, FileEntry, Part, RankRestore, SaveFacts

log = logging.getLogger("ray_ckpt.coordinator")

TICK_S = 0.5
TAKE_OVER_AGAIN_S = 5.0
STORE_TIMEOUT_S = 30.0  # a create that takes longer is answered "unknown"
AGENT_START_S = 120.0  # a cold node imports torch first
AGENT_CALL_S = 60.0
PARTS_WAIT_S = 300.0  # for the other parts of a group, whose processes may still be starting
OWNER_GONE_S = 10.0  # a launcher that ends is dead for Ray within seconds; one that lives longer has the run
NOTICE_HOLDS_S = 60.0  # after its deadline, or the last time that it was told
MAX_NOTICE_S = 600.0  # that a deadline counts without being said again; clouds give 2 to 5 minutes
DISKS_EVERY_S = 10.0  # between looks at the nodes' file systems
DRAIN_SLACK_S = 900.0  # for a drain, besides what its bytes take: one part at a time on a poor link
LEAST_DRAIN_BYTES_PER_S = 1 << 20  # of a node; whoever is slower is taken for stuck
LOG_THREADS = 4  # per run: calls of a hung store under way, before further ones wait for those
INVENTORY_AGAIN_S = 1.0
REMOTE_THREADS = 4  # deletes and descriptions on storage paths, over all runs
CONTROL_THREADS = 2  # questions to Ray
GOODPUT_EVERY_S = 60.0  # between two looks at the whole log for it
OPEN_LOG_TRIES = 3  # races with the last words of a coordinator that died
LAST_RECORDS_S = 10.0  # for records on their way when the service is to end; the next one finds them anyway
CARD_S = 5.0  # for what agents tell people
MAX_ASKED = 64  # agents, each time that somebody looks
ENDING_S = 120.0  # until whoever asked for the end kills me; else I go on, as Ray starts me again


@dataclass(slots=True)
class ComingParts:
    """Parts of a group that wait for the others."""

    parts: tuple[Part, ...]
    nodes: dict[str, tuple[str, ...]]  # part -> the node of each of its ranks
    joined: asyncio.Future[Joined]


class Run:
    """One run: its machine, its store, and those who wait for an answer."""

    def __init__(self, spec: RunSpec, service: str) -> None:
        self.spec = spec
        self.remote = spec.storage.open()
        self.machine = RunMachine(options=spec.options, writer=uuid.uuid4().hex, service=service)
        self.nonce = uuid.uuid4().hex
        self.waiting: dict[m.Token, asyncio.Future[Any]] = {}
        self.threads = ThreadPoolExecutor(LOG_THREADS, thread_name_prefix=f"ray_ckpt-log-{spec.name[:32]}")
        self.opened: set[str] = set()  # nodes whose agent knows this run
        self.opening: set[str] = set()  # nodes that were asked, or could not
        self.is_fenced_in = False  # its fence has been in the log
        self.is_ready = False  # nodes have been asked to open it
        self.is_over = False  # its launcher has ended it; nobody needs agents for it until the next group
        self.disks: dict[str, m.DiskSpace] = {}
        self.seen_disks: dict[str, m.DiskSpace] = {}  # the last look at each node, for people
        self.warning: tuple[str, float] = ("", 0.0)  # the last one of the machine's, and its Unix time
        self.goodput: tuple[Sample, ...] = ()  # by the log
        self.goodput_s = 0.0  # when that is to be looked at again (monotonic)
        self.changed = asyncio.Condition()
        self.coming: ComingParts | None = None

    @property
    def store(self) -> LogStore:
        """Opened by the probe, in a thread: making a client may read files and ask servers."""
        return self.remote.log

    @property
    def run_uid(self) -> str:
        return self.machine.history.run_uid


class Coordinator:
    """See the module. Methods are called by agents and by the launchers of groups."""

    def __init__(self) -> None:
        self._problem: ConfigError | None = None  # of this node's environment; told to launchers
        encrypt = True
        try:
            encrypt = is_encrypted()
        except ConfigError as error:
            self._problem = error
        self._keys = ServiceKeys.make(datetime.now(UTC), encrypt=encrypt)
        self._service = uuid.uuid4().hex  # of this cluster's service; agents keep it over my restarts
        self._needed_s: dict[str, float] = {}  # node -> when it was last needed (monotonic)
        self._looked_s = 0.0  # at the disks
        self._runs: dict[str, Run] = {}  # by RunSpec.key
        self._opening: dict[str, asyncio.Lock] = {}
        self._agents: dict[str, Any] = {}
        # Nodes about to go, by whose word: the Unix time if it is known, and until when that counts unless it
        # is said again.
        self._leaving: dict[tuple[str, str], tuple[float | None, float]] = {}
        self._cards: dict[str, AgentCard] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # Apart from each other and from the logs, so that a hanging store stops none of the others.
        self._remote_io = ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="ray_ckpt-remote")
        self._control_io = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="ray_ckpt-control")
        self._meters = Meters()
        self._gauges_s = 0.0  # when they are to be set again (monotonic)
        self._ticker: asyncio.Task[None] | None = None
        self._found: asyncio.Task[None] | None = None
        self._goodput_io = ThreadPoolExecutor(1, thread_name_prefix="ray_ckpt-goodput")
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
        actors = await self._in_thread(
            self._control_io, partial(ray.util.list_named_actors, all_namespaces=True)
        )
        prefix = names.AGENT_PREFIX
        nodes = [a["name"].removeprefix(prefix) for a in actors if a["name"].startswith(prefix)]
        live = set(nodes) & set(await self._live_nodes())
        cards = await asyncio.gather(*(self._find_agent(node) for node in sorted(live)))
        runs: dict[str, OpenedRun] = {}
        for found in cards:
            if found is None:
                continue
            self._keys, self._service = found.keys, found.service
            for run in found.runs:
                known = runs.get(run.spec.key)
                newest = max((r for r in (known, run) if r is not None), key=_age)
                epoch = max(known.epoch, run.epoch) if known is not None else run.epoch
                runs[run.spec.key] = replace(newest, epoch=epoch)
        for run in runs.values():
            self._spawn(self._take_over(run))

    async def _find_agent(self, node: str) -> ServiceCard | None:
        try:
            agent = ray.get_actor(names.agent_name(node), namespace=names.NAMESPACE)
            found: ServiceCard = await asyncio.wait_for(agent.describe.remote(), AGENT_CALL_S)
            self._cards[node] = await agent.card.remote()
        except (ray.exceptions.RayError, ValueError, TimeoutError):
            return None
        self._agents[node] = agent
        return found

    async def _take_over(self, found: OpenedRun) -> None:
        """Claim the log of a run that was open, and go on with the group that is at work."""
        log.warning("%s: this coordinator takes over from one that died", found.spec.name)
        with self._in_use(found.spec.name):
            await self._go_on_with(found)

    async def _go_on_with(self, found: OpenedRun) -> None:
        while found.spec.key not in self._runs:
            try:
                await self._open(found.spec, owner=None)
            except RunSuperseded as error:
                log.error("%s: %s", found.spec.name, error)
                await self._end_group(found, error)
                return
            except RunConflict as error:
                log.error("%s: it is left alone: %s", found.spec.name, error)
                return
            except (CheckpointError, OSError) as error:
                log.warning("%s: cannot take over yet: %s", found.spec.name, error)
                await asyncio.sleep(TAKE_OVER_AGAIN_S)
        run = self._run(found.spec.key)
        if found.plan is not None and run.run_uid == found.run_uid:
            inventories = await self._open_on_nodes(run, await self._live_nodes())
            self._handle(run, m.GroupFound(plan=found.plan, inventories=inventories))
            for node in inventories:
                self._send(run, node, "coordinator_returned", run.run_uid, run.machine.epoch)

    async def _end_group(self, found: OpenedRun, error: CheckpointError) -> None:
        """Another service has the run: tell the group that is at work here."""
        if found.plan is None:
            return
        for node in {n.node_id for n in found.plan.nodes} & set(self._agents):
            with contextlib.suppress(ray.exceptions.RayError):
                await self._agents[node].end_session.remote(found.run_uid, found.plan.age, error, found.epoch)

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
            if not await self._in_thread(self._control_io, ray_state.is_alive, rival):
                return rival
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(TICK_S)
        return ""

    async def _open(self, spec: RunSpec, *, owner: str | None) -> str:
        async with self._opening.setdefault(spec.key, asyncio.Lock()):
            run = self._runs.get(spec.key)
            if self._ticker is None:
                self._ticker = asyncio.ensure_future(self._tick())
            is_new = run is None or not run.machine.is_open or await self._is_overtaken(run)
            if run is None or is_new:
                if run is not None:
                    run.threads.shutdown(wait=False)
                run = await self._open_log(spec, owner)
            elif run.spec.storage != spec.storage:
                await self._in_thread(self._remote_io, _check_same_log, run, spec)
                run.remote = spec.storage.open()
            run.spec, run.machine.options = spec, spec.options
            await self._open_on_nodes(run, await self._live_nodes(), checks_storage=is_new)
            return run.run_uid

    async def _is_overtaken(self, run: Run) -> bool:
        """Nobody trains, and somebody else has written to the log: a rollback, or another cluster."""
        if not run.machine.is_idle:
            return False
        name = record_file(run.machine.history.next_seq)
        try:
            found = await asyncio.wait_for(self._in_log_thread(run, run.store.read, name), STORE_TIMEOUT_S)
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
        run.is_over = False
        self._forget_signals({n.node_id for n in nodes})
        inventories = await self._open_on_nodes(run, await self._live_nodes())
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
        found: Origin | None = await self._in_thread(self._remote_io, find_origin, spec.options, spec.storage)
        return found

    async def open_part(
        self,
        key: str,
        parts: tuple[Part, ...],
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

    async def finish(self, key: str, timeout_s: float) -> CheckpointInfo | None:
        """The run is over: wait until its last checkpoint is durable, and return it."""
        run = self._run(key)
        try:
            asked = self._ask(run, lambda token: m.FinishAsked(token=token, ends_group=True))
            newest: CheckpointInfo | None = await asyncio.wait_for(asked, timeout_s)
            run.is_over = True
            for node in run.opened:
                self._send(run, node, "rest", run.run_uid)
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
            records=tuple(
                record for record, _ in (await self._in_thread(self._control_io, read_run, run.store))[1]
            ),
            newest=lineage[-1] if lineage else None,
            holders=run.machine.holders,
            nodes=run.machine.plan.nodes if run.machine.plan else (),
            restores=run.machine.restores,
            agents=tuple(self._cards.values()),
            exposure=await self.exposure(key),
            copies_missing=run.machine.copies_missing,
        )

    async def exposure(self, key: str) -> tuple[Exposure, ...]:
        return self._run(key).machine.exposure()

    async def overview(self) -> ServiceView:
        """All that people see of this service."""
        await self._ready()
        await asyncio.gather(*(self._read_card(node) for node in list(self._agents)))
        live = await self._live_nodes()
        now_s = time.time()
        return ServiceView(
            version=ray_ckpt.__version__,
            protocol=names.PROTOCOL_VERSION,
            ray_version=ray.__version__,
            coordinator_node=ray.get_runtime_context().get_node_id(),
            coordinator_host=ray.util.get_node_ip_address(),
            up_s=now_s - self._began_s,
            is_encrypted=self._keys.encrypt,
            nodes=live,
            agents=tuple(self._cards[node] for node in sorted(self._cards)),
            leaving=tuple(
                LeavingView(node_id=node, source=source, in_s=None if at_s is None else at_s - now_s)
                for (node, source), (at_s, _) in sorted(self._leaving.items())
            ),
            runs=tuple(await asyncio.gather(*(self._view(run) for run in list(self._runs.values())))),
        )

    async def _read_card(self, node: str) -> None:
        """Again, if it was read before a run was opened there: then it names no staging folders."""
        if (card := self._cards.get(node)) is not None and not card.staging:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError, KeyError):
                agent = self._agents[node]
                read: AgentCard = await asyncio.wait_for(agent.card.remote(), CARD_S)
                if self._agents.get(node) is agent:  # or its successor would have a dead one's address
                    self._cards[node] = read

    async def _view(self, run: Run) -> RunView:
        owner = run.machine.owner
        lives = not owner or await self._in_thread(self._control_io, ray_state.is_alive, owner)
        text, at_s = run.warning
        seen = Seen(
            disks=run.seen_disks,
            warning=text,
            warned_at_s=at_s,
            is_over=run.is_over,
            owner_lives=lives,
            sent_bytes=await self._sent_bytes(run),
        )
        return run_view(run.spec, run.machine, seen, wall_s=time.time())

    async def _sent_bytes(self, run: Run) -> dict[str, int]:
        """Of fragments on their way to the storage path, as far as few nodes tell: of many, one is little."""
        nodes = {node for drain in run.machine.drains_underway for node in drain.nodes} & self._agents.keys()
        if len(nodes) > MAX_ASKED:
            return {}
        calls = (asyncio.wait_for(self._agents[n].uploads.remote(run.run_uid), CARD_S) for n in nodes)
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
        asyncio.get_running_loop().call_later(ENDING_S, os._exit, 1)
        if self._ticker is not None:
            self._ticker.cancel()
        until_s = time.monotonic() + LAST_RECORDS_S
        while any(run.machine.records_waiting for run in self._runs.values()) and time.monotonic() < until_s:
            await asyncio.sleep(TICK_S)
        for node, agent in list(self._agents.items()):
            agent.retire.remote()
            self._forget(node)
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
        run = self._run(key)
        end_s = None if expires_in_s is None else time.time() + expires_in_s
        attempt = checkpoint_to_pin(run.machine.history, step).id.attempt
        await self._ask(
            run, lambda token: m.PinAsked(token=token, attempt=attempt, owner=owner, expires_at_s=end_s)
        )
        return run.machine.history.checkpoints[attempt]

    async def unpin(self, key: str, step: int, owner: str) -> CheckpointInfo:
        run = self._run(key)
        attempt = checkpoint_to_pin(run.machine.history, step).id.attempt
        await self._ask(run, lambda token: m.UnpinAsked(token=token, attempt=attempt, owner=owner))
        return run.machine.history.checkpoints[attempt]

    async def drain(self, key: str, attempt: str) -> None:
        """Bring a checkpoint to the storage path, due or not; does not wait for that."""
        await self._ask(self._run(key), lambda token: m.DrainAsked(token=token, attempt=attempt))

    async def drill_sources(self, key: str) -> DrillSources:
        """What a recovery drill of the run reads, and how. Unavailable if it is not open."""
        await self._ready()
        run = self._run(key)
        now = await self._in_thread(self._control_io, ray_state.nodes_now, run.spec.options.failure_domain)
        machine = run.machine
        return DrillSources(
            live=live_checkpoints(machine.history, machine.holders, machine.plan),
            endpoints={node: card.endpoint for node, card in self._cards.items()},
            domains=now.domains,
            credentials=self._keys.credentials(run.run_uid),
            storage=run.spec.storage,
            last_step=machine.last_step,
        )

    async def drilled(
        self,
        key: str,
        attempt: str,
        scenario: str,
        passed: bool,
        seconds: float,
        read_bytes: Mapping[str, float],
        text: str,
    ) -> None:
        """A drill has read a checkpoint; replied when that is in the log."""
        await self._ask(
            self._run(key),
            lambda token: m.DrillEnded(
                token=token,
                attempt=attempt,
                scenario=scenario,
                passed=passed,
                seconds=seconds,
                read_bytes=read_bytes,
                text=text,
            ),
        )

    async def annotate(self, key: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the newest live checkpoint of a step; see `m.AnnotateAsked`."""
        await self._annotate(self._run(key), step, metrics)

    async def _annotate(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        await self._ask(run, lambda token: m.AnnotateAsked(token=token, step=step, metrics=metrics))

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

    async def replica_ended(
        self, attempt: AttemptId, node_index: int, holder: str, error: str | None, epoch: int
    ) -> None:
        event = m.ReplicaEnded(
            attempt=attempt, node_index=node_index, holder=holder, error=error, epoch=epoch
        )
        self._handle(self._by_uid(attempt.run_uid), event)

    async def save_refused(self, attempt: AttemptId, ranks: tuple[int, ...], reason: str) -> None:
        self._handle(
            self._by_uid(attempt.run_uid), m.SaveRefused(attempt=attempt, ranks=ranks, reason=reason)
        )

    async def progress(self, run_uid: str, age: m.Age, ranks: Mapping[int, m.RankProgress]) -> None:
        await self._ready()
        self._handle(self._by_uid(run_uid), m.RanksProgressed(age=age, ranks=ranks))

    async def node_restored(
        self, run_uid: str, age: m.Age, node_id: str, ranks: tuple[RankRestore, ...]
    ) -> bool:
        """True: all ranks have their state, go. False: a new session with an older checkpoint has begun."""
        answer = await self._ask(
            self._by_uid(run_uid),
            lambda token: m.NodeRestored(token=token, age=age, node_id=node_id, ranks=ranks),
        )
        return answer is None

    async def rank_annotates(self, run_uid: str, step: int, metrics: Mapping[str, float]) -> None:
        await self._ready()
        await self._annotate(self._by_uid(run_uid), step, metrics)

    async def revive(self, node: str) -> None:
        """The agent of a node is said to be gone: start a new one if that is so."""
        async with self._opening.setdefault(node, asyncio.Lock()):
            try:
                await asyncio.wait_for(self._agents[node].card.remote(), AGENT_CALL_S)
            except (ray.exceptions.RayError, TimeoutError, KeyError):
                self._forget(node)
                if node in await self._live_nodes():
                    for run in list(self._runs.values()):
                        await self._open_on_fresh(run, (node,))

    async def node_leaves(self, node: str, notice: Notice) -> None:
        """A node is about to go, as its cloud or a signal says; said again as long as it is so."""
        key, now_s = (node, notice.source), time.time()
        if key not in self._leaving:
            log.warning("node %s is about to go: %s (%s)", node[:12], notice.text, notice.source)
        until_s = min(max(now_s, notice.deadline_s or 0.0), now_s + MAX_NOTICE_S) + NOTICE_HOLDS_S
        self._leaving[key] = (notice.deadline_s, until_s)

    def _forget_signals(self, nodes: Set[str]) -> None:
        """A new group is on these nodes: what got a signal there was a process of the one before.

        Ray ends a worker by SIGTERM, and by SIGKILL a moment later, also on a node that stays.
        """
        self._leaving = {k: v for k, v in self._leaving.items() if k[1] != "sigterm" or k[0] not in nodes}

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
        self._advance(run)
        for effect in run.machine.handle(event):
            self._carry_out(run, effect)
        for sample in run.machine.take_samples():
            self._meters.record(run.spec.name, sample)

    def _advance(self, run: Run) -> None:
        """Time passes before each event, so that the machine needs no clock."""
        for effect in run.machine.handle(m.Ticked(now_s=time.monotonic(), wall_s=time.time())):
            self._carry_out(run, effect)

    def _carry_out(self, run: Run, effect: m.Effect) -> None:
        epoch = run.machine.epoch
        match effect:
            case m.Append():
                self._spawn(self._append(run, effect))
            case m.AskInventory(token=token):
                self._spawn(self._inventory_again(run, token))
            case m.StartSession():
                self._spawn(self._start_session(run, effect))
            case m.Reply(token=token, value=value):
                if (future := run.waiting.get(token)) and not future.done():
                    future.set_result(value)
            case m.Fail(token=token, error=error):
                if (future := run.waiting.get(token)) and not future.done():
                    future.set_exception(error)
            case m.Publish(attempt=attempt, level=level, error=problem, nodes=nodes, epoch=epoch):
                for node in nodes:
                    self._send(run, node, "publish", run.run_uid, attempt, level, problem, epoch)
            case m.NameStep(age=age, agreed=agreed, nodes=nodes):
                for node in nodes:
                    self._send(run, node, "name_step", run.run_uid, age, agreed, epoch)
            case m.Replicate(attempt=attempt, node_index=index, source=source, holder=holder):
                if holder in self._cards:
                    where = self._cards[holder].endpoint
                    self._send(run, source, "replicate", run.run_uid, attempt, index, holder, where, epoch)
            case m.Drain():
                self._spawn(self._drain(run, effect))
            case m.WriteDescription(checkpoint=checkpoint):
                self._spawn(self._describe(run, checkpoint))
            case m.Delete():
                self._spawn(self._delete(run, effect))
            case m.SweepRemote():
                self._spawn(self._sweep(run, effect))
            case m.DeleteOrphans():
                self._spawn(self._delete_orphans(run, effect))
            case m.DeleteStrays(node_id=node, directories=directories):
                self._send(run, node, "delete", run.run_uid, directories, epoch)
            case m.Evict(attempt=attempt, node_id=node):
                self._send(run, node, "delete", run.run_uid, (attempt.directory,), epoch)
            case m.Scrub():
                self._spawn(self._scrub(run, effect))
            case m.WriteSnapshot():
                self._spawn(self._write_snapshot(run, effect))
            case m.Supersede(nodes=nodes, age=age, error=problem):
                for node in nodes:
                    self._send(run, node, "end_session", run.run_uid, age, problem, epoch)
            case m.Warn(text=text):
                log.warning("%s: %s", run.spec.name, text)
                run.warning = (text, time.time())
            case m.StepDown(error=error, is_foreign=is_foreign):
                log.error("%s: %s This coordinator steps down.", run.spec.name, error)
                if self._runs.get(run.spec.key) is run:
                    del self._runs[run.spec.key]
                run.threads.shutdown(wait=False)
                if run.is_fenced_in and not is_foreign:
                    # A newer coordinator of this service has the name. If it is me who has it, Ray starts me
                    # again, and I take over by the book; a zombie ends here.
                    asyncio.get_running_loop().call_later(TICK_S, os._exit, 1)

    async def _append(self, run: Run, effect: m.Append) -> None:
        record, service = effect.record, ""
        create = self._in_log_thread(run, create_record, run.store, record.seq, encode_record(record))
        outcome: Literal["ok", "exists", "unknown"] = "unknown"
        try:
            match await asyncio.wait_for(create, STORE_TIMEOUT_S):
                case Outcome.OK:
                    outcome = "ok"
                case Outcome.EXISTS:
                    outcome = "exists"
                    service = await asyncio.wait_for(self._last_service(run), STORE_TIMEOUT_S)
        except (TimeoutError, OSError, CheckpointError) as error:
            log.warning("%s: record %d: %s", run.spec.name, record.seq, error or "no answer in time")
        self._handle(run, m.Appended(seq=record.seq, outcome=outcome, service=service))
        run.is_fenced_in = run.is_fenced_in or run.machine.is_open
        async with run.changed:
            run.changed.notify_all()

    async def _last_service(self, run: Run) -> str:
        """Whose coordinator has written the last epoch of the log."""
        history, records = await self._in_log_thread(run, read_run, run.store)
        for record, record_digest in records:
            history.apply(record, record_digest)
        return str(history.service)

    async def _scrub(self, run: Run, effect: m.Scrub) -> None:
        attempt, index, place = effect.attempt, effect.node_index, effect.place
        damage: tuple[str, ...] = ()
        error = None
        try:
            if place == m.REMOTE:
                num_nodes = run.machine.history.checkpoints[attempt.attempt].num_nodes
                node = secrets.choice(sorted(run.opened & set(self._agents)))
                call = self._agents[node].scrub_remote.remote(run.run_uid, attempt, num_nodes, index)
            else:
                call = self._agents[place].scrub.remote(run.run_uid, attempt, index, run.machine.epoch)
            damage = await call
        except (ray.exceptions.RayError, KeyError, IndexError) as failure:
            error = _reason(failure)
        event = m.ScrubEnded(attempt=attempt, node_index=index, place=place, damage=damage, error=error)
        self._handle(run, event)

    async def _write_snapshot(self, run: Run, effect: m.WriteSnapshot) -> None:
        snapshot, error = run.machine.history.to_snapshot(time.time()), None
        try:
            await self._in_thread(self._remote_io, write_snapshot, run.store, snapshot)
            await self._in_thread(self._remote_io, trim_log, run.store, time.time())
        except (OSError, CheckpointError) as failure:
            error = str(failure)
        self._handle(run, m.SnapshotWritten(seq=effect.seq, error=error))

    async def _inventory_again(self, run: Run, token: m.Token) -> None:
        await asyncio.sleep(INVENTORY_AGAIN_S)
        inventories: dict[str, m.Inventory] = {}
        try:
            inventories = await self._open_on_nodes(run, await self._live_nodes())
        except (CheckpointError, ray.exceptions.RayError) as error:
            log.warning("%s: a node could not take inventory: %s", run.spec.name, error)
        self._handle(run, m.InventoryTaken(token=token, inventories=inventories))

    async def _start_session(self, run: Run, effect: m.StartSession) -> None:
        start = self._session_start(run, effect.plan)
        try:
            calls = [self._agents[n.node_id].start_session.remote(start) for n in effect.plan.nodes]
            await asyncio.wait_for(asyncio.gather(*calls), AGENT_CALL_S)
        except (ray.exceptions.RayError, TimeoutError, KeyError) as error:
            problem = Unavailable(f"A node did not take session {effect.plan.session}: {_reason(error)}")
            for token in effect.tokens:
                self._carry_out(run, m.Fail(token=token, error=problem))
            return
        for token in effect.tokens:
            self._carry_out(run, m.Reply(token=token, value=effect.plan))

    async def _drain(self, run: Run, effect: m.Drain) -> None:
        error, is_damage = None, False
        try:
            agent = self._agents[effect.node_id]
            call = agent.drain.remote(run.run_uid, effect.attempt, effect.node_index, run.machine.epoch)
            await asyncio.wait_for(call, self._drain_bound_s(run, effect.attempt))
        except (ray.exceptions.RayError, KeyError, TimeoutError) as failure:
            error = _reason(failure)
            is_damage = isinstance(getattr(failure, "cause", None), CorruptionError)
            if isinstance(failure, ray.exceptions.ActorDiedError | KeyError):
                self._spawn(self.revive(effect.node_id))  # no rank may miss it for a while
        self._handle(
            run,
            m.DrainEnded(
                attempt=effect.attempt,
                node_index=effect.node_index,
                node_id=effect.node_id,
                error=error,
                is_damage=is_damage,
            ),
        )

    async def _sweep(self, run: Run, effect: m.SweepRemote) -> None:
        try:
            listed = await self._in_thread(self._remote_io, list_remote, run.remote, effect)
        except (OSError, CheckpointError) as failure:
            listed = m.RemoteListed(number=effect.number, error=_reason(failure))
        self._handle(run, listed)

    async def _delete_orphans(self, run: Run, effect: m.DeleteOrphans) -> None:
        """What is not gone after it is found by the next listing."""
        try:
            await self._in_thread(self._remote_io, delete_all, run.remote, effect)
        except (OSError, CheckpointError) as failure:
            log.warning("%s: the storage path is not tidied: %s", run.spec.name, _reason(failure))

    def _drain_bound_s(self, run: Run, attempt: AttemptId) -> float:
        """After this long another holder is asked: the first may be frozen. Twice is harmless."""
        checkpoint = run.machine.history.checkpoints[attempt.attempt]
        rate = min(LEAST_DRAIN_BYTES_PER_S, run.spec.options.drain_bytes_per_s or LEAST_DRAIN_BYTES_PER_S)
        return DRAIN_SLACK_S + checkpoint.size_bytes / rate

    async def _describe(self, run: Run, checkpoint: CheckpointInfo) -> None:
        error, is_damage = None, False
        try:
            await self._in_thread(self._remote_io, write_description, run.remote, checkpoint)
        except (OSError, EOFError, CheckpointError) as failure:
            error, is_damage = str(failure), isinstance(failure, CorruptionError | EOFError)
        self._handle(run, m.DescriptionWritten(attempt=checkpoint.id, error=error, is_damage=is_damage))

    async def _delete(self, run: Run, effect: m.Delete) -> None:
        error = None
        try:
            if effect.place == m.REMOTE:
                await self._in_thread(self._remote_io, run.remote.delete, effect.directory)
            elif effect.place in self._agents:
                await self._agents[effect.place].delete.remote(
                    run.run_uid, (effect.directory,), run.machine.epoch
                )
        except (OSError, ray.exceptions.RayError) as failure:
            error = _reason(failure)
        self._handle(run, m.DeleteEnded(attempt=effect.attempt, place=effect.place, error=error))

    # -- runs and nodes --------------------------------------------------------------------------------

    async def _open_log(self, spec: RunSpec, owner: str | None) -> Run:
        """Read the run's log to its tail and put this coordinator's fence there, if it may."""
        marks = await self._survey(spec)
        for _ in range(OPEN_LOG_TRIES):
            run = Run(spec, self._service)
            await self._in_log_thread(run, run.remote.probe_log)
            history, records = await self._in_log_thread(run, read_run, run.store)
            read = history.copy()
            for record, record_digest in records:
                read.apply(record, record_digest)
            check_marks(read, run_name=spec.name, marks=marks, resume=spec.options.resume)
            check_claim(read, service=self._service, owner=owner)
            await self._in_log_thread(run, run.remote.leave_nonce, run.nonce)  # others' stays until here
            self._runs[spec.key] = run
            event = m.LogOpened(
                records=records, history=history, run_name=spec.name, fresh_uid=uuid.uuid4().hex
            )
            self._handle(run, event)
            async with run.changed:
                is_settled = run.changed.wait_for(partial(self._is_settled, run))
                try:
                    await asyncio.wait_for(is_settled, 2 * STORE_TIMEOUT_S)
                except TimeoutError:
                    del self._runs[spec.key]
                    break
            if run.machine.is_open:
                return run
        raise Unavailable(
            f"The log of run {spec.name} at {run.remote.where} does not take records.",
            hint="Check that the storage path is healthy and that no other cluster runs it, then try again.",
        )

    async def _survey(self, spec: RunSpec) -> tuple[RunMark, ...]:
        """What the nodes' disks remember of this run."""
        answers = await asyncio.gather(*(self._survey_on(node, spec) for node in await self._live_nodes()))
        return tuple(mark for found in answers for mark in found)

    async def _survey_on(self, node: str, spec: RunSpec) -> tuple[RunMark, ...]:
        found: tuple[RunMark, ...] | None = await self._ask_agent(node, "survey", spec)
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
            *(self._ask_agent(node, "open_run", order) for node in nodes), return_exceptions=True
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
        now = await self._in_thread(self._control_io, ray_state.nodes_now, run.spec.options.failure_domain)
        self._handle(run, self._seen(now, frozenset(inventories)))
        return inventories

    async def _ask_agent(self, node: str, method: str, *args: Any) -> Any:
        """The answer of a node's agent, started if need be; None if it is dying. It may raise its own."""
        for _ in range(2):  # once more with a new agent, if the old one died with its process
            if self._is_ending:
                return None
            try:
                agent = self._agent(node)
                if node not in self._cards:
                    self._cards[node] = await asyncio.wait_for(agent.card.remote(), AGENT_START_S)
                return await asyncio.wait_for(getattr(agent, method).remote(*args), AGENT_START_S)
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, CheckpointError) else error from None
            except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
                log.warning("node %s: its agent does not answer: %s", node[:12], _reason(error))
                self._forget(node)
                if node not in await self._live_nodes():
                    break
        return None

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
                .remote(node, self._keys, self._service)
            )
        return self._agents[node]

    def _forget(self, node: str) -> None:
        self._agents.pop(node, None)
        self._cards.pop(node, None)
        for run in self._runs.values():
            run.seen_disks.pop(node, None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                for run in list(self._runs.values()):
                    domain = run.spec.options.failure_domain
                    nodes = await self._in_thread(self._control_io, ray_state.nodes_now, domain)
                    self._tick_run(run, nodes)
                live = frozenset(await self._live_nodes())
                for node in set(self._agents) - live:
                    self._forget(node)
                now_s = time.time()
                self._leaving = {k: v for k, v in self._leaving.items() if k[0] in live and now_s < v[1]}
                self._retire_idle_agents()
                self._set_gauges()
                if time.monotonic() - self._looked_s > DISKS_EVERY_S:
                    self._looked_s = time.monotonic()
                    self._spawn(self._look_at_disks())
            except Exception:
                log.exception("the coordinator's tick failed")

    def _set_gauges(self) -> None:
        now_s = time.monotonic()
        if now_s < self._gauges_s:
            return
        self._gauges_s = now_s + GAUGES_EVERY_S
        for run in list(self._runs.values()):
            if not run.machine.is_open or run.is_over:
                continue
            if now_s >= run.goodput_s:
                run.goodput_s = math.inf  # until this look has ended
                self._spawn(self._look_at_goodput(run))
            for sample in (
                *run.machine.gauges(),
                *disk_samples(run.seen_disks, run.spec.options),
                *run.goodput,
            ):
                self._meters.record(run.spec.name, sample)

    async def _look_at_goodput(self, run: Run) -> None:
        """Beside the ticks: of a long log it takes seconds."""
        try:
            history = run.machine.history.copy()
            run.goodput = await self._in_thread(self._goodput_io, goodput_samples, history)
        finally:
            run.goodput_s = time.monotonic() + GOODPUT_EVERY_S

    def _tick_run(self, run: Run, nodes: ray_state.NodesNow) -> None:
        if not run.is_ready:  # its log is still being opened: time passes, nodes come later
            self._advance(run)
            return
        live = frozenset(nodes.live)
        disks, run.disks = run.disks, {}  # told once per look
        self._handle(run, replace(self._seen(nodes, live & run.opened), disks=disks))
        if run.is_over:
            return
        if fresh := live - run.opened - run.opening:
            run.opening |= fresh
            self._spawn(self._open_on_fresh(run, tuple(sorted(fresh))))

    def _seen(self, nodes: ray_state.NodesNow, live: frozenset[str]) -> m.NodesSeen:
        """Placement goes by all of it, so it is told as a whole each time."""
        draining = nodes.draining | {node for node, _ in self._leaving}
        return m.NodesSeen(live=live, draining=draining, left_s=self._left_s(nodes), domains=nodes.domains)

    def _left_s(self, nodes: ray_state.NodesNow) -> dict[str, float]:
        """Until leaving nodes are gone, by whoever says it sooner: Ray, the cloud, or a signal."""
        now_s, left_s = time.time(), dict(nodes.left_s)
        for (node, _), (at_s, _) in self._leaving.items():
            if at_s is not None:
                left_s[node] = min(max(at_s - now_s, 0.0), left_s.get(node, math.inf))
        return left_s

    async def _open_on_fresh(self, run: Run, nodes: tuple[str, ...]) -> None:
        """Nodes that joined, or that got a new agent in the middle of a session."""
        order = OpenRun(spec=run.spec, run_uid=run.run_uid, nonce=run.nonce, epoch=run.machine.history.epoch)
        for node in nodes:
            try:
                inventory = await self._ask_agent(node, "open_run", order)
                if inventory is not None:
                    run.opened.add(node)
                    run.opening.discard(node)
                    self._handle(run, m.NodesOpened(inventories={node: inventory}))
                    await self._rejoin(run, node)
            except (CheckpointError, ray.exceptions.RayError) as error:  # tried again by the next group
                log.warning("node %s cannot hold checkpoints of %s: %s", node[:12], run.spec.name, error)

    async def _look_at_disks(self) -> None:
        runs = list(self._runs.values())
        looks = (self._look_at_disk(r, node) for r in runs for node in r.opened & set(self._agents))
        await asyncio.gather(*looks)

    async def _look_at_disk(self, run: Run, node: str) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, KeyError):
            disk = self._agents[node].disk.remote(run.run_uid)
            run.disks[node] = run.seen_disks[node] = await asyncio.wait_for(disk, AGENT_CALL_S)

    def _retire_idle_agents(self) -> None:
        """End agents whose nodes hold nothing needed, or they would keep the autoscaler from its work."""
        now_s = time.monotonic()
        needed = {node for run in self._runs.values() for node in run.machine.needed_nodes()}
        runs = [run.spec.options for run in self._runs.values()] or [RunOptions()]
        idle_s = max(options.agent_idle_s for options in runs)
        for node in list(self._agents):
            if node in needed:
                self._needed_s[node] = now_s
            elif now_s - self._needed_s.setdefault(node, now_s) > idle_s:
                log.info("node %s holds nothing needed: its agent ends", node[:12])
                self._agents[node].retire.remote()
                self._forget(node)
                for run in self._runs.values():
                    run.opened.discard(node)
                    run.opening.add(node)  # or the next tick would start it again; the next group may
        self._needed_s = {node: since for node, since in self._needed_s.items() if node in self._agents}

    async def _rejoin(self, run: Run, node: str) -> None:
        """Give a new agent the session at work, and its peers the new agent's address."""
        plan = run.machine.plan
        if plan is None:
            return
        start = self._session_start(run, plan)
        for peer in {n.node_id for n in plan.nodes} - {node}:
            self._send(run, peer, "meet", run.run_uid, start.endpoints)
        if any(n.node_id == node for n in plan.nodes):
            await self._agents[node].start_session.remote(start)
            await self._agents[node].coordinator_returned.remote(run.run_uid, run.machine.epoch)

    def _session_start(self, run: Run, plan: m.SessionPlan) -> SessionStart:
        endpoints = {node: card.endpoint for node, card in self._cards.items()}
        return SessionStart(plan=plan, spec=run.spec, endpoints=endpoints, epoch=run.machine.epoch)

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

    def _send(self, run: Run, node: str, method: str, *args: Any) -> None:
        """Tell an agent, and note if it did not hear; what it missed it learns at the next session."""
        if node in self._agents:
            self._spawn(self._sent(run, node, method, getattr(self._agents[node], method).remote(*args)))

    async def _sent(self, run: Run, node: str, method: str, call: Awaitable[Any]) -> None:
        try:
            await call
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Fenced):
                self._handle(run, m.OrderRefused(epoch=cause.fields["epoch"]))
            log.warning("node %s did not take %s: %s", node[:12], method, _reason(error))

    async def _live_nodes(self) -> tuple[str, ...]:
        nodes = await self._in_thread(self._control_io, ray.nodes)
        return tuple(sorted(node["NodeID"] for node in nodes if node["Alive"]))

    async def _in_log_thread(self, run: Run, work: Any, *args: Any) -> Any:
        return await self._in_thread(run.threads, work, *args)

    async def _in_thread(self, pool: ThreadPoolExecutor, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args))

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


def group_nodes(nodes: Sequence[str]) -> tuple[m.GroupNode, ...]:
    """Ranks by node, where rank k runs on `nodes[k]`."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    return tuple(m.GroupNode(node_id=node, ranks=tuple(ranks)) for node, ranks in by_node.items())


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "cause", None) or error).splitlines()[0]


def _age(run: OpenedRun) -> tuple[int, int]:
    return run.plan.age if run.plan else (0, 0)
