"""The coordinator's part: commits of saves, the choice of a checkpoint, sessions, and the common `go`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_ckpt.actors.messages import SessionStart
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import ResumePoint, SessionKey, SessionNode, SessionPlan
from ray_ckpt.errors import RunSuperseded
from ray_ckpt.format.digest import root_digest
from ray_ckpt.format.names import make_attempt, shard_file, state_file
from ray_ckpt.types import AttemptId, CheckpointInfo, Level, RankRestore
from tests.actors.prefetch_restarts.nodes import Machine, order
from tests.transport.peers import UID


@dataclass(slots=True)
class Save:
    """An attempt to save; `copies` have not ended yet, by node index and holder."""

    attempt: AttemptId
    plan: SessionPlan
    copies: set[tuple[int, str]]
    stored: dict[int, m.NodeStored] = field(default_factory=dict)
    is_dropped: bool = False

    @property
    def is_whole(self) -> bool:
        return len(self.stored) == len(self.plan.nodes)

    def commit(self) -> CheckpointInfo:
        return CheckpointInfo(
            id=self.attempt,
            seq=0,
            level=Level.LOCAL,
            world_size=self.plan.world_size,
            num_nodes=len(self.plan.nodes),
            size_bytes=sum(event.size_bytes for event in self.stored.values()),
            root_digest=root_digest([event.fragment for event in self.stored.values()]),
            committed_at_s=0.0,
            metrics={},
        )


class Decisions:
    """A coordinator without a log. `lineage` has the commits that a group may restore, oldest first."""

    def __init__(self, machines: Sequence[Machine], replicas: int) -> None:
        self.machines = machines
        self.replicas = replicas
        self.epoch = 1
        self.plan: SessionPlan | None = None
        self.lineage: list[CheckpointInfo] = []
        self.commits: dict[str, Save] = {}  # all commits by attempt, also those off the lineage
        self.saves: dict[str, Save] = {}  # those of the session at work
        self.sessions: list[SessionPlan] = []
        self.proves_fragments = True
        self.damage: list[tuple[AttemptId, tuple[str, ...]]] = []  # reported by ranks
        self._excluded: set[str] = set()
        self._restored: dict[str, tuple[RankRestore, ...]] = {}
        self._go: asyncio.Future[bool] | None = None
        self.changed = asyncio.Event()

    def live(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.is_live]

    def machine(self, node_id: str) -> Machine | None:
        """Return the live machine that is this node."""
        return next((each for each in self.live() if each.node_id == node_id), None)

    def files(self, checkpoint: CheckpointInfo) -> set[str]:
        """Return the names of all files of a commit."""
        fragments = {event.fragment.name for event in self.commits[checkpoint.id.attempt].stored.values()}
        world_size = checkpoint.world_size
        return fragments | {
            file
            for rank in range(world_size)
            for file in (shard_file(rank, world_size), state_file(rank, world_size))
        }

    # -- reports of agents -----------------------------------------------------------------------------

    async def requested(self, node_id: str, method: str, *args: Any) -> Any:
        """Answer a call of an agent."""
        match method, args:
            case "node_stored", (m.NodeStored() as event,):
                await self._stored(event)
            case "replica_ended", (m.ReplicaEnded() as event,):
                if (save := self.saves.get(event.attempt.attempt)) is not None:
                    save.copies.discard((event.node_index, event.holder))
            case "save_refused", (m.SaveRefused() as event,):
                if (save := self.saves.get(event.attempt.attempt)) is not None:
                    save.is_dropped = True
            case "node_restored", (_, key, node, ranks):
                return await self._node_restored(key, node, ranks)
            case (("ranks_progressed" | "ranks_restored"), _):
                return ()
            case _:
                raise AssertionError(f"{method} is not expected here")
        self._change()
        return None

    def _change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _stored(self, event: m.NodeStored) -> None:
        save = self.saves.get(event.attempt.attempt)
        if save is None or save.is_dropped or save.is_whole or save.plan is not self.plan:
            return
        save.stored[event.node_index] = event
        if save.is_whole:
            self.lineage.append(save.commit())
            self.commits[save.attempt.attempt] = save
            for node in save.plan.nodes:
                if (machine := self.machine(node.node_id)) is not None:
                    told = n.OutcomeNotified(
                        attempt=save.attempt, level=Level.LOCAL, error=None, epoch=self.epoch
                    )
                    await order(machine, told)

    # -- saves -----------------------------------------------------------------------------------------

    def begin_save(self, step: int) -> Save:
        plan = self.plan
        assert plan is not None
        attempt = make_attempt(run_uid=UID, session=plan.session, step=step, attempt=0, epoch=plan.epoch)
        copies = {(node.node_index, holder) for node in plan.nodes for holder in node.holders}
        save = self.saves[attempt.attempt] = Save(attempt=attempt, plan=plan, copies=copies)
        return save

    async def settled(self, save: Save) -> None:
        """Wait until a save is committed and its copies have ended, or until it is dropped."""
        while not save.is_dropped:
            changed = self.changed
            away = {(i, holder) for i, holder in save.copies if self.machine(holder) is None}
            if save.is_whole and not save.copies - away:
                return
            await asyncio.wait_for(changed.wait(), 20.0)

    # -- sessions --------------------------------------------------------------------------------------

    async def open(
        self, group: Sequence[tuple[Machine, tuple[int, ...]]], left: tuple[SessionKey, ...] = ()
    ) -> SessionPlan:
        """Choose a checkpoint, and begin a session on these machines with these ranks.

        `left` are the sessions that these ranks have left.
        """
        self._supersede()
        resume = await self._choose()
        at = 0 if resume is None else self.lineage.index(resume.checkpoint) + 1
        del self.lineage[at:]
        nodes = [machine.node_id for machine, _ in group]
        plan = SessionPlan(
            run_uid=UID,
            session=len(self.sessions) + 1,
            world_size=sum(len(ranks) for _, ranks in group),
            nodes=tuple(
                SessionNode(node_id=node, node_index=i, ranks=group[i][1], holders=self._holders(nodes, i))
                for i, node in enumerate(nodes)
            ),
            resume=resume,
            epoch=self.epoch,
            left=left,
        )
        self.plan, self.saves = plan, {}
        self.sessions.append(plan)
        for machine, _ in group:
            await self.start(machine)
        return plan

    async def start(self, machine: Machine) -> None:
        """Send the plan at work to a node."""
        assert self.plan is not None
        endpoints = {each.node_id: each.endpoint for each in self.live()}
        packed = SessionStart.pack(self.plan, endpoints)
        start = SessionStart(packed=packed, spec=machine.spec, epoch=self.epoch)
        await machine.require_agent().start_session(start)

    def _supersede(self) -> None:
        self._restored = {}
        if self._go is not None and not self._go.done():
            self._go.set_exception(RunSuperseded("A newer training group has opened this run."))
            self._go.exception()  # perhaps nobody waits
        self._go = asyncio.get_running_loop().create_future()

    def _holders(self, nodes: Sequence[str], index: int) -> tuple[str, ...]:
        """Return the next nodes of the group, then live nodes outside of it."""
        others = [machine.node_id for machine in self.live() if machine.node_id not in nodes]
        order = [*nodes[index + 1 :], *nodes[:index], *others]
        return tuple(order[: self.replicas])

    async def _choose(self) -> ResumePoint | None:
        """Return the newest checkpoint of which live nodes hold all fragments."""
        inventories = {
            machine.node_id: await machine.require_agent().inventory(UID) for machine in self.live()
        }
        for checkpoint in reversed(self.lineage):
            save = self.commits[checkpoint.id.attempt]
            holders = tuple(
                tuple(
                    node
                    for node, inventory in inventories.items()
                    if any(
                        held.attempt == checkpoint.id and held.node_index == index
                        for held in inventory.fragments
                    )
                )
                for index in range(checkpoint.num_nodes)
            )
            if all(holders) and checkpoint.id.attempt not in self._excluded:
                digests = tuple(save.stored[i].fragment.digest for i in range(checkpoint.num_nodes))
                fragments = digests if self.proves_fragments else ()
                return ResumePoint(checkpoint=checkpoint, holders=holders, fragments=fragments)
        return None

    async def _node_restored(self, key: SessionKey, node: str, ranks: tuple[RankRestore, ...]) -> bool:
        """Return True when all nodes have restored; False after the begin of a session with older state."""
        plan, go = self.plan, self._go
        if plan is None or plan.session_key != key or go is None:
            raise RunSuperseded("A newer training group has opened this run.")
        self._restored[node] = ranks
        if len(self._restored) == len(plan.nodes) and not go.done():
            damage = tuple(
                text for found in self._restored.values() for rank in found for text in rank.damage
            )
            if not damage:
                go.set_result(True)
            else:
                await self._fall_back(plan, damage, go)
        return await asyncio.shield(go)

    async def _fall_back(self, plan: SessionPlan, damage: tuple[str, ...], go: asyncio.Future[bool]) -> None:
        assert plan.resume is not None
        attempt = plan.resume.checkpoint.id
        self.damage.append((attempt, damage))
        self._excluded.add(attempt.attempt)
        group = [(self.machine(node.node_id), node.ranks) for node in plan.nodes]
        self._go = None  # `open` does not supersede this call
        live = [(machine, ranks) for machine, ranks in group if machine is not None]
        await self.open(live, (*plan.left, plan.session_key))
        go.set_result(False)

    async def release(self, machine: Machine, *, is_finished: bool) -> None:
        """End the run on a node."""
        assert self.plan is not None
        key = self.plan.session_key
        await order(machine, n.RunReleased(session_key=key, is_finished=is_finished, epoch=self.epoch))
