"""Random schedules: the events of a world are a function of a seed.

`play(seed)` plays events and checks the promises after each event; then it heals the world and checks that
everything works again (P7, P8). To replay a failure: `python -m ray_ckpt.testing --seeds SEED:SEED+1`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, TypeVar

from ray_ckpt.testing.healing import A_DAY_S, HOME, LONG_S, Healing, unknown_attempt
from ray_ckpt.testing.oracle import MAX_PENDING, must
from ray_ckpt.testing.parts import (
    NETWORK,
    Coordinator,
    Create,
    Fate,
    Group,
    Launcher,
    Local,
    Member,
    Message,
    item_options,
    label_of,
    random_options,
)
from ray_ckpt.testing.simulator import World
from ray_ckpt.testing.stores import START_S

T = TypeVar("T")

NUM_EVENTS = 200
MIN_NODES = 3  # live nodes that a schedule leaves in each cluster
MAX_NODES = 16  # nodes that ever join a small world: limits the cost of a schedule
FEW_NODES = range(3, 6)  # sizes of the first cluster of a small world
PARITY_NODES = range(5, 9)  # the same of a world whose saves have parity
PARITIES = (2, 1), (2, 2), (4, 2), (6, 2)
RELAY_NODES = 2, 8  # nodes of one relay in small and in large worlds
MAX_COORDINATORS = 12
REACH = 8  # a message overtakes at most this number of messages
MAX_ALTERED = 5  # fragments of an attempt: they give at most 32 of the 64 candidates of `choose_fragments`
MAX_ANNOTATED = 6  # newest steps that are annotated: older steps are mostly retired


@dataclass(slots=True)
class Played:
    """Event counts of a schedule."""

    events: Counter[str] = field(default_factory=Counter)
    num_commits: int = 0
    num_coded: int = 0  # parity files
    num_exported: int = 0  # checkpoints of which items were uploaded alone
    num_links: int = 0  # still files that share the bytes of an earlier checkpoint
    num_sessions: int = 0
    num_records: int = 0
    num_messages: int = 0


class Schedule:
    """A world, and the random generator that chooses the world's events.

    The size of the first cluster is drawn from `sizes`. In a large world, an event
    delivers more messages and moves more ranks, so that saves of many nodes are completed.
    """

    def __init__(
        self, seed: int, sizes: range = FEW_NODES, *, with_parity: bool = False, with_items: bool = False
    ) -> None:
        self.chance = chance = random.Random(seed)
        options = random_options(chance, keep_local_at_end=seed % 4 == 3)
        if seed % 7 == 5:
            options = replace(options, spare_nodes="role=spare")  # of all nodes, those that are idle
        if salvages(seed):
            options = replace(options, salvage=True, salvage_copy=seed // 20 % 2 == 1)
        self.more_nodes = 0  # of each group: a parity group needs several nodes
        if with_parity:  # drawn apart, so that a seed without parity plays as before
            apart = random.Random(f"parity {seed}")
            options = replace(options, replicas=1, parity=apart.choice(PARITIES))
            self.more_nodes = apart.choice([1, 2, 3])
        if with_items:
            options = item_options(random.Random(f"items {seed}"), options)
        size = chance.choice(sizes)
        self.scale = max(1, size // FEW_NODES[-1])  # factor of the sizes of groups and batches
        self.max_nodes = MAX_NODES * self.scale
        clusters = {HOME: size}
        if chance.random() < 0.4:
            clusters["west"] = 3
        self.world = World(
            options,
            clusters,
            ranks_per_node=chance.choice([1, 1, 2]),
            disk_bytes=chance.choice([5_000, 100_000]),
            relay_nodes=RELAY_NODES[self.scale > 1] if seed % 3 == 2 else 0,
            has_still_files=seed % 2 == 0,
        )
        self.world.oracle.num_classes = 1 + seed // 10 % 2
        self.foreign = unknown_attempt(self.chance, "1" * 32)  # attempt of an older log on the same path
        self.world.upload_late(self.foreign, age_s=2 * A_DAY_S)
        self.launchers = {name: Launcher(f"{name}-driver", name) for name in clusters}
        self.world.launchers = {launcher.name: launcher for launcher in self.launchers.values()}
        self.altered: Counter[str] = Counter()  # fragments that were altered, by attempt
        self.played = Played()
        self.story: list[str] = []
        self.faults = chance.choice([0.0, 0.02, 0.05])  # share of messages lost or delivered twice
        self.world.disks_fail = self.faults > 0
        self.cuts = random.Random(f"cuts {seed}")  # of a node's ranks from all sources
        self.slowness = chance.choice([0.0, 0.1, 0.3])  # share of messages that all others overtake
        weights = self._weights()
        self._events = list(weights)
        self._cumulative = list(accumulate(weights.values()))

    def _weights(self) -> dict[Callable[[], str | None], int]:
        """Map each event to its share; an event returns a line for the story, or None if it cannot happen."""
        chance = self.chance
        return {
            self.deliver_some: 100,
            self.ranks_act: 60,
            self.time_passes: 12,
            self.launchers_act: 10,
            self.store_changes: 3,
            self.coordinator_restarts: 5,
            self.coordinator_dies: 1,
            self.service_stops: 2,
            self.coordinator_freezes: 3,
            self.node_goes: 3,
            self.links_change: 4,
            self.node_comes: 2,
            self.agent_crashes: 1,
            self.agent_revives: 3,
            self.ranks_die: 1,
            self.driver_comes: 1,
            self.bytes_corrupted: 1,
            self.fragment_altered: chance.choice([0, 0, 2]),
            self.clock_jumps: 1,
            self.node_drains: 1,
            self.node_gets_notice: 1,
            self.run_finishes: 1,
            self.ranks_report: 3,
            self.ranks_meet: 3,
            self.ranks_wait: 1,
            self.user_pins: 2,
            self.user_annotates: 2,
            self.user_drills: 2,
            self.user_pins_aside: chance.choice([0, 0, 1]),
            self.log_is_trimmed: chance.choice([0, 0, 0, 1]),
            self.a_day_passes: chance.choice([0, 1]),
            self.files_arrive_late: 1,
            # Without salvages, no number is drawn for these.
            self.rank_finishes_step: 60 * self.world.options.salvage,
            self.rank_dies: 8 * self.world.options.salvage,
            self.survivor_offers: 60 * self.world.options.salvage,
            self.launcher_salvages: 1 * self.world.options.salvage,
        }

    def happen(self) -> None:
        """Play one event that changes the world."""
        while True:
            (event,) = self.chance.choices(self._events, cum_weights=self._cumulative)
            line = event()
            if line is not None:
                break
        self.played.events[event.__name__] += 1
        self.story.append(line)
        for process in self.world.coordinators.values():
            pending = process.num_pending if process.is_up else 0
            must(pending <= MAX_PENDING, "P8", f"{process.name} has {pending} records in its queue")

    def _any(self, candidates: Sequence[T]) -> T | None:
        return self.chance.choice(candidates) if candidates else None

    def _running_launcher(self) -> Launcher | None:
        return self._any([la for la in self.world.launchers.values() if la.state == "running"])

    def _coordinator(self) -> Coordinator | None:
        return self._any([process for process in self.world.coordinators.values() if process.is_up])

    # -- messages ------------------------------------------------------------------------------------

    def deliver_some(self) -> str | None:
        if not self.world.wire:
            return None
        number = self.chance.choice([1, 4, 8, 16, 24]) * self.scale
        return "deliver " + " ".join(name for _ in range(number) if (name := self._deliver_one()))

    def _deliver_one(self) -> str:
        wire, chance = self.world.wire, self.chance
        if not wire:
            return ""
        index = chance.randrange(min(len(wire), REACH)) if chance.random() < 0.4 else 0
        message = wire[index]
        if not self.world.can_deliver(message) or chance.random() < self.slowness:
            wire.append(wire.pop(index))  # all other messages overtake this one
            return ""
        if isinstance(message, Create) and message.is_late and chance.random() < 0.6:
            wire.append(wire.pop(index))
            return ""
        fate = _fate(chance, self.faults, message)
        twice = isinstance(message, NETWORK) and chance.random() < self.faults
        self.played.num_messages += 1
        self.world.deliver(index, fate, twice=twice)
        return f"{label_of(message)}{'' if fate == 'delivered' else f'({fate})'}{'(twice)' if twice else ''}"

    # -- ranks and launchers ---------------------------------------------------------------------------

    def ranks_act(self) -> str | None:
        lines: list[str] = []
        for _ in range(self.scale):
            ready: list[tuple[Launcher, Group, Member]] = []
            for launcher, group, member in self.world.members():
                is_free = not member.busy or self.chance.random() < 0.1
                if member.state == "waiting" or (is_free and self.world.can_save(group, member)):
                    ready.append((launcher, group, member))
            if not ready:
                break
            launcher, group, member = self.chance.choice(ready)
            if member.state == "waiting":
                is_cut_off = self.cuts.random() < self.faults
                self.world.read_state(member, launcher.name, is_cut_off=is_cut_off)
                lines.append(f"{member.node} reads" + ", cut off" * is_cut_off)
            else:
                self.world.save(group, member, self.chance.randint(1, 3))
                lines.append(f"{member.node} saves {group.steps[member.saved - 1]}")
        return ", ".join(lines) or None

    def launchers_act(self) -> str | None:
        if (
            launcher := self._any(
                [launcher for launcher in self.world.launchers.values() if self._wants_group(launcher)]
            )
        ) is None:
            return None
        size = self.chance.choice([1, 2, 2, 2, 3]) * self.scale + self.more_nodes
        lineage = self.world.oracle.history.lineage()
        launcher.resume = self.chance.choices(["auto", "never", "must"], [96, 2, 2])[0]
        if lineage and self.chance.random() < 0.03:
            launcher.resume = f"step:{self.chance.choice(lineage).step}"
        live = sorted(self.world.live(launcher.service))
        is_absent = self.chance.random() < self.faults  # an agent does not answer a call to all agents
        self.world.absent = frozenset(live[-1:]) if is_absent else frozenset()
        self.world.launch(launcher.name, size, in_parts=self.chance.random() < 0.2)
        return f"{launcher.name} launches"

    def _wants_group(self, launcher: Launcher) -> bool:
        """Return whether a launcher begins a group: its last one has lost ranks, and is perhaps salvaged."""
        if launcher.state != "running":
            return launcher.state == "idle"
        assert launcher.group is not None
        is_lost = any(member.state == "ended" for member in launcher.group.members) or launcher.group.dead
        return bool(is_lost) and not (self.world.options.salvage and self.chance.random() < 0.9)

    def ranks_die(self) -> str | None:
        if (launcher := self._running_launcher()) is None:
            return None
        self.world.kill_ranks(launcher.name)
        return f"a rank of {launcher.name} dies"

    def rank_finishes_step(self) -> str | None:
        """Let the ranks of a group finish a step, one or all of them."""
        world, chance = self.world, self.chance
        found = [(g, x, rank) for _, g, x in world.members() if x.state == "training" for rank in x.ranks]
        chance.shuffle(found)
        finished = [str(k) for g, x, k in found[: chance.choice([1, 8, 8])] if world.finish_step(g, x, k)]
        return f"rank(s) {', '.join(finished)} finish a step" if finished else None

    def rank_dies(self) -> str | None:
        """Let one rank of a group die; the others find that their collective operations fail."""
        alive = [(g, k) for _, g, x in self.world.members() for k in x.ranks if k in g.done]
        if (found := self._any(alive)) is None:
            return None
        self.world.kill_rank(*found)
        return f"rank {found[1]} dies alone"

    def survivor_offers(self) -> str | None:
        """Let a rank of a group that has lost ranks offer its state."""
        offers = [
            (group, member, rank)
            for _, group, member in self.world.members()
            for rank in member.ranks
            if member.state == "training"
            and rank in group.done
            and rank not in group.dead | group.offered
            and (group.dead or any(other.state == "ended" for other in group.members))
        ]
        offers = offers if self.chance.random() < 0.6 else offers[:1]
        for group, member, rank in offers:
            self.world.offer(group, member, rank)
        return ", ".join(f"rank {k} offers step {g.done[k]}" for g, _, k in offers) or None

    def launcher_salvages(self) -> str | None:
        if (launcher := self._running_launcher()) is None:
            return None
        self.world.request_salvage(launcher)
        return f"{launcher.name} waits for a salvage"

    def driver_comes(self) -> str | None:
        """Start another driver with the same run name, perhaps after the death of the first driver."""
        if len(self.world.launchers) >= 4:
            return None
        service = self.chance.choice(sorted(self.launchers))
        first = self.launchers[service]
        if self.chance.random() < 0.7:
            self.world.kill_launcher(first.name)
        name = f"{service}-driver-{len(self.world.launchers)}"
        driver = Launcher(name, service, is_job=self.chance.random() < 0.3)
        self.launchers[service] = self.world.launchers[name] = driver
        return f"{name} comes"

    def ranks_report(self) -> str | None:
        if (launcher := self._running_launcher()) is None:
            return None
        self.world.report_progress(launcher)
        return f"ranks of {launcher.name} report"

    def ranks_meet(self) -> str | None:
        """Let the ranks of a node reach a barrier."""
        candidates = [member for *_, member in self.world.members() if member.state == "training"]
        if (member := self._any(candidates)) is None:
            return None
        self.world.meet(member, self.chance.choice([None, None, 1]))
        return f"{member.node} comes to barrier {member.met + 1}"

    def ranks_wait(self) -> str | None:
        """Let a rank of a node restore before the other ranks."""
        candidates = [(la, x) for la, _, x in self.world.members() if x.state == "waiting"]
        if (found := self._any(candidates)) is None:
            return None
        launcher, member = found
        self.world.read_state(member, launcher.name, num_ranks=1)
        return f"a rank on {member.node} reads"

    def user_pins(self) -> str | None:
        """Pin a checkpoint, or remove a pin."""
        world, chance = self.world, self.chance
        service = chance.choice(sorted(self.launchers))
        if world.pins and chance.random() < 0.5:
            token = chance.choice(list(world.pins))
            world.unpin(service, token)
            return f"{token} is unpinned"
        known = list(world.oracle.history.checkpoints)
        if not known:
            return None
        attempt = chance.choice(known)
        end_s = START_S + world.now_s + chance.choice([60.0, 100_000.0])
        expires_at_s = None if chance.random() < 0.5 else end_s
        world.pin(service, attempt, expires_at_s)
        return f"{attempt} is pinned"

    def user_annotates(self) -> str | None:
        """Annotate a step that is in the log, live or not, or that waits to be logged."""
        world, chance = self.world, self.chance
        steps = [c.step for c in world.oracle.history.checkpoints.values()]
        steps += [step for _, group, _ in world.members() for step in group.steps[-1:]]
        if not steps:
            return None
        step = chance.choice(steps[-MAX_ANNOTATED:])
        world.annotate(chance.choice(sorted(self.launchers)), step, chance.choice(["eval", "loss"]))
        return f"step {step} is annotated"

    def user_drills(self) -> str | None:
        """Report a drill of a checkpoint that is live, or was live when the drill began."""
        world, chance = self.world, self.chance
        known = list(world.oracle.history.checkpoints)
        if not known:
            return None
        attempt = chance.choice(known)
        world.drill(chance.choice(sorted(self.launchers)), attempt, passed=chance.random() < 0.7)
        return f"{attempt} is drilled"

    def user_pins_aside(self) -> str | None:
        """Pin a checkpoint by writing to the log directly, also while a coordinator is at work."""
        world, lineage = self.world, self.world.oracle.history.lineage()
        if not lineage or world.storage.is_away:
            return None
        step = self.chance.choice(lineage).step
        world.write_aside(step, f"aside-{world.clock}")
        return f"step {step} is pinned on the log alone"

    def run_finishes(self) -> str | None:
        if (launcher := self._running_launcher()) is None:
            return None
        ends_group = self.chance.random() < 0.2
        self.world.finish(launcher.name, ends_group=ends_group)
        return f"{launcher.name} {'finishes' if ends_group else 'wants it durable'}"

    def log_is_trimmed(self) -> str:
        self.world.trim_log()
        return "the log is trimmed"

    # -- time, store, coordinators -----------------------------------------------------------------------

    def time_passes(self) -> str:
        seconds = self.chance.choice([0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 5.0, 11.0, 31.0, LONG_S])
        self.world.wait(seconds)
        self.tick_all()
        return f"{seconds} s"

    def a_day_passes(self) -> str:
        self.world.wait(A_DAY_S)
        self.tick_all()
        return "a day"

    def files_arrive_late(self) -> str | None:
        """Upload a file of a checkpoint whose bytes are deleted, or of an attempt that was never logged."""
        world, chance = self.world, self.chance
        gone = [c.id for c in world.oracle.history.checkpoints.values() if c.state == "collected"]
        attempt = chance.choice(gone) if gone and chance.random() < 0.5 else unknown_attempt(self.chance)
        world.upload_late(attempt)
        return f"a file of {attempt.attempt} is uploaded late"

    def tick_all(self) -> None:
        for process in list(self.world.coordinators.values()):
            if process.is_up and not process.is_frozen:
                self.world.tick(process.name)

    def store_changes(self) -> str | None:
        """Make the store unreachable, or reachable again, which is more likely."""
        storage = self.world.storage
        if not storage.is_away and self.chance.random() < 0.6:
            return None
        storage.is_away = not storage.is_away
        return "the store goes" if storage.is_away else "the store is back"

    def coordinator_restarts(self) -> str | None:
        """Start a new coordinator, as Ray does, if the process of that name is dead or seems dead."""
        missing = []
        for service in self.launchers:
            process = self.world.process_of(service)
            if process is None or process.is_frozen:
                missing.append(service)
        if not missing or len(self.world.coordinators) >= MAX_COORDINATORS:
            return None
        service = self.chance.choice(missing)
        self.world.start_coordinator(service)
        return f"a coordinator of {service} starts"

    def coordinator_dies(self) -> str | None:
        if (process := self._coordinator()) is None:
            return None
        self.world.kill_coordinator(process.name)
        return f"{process.name} dies"

    def service_stops(self) -> str:
        service = self.chance.choice(sorted(self.launchers))
        return f"{service} {'stops' if self.world.stop_service(service) else 'is not to stop'}"

    def coordinator_freezes(self) -> str | None:
        if (process := self._coordinator()) is None:
            return None
        if process.is_frozen:
            self.world.thaw(process.name)
            return f"{process.name} thaws"
        self.world.freeze(process.name)
        return f"{process.name} freezes"

    def clock_jumps(self) -> str | None:
        if (process := self._coordinator()) is None:
            return None
        self.world.set_clock(process.name, self.chance.choice([-3_600.0, 0.0, 3_600.0]))
        return f"the clock of {process.name} jumps"

    # -- nodes ---------------------------------------------------------------------------------------

    def node_goes(self) -> str | None:
        service = self.chance.choice(sorted(self.launchers))
        live = sorted(self.world.live(service))
        if len(live) <= MIN_NODES - 1:
            return None
        name = self.chance.choice(live)
        how: Literal["destroyed", "kept"] = "destroyed" if self.chance.random() < 0.5 else "kept"
        self.world.lose_node(name, disk=how)
        return f"{name} goes ({how})"

    def links_change(self) -> str | None:
        """Cut the link between two nodes, in one direction or both, or mend a link."""
        world, chance = self.world, self.chance
        if world.silent and chance.random() < 0.5:
            name, peer = chance.choice(sorted(world.silent))
            world.mend(name, peer)
            return f"{name} reaches {peer}"
        live = sorted(world.live(chance.choice(sorted(self.launchers))))
        if len(live) < 2:
            return None
        name, peer = chance.sample(live, 2)
        world.cut(name, peer)
        if both := chance.random() < 0.5:
            world.cut(peer, name)
        return f"{name} {'and' if both else 'does not reach'} {peer}{' are cut off' if both else ''}"

    def node_comes(self) -> str | None:
        if len(self.world.nodes) >= self.max_nodes:
            return None
        used = {id(node.disk) for node in self.world.nodes.values() if node.is_alive}
        away = [x for x in self.world.nodes.values() if id(x.disk) not in used and not x.disk.is_destroyed]
        if away and self.chance.random() < 0.7:
            node = self.chance.choice(away)
            self.world.return_disk(node.name)
            return f"the machine of {node.name} comes back"
        return f"{self.world.join(self.chance.choice(sorted(self.launchers))).name} joins"

    def agent_crashes(self) -> str | None:
        candidates = [node.name for node in self.world.nodes.values() if node.agent is not None]
        if (name := self._any(candidates)) is None:
            return None
        self.world.crash_agent(name)
        return f"the agent of {name} crashes"

    def agent_revives(self) -> str | None:
        candidates = [x.name for x in self.world.nodes.values() if x.is_alive and x.agent is None]
        if (name := self._any(candidates)) is None:
            return None
        self.world.restart_agent(name)
        return f"{name} needs an agent"

    def node_drains(self) -> str | None:
        node = self.chance.choice(list(self.world.nodes.values()))
        node.is_draining = not node.is_draining
        return f"{node.name} {'is draining' if node.is_draining else 'stays'}"

    def node_gets_notice(self) -> str | None:
        """Let a cloud, or a signal, announce that a live node is about to go; it may stay after all."""
        live = sorted(self.world.live(self.chance.choice(sorted(self.launchers))))
        if (name := self._any(live)) is None:
            return None
        left_s = self.chance.choice([None, 30.0, 120.0])
        self.world.notify_preemption(name, left_s)
        return f"{name} is about to go{'' if left_s is None else f' in {left_s} s'}"

    def bytes_corrupted(self) -> str | None:
        there = [(x.name, copy) for x in self.world.nodes.values() if x.is_alive for copy in x.disk.fragments]
        if not there or self.chance.random() < 0.5:
            return None
        name, copy = self.chance.choice(there)
        self.world.corrupt(name, copy)
        return f"{copy} on {name} rots"

    def fragment_altered(self) -> str | None:
        """Alter a fragment of an attempt that is not in the log, at most MAX_ALTERED of each attempt."""
        logged = self.world.oracle.history.checkpoints
        nodes = [node for node in self.world.nodes.values() if node.is_alive]
        there = [(x.name, copy) for x in nodes for copy in x.disk.fragments if copy[0] not in logged]
        there = [(name, copy) for name, copy in there if self.altered[copy[0]] < MAX_ALTERED]
        if not there:
            return None
        name, copy = self.chance.choice(there)
        self.altered[copy[0]] += 1
        self.world.corrupt(name, copy, alters=True)
        return f"{copy} on {name} is altered"


def salvages(seed: int) -> bool:
    """Return whether the schedule of a seed has salvages; the other seeds draw no number for them."""
    return seed % 10 == 9


def _fate(chance: random.Random, faults: float, message: Message) -> Fate:
    if isinstance(message, Create) and message.is_late:
        return "lost" if chance.random() < 0.3 else "delivered"
    if not isinstance(message, (*NETWORK, Create, Local)) or chance.random() > 2 * faults:
        return "delivered"
    return "lost" if chance.random() < 0.5 else "unanswered"


def play(
    seed: int,
    num_events: int = NUM_EVENTS,
    sizes: range = FEW_NODES,
    *,
    with_parity: bool = False,
    with_items: bool = False,
) -> Played:
    """Play `num_events` events, then heal the world; a Violation carries the seed and the story."""
    schedule = Schedule(seed, sizes, with_parity=with_parity, with_items=with_items)
    try:
        for _ in range(num_events):
            schedule.happen()
        Healing(schedule).heal()
    except Exception as error:
        error.add_note(f"seed {seed}, {num_events} events: {'; '.join(schedule.story)}")
        raise
    history = schedule.world.oracle.history
    schedule.played.num_coded = len(schedule.world.oracle.coded_on)
    schedule.played.num_exported = schedule.world.oracle.num_exported
    schedule.played.num_links = sum(disk.num_links for disk in schedule.world.disks())
    schedule.played.num_commits = schedule.world.oracle.num_commits
    schedule.played.num_sessions = len(history.sessions)
    schedule.played.num_records = history.next_seq
    return schedule.played
