"""Salvages in a simulated world: ranks that finish steps, die one by one, and offer what they hold."""

from __future__ import annotations

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.step_states import keep
from ray_ckpt.core.values import Salvage
from ray_ckpt.engine.node_ports import SurvivorCame
from ray_ckpt.format.names import shard_file
from ray_ckpt.testing.coordinators import Coordinators
from ray_ckpt.testing.parts import (
    Agent,
    Answer,
    Fate,
    Group,
    Launcher,
    Local,
    Member,
    Node,
    RankCall,
    file_entry,
)


class Survivors(Coordinators):
    """The part of a world with the steps of single ranks; the rank `k` is of the class `k % num_classes`."""

    def finish_step(self, group: Group, member: Member, rank: int) -> bool:
        """Let a rank finish a step, and send its own state to its agent; False if it waits for others.

        Steps are collective: no rank is two steps ahead, and after the death of a rank the others come at
        most to the end of the step that the dead rank has computed as well.
        """
        assert member.plan is not None
        for other in group.members:
            for k in other.ranks:
                group.done.setdefault(k, _first_step(member))
        done, agent = group.done[rank], self.nodes[member.node].agent
        is_gone = rank in group.dead or rank in group.offered or member.state != "training"
        if is_gone or done > min(group.done.values()):
            return False
        self.clock += 1
        group.done[rank] = done + 1
        if agent is not None:
            key, holds = member.plan.session_key, self.oracle.class_of(rank)
            kept = n.StepStateKept(session_key=key, rank=rank, step=done + 1, holds=holds)
            self.wire.append(Local(member.node, agent.number, kept))
        return True

    def kill_rank(self, group: Group, rank: int) -> None:
        self.clock += 1
        group.dead.add(rank)

    def offer(self, group: Group, member: Member, rank: int) -> None:
        """Let a rank whose collective operation has failed offer its live state, and perhaps a copy."""
        self.clock += 1
        assert member.plan is not None
        group.offered.add(rank)
        key, step = member.plan.session_key, group.done[rank]
        has_copy = self.options.salvage_copy and step > _first_step(member) + 1
        steps = (step, step - 1) if has_copy else (step,)
        self.call_agent(member, SurvivorCame(token=self._token(), session_key=key, rank=rank, steps=steps))

    def request_salvage(self, launcher: Launcher) -> None:
        """Let a launcher wait for a salvage before it ends its group."""
        self.clock += 1
        process = self.process_of(launcher.service)
        if process is not None and not process.is_frozen:
            self.wire.append(Answer(process.name, (m.SalvageRequested(token=self._token()),)))

    def _answer_offer(self, call: RankCall, event: SurvivorCame, value: object) -> None:
        """Let a rank capture the step of the decision if it has that step, else its live state."""
        agent = self.nodes[call.member.node].agent
        if not isinstance(value, Salvage) or value.attempt is None or event.rank not in value.savers:
            return
        if agent is None:
            return
        step = value.attempt.step if value.attempt.step in event.steps else event.steps[0]
        self.oracle.captures(value.attempt, event.rank, step, is_survivor=True)
        sealed = n.ShardSealed(attempt=value.attempt, rank=event.rank, replicated=(), metrics=None)
        self.wire.append(Local(call.member.node, agent.number, sealed))

    def _keep(self, node: Node, agent: Agent, work: n.StepStateKept) -> None:
        plan = agent.host.machine.plan
        if plan is not None and plan.session_key == work.session_key:
            keep(agent.states, work.rank, work.step, work.step)
        self._to_agent(node, work)

    def _send_state(self, node: Node, agent: Agent, work: n.SendStepState, fate: Fate) -> None:
        """Send a state to a peer; nobody notices if it is lost."""
        state, peer = agent.states.get(work.rank, {}).get(work.step), self.nodes[work.peer]
        if fate != "lost" and state is not None and self.reaches(node.name, work.peer):
            assert peer.agent is not None
            holds = self.oracle.class_of(work.rank)
            key = work.session_key
            kept = n.StepStateKept(session_key=key, rank=work.rank, step=state, holds=holds)
            self._keep(peer, peer.agent, kept)

    def _write_state(self, node: Node, agent: Agent, work: n.WriteStepState, fate: Fate) -> None:
        state, attempt = agent.states.get(work.rank, {}).get(work.attempt.step), work.attempt
        plan = agent.host.machine.plan
        if fate == "lost" or state is None or plan is None:
            self._to_agent(node, n.SaveFailed(attempt=attempt, rank=work.rank, reason="it is gone"))
            return
        file = shard_file(work.rank, plan.world_size)
        node.disk.write(attempt.directory, file)
        self.oracle.captures(attempt, work.rank, state, is_survivor=False)
        self._to_agent(
            node, n.ShardWritten(attempt=attempt, rank=work.rank, files=(file_entry(attempt, file),), rows=())
        )


def _first_step(member: Member) -> int:
    assert member.plan is not None
    return member.plan.resume.checkpoint.step if member.plan.resume is not None else 0
