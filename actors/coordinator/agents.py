"""Start, find, call and end the node agents of a service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ckpt.actors import names
from ray_ckpt.actors.agent.actor import NodeAgent
from ray_ckpt.actors.coordinator.nodes import NodeList
from ray_ckpt.actors.failures import reason
from ray_ckpt.actors.messages import AgentCard, ServiceCard
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import SessionPlan
from ray_ckpt.errors import CheckpointError
from ray_ckpt.transport.credentials import ServiceKeys

log = logging.getLogger("ray_ckpt.coordinator")
T = TypeVar("T")

AGENT_START_S = 120.0  # longest start of an agent; a cold node imports torch first
AGENT_CALL_S = 60.0  # longest wait for an answer from an agent
LATE_S = 10.0  # longest wait for agents that hang, once others have answered a restarted coordinator
CARD_S = 5.0  # short, for calls whose results only status shows


class Agents:
    """The agents of the service, at most one on each node of the cluster.

    `keys` and `service` belong to the service; agents keep both while the coordinator restarts. Calls to Ray
    itself block, so they run in the threads of `control_io`.
    """

    def __init__(self, keys: ServiceKeys, control_io: Executor) -> None:
        self.keys = keys
        self.service = uuid.uuid4().hex
        self.cards: dict[str, AgentCard] = {}  # by node, of agents that have answered
        self.silent: dict[str, float] = {}  # nodes whose agents `ask` has not reached -> when (monotonic)
        self.cluster = NodeList(control_io)
        self.num_changes = 0  # of addresses
        self._actors: dict[str, Any] = {}
        self._control_io = control_io
        self._is_closed = False

    @property
    def nodes(self) -> Set[str]:
        """Nodes with an agent."""
        return self._actors.keys()

    @property
    def endpoints(self) -> dict[str, str]:
        """Addresses at which the agents serve their peers, by node."""
        return {node: card.endpoint for node, card in self.cards.items()}

    async def live_nodes(self) -> tuple[str, ...]:
        """Return all live nodes of the cluster, with an agent or without, sorted."""
        return tuple(sorted((await self.cluster.now()).live))

    async def find(self) -> tuple[ServiceCard, ...]:
        """Find the agents of an earlier coordinator, and take over their keys and service.

        Agents that have not answered after LATE_S are in `silent`, if others have the groups of all runs.
        """
        actors = await in_thread(self._control_io, partial(ray.util.list_named_actors, all_namespaces=True))
        prefix = names.AGENT_PREFIX
        nodes = {a["name"].removeprefix(prefix) for a in actors if a["name"].startswith(prefix)}
        live = sorted(nodes.intersection(await self.live_nodes()))
        asked = {node: asyncio.ensure_future(self.ask(node)) for node in live}
        done = await first_answers(asked.values(), _have_groups)
        for node, call in asked.items():
            if call not in done:
                call.cancel()
                self.silent[node] = time.monotonic()
        found = [card for call in asked.values() if call in done and (card := call.result()) is not None]
        for card in found:
            self.keys, self.service = card.keys, card.service
        return tuple(found)

    async def ask(self, node: str) -> ServiceCard | None:
        """Return the service and the runs of an agent that was started by an earlier coordinator.

        None if the agent is dead; also if it does not answer, and then its node is in `silent`.
        """
        self.silent.pop(node, None)
        find = partial(ray.get_actor, names.agent_name(node), namespace=names.NAMESPACE)
        try:
            agent = await in_thread(self._control_io, find)
            found: ServiceCard = await asyncio.wait_for(agent.describe.remote(), AGENT_CALL_S)
            self._add(await asyncio.wait_for(agent.card.remote(), AGENT_CALL_S))
        except (ray.exceptions.ActorDiedError, ray.exceptions.RayTaskError, ValueError):
            return None
        except (ray.exceptions.RayError, TimeoutError):
            self.silent[node] = time.monotonic()
            return None
        self._actors[node] = agent
        return found

    async def request(self, node: str, method: str, *args: Any) -> Any:
        """Call a node's agent, started if necessary, and return the result; None if it gives no answer.

        A CheckpointError of the agent is raised unchanged.
        """
        for _ in range(2):  # the second try is with a new agent, if the first one has died
            if self._is_closed:
                return None
            try:
                if node not in self._actors:
                    started = await in_thread(self._control_io, self.start, node)
                    if self._is_closed:
                        started.exit.remote(None)
                        return None
                    self._actors[node] = started
                agent = self._actors[node]
                if node not in self.cards:
                    self._add(await asyncio.wait_for(agent.card.remote(), AGENT_START_S))
                call = asyncio.ensure_future(getattr(agent, method).remote(*args))
                if await asyncio.wait({call}, timeout=AGENT_START_S) == (set(), {call}):
                    call.cancel()  # of one run, whose storage path may hang: the others still need this agent
                    log.warning("node %s: its agent has not answered %s", node[:12], method)
                    return None
                return call.result()
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, CheckpointError) else error from None
            except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
                log.warning("node %s: its agent does not answer: %s", node[:12], reason(error))
                self.forget(node)
                if node not in await self.live_nodes():
                    break
        return None

    def start(self, node: str) -> Any:
        """Start the agent of a node, or find it; return its handle. Blocks."""
        return (
            names.actor_class(NodeAgent)
            .options(
                name=names.agent_name(node),
                namespace=names.NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=0,  # a restarted agent would have no runs: see open_run
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(node, self.keys, self.service)
        )

    def call(self, node: str, method: str, *args: Any) -> Awaitable[Any]:
        """Call a node's agent without a time limit. RayError; KeyError if the node has no agent."""
        answer: Awaitable[Any] = getattr(self._actors[node], method).remote(*args)
        return answer

    async def plans(self, node: str) -> dict[str, SessionPlan | None] | None:
        """Return the plans of the runs of a node's agent, by run uid; None if the agent is dead."""
        try:
            found: ServiceCard = await asyncio.wait_for(self.call(node, "describe"), AGENT_CALL_S)
        except (ray.exceptions.RayError, TimeoutError, KeyError):
            return None
        return {run.run_uid: run.plan for run in found.runs}

    async def read_cards(self) -> None:
        """Read the cards again that lack staging folders, because no run was open when they were read."""
        await asyncio.gather(*(self._read_card(node) for node, c in self.cards.items() if not c.staging))

    async def _read_card(self, node: str) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, KeyError):
            agent = self._actors[node]
            read: AgentCard = await asyncio.wait_for(agent.card.remote(), CARD_S)
            if self._actors.get(node) is agent:  # a new agent must not get the card of a dead one
                self._add(read)

    def _add(self, card: AgentCard) -> None:
        known = self.cards.get(card.node_id)
        self.num_changes += known is None or known.endpoint != card.endpoint
        self.cards[card.node_id] = card

    def forget(self, node: str) -> None:
        """Drop the agent of a node, because the agent is dead or does not answer."""
        self._actors.pop(node, None)
        self.num_changes += self.cards.pop(node, None) is not None

    async def end(self, node: str, orders: Mapping[str, n.ExitOrdered]) -> None:
        """End an agent whose node is not needed; an agent keeps the autoscaler from removing its node.

        `orders` are those of this coordinator's runs, by run uid. The agent stays with RunInUse if a group
        is at work there, with Fenced if a run there has a newer coordinator.
        """
        log.info("node %s holds nothing needed: its agent ends", node[:12])
        try:
            await asyncio.wait_for(self._end(node, orders), AGENT_CALL_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, CheckpointError):
                raise error.cause from None
            log.info("node %s: its agent does not end: %s", node[:12], reason(error))
        except (ray.exceptions.RayError, TimeoutError, KeyError) as error:
            log.debug("node %s: its agent has not answered: %s", node[:12], reason(error))

    def close(self) -> None:
        """Start no agent from now on."""
        self._is_closed = True

    def end_all(self) -> None:
        for node in list(self._actors):
            self._end(node, None)

    def _end(self, node: str, orders: Mapping[str, n.ExitOrdered] | None) -> Awaitable[None]:
        answer: Awaitable[None] = self._actors[node].exit.remote(orders)
        self.forget(node)
        return answer


async def first_answers(
    calls: Iterable[asyncio.Future[T]], are_enough: Callable[[list[T]], bool]
) -> set[asyncio.Future[T]]:
    """Wait LATE_S for calls, and then for the rest unless the answers are enough; return those that ended."""
    asked = set(calls)
    if not asked:
        return asked
    done, late = await asyncio.wait(asked, timeout=LATE_S)
    if late and not are_enough([call.result() for call in done if call.exception() is None]):
        done |= (await asyncio.wait(late))[0]
    return done


def _have_groups(cards: list[ServiceCard | None]) -> bool:
    """Return whether there are runs that have not ended, and each has a group on one of these agents."""
    found = [run for card in cards if card is not None for run in card.runs]
    runs = [run for run in found if not (run.is_finished or run.failed)]
    return bool(runs) and {r.run_uid for r in runs} == {r.run_uid for r in runs if r.plan is not None}
