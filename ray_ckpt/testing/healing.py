"""Healing after a schedule: end all faults, train a last group, and find no leftovers (P7, P8)."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from ray_ckpt.errors import RestoreError
from ray_ckpt.format.names import make_attempt
from ray_ckpt.testing.oracle import DAY_S, Violation, must
from ray_ckpt.testing.parts import Launcher, Member
from ray_ckpt.types import AttemptId, Level

if TYPE_CHECKING:
    from ray_ckpt.testing.schedules import Schedule

HOME = "east"  # the cluster of the last group
LONG_S = 70.0  # longer than all time-outs of a save
A_DAY_S = DAY_S + 3_600.0  # longer than ORPHAN_AGE_S and the next interval between listings
ROUNDS = 60  # rounds of delivery and waiting; a world that needs more never comes to rest
DAYS_TO_SWEEP = 3  # days until an orphan is old, listed, and deleted
MAX_TIDYING = 4  # number of groups after which each orphan has had a group that deletes it
MAX_DELIVERIES = 4_000  # deliveries in a round of a small world


class Healing:
    """The end of a schedule: one driver opens the run without faults, and leftovers are deleted."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._world = schedule.world

    def heal(self) -> None:
        """End all faults, train once more, and check that the run comes to its end."""
        self._schedule.faults = 0.0
        world = self._world
        world.storage.is_away = False
        world.silent.clear()
        world.absent = frozenset()
        world.disks_fail = False
        for process in world.coordinators.values():
            world.thaw(process.name)
            process.host.notices.expire(frozenset(), process.host.ports.wall_s())
        for node in world.nodes.values():
            node.is_draining = False
        for launcher in list(world.launchers.values()):
            if launcher.group is not None and launcher.group.dead:
                world.kill_ranks(launcher.name)  # the launcher notices the death of its ranks
        self._start_coordinators(4)
        self._check_agents()
        self._start_coordinators(2)  # a coordinator that found a group may have been fenced
        self._check_zombies()
        for name in list(world.launchers):
            world.kill_launcher(name)
        self._check_dead_owner()
        last = world.launchers["last"] = Launcher("last", HOME)
        attempt = self._train(last)
        self._finish(last)
        if last.error is not None and self._is_linked_to_damage(attempt):
            self._rest(LONG_S)  # the upload has found the damage, so that scrub takes it away
            last.error, attempt = None, self._save_twice(last)
            self._finish(last)
        self._check_end(last, attempt)

    def _check_dead_owner(self) -> None:
        """Check in some schedules that the group of a dead launcher ends, so that nodes free its memory."""
        world, owner = self._world, self._owner()
        if owner and not world.launchers[owner].is_job and self._schedule.chance.random() < 0.5:
            for _ in range(ROUNDS):
                self._rest(LONG_S)
                if not self._owner():
                    return
            raise Violation(f"P7: the group of {owner}, which is dead, does not end")

    def _owner(self) -> str:
        """Return the launcher that has the run in the home cluster; "" if there is none."""
        process = self._world.process_of(HOME)
        return process.machine.view.owner if process is not None else ""

    def _finish(self, launcher: Launcher) -> None:
        """Request the last checkpoint on the storage path, and wait for the answer."""
        self._world.finish(launcher.name)
        for _ in range(ROUNDS):
            self._rest(LONG_S)
            if launcher.finished or launcher.error is not None:
                break

    def _is_linked_to_damage(self, attempt: str) -> bool:
        """Return whether the last save has a still file with bytes that were damaged before."""
        world = self._world
        copies = [(attempt, index) for index in range(len(world.oracle.plans[attempt].nodes))]
        is_lost = not all(any(disk.has_intact(copy) for disk in world.disks()) for copy in copies)
        return is_lost and attempt in world.oracle.failed

    def _start_coordinators(self, times: int) -> None:
        for _ in range(times):
            for service in self._schedule.launchers:
                if self._world.process_of(service) is None:
                    self._world.start_coordinator(service)
            self._rest(LONG_S)

    def _check_agents(self) -> None:
        """Check that new agents get the session of the group at work on their nodes."""
        world = self._world
        for _, _, member in world.members():
            agent = world.nodes[member.node].agent
            if member.state == "training" and (agent is None or agent.host.plan != member.plan):
                world.restart_agent(member.node)  # the ranks' agent is dead, even if there is a new one
        for _ in range(3):  # the session is sent again if it was lost
            self._rest()
        for launcher, _, member in world.members():
            process, agent = world.process_of(launcher.service), world.nodes[member.node].agent
            if process is None or process.machine.plan is None or member.plan != process.machine.plan:
                continue
            if member.state == "training" and not self._is_over(member):
                has_plan = agent is not None and agent.host.plan == member.plan
                must(has_plan, "P7", f"agent of {member.node} lacks the session of {launcher.name}")

    def _check_zombies(self) -> None:
        """Check that a group that has lost the run ends at its next save, and that others are known."""
        world = self._world
        for _, group, member in world.members():
            member.saved = len(group.steps)  # a save is complete only if all members make the same save
        for _, group, member in world.members():
            if world.can_save(group, member):
                world.save(group, member, 1)
        self._rest(LONG_S)
        for launcher, group, member in world.members():
            is_whole = all(x.state == "training" and world.nodes[x.node].agent for x in group.members)
            if is_whole and self._is_over(member):
                raise Violation(f"P7: {launcher.name} trains on {member.node} in an ended session")
            process = world.process_of(launcher.service)
            if is_whole and world.is_at_work(launcher, group) and process is not None:
                text = f"{process.name} does not know that {launcher.name} is at work"
                must(process.machine.plan == member.plan, "P7", text)

    def _is_over(self, member: Member) -> bool:
        """Return whether a member's session has ended in the log, or for the agent of the member's node."""
        if member.plan is None:
            return False
        agent = self._world.nodes[member.node].agent
        is_ended = agent is not None and agent.machine.is_over(member.plan.session_key)
        return is_ended or self._world.oracle.is_over(member.plan)

    def _train(self, launcher: Launcher) -> str:
        """Let a group open and save twice; return the attempt of the second save."""
        world = self._world
        for _ in range(ROUNDS):
            members = launcher.group.members if launcher.group is not None else []
            if launcher.state == "done":
                break
            if members and all(member.state == "training" for member in members):
                return self._save_twice(launcher)
            if launcher.state == "idle" or any(member.state == "ended" for member in members):
                errors = (launcher.error, *(member.error for member in members))
                if any(isinstance(error, RestoreError) for error in errors):
                    launcher.resume = "never"  # no intact checkpoint is left
                world.launch(launcher.name, 2 * self._schedule.scale)
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
                self._world.save(group, member, 1)
            self._rest()
        return next(reversed(self._world.oracle.plans))

    def _check_end(self, launcher: Launcher, attempt: str) -> None:
        world, history = self._world, self._world.oracle.history
        known = history.checkpoints.get(attempt)
        must(launcher.finished, "P7", f"the run does not finish: {launcher.error}")
        must(known is not None, "P7", "the last save is not in the log")
        assert known is not None
        must(known.level is Level.DURABLE, "P7", f"the last save is {known.level.label}")
        for _ in range(6):
            self._rest(LONG_S)
        left = [c.step for c in history.checkpoints.values() if c.state == "retired"]
        must(not left, "P8", f"steps {left} are retired and never collected")
        left = [c.step for c in history.lost() if not c.pins]
        must(not left, "P8", f"files of the lost steps {left} stay although newer ones are there")
        for _ in range(MAX_TIDYING):
            if not (orphans := self._orphans()):
                break
            world.kill_ranks(launcher.name)  # the next group deletes the folders that this group had to keep
            self._train(launcher)
            self._rest(LONG_S)
        must(not orphans, "P8", f"folders stay on nodes: {orphans}")
        self._check_remote()
        self._check_put_away(launcher)
        world.oracle.check_log(world)

    def _check_put_away(self, launcher: Launcher) -> None:
        """Check that nodes keep no folder of a finished run except sole copies and those kept by options."""
        world = self._world
        world.finish(launcher.name, ends_group=True)
        for _ in range(ROUNDS):
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
        """Check that orphans on the storage path are deleted in time, and files of another log stay."""
        world = self._world
        world.upload_late(unknown_attempt(self._schedule.chance))
        for _ in range(DAYS_TO_SWEEP):
            self._rest(A_DAY_S)
        self._rest()
        storage = world.storage
        must(not storage.uploads, "P8", f"uploads stay unfinished: {storage.uploads}")
        orphans = world.oracle.orphans(world)
        must(not orphans, "P8", f"orphans stay on the storage path: {orphans}")
        checkpoints = world.oracle.history.checkpoints
        left = [key for key in storage.items if checkpoints[key[0]].state == "collected"]
        must(not left, "P8", f"items of collected checkpoints stay on the storage path: {left}")
        must(self._schedule.foreign.directory in storage.written_s, "P5", "files of another log are gone")

    def _orphans(self) -> list[tuple[str, str]]:
        """Return the folders on live nodes that belong to no live checkpoint."""
        live = {c.directory for c in self._world.oracle.history.live()}
        nodes = [self._world.nodes[name] for name in sorted(self._world.live(HOME))]
        return [(node.name, d) for node in nodes for d in node.disk.folders if d not in live]

    def _rest(self, seconds: float = 0.0) -> None:
        """Deliver all messages, then let time pass."""
        world = self._world
        for _ in range(MAX_DELIVERIES * self._schedule.scale):
            index = next((i for i, message in enumerate(world.wire) if world.can_deliver(message)), None)
            if index is None:
                break
            world.deliver(index)
        else:
            must(False, "P7", f"the world does not come to rest: {world.wire[:4]}")
        world.wait(seconds)
        self._schedule.tick_all()


def unknown_attempt(chance: Random, run_uid: str = "0" * 32) -> AttemptId:
    """Choose an attempt that no rank has saved."""
    number = chance.randrange(10**6)
    return make_attempt(run_uid=run_uid, session=number, step=number, attempt=0)
