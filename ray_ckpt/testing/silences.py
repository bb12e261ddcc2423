"""Schedules of silence: a group saves regularly while one node cannot reach another for some time.

Time passes evenly, copies take some seconds, and there is no other fault. So `play(seed)` can check the time
to each commit in addition to all promises. The module `schedules` cuts links among all other faults, and
checks no times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ray_ckpt.config import RunOptions
from ray_ckpt.testing.oracle import must
from ray_ckpt.testing.parts import Group, Launcher
from ray_ckpt.testing.schedules import Played
from ray_ckpt.testing.simulator import World
from ray_ckpt.transport.pulse import SILENT_S
from ray_ckpt.types import Level

HOME = "east"
STEP_S = 1.0  # seconds per step of the schedule; messages arrive within a step
START_STEPS = 20  # steps until a group must be training
PROMPT_S = 3 * STEP_S  # time for three messages: stored, reported, ordered
HEALED_S = 30.0  # time from the end of the silence until all copies exist
INTERVALS_S = (1.0, 1.0, 4.0, 4.0, 30.0)  # choices of the time between saves
SILENCES_S = (35.0, 35.0, 70.0, 130.0)
COPIES_S = (0.2, 1.0, 3.0)  # durations of a copy


@dataclass(slots=True)
class _Save:
    at_s: float
    is_in_silence: bool  # its copies may be the first copies sent to the silent peer


class _Silence:
    """A run of a few minutes in a world in which some links are silent for a while."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.saves: dict[int, _Save] = {}  # by step, until a save at or after the step is replicated
        self.story: list[str] = []
        self.committed_s = 0.0  # time of the last commit
        self.num_commits = 0
        num_nodes = chance.choice([2, 3, 3, 4, 5])
        self.options = RunOptions(
            keep_last=chance.choice([1, 2, 3]), replicas=chance.choice([1, 1, 2]), remote_every=100_000
        )
        self.world = World(self.options, {HOME: num_nodes}, ranks_per_node=chance.choice([1, 2]))
        self.size = chance.randint(2, min(num_nodes, 3))
        self.interval_s = chance.choice(INTERVALS_S)
        self.silence_s = chance.choice(SILENCES_S)
        self.goes_on = chance.random() < 0.5  # True: the group also saves after the silence
        self.world.copy_s = chance.choice(COPIES_S)
        self.world.silent_s = SILENT_S
        self.launcher = Launcher("driver", HOME)
        self.world.launchers = {self.launcher.name: self.launcher}

    # -- events ----------------------------------------------------------------------------------------

    def play(self) -> None:
        group, world, chance = self._start(), self.world, self.chance
        begin_s = world.now_s
        cut_s = begin_s + chance.choice([0.0, 7.0, 13.5, 31.0])
        heal_s, cuts = cut_s + self.silence_s, self._cuts()
        next_s = self.committed_s = begin_s
        self.story.append(
            f"{len(world.nodes)} nodes, {self.size} of them train, a save each {self.interval_s} s, a copy "
            f"takes {world.copy_s} s; from {cut_s} s to {heal_s} s packets are lost: {cuts}"
        )
        while world.now_s < heal_s + HEALED_S:
            now_s = world.now_s
            if cut_s <= now_s < heal_s and not world.silent:
                for name, peer in cuts:
                    world.cut(name, peer)
            elif now_s >= heal_s and world.silent:
                world.silent.clear()
            is_free = all(world.can_save(group, x) and not x.busy for x in group.members)
            if now_s >= next_s and is_free and (now_s < heal_s or self.goes_on):
                next_s = now_s + self.interval_s
                self._save(group, found_s=cut_s + SILENT_S + world.copy_s + self.interval_s + PROMPT_S)
            self._rest()
            self._judge(is_silent=cut_s <= now_s < heal_s)
        if not self.goes_on:
            self._judge_copies()

    def _start(self) -> Group:
        world, launcher = self.world, self.launcher
        for _ in range(START_STEPS):
            if launcher.state == "idle":
                world.launch(launcher.name, self.size)
            for member in launcher.group.members if launcher.group is not None else ():
                if member.state == "waiting":
                    world.read_state(member, launcher.name)
            self._rest()
        assert launcher.group is not None
        assert all(member.state == "training" for member in launcher.group.members)
        return launcher.group

    def _cuts(self) -> list[tuple[str, str]]:
        """Choose links to cut: to one node, from it, or both; with one other node or with all nodes."""
        chance, nodes = self.chance, sorted(self.world.nodes)
        silent = chance.choice(nodes)
        others = [node for node in nodes if node != silent]
        if chance.random() < 0.6:
            others = [chance.choice(others)]
        way = chance.choice(["to", "from", "both"])
        cuts = [(other, silent) for other in others if way != "from"]
        return cuts + [(silent, other) for other in others if way != "to"]

    def _save(self, group: Group, *, found_s: float) -> None:
        now_s = self.world.now_s
        for member in group.members:
            self.world.save(group, member, 1)
        self.saves[group.steps[-1]] = _Save(now_s, is_in_silence=now_s < found_s)

    def _rest(self) -> None:
        """Deliver all messages that can arrive, then let time pass."""
        world = self.world
        for _ in range(2):
            while (index := next((i for i, x in enumerate(world.wire) if world.can_deliver(x)), -1)) >= 0:
                world.deliver(index)
            for process in list(world.coordinators.values()):
                if process.is_up:
                    world.tick(process.name)
        world.wait(STEP_S)

    # -- checks ----------------------------------------------------------------------------------------

    def _judge(self, *, is_silent: bool) -> None:
        oracle, now_s = self.world.oracle, self.world.now_s
        if oracle.num_commits > self.num_commits:
            self.num_commits, self.committed_s = oracle.num_commits, now_s
        late_s = now_s - self.committed_s
        is_due = any(save.at_s > self.committed_s - self.interval_s for save in self.saves.values())
        must(
            not is_due or late_s <= self.options.goal_timeout_s,
            "P7",
            f"nothing was committed for {late_s} s while the group saves",
        )
        reached = max((c.step for c in oracle.history.live() if c.level >= Level.REPLICATED), default=0)
        self.saves = {step: save for step, save in self.saves.items() if step > reached}
        if is_silent and not self._can_replicate():
            # The time of open saves counts from the end of the silence.
            self.saves = dict.fromkeys(self.saves, _Save(now_s, is_in_silence=True))
        copy_s = self.world.copy_s
        for step, save in self.saves.items():
            allowed_s = 3 * copy_s + PROMPT_S + (SILENT_S + copy_s) * save.is_in_silence
            if not is_silent:
                allowed_s = max(allowed_s, HEALED_S)
            must(now_s - save.at_s <= allowed_s, "P7", f"step {step} has no copies after {allowed_s} s")

    def _can_replicate(self) -> bool:
        """Return True if each node of the group gets answers from enough other nodes for its copies."""
        assert self.launcher.group is not None
        wanted = min(self.options.replicas, len(self.world.nodes) - 1)
        return all(
            sum(self.world.reaches(member.node, peer) for peer in self.world.nodes if peer != member.node)
            >= wanted
            for member in self.launcher.group.members
        )

    def _judge_copies(self) -> None:
        """Check that each kept checkpoint has all its copies again, and that the log records them."""
        world, wanted = self.world, min(self.options.replicas + 1, len(self.world.nodes))
        in_cluster = [c for c in world.oracle.history.live() if c.level < Level.DURABLE]
        for checkpoint in in_cluster:
            for index in range(checkpoint.num_nodes):
                copy = (checkpoint.id.attempt, index)
                num = sum(node.disk.has_intact(copy) for node in world.nodes.values())
                must(
                    num >= wanted,
                    "P7",
                    f"step {checkpoint.step} has {num} of {wanted} copies, {HEALED_S} s on",
                )
            must(
                checkpoint.replicas >= wanted - 1,
                "P7",
                f"step {checkpoint.step} is called {checkpoint.replicas} copies",
            )


def play(seed: int) -> Played:
    """Play the silence of a seed; a Violation carries the seed and the story."""
    silence = _Silence(seed)
    try:
        silence.play()
    except Exception as error:
        error.add_note(f"silence {seed}: {'; '.join(silence.story)}")
        raise
    history = silence.world.oracle.history
    return Played(
        num_commits=silence.world.oracle.num_commits,
        num_sessions=len(history.sessions),
        num_records=history.next_seq,
    )
