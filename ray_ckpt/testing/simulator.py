"""A world in which real machines run: clusters with nodes, agents and coordinators on one storage path.

A scheduler calls the methods under "events". Each call is one step, and the oracle checks all promises at the
step's end. Messages stay in `wire` until the scheduler delivers them, in any order, twice, or not at all. A
world has no random generator and no clock: the scheduler passes in choices and time. A world can be pickled,
to copy it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from ray_ckpt.admin import pins
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import RankProgress, SessionPlan, Token
from ray_ckpt.engine.node_ports import (
    EndAwaited,
    OutcomeAwaited,
    RankMet,
    RankProgressed,
    RankRestored,
    ReportAnswered,
    SurvivorCame,
)
from ray_ckpt.engine.ports import AgentDied, GroupFound, ServiceEnding
from ray_ckpt.engine.stopping import objections
from ray_ckpt.errors import CheckpointError, ConfigError, RunSuperseded, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import is_still_name, make_attempt
from ray_ckpt.format.records import Drilled, decode_record
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.storage.log_store import TRIM_AFTER_S, trim_log, write_snapshot
from ray_ckpt.testing.coordinators import RUN
from ray_ckpt.testing.oracle import must
from ray_ckpt.testing.parts import (
    Answer,
    Create,
    Fate,
    Group,
    Launcher,
    Local,
    Member,
    Message,
    Order,
    Pass,
    RankCall,
    Replied,
    Report,
    Reporter,
    Work,
)
from ray_ckpt.testing.stores import START_S, Copy
from ray_ckpt.testing.survivors import Survivors
from ray_ckpt.types import AttemptId, Level, RankRestore


class World(Survivors):
    """A world; the module docstring describes its use."""

    # -- events: messages ------------------------------------------------------------------------------

    def deliver(self, index: int, fate: Fate = "delivered", *, twice: bool = False) -> None:
        """Carry out a message of the wire; with `twice` the message stays for another delivery."""
        message = self.wire[index] if twice else self.wire.pop(index)
        self.clock += 1
        match message:
            case Order():
                self._order(message, fate)
            case Pass():
                self._pass(message, fate)
            case Report():
                self._report(message, fate)
            case Answer(coordinator=name, events=events, at_s=at_s):
                self.now_s = max(self.now_s, at_s)
                self._feed(name, *events)
                self._check_scrubbed(self.coordinators[name], events[-1])
            case Create():
                self._create(message, fate)
            case Work():
                self._work(message, fate)
            case Local():
                self._local(message, fate)
            case Replied():
                self._replied(message)
        self.oracle.check(self)

    def can_deliver(self, message: Message) -> bool:
        """Return False for messages to a frozen process, and for work that cannot end yet."""
        match message:
            case Answer(coordinator=name):
                return not self.coordinators[name].is_frozen
            case Report(service=service, relay=""):
                process = self.coordinators.get(self.current.get(service, ""))
                return process is None or not process.is_frozen
            case Create(is_late=False):
                return True
            case Local(at_s=at_s):
                return at_s <= self.now_s
            case _:
                return True

    # -- events: time and coordinators -----------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        self.clock += 1
        self.now_s += seconds
        self.wire += [timer for timer in self.timers if timer.at_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer.at_s > self.now_s]

    def tick(self, name: str) -> None:
        """Let a coordinator check the clock and its nodes."""
        self.clock += 1
        process = self.coordinators[name]
        seen = self.seen(process)
        process.host.notices.expire(seen.live, process.host.ports.wall_s())
        self._feed(name, seen)
        if process.is_up:
            self.end_idle_agents(process)
        self.oracle.check(self)

    def start_coordinator(self, service: str) -> None:
        """Start a coordinator under the service's name, as Ray does; it looks for agents with open runs."""
        self.clock += 1
        if not any(self.nodes[node].agent for node in self.live(service)):
            self.current.pop(service, None)
        elif not self.storage.is_away and self._open_log(service, owner=None) is None:
            self._supersede(service)
        self.oracle.check(self)

    def stop_service(self, service: str) -> bool:
        """Let a user stop a service that is not needed; return False if it is needed, or does not answer."""
        self.clock += 1
        process = self.process_of(service)
        if process is None or process.is_frozen:
            return False
        host, owner = process.host, process.machine.view.owner
        is_dead = bool(owner) and self.launchers[owner].state in ("dead", "done")
        wall_s = host.ports.wall_s()
        if objections(host, RUN, dead_owner=owner if is_dead else "", wall_s=wall_s):
            return False
        for launcher, group, member in self.members():
            is_here = launcher.service == service and member.node not in process.absent
            is_needed = is_here and self.is_at_work(launcher, group)
            must(not is_needed, "P7", f"the service ends, and {launcher.name} is at work")
        answered = {message.token for message in self.wire if isinstance(message, Replied)}
        for token, (name, caller) in self.waiting.items():
            is_opening = isinstance(caller, Launcher) and caller.state == "asking" and token not in answered
            must(name != process.name or not is_opening, "P7", "the service ends while a group is opened")
        self._feed(process.name, ServiceEnding())
        for node in sorted(process.agents):
            self.crash_agent(node)
        self.kill_coordinator(process.name)
        return True

    def kill_coordinator(self, name: str) -> None:
        """Kill a coordinator: messages that it sent stay in the wire, and its callers get an error."""
        self.clock += 1
        self.coordinators[name].is_up = False
        self.fail_tokens(name, Unavailable("The coordinator died."))
        self.wire = [
            Create(w.coordinator, w.record, is_late=True)
            if isinstance(w, Create) and w.coordinator == name
            else w
            for w in self.wire
            if not (isinstance(w, Answer) and w.coordinator == name)
        ]

    def freeze(self, name: str) -> None:
        self.clock += 1
        self.coordinators[name].is_frozen = True

    def thaw(self, name: str) -> None:
        self.clock += 1
        self.coordinators[name].is_frozen = False

    def set_clock(self, name: str, wall_skew_s: float) -> None:
        self.clock += 1
        self.coordinators[name].wall_skew_s = wall_skew_s

    # -- events: nodes ---------------------------------------------------------------------------------

    def lose_node(self, name: str, *, disk: Literal["destroyed", "kept"]) -> None:
        """Remove a machine forever, or until its disk comes back."""
        self.clock += 1
        node = self.nodes[name]
        node.is_alive, node.agent = False, None
        if disk == "destroyed":
            node.disk.destroy()
            self.oracle.destroyed(node.disk)
        for member in self.members_on(name):
            member.state = "ended"
        self._lose_local(name)
        self.oracle.check(self)

    def return_disk(self, name: str) -> None:
        """Bring back the machine of a lost node as a new node."""
        self.join(self.nodes[name].service, self.nodes[name].disk)

    def restart_agent(self, name: str) -> None:
        """Let a rank report that its agent is gone."""
        self.clock += 1
        service = self.nodes[name].service
        plans, process = self._plans_of_ranks(name), self.process_of(service)
        if process is not None:
            process.agents.discard(name)
            found = (GroupFound(plan=plan) for plan in plans)
            self.wire.append(Answer(process.name, (AgentDied(node=name), *found)))
        elif plans and not self.storage.is_away and self._open_log(service, owner=None, found=plans) is None:
            self._end_members(plans, RunSuperseded("The run was taken over by another service."))

    def _end_members(self, plans: tuple[SessionPlan, ...], error: CheckpointError) -> None:
        """End the ranks of groups of which rank 0 got an error as the answer to its request for an agent."""
        for _, _, member in self.members():
            if member.plan in plans and member.state == "training":
                member.state, member.error = "ended", error

    def _plans_of_ranks(self, name: str) -> tuple[SessionPlan, ...]:
        """Return the plans of the groups whose rank 0 trains on a node."""
        firsts = (x.group.members[0] for x in self.launchers.values() if x.group and x.group.members)
        return tuple(
            x.plan for x in firsts if x.node == name and x.state == "training" and x.plan is not None
        )

    def notify_preemption(self, name: str, left_s: float | None) -> None:
        """Let a node, or a rank on it, report that it is about to go."""
        self.clock += 1
        process = self.process_of(self.nodes[name].service)
        if process is not None and not process.is_frozen:
            now_s = process.host.ports.wall_s()
            source, uid = ("sigterm", process.host.machine.history.run_uid) if left_s is None else ("aws", "")
            deadline_s = None if left_s is None else now_s + left_s
            notice = Notice(source=source, text="it goes", deadline_s=deadline_s)
            process.host.notices.add(name, notice, now_s, uid)

    def corrupt(self, name: str, copy: Copy, *, alters: bool = False) -> None:
        """Damage bytes of a copy; `alters`: of the fragment, so that inventories list its new digest.

        In a still file, the bytes are damaged in all fragments that share it.
        """
        self.clock += 1
        disk = self.nodes[name].disk
        still = [file for file in disk.listed[copy] if is_still_name(file) and disk.has(copy)]
        if still and not alters and self.clock % 2:
            disk.bad_inodes.add(disk.inodes[disk.fragments[copy].attempt.directory, still[0]])
            for other in disk.sharers(copy, still[0]):
                self.oracle.corrupted(disk, other)
            return
        disk.rotten.add(copy)
        if alters:
            disk.alter(copy)
            self.oracle.stored(disk, copy)
        self.oracle.corrupted(disk, copy)

    # -- events: launchers and ranks -------------------------------------------------------------------

    def launch(self, name: str, size: int, *, in_parts: bool = False) -> None:
        """Let a launcher take the next step towards a new group of `size` nodes; old ranks have ended."""
        self.clock += 1
        launcher = self.launchers[name]
        self._end_group(launcher)
        launcher.state = "idle"
        process = self.process_of(launcher.service)
        if process is not None and process.machine.is_closing and not process.is_frozen:
            process.is_up = False  # the process's orders to nodes stay in the wire
        if process is None or not process.is_up:
            if not self.storage.is_away:
                try:
                    self._open_log(launcher.service, owner=name, raises=True)
                except RunSuperseded as error:
                    self._give_up(launcher, error)
        elif process.machine.is_open and not process.is_frozen:
            (self._open_parts if in_parts else self._open_group)(process, launcher, size)
        self.oracle.check(self)

    def kill_launcher(self, name: str) -> None:
        self.clock += 1
        launcher = self.launchers[name]
        self._end_group(launcher)
        launcher.end("dead", self.now_s)

    def kill_ranks(self, name: str) -> None:
        """Kill a worker: the group ends, but the group's launcher lives."""
        self.clock += 1
        self._end_group(self.launchers[name])
        self.launchers[name].state = "idle"

    def read_state(
        self, member: Member, owner: str, *, num_ranks: int | None = None, is_cut_off: bool = False
    ) -> None:
        """Let ranks of a node, by default all, restore by the plan of their agent, and report the result.

        If they are cut off, they reach no source.
        """
        self.clock += 1
        agent = self.nodes[member.node].agent
        plan = agent.host.plan if agent is not None else None
        if plan is None or plan.owner != owner:
            return
        if plan != member.plan:
            member.plan, member.read = plan, set()
            self.oracle.restores(plan)
        ranks = [rank for rank in member.ranks if rank not in member.read][:num_ranks]
        if not ranks:
            return
        member.read.update(ranks)
        member.state = "reading" if len(member.read) == len(member.ranks) else member.state
        found = self._damage(plan, member.node)
        bad_nodes = tuple(sorted(set(self._bad_nodes(plan, member.node))))
        damage, is_unreachable = tuple(found), bool(found) and all(found.values())
        if is_cut_off and plan.resume is not None:
            damage, is_unreachable, bad_nodes = ("no source",), True, ()
        self.oracle.read(plan, damage, is_unreachable=is_unreachable)
        for rank in ranks:
            report = RankRestore(rank=rank, damage=damage, is_unreachable=is_unreachable, bad_nodes=bad_nodes)
            self.call_agent(
                member, RankRestored(token=self._token(), session_key=plan.session_key, report=report)
            )

    def save(self, group: Group, member: Member, gap: int) -> None:
        """Let the ranks of a node capture the group's next save; the first member chooses the step."""
        self.clock += 1
        agent = self.nodes[member.node].agent
        assert member.plan is not None
        signal = agent.signal if agent is not None else None
        if member.saved == len(group.steps):
            last = group.steps[-1] if group.steps else _resumed_step(member.plan)
            is_ahead = signal is not None and last < signal.step <= last + gap
            group.steps.append(signal.step if signal is not None and is_ahead else last + gap)
        step = group.steps[member.saved]
        if signal is not None and signal.step < step:
            member.missed = signal.word
        member.saved += 1
        attempt = make_attempt(
            run_uid=member.plan.run_uid,
            session=member.plan.session,
            step=step,
            attempt=0,
            epoch=member.plan.epoch,
        )
        self.oracle.saves(attempt, member.plan)
        self.saved_at_s.setdefault(attempt.attempt, self.now_s)
        for rank in member.ranks if agent is not None else ():
            assert agent is not None
            event: n.NodeEvent = n.ShardSealed(
                attempt=attempt, rank=rank, replicated=("same",), metrics={"loss": 1.0} if rank == 0 else None
            )
            if rank in member.busy:
                event = n.SaveFailed(attempt=attempt, rank=rank, reason="busy")
            member.busy.add(rank)
            self.wire.append(Local(member.node, agent.number, event))
            token = f"outcome-{attempt.attempt}-{rank}"
            self.call_agent(member, OutcomeAwaited(token=token, attempt=attempt, level=Level.LOCAL))

    def finish(self, name: str, *, ends_group: bool = False) -> None:
        """Let a launcher request the last checkpoint on the storage path, perhaps at the end of training."""
        self.clock += 1
        launcher = self.launchers[name]
        process = self.process_of(launcher.service)
        if process is not None and not process.is_frozen:
            token = self._token()
            self.waiting[token] = (process.name, launcher)
            request = m.FinishRequested(token=token, owner=name, ends_group=ends_group)
            self.wire.append(Answer(process.name, (request,)))
        if ends_group:
            self._end_group(launcher)
            launcher.end("done", self.now_s)

    def pin(self, service: str, attempt: str, expires_at_s: float | None) -> None:
        """Let a user pin a checkpoint."""
        self.clock += 1
        process = self.process_of(service)
        if process is not None:
            token = self._token()
            self.pins[token] = (attempt, token)
            event = m.PinRequested(token=token, attempt=attempt, owner=token, expires_at_s=expires_at_s)
            self.wire.append(Answer(process.name, (event,)))

    def unpin(self, service: str, token: Token) -> None:
        """Let a user remove a pin."""
        self.clock += 1
        process = self.process_of(service)
        if process is not None:
            attempt, owner = self.pins[token]
            event = m.UnpinRequested(token=self._token(), attempt=attempt, owner=owner)
            self.wire.append(Answer(process.name, (event,)))

    def annotate(self, service: str, step: int, metric: str) -> None:
        """Let a user add a metric to a step, which may still be on its way to the log."""
        self.clock += 1
        process = self.process_of(service)
        if process is not None:
            token = self._token()
            value = float(self.num_tokens)
            self.annotations[token] = (step, metric, value)
            event = m.AnnotateRequested(token=token, step=step, metrics={metric: value})
            self.wire.append(Answer(process.name, (event,)))

    def drill(self, service: str, attempt: str, *, passed: bool) -> None:
        """Let a user report a drill of a checkpoint."""
        self.clock += 1
        process = self.process_of(service)
        if process is not None:
            token = self._token()
            self.drills.add(token)
            drilled = Drilled(
                attempt=attempt,
                scenario="lose-node a",
                passed=passed,
                seconds=1.0,
                read_bytes={"peer": 10.0},
                text=token,
            )
            self.wire.append(Answer(process.name, (m.DrillEnded(token=token, result=drilled),)))

    def write_aside(self, step: int, owner: str) -> None:
        """Let a user pin the newest checkpoint of a step, if there is one, by writing to the log directly."""
        self.clock += 1
        log, history = self.storage.log, self.oracle.history
        known = set(log.objects)
        with contextlib.suppress(ConfigError):
            wall_s = START_S + self.now_s
            pins.pin(log, history, step=step, owner=owner, expires_at_s=None, now_s=wall_s)
        for name in sorted(set(log.objects) - known):
            data = log.objects[name]
            self.storage.records.append((decode_record(data), digest(data)))
            self.oracle.logged(self)
        self.oracle.check(self)

    def report_progress(self, launcher: Launcher) -> None:
        """Let the ranks of a group report their progress."""
        self.clock += 1
        assert launcher.group is not None
        steps = launcher.group.steps
        for member in launcher.group.members:
            if member.state == "training" and member.plan is not None:
                saved = steps[member.saved - 1] if member.saved else -1
                step = max(saved, _resumed_step(member.plan))
                before = steps[member.saved - 2] if member.saved > 1 else _resumed_step(member.plan)
                progress = RankProgress(
                    step=step,
                    saved_step=saved,
                    missed=member.missed,
                    saved_before=before if member.saved else None,
                    updates=step - _resumed_step(member.plan),
                    saved_updates=saved - _resumed_step(member.plan) if member.saved else 0,
                )
                agent = self.nodes[member.node].agent
                for rank in member.ranks if agent is not None else ():
                    assert agent is not None
                    event = RankProgressed(session_key=member.plan.session_key, rank=rank, progress=progress)
                    self.wire.append(Local(member.node, agent.number, event))

    def meet(self, member: Member, num_ranks: int | None = None) -> None:
        """Let ranks of a node, by default all, reach their next barrier, or repeat a call."""
        self.clock += 1
        assert member.plan is not None
        if self.nodes[member.node].agent is None:
            return
        plan, number = member.plan, member.met + 1
        for rank in member.ranks[:num_ranks]:
            self.oracle.comes(plan.session_key, number, rank)
            event = RankMet(token=self._token(), session_key=plan.session_key, rank=rank, number=number)
            self.call_agent(member, event)

    def upload_late(self, attempt: AttemptId, *, age_s: float = 0.0) -> None:
        """Put a file on the storage path, as a late upload for which no coordinator waits."""
        self.clock += 1
        self.storage.put(attempt, 0, (), self.now_s - age_s)
        self.oracle.stale = True

    def trim_log(self) -> None:
        """Write a snapshot of the log, and delete the records that the previous snapshot covers."""
        self.clock += 1
        if self.oracle.history.next_seq:
            wall_s = START_S + self.now_s
            write_snapshot(self.storage.log, self.oracle.history.to_snapshot(wall_s))
            trim_log(self.storage.log, wall_s + TRIM_AFTER_S + 1.0)
        self.oracle.check_log(self)

    # -- ranks and launchers ---------------------------------------------------------------------------

    def _damage(self, plan: SessionPlan, reader: str) -> dict[str, bool]:
        """Return the fragments for which the ranks find no intact source; True if a node was not reached."""
        found: dict[str, bool] = {}
        if plan.resume is None or self.storage.holds(plan.resume.checkpoint):
            return found
        attempt, computed = plan.resume.checkpoint.id.attempt, set[int]()
        for places in plan.resume.groups:
            if self.decodable(plan.resume.checkpoint.id, places, reader) is not None:
                computed |= set(places.group.members)
        for index, holders in enumerate(plan.resume.holders):
            sources = [self.nodes[name] for name in {*holders, reader}]
            reached = [s for s in sources if s.is_alive and s.agent is not None]
            if index not in computed and not any(s.disk.has_intact((attempt, index)) for s in reached):
                found[f"fragment {index}"] = len(reached) < len(sources)
        return found

    def _bad_nodes(self, plan: SessionPlan, reader: str) -> Iterator[str]:
        """Yield the nodes whose damaged copies the ranks of a node read before they find an intact one."""
        if plan.resume is None:
            return
        for index, holders in enumerate(plan.resume.holders):
            copy = plan.resume.checkpoint.id.attempt, index
            for name in (reader, *holders):
                if self._serves(reader, name) and self.nodes[name].disk.has(copy):
                    if self.nodes[name].disk.has_intact(copy):
                        break
                    yield name

    def _replied(self, message: Replied) -> None:
        if (call := self.rank_replies.pop(message.token, None)) is not None:
            self._rank_answered(call, message)
        waiting = self.waiting.pop(message.token, None)
        if message.error is None:
            if message.token in self.pins:
                self.oracle.pin_acknowledged(*self.pins[message.token])
            if message.token in self.drills:
                self.oracle.drill_acknowledged(message.token)
            if message.token in self.annotations:
                self.oracle.annotation_acknowledged(*self.annotations[message.token])
        match waiting:
            case (_, Launcher() as launcher) if launcher.state != "dead":
                self._launcher_answered(launcher, message)
            case (_, Reporter(node=name, agent=number, event=event)):
                agent = self.nodes[name].agent
                if agent is not None and agent.number == number:
                    answer = ReportAnswered(report=event, value=message.value, error=message.error)
                    agent.host.handle(answer)

    def _launcher_answered(self, launcher: Launcher, message: Replied) -> None:
        if isinstance(message.error, RunSuperseded) and launcher.state == "asking":
            self._give_up(launcher, message.error)
        elif message.error is not None:
            launcher.error = message.error
            if launcher.state == "asking":
                launcher.state = "idle"
        elif isinstance(message.value, SessionPlan):
            if launcher.state == "asking":
                members = [Member(node.node_id, node.ranks) for node in message.value.nodes]
                nodes = {rank: member.node for member in members for rank in member.ranks}
                wanted = dict(enumerate(launcher.wanted[message.token]))
                must(nodes == wanted, "P7", f"ranks of {launcher.name} run on {wanted}, and it got {nodes}")
                launcher.state, launcher.group = "running", Group(members)
        else:
            launcher.finished = True
            self.oracle.finished(message.value)

    def _rank_answered(self, call: RankCall, message: Replied) -> None:
        """Handle the answer of an agent to a rank; ignore an answer of an earlier session."""
        member, event = call.member, call.event
        if member.state == "ended" or member.plan != call.plan:
            return
        match event, message.value:
            case OutcomeAwaited(), n.SaveOutcome(error=RunSuperseded() as error):
                member.state, member.error = "ended", error
            case EndAwaited(), Exception() as error:
                member.state, member.error = "ended", error
            case SurvivorCame(), _:
                self._answer_offer(call, event, message.value)
            case RankMet(number=number), tuple() if number == member.met + 1:
                member.met = number
            case RankRestored(), False:
                member.state = "waiting"
            case RankRestored(), True if member.state == "reading":
                member.state = "training"
                self.oracle.go(call.plan)
                token = f"end-{member.node}-{call.plan.session_key}"
                self.call_agent(member, EndAwaited(token=token, session_key=call.plan.session_key))
            case RankRestored(), None:
                member.state, member.error = "ended", message.error

    def _give_up(self, launcher: Launcher, error: CheckpointError) -> None:
        self._end_group(launcher)
        launcher.error = error
        launcher.end("done", self.now_s)

    def _end_group(self, launcher: Launcher) -> None:
        if launcher.group is not None:
            for member in launcher.group.members:
                member.state = "ended"
        launcher.group = None


def _resumed_step(plan: SessionPlan) -> int:
    return plan.resume.checkpoint.step if plan.resume is not None else 0
