"""Schedules by chance: what happens to a world is a function of a seed.

`play(seed)` lets things happen, checks the promises after each, then heals the world and sees whether it
works again (P7, P8). To replay a failure: `python -m ray_ckpt.testing --seeds SEED:SEED+1`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ray_ckpt.config import RunOptions
from ray_ckpt.errors import RestoreError
from ray_ckpt.format.names import make_attempt
from ray_ckpt.testing.oracle import DAY_S, MAX_PENDING, Violation, must
from ray_ckpt.testing.parts import (
    NETWORK,
    Answer,
    Create,
    Fate,
    Group,
    Launcher,
    Local,
    Member,
    Message,
)
from ray_ckpt.testing.simulator import World
from ray_ckpt.testing.stores import START_S
from ray_ckpt.types import AttemptId, Level

NUM_EVENTS = 200
HOME = "east"  # the cluster that is left in the end
MIN_NODES = 3  # of each cluster that are left alive
MAX_NODES = 16  # that ever join: bounds what a schedule costs
MAX_COORDINATORS = 12
REACH = 8  # a message overtakes at most so many others
LONG_S = 70.0  # beyond all time-outs of a save
A_DAY_S = DAY_S + 3_600.0  # beyond the age at which nobody's files go, and the time until somebody looks
MAX_ANNOTATED = 6  # steps, the newest: older ones are retired more often than not
HEAL_ROUNDS = 60  # of delivering everything and waiting; a world that needs more does not come to rest
DAYS_TO_SWEEP = 3  # one to become old, one to be found, one to be told
MAX_TIDYING = 4  # groups after which every stray has been some group's to delete
MAX_DELIVERIES = 4_000  # in a round


@dataclass(slots=True)
class Played:
    """What a schedule has been through."""

    events: Counter[str] = field(default_factory=Counter)
    num_commits: int = 0
    num_sessions: int = 0
    num_records: int = 0
    num_messages: int = 0


class Schedule:
    """A world and the chance that moves it."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        options = RunOptions(
            keep_last=chance.choice([1, 2, 3]),
            replicas=chance.choice([0, 1, 1, 1, 2]),
            remote_every=chance.choice([1, 2, 5]),
            remote_every_s=chance.choice([None, None, 60.0]),
            keep_local=chance.choice([1, 2]),
            retire_grace_s=chance.choice([0.0, 60.0]),
            scrub_every_s=chance.choice([100.0, 7 * 24 * 3600.0]),
            keep_best=chance.choice([None, ("eval", "max", 1)]),
            keep_local_at_end=seed % 4 == 3,
        )
        clusters = {HOME: chance.choice([3, 4, 5])}
        if chance.random() < 0.4:
            clusters["west"] = 3
        self.world = World(
            options,
            clusters,
            ranks_per_node=chance.choice([1, 1, 2]),
            disk_bytes=chance.choice([5_000, 100_000]),
        )
        self.foreign = self._nobodys()  # of a log that was here before
        self.world.upload_late(self.foreign, age_s=2 * A_DAY_S)
        self.launchers = {name: Launcher(f"{name}-driver", name) for name in clusters}
        self.world.launchers = {launcher.name: launcher for launcher in self.launchers.values()}
        self.played = Played()
        self.story: list[str] = []
        self.faults = chance.choice([0.0, 0.02, 0.05])  # share of messages that are lost, or come twice
        self.slowness = chance.choice([0.0, 0.1, 0.3])  # share of those that all others overtake
        self._weights: dict[Callable[[], str | None], int] = {
            self.deliver_some: 70,
            self.ranks_act: 60,
            self.time_passes: 12,
            self.launchers_act: 8,
            self.store_changes: 3,
            self.coordinator_restarts: 5,
            self.coordinator_dies: 1,
            self.coordinator_freezes: 3,
            self.node_goes: 3,
            self.links_change: 4,
            self.node_comes: 2,
            self.agent_crashes: 1,
            self.agent_revives: 3,
            self.ranks_die: 1,
            self.driver_comes: 1,
            self.bytes_corrupted: 1,
            self.clock_jumps: 1,
            self.node_drains: 1,
            self.run_finishes: 1,
            self.ranks_report: 3,
            self.ranks_meet: 3,
            self.ranks_wait: 1,
            self.somebody_pins: 2,
            self.somebody_annotates: 2,
            self.somebody_drills: 2,
            self.somebody_pins_aside: chance.choice([0, 0, 1]),
            self.log_is_trimmed: chance.choice([0, 0, 0, 1]),
            self.a_day_passes: chance.choice([0, 1]),
            self.files_arrive_late: 1,
        }
        self._what = list(self._weights)
        self._cumulative: list[int] = []
        total = 0
        for weight in self._weights.values():
            total += weight
            self._cumulative.append(total)

    def happen(self) -> None:
        """One event that makes a difference."""
        while True:
            (what,) = self.chance.choices(self._what, cum_weights=self._cumulative)
            told = what()
            if told is not None:
                break
        self.played.events[what.__name__] += 1
        self.story.append(told)
        for process in self.world.coordinators.values():
            pending = process.num_pending if process.is_up else 0
            must(pending <= MAX_PENDING, "P8", f"{process.name} has {pending} records in its queue")

    # -- messages ------------------------------------------------------------------------------------

    def deliver_some(self) -> str | None:
        if not self.world.wire:
            return None
        number = self.chance.choice([1, 2, 4, 8, 16])
        return "deliver " + " ".join(name for _ in range(number) if (name := self._deliver_one()))

    def _deliver_one(self) -> str:
        wire, chance = self.world.wire, self.chance
        if not wire:
            return ""
        index = chance.randrange(min(len(wire), REACH)) if chance.random() < 0.4 else 0
        message = wire[index]
        if not self.world.can_deliver(message) or chance.random() < self.slowness:
            wire.append(wire.pop(index))  # all others overtake it
            return ""
        if isinstance(message, Create) and message.is_late and chance.random() < 0.6:
            wire.append(wire.pop(index))
            return ""
        fate = self._fate(message)
        twice = isinstance(message, NETWORK) and chance.random() < self.faults
        self.played.num_messages += 1
        self.world.deliver(index, fate, twice=twice)
        return f"{_label(message)}{'' if fate == 'heard' else f'({fate})'}{'(twice)' if twice else ''}"

    def _fate(self, message: Message) -> Fate:
        chance, faults = self.chance, self.faults
        if isinstance(message, Create) and message.is_late:
            return "lost" if chance.random() < 0.3 else "heard"
        if not isinstance(message, (*NETWORK, Create, Local)) or chance.random() > 2 * faults:
            return "heard"
        return "lost" if chance.random() < 0.5 else "unheard"

    # -- ranks and launchers ---------------------------------------------------------------------------

    def ranks_act(self) -> str | None:
        ready: list[tuple[Launcher, Group, Member]] = []
        for launcher, group, member in self.world.members():
            is_free = not member.busy or self.chance.random() < 0.1
            if member.state == "waiting" or (is_free and self.world.can_save(group, member)):
                ready.append((launcher, group, member))
        if not ready:
            return None
        launcher, group, member = self.chance.choice(ready)
        if member.state == "waiting":
            self.world.read_state(member, launcher.name)
            return f"{member.node} reads"
        self.world.save(group, member, self.chance.randint(1, 3))
        return f"{member.node} saves {group.steps[member.saved - 1]}"

    def launchers_act(self) -> str | None:
        idle = [launcher for launcher in self.world.launchers.values() if self._wants_group(launcher)]
        if not idle:
            return None
        launcher = self.chance.choice(idle)
        self._launch(launcher)
        return f"{launcher.name} launches"

    def _wants_group(self, launcher: Launcher) -> bool:
        if launcher.state == "running":
            assert launcher.group is not None
            return any(member.state == "ended" for member in launcher.group.members)
        return launcher.state == "idle"

    def _launch(self, launcher: Launcher) -> None:
        size = self.chance.choice([1, 2, 2, 2, 3])
        lineage = self.world.oracle.history.lineage()
        launcher.resume = self.chance.choices(["auto", "never", "must"], [96, 2, 2])[0]
        if lineage and self.chance.random() < 0.03:
            launcher.resume = f"step:{self.chance.choice(lineage).step}"
        self.world.launch(launcher.name, size, self._absent(launcher.service))

    def _absent(self, service: str) -> frozenset[str]:
        """Agents that do not answer when all are asked."""
        live = sorted(self.world.live(service))
        return frozenset(live[-1:]) if self.chance.random() < self.faults else frozenset()

    def ranks_die(self) -> str | None:
        running = [la for la in self.world.launchers.values() if la.state == "running"]
        if not running:
            return None
        launcher = self.chance.choice(running)
        self.world.kill_ranks(launcher.name)
        return f"a rank of {launcher.name} dies"

    def driver_comes(self) -> str | None:
        """Another driver with the same run name; perhaps because the first one died."""
        if len(self.world.launchers) >= 4:
            return None
        service = self.chance.choice(sorted(self.launchers))
        first = self.launchers[service]
        if self.chance.random() < 0.7:
            self.world.kill_launcher(first.name)
            if self.chance.random() < 0.5:
                self.world.miss_launcher(first.name)
        name = f"{service}-driver-{len(self.world.launchers)}"
        self.launchers[service] = self.world.launchers[name] = Launcher(name, service)
        return f"{name} comes"

    def ranks_report(self) -> str | None:
        running = [la for la in self.world.launchers.values() if la.state == "running"]
        if not running:
            return None
        launcher = self.chance.choice(running)
        self.world.report_progress(launcher)
        return f"ranks of {launcher.name} report"

    def ranks_meet(self) -> str | None:
        """Those of a node come to a barrier."""
        ready = [member for *_, member in self.world.members() if member.state == "training"]
        if not ready:
            return None
        member = self.chance.choice(ready)
        self.world.meet(member)
        return f"{member.node} comes to barrier {member.met + 1}"

    def ranks_wait(self) -> str | None:
        """One of a node's has restored before the others."""
        ready = [member for *_, member in self.world.members() if member.plan is not None]
        if not ready:
            return None
        member = self.chance.choice(ready)
        self.world.wait_to_restore(member)
        return f"a rank on {member.node} waits to restore"

    def somebody_pins(self) -> str | None:
        """Or takes a pin away again."""
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

    def somebody_annotates(self) -> str | None:
        """A step that is in the log, live or not, or one that is about to be."""
        world, chance = self.world, self.chance
        steps = [c.step for c in world.oracle.history.checkpoints.values()]
        steps += [step for _, group, _ in world.members() for step in group.steps[-1:]]
        if not steps:
            return None
        step = chance.choice(steps[-MAX_ANNOTATED:])
        world.annotate(chance.choice(sorted(self.launchers)), step, chance.choice(["eval", "loss"]))
        return f"step {step} is annotated"

    def somebody_drills(self) -> str | None:
        """A checkpoint that is live, or was when the drill began."""
        world, chance = self.world, self.chance
        known = list(world.oracle.history.checkpoints)
        if not known:
            return None
        attempt = chance.choice(known)
        world.drill(chance.choice(sorted(self.launchers)), attempt, passed=chance.random() < 0.7)
        return f"{attempt} is drilled"

    def somebody_pins_aside(self) -> str | None:
        """On the log alone, whoever is at work."""
        world, lineage = self.world, self.world.oracle.history.lineage()
        if not lineage or world.storage.is_away:
            return None
        step = self.chance.choice(lineage).step
        world.write_aside(step, f"aside-{world.clock}")
        return f"step {step} is pinned on the log alone"

    def run_finishes(self) -> str | None:
        running = [la for la in self.world.launchers.values() if la.state == "running"]
        if not running:
            return None
        launcher = self.chance.choice(running)
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
        self._tick_all()
        return f"{seconds} s"

    def a_day_passes(self) -> str:
        self.world.wait(A_DAY_S)
        self._tick_all()
        return "a day"

    def files_arrive_late(self) -> str | None:
        """Of a checkpoint whose bytes are gone, or of one that the log never heard of."""
        world, chance = self.world, self.chance
        gone = [c.id for c in world.oracle.history.checkpoints.values() if c.state == "collected"]
        attempt = chance.choice(gone) if gone and chance.random() < 0.5 else self._nobodys()
        world.upload_late(attempt)
        return f"a file of {attempt.attempt} is uploaded late"

    def _nobodys(self) -> AttemptId:
        number = self.chance.randrange(10**6)
        return make_attempt(run_uid="0" * 32, session=number, step=number, attempt=0)

    def _tick_all(self) -> None:
        for process in list(self.world.coordinators.values()):
            if process.is_up and not process.is_frozen:
                self.world.tick(process.name)
            if process.is_up and process.takes_over and process.machine.is_open and not process.is_frozen:
                self.world.take_over(process.name, self._absent(process.service))

    def store_changes(self) -> str | None:
        """It comes back sooner than it goes."""
        storage = self.world.storage
        if not storage.is_away and self.chance.random() < 0.6:
            return None
        storage.is_away = not storage.is_away
        return "the store goes" if storage.is_away else "the store is back"

    def coordinator_restarts(self) -> str | None:
        """Ray starts a new process if the one of that name is dead, or seems to be."""
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
        up = [p for p in self.world.coordinators.values() if p.is_up]
        if not up:
            return None
        process = self.chance.choice(up)
        self.world.kill_coordinator(process.name)
        return f"{process.name} dies"

    def coordinator_freezes(self) -> str | None:
        up = [p for p in self.world.coordinators.values() if p.is_up]
        if not up:
            return None
        process = self.chance.choice(up)
        if process.is_frozen:
            self.world.thaw(process.name)
            return f"{process.name} thaws"
        self.world.freeze(process.name)
        return f"{process.name} freezes"

    def clock_jumps(self) -> str | None:
        up = [p for p in self.world.coordinators.values() if p.is_up]
        if not up:
            return None
        process = self.chance.choice(up)
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
        """A node does not reach another one, in one direction or in both, or does again."""
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
        if len(self.world.nodes) >= MAX_NODES:
            return None
        used = {id(node.disk) for node in self.world.nodes.values() if node.is_alive}
        away = [x for x in self.world.nodes.values() if id(x.disk) not in used and not x.disk.is_destroyed]
        if away and self.chance.random() < 0.7:
            node = self.chance.choice(away)
            self.world.return_disk(node.name)
            return f"the machine of {node.name} comes back"
        return f"{self.world.join(self.chance.choice(sorted(self.launchers))).name} joins"

    def agent_crashes(self) -> str | None:
        there = [node.name for node in self.world.nodes.values() if node.agent is not None]
        if not there:
            return None
        name = self.chance.choice(there)
        self.world.crash_agent(name)
        return f"the agent of {name} crashes"

    def agent_revives(self) -> str | None:
        gone = [x.name for x in self.world.nodes.values() if x.is_alive and x.agent is None]
        if not gone:
            return None
        name = self.chance.choice(gone)
        self.world.restart_agent(name)
        return f"{name} asks for an agent"

    def node_drains(self) -> str | None:
        node = self.chance.choice(list(self.world.nodes.values()))
        node.is_draining = not node.is_draining
        return f"{node.name} {'is draining' if node.is_draining else 'stays'}"

    def bytes_corrupted(self) -> str | None:
        there = [(x.name, copy) for x in self.world.nodes.values() if x.is_alive for copy in x.disk.fragments]
        if not there or self.chance.random() < 0.5:
            return None
        name, copy = self.chance.choice(there)
        self.world.corrupt(name, copy)
        return f"{copy} on {name} rots"

    # -- in the end ------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Faults are over: one driver opens the run, everything works, and what is not needed goes."""
        self.faults = 0.0
        world = self.world
        world.storage.is_away = False
        world.silent.clear()
        for process in world.coordinators.values():
            world.thaw(process.name)
        for node in world.nodes.values():
            node.is_draining = False
        for _ in range(4):
            for service in self.launchers:
                if world.process_of(service) is None:
                    world.start_coordinator(service)
            self._rest(LONG_S)
            for process in list(world.coordinators.values()):
                if process.is_up and process.takes_over and process.machine.is_open:
                    world.take_over(process.name, frozenset())
            self._rest(LONG_S)
        self._check_zombies()
        for name in list(world.launchers):
            world.kill_launcher(name)
        last = world.launchers["last"] = Launcher("last", HOME)
        attempt = self._train(last)
        world.finish(last.name)
        for _ in range(HEAL_ROUNDS):
            self._rest(LONG_S)
            if last.finished:
                break
        self._check_end(last, attempt)

    def _check_zombies(self) -> None:
        """A group that has lost the run hears of it with its next save."""
        world = self.world
        for _, group, member in world.members():
            member.saved = len(group.steps)  # all at the same step, or no save is whole
        for _, group, member in world.members():
            if world.can_save(group, member):
                world.save(group, member, 1)
        self._rest(LONG_S)
        for launcher, group, member in world.members():
            is_whole = all(x.state == "training" and world.nodes[x.node].agent for x in group.members)
            if is_whole and member.plan is not None and world.oracle.is_over(member.plan):
                raise Violation(f"P7: {launcher.name} trains on {member.node} in an ended session")

    def _train(self, launcher: Launcher) -> str:
        """A group opens and saves twice; the attempt of its last save."""
        world = self.world
        for _ in range(HEAL_ROUNDS):
            members = launcher.group.members if launcher.group is not None else []
            if launcher.state == "done":
                break
            if members and all(member.state == "training" for member in members):
                return self._save_twice(launcher)
            if launcher.state == "idle" or any(member.state == "ended" for member in members):
                errors = (launcher.error, *(member.error for member in members))
                if any(isinstance(error, RestoreError) for error in errors):
                    launcher.resume = "never"  # nothing intact is left
                world.launch(launcher.name, 2)
            for member in members:
                if member.state == "waiting":
                    world.read_state(member, launcher.name)
            self._rest(2.0)
        raise Violation(f"P7: nobody trains: {launcher.state}, {launcher.error!r}")

    def _save_twice(self, launcher: Launcher) -> str:
        group = launcher.group
        assert group is not None
        for _ in range(2):
            for member in group.members:
                self.world.save(group, member, 1)
            self._rest()
        return next(reversed(self.world.oracle.plans))

    def _check_end(self, launcher: Launcher, attempt: str) -> None:
        world, history = self.world, self.world.oracle.history
        known = history.checkpoints.get(attempt)
        must(launcher.finished, "P7", f"the run does not finish: {launcher.error}")
        must(known is not None, "P7", "the last save is not in the log")
        assert known is not None
        must(known.level is Level.DURABLE, "P7", f"the last save is {known.level.label}")
        for _ in range(6):
            self._rest(LONG_S)
        left = [c.step for c in history.checkpoints.values() if c.state == "retired"]
        must(not left, "P8", f"steps {left} are retired and never collected")
        for _ in range(MAX_TIDYING):
            if not (orphans := self._orphans()):
                break
            world.kill_ranks(launcher.name)  # what was left over while it was live goes with the next group
            self._train(launcher)
            self._rest(LONG_S)
        must(not orphans, "P8", f"folders stay on nodes: {orphans}")
        self._check_remote()
        self._check_put_away(launcher)
        world.oracle.check_log(world)

    def _check_put_away(self, launcher: Launcher) -> None:
        """Nothing of a finished run stays but what is on the storage path, or is to stay where it is."""
        world = self.world
        world.finish(launcher.name, ends_group=True)
        for _ in range(HEAL_ROUNDS):
            self._rest(LONG_S)
            if world.process_of(HOME) is None:
                break
        must(world.process_of(HOME) is None, "P8", "a finished run is not put away")
        only = {c.directory for c in world.oracle.history.live() if c.level < Level.DURABLE}
        nodes = [world.nodes[name] for name in sorted(world.live(HOME))]
        left = {directory for node in nodes for directory in node.disk.folders}
        if not world.options.keep_local_at_end:
            must(left <= only, "P8", f"a finished run leaves folders on nodes: {left}")

    def _check_remote(self) -> None:
        """What nobody needs on the storage path goes in a day, and what another log knew stays."""
        world = self.world
        world.upload_late(self._nobodys())
        for _ in range(DAYS_TO_SWEEP):
            self._rest(A_DAY_S)
        self._rest()
        storage = world.storage
        must(not storage.uploads, "P8", f"uploads stay unfinished: {storage.uploads}")
        orphans = world.oracle.orphans(world)
        must(not orphans, "P8", f"orphans stay on the storage path: {orphans}")
        must(self.foreign.directory in storage.written_s, "P5", "files of another log are gone")

    def _orphans(self) -> list[tuple[str, str]]:
        """Folders on live nodes that belong to no live checkpoint."""
        live = {c.directory for c in self.world.oracle.history.live()}
        nodes = [self.world.nodes[name] for name in sorted(self.world.live(HOME))]
        return [(node.name, d) for node in nodes for d in node.disk.folders if d not in live]

    def _rest(self, seconds: float = 0.0) -> None:
        """Everything arrives, then time passes."""
        world = self.world
        for _ in range(MAX_DELIVERIES):
            index = next((i for i, message in enumerate(world.wire) if world.can_deliver(message)), None)
            if index is None:
                break
            world.deliver(index)
        else:
            must(False, "P7", f"the world does not come to rest: {world.wire[:4]}")
        world.wait(seconds)
        self._tick_all()


def _label(message: Message) -> str:
    content = getattr(message, "event", None) or getattr(message, "effect", None)
    content = content or getattr(message, "work", None)
    if isinstance(message, Create):
        content = message.record.op
    elif isinstance(message, Answer):
        content = message.events[-1]
    return type(content or message).__name__


def play(seed: int, num_events: int = NUM_EVENTS) -> Played:
    """Let `num_events` things happen, then heal. A Violation carries the seed and the story."""
    schedule = Schedule(seed)
    try:
        for _ in range(num_events):
            schedule.happen()
        schedule.heal()
    except Exception as error:
        error.add_note(f"seed {seed}, {num_events} events: {'; '.join(schedule.story)}")
        raise
    history = schedule.world.oracle.history
    schedule.played.num_commits = schedule.world.oracle.num_commits
    schedule.played.num_sessions = len(history.sessions)
    schedule.played.num_records = history.next_seq
    return schedule.played
