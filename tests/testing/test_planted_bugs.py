"""Planted bugs: the simulator must find each of the bugs that matter.

Each bug is put into the real machines for one test. `test_random.py` plays the same seeds without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_machine, ownership, salvage, sessions, step_states, sweep
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.attempts import Attempt
from ray_ckpt.core.closing import Closing
from ray_ckpt.core.ledger import Ledger
from ray_ckpt.core.log_requests import Requests
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.open_attempts import MAX_OPEN_ATTEMPTS, OpenAttempts
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.session_end import SessionEnd
from ray_ckpt.core.sweep import Sweeps
from ray_ckpt.core.values import Salvage, SessionKey, SessionPlan, Token
from ray_ckpt.engine import launchers, stopping
from ray_ckpt.engine.deletes import NodeDeletes
from ray_ckpt.engine.groups import Groups
from ray_ckpt.engine.launchers import LauncherWatch
from ray_ckpt.engine.node_host import NodeHost
from ray_ckpt.engine.node_ports import RankMet, RankRestored, ReportAnswered
from ray_ckpt.engine.node_session import NodeSession
from ray_ckpt.engine.opened_nodes import OpenedNodes
from ray_ckpt.engine.ports import Answered, Call, LauncherSeen, PartRequested
from ray_ckpt.engine.relays import Batch, OrderRelays
from ray_ckpt.engine.run_host import RunHost
from ray_ckpt.errors import CheckpointError, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.testing import silences, simulator, survivors
from ray_ckpt.testing.oracle import Violation
from ray_ckpt.testing.parts import fragment_on_disk
from ray_ckpt.testing.schedules import play, salvages
from ray_ckpt.types import CheckpointInfo, Level
from tests.support.examples import every_few

NUM_SEEDS = 400
MAX_SALVAGE_SEED = 20_000  # one seed in ten has salvages
SILENT_SEEDS = range(60)  # of `silences`
FIRST_SEEDS = {  # before which no schedule shows the bug; a change of the schedules moves them
    "a_late_start_replaces_a_newer_session": 125,
    "a_node_comes_to_a_barrier_with_its_first_rank": 174,
    "a_relay_that_dies_takes_orders_along": 155,
    "a_salvage_ignores_classes": 439,
    "a_session_ends_with_its_job": 59,
    "a_session_ends_with_its_launcher": 30,
    "acknowledge_before_the_log": 4,
    "an_end_recorded_twice": 25,
    "commit_before_fsync": 90,
    "never_use_another_holder": 25,
    "ranks_do_not_report_their_group": 1000917,
    "ranks_train_when_those_of_their_node_have_restored": 748,
    "sources_that_were_not_reached_are_lost": 147,
    "survivors_save_whatever_step_they_have": 1609,
    "sweep_without_a_note": 191,
    "the_state_of_another_step_is_taken": 2399,
}

Plant = Callable[[pytest.MonkeyPatch], None]


def plant_effects(
    patch: pytest.MonkeyPatch, machine: Any, change: Callable[[Any, Any, Any], Iterator[Any]]
) -> None:
    """Replace each effect by those of `change(machine, event, effect)`."""
    real = machine.handle

    def handle(self: Any, event: Any) -> tuple[Any, ...]:
        return tuple(new for effect in real(self, event) for new in change(self, event, effect))

    patch.setattr(machine, "handle", handle)


def an_end_recorded_twice(patch: pytest.MonkeyPatch) -> None:
    """A coordinator does not check whether one that died has recorded the end of the session."""
    real = SessionEnd.end

    def end(self: SessionEnd, *args: Any, **how: Any) -> bool:
        session = self._context.history.session
        if session is not None and session.ended is not None:
            self._context.history.sessions[session.session] = replace(session, ended=None)
        return real(self, *args, **how)

    patch.setattr(SessionEnd, "end", end)


def a_finished_run_keeps_nothing(patch: pytest.MonkeyPatch) -> None:
    """Nodes are to forget all of a finished run, also what is nowhere else."""

    def begin(self: Closing) -> m.PutAway:
        self._kept = ()
        return self._order()

    patch.setattr(Closing, "begin", begin)


def commit_before_fsync(patch: pytest.MonkeyPatch) -> None:
    """A node reports its fragment when it begins to write it."""

    def change(machine: NodeMachine, event: Any, effect: Any) -> Iterator[Any]:
        yield effect
        if isinstance(effect, n.WriteFragment):
            held = fragment_on_disk(effect.fragment)
            yield n.ReportStored(
                epoch=machine.epoch,
                attempt=held.attempt,
                node_index=held.node_index,
                fragment=held.fragment,
                size_bytes=held.size_bytes,
                replicated=held.replicated,
                metrics=held.metrics,
            )

    plant_effects(patch, NodeMachine, change)


def any_version_of_a_fragment_is_as_good(patch: pytest.MonkeyPatch) -> None:
    """A commit does not compare the versions of a fragment that the inventories list."""
    patch.setattr(Attempt, "differing", ())


def missing_fence_in_the_log(patch: pytest.MonkeyPatch) -> None:
    """A coordinator writes on in the epoch that it finds."""
    real = Ledger.open

    def opened(self: Ledger, event: m.LogOpened) -> None:
        real(self, event)
        if self.history.epoch:
            self._queue.clear()
            self.epoch = self.history.epoch

    patch.setattr(Ledger, "open", opened)


def missing_fence_on_the_nodes(patch: pytest.MonkeyPatch) -> None:
    """A node obeys whoever speaks."""
    real = NodeMachine.handle

    def handle(self: NodeMachine, event: n.NodeEvent) -> tuple[n.NodeEffect, ...]:
        if isinstance(event, n.Order) and event.epoch < self.epoch:
            return tuple(self._on(event))
        return real(self, event)

    patch.setattr(NodeMachine, "handle", handle)


def delete_before_retire(patch: pytest.MonkeyPatch) -> None:
    """Bytes go when the retirement is decided, not when it is in the log."""

    def change(machine: RunMachine, event: Any, effect: Any) -> Iterator[Any]:
        yield effect
        if isinstance(effect, m.Append) and isinstance(effect.record.op, r.Retired):
            checkpoint = machine.history.checkpoints[effect.record.op.attempt]
            for nodes in machine.view.holders.get(checkpoint.id.attempt, {}).values():
                for node in nodes:
                    yield m.Delete(attempt=checkpoint.id.attempt, directory=checkpoint.directory, place=node)

    plant_effects(patch, RunMachine, change)


def retire_the_last_durable(patch: pytest.MonkeyPatch) -> None:
    """Retention gives up the newest durable checkpoint as soon as a newer one exists."""
    real = RunMachine.handle

    def handle(self: RunMachine, event: m.Event) -> tuple[m.Effect, ...]:
        if self.is_open and not self._ledger.pending:
            lineage = self.history.lineage()
            durable = [c for c in lineage[:-1] if c.level is Level.DURABLE]
            for checkpoint in durable[-1:]:
                self._ledger.append(r.Retired(attempt=checkpoint.id.attempt, reason="planted"))
        return real(self, event)

    patch.setattr(RunMachine, "handle", handle)


def guess_on_unknown(patch: pytest.MonkeyPatch) -> None:
    """No answer from the store counts as a good one."""
    real = Ledger.settle

    def settle(self: Ledger, event: m.Appended, now_s: float) -> Any:
        if event.outcome == "unknown":
            event = m.Appended(seq=event.seq, outcome="ok")
        return real(self, event, now_s)

    patch.setattr(Ledger, "settle", settle)


def restore_without_a_session(patch: pytest.MonkeyPatch) -> None:
    """A group gets its resume point before the choice is in the log."""

    def change(machine: RunMachine, event: Any, effect: Any) -> Iterator[Any]:
        yield effect
        if isinstance(effect, m.Append) and isinstance(effect.record.op, r.Session):
            groups = machine._sessions
            if groups._waiting and not groups._choosing:
                yield from groups._begin(machine._ledger.projected())

    plant_effects(patch, RunMachine, change)


def drop_what_is_being_committed(patch: pytest.MonkeyPatch) -> None:
    """A coordinator calls a save lost as soon as a node of it dies, even if its commit is on its way."""

    def change(machine: RunMachine, event: Any, effect: Any) -> Iterator[Any]:
        yield effect
        if isinstance(effect, m.Append) and isinstance(effect.record.op, r.Commit):
            for attempt in machine._attempts:
                if attempt.id.attempt == effect.record.op.attempt:
                    nodes = tuple(node.node_id for node in attempt.nodes)
                    error = Unavailable("planted")
                    yield m.NotifyOutcome(
                        attempt=attempt.id, level=None, error=error, nodes=nodes, epoch=machine.epoch
                    )

    plant_effects(patch, RunMachine, change)


def sweep_without_a_note(patch: pytest.MonkeyPatch) -> None:
    """A coordinator takes what it does not know for an orphan, although another may have written since."""
    real = Sweeps.listed

    def listed(self: Sweeps, event: m.RemoteListed, **facts: Any) -> Iterator[m.Effect]:
        yield from real(self, event, **facts)
        if self._unconfirmed is not None:
            yield m.DeleteOrphans(directories=self._unconfirmed[1], uploads=())

    patch.setattr(Sweeps, "listed", listed)


def sweep_without_an_age(patch: pytest.MonkeyPatch) -> None:
    """Uploads are taken for left over while somebody may be at work on them."""
    patch.setattr(sweep, "ORPHAN_AGE_S", 0.0)


def sweep_older_logs(patch: pytest.MonkeyPatch) -> None:
    """Directories that are older than the log count as orphans."""
    patch.setattr(Sweeps, "_is_older", lambda self, age_s: False)


def never_sweep(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks for what dead agents leave on the storage path."""
    patch.setattr(Sweeps, "order_listing", lambda self, wall_s, *, is_end=False: iter(()))


def acknowledge_before_the_log(patch: pytest.MonkeyPatch) -> None:
    """An annotation is acknowledged when its record goes out."""

    def change(machine: RunMachine, event: Any, effect: Any) -> Iterator[Any]:
        yield effect
        if isinstance(effect, m.Append) and isinstance(effect.record.op, r.Annotated):
            yield m.Reply(token=machine._requests.waiting[0].token, value=None)

    plant_effects(patch, RunMachine, change)


def annotate_what_is_retired(patch: pytest.MonkeyPatch) -> None:
    """A step that has no live checkpoint gets its metrics at the last one that it had."""

    def meant(self: Requests, step: int, attempt: str | None) -> CheckpointInfo | None:
        checkpoints = reversed(self._context.history.checkpoints.values())
        return next((checkpoint for checkpoint in checkpoints if checkpoint.step == step), None)

    patch.setattr(Requests, "_to_annotate", meant)


def drop_the_oldest_of_many(patch: pytest.MonkeyPatch) -> None:
    """The oldest of too many open attempts goes, complete or not."""

    def bound(self: OpenAttempts) -> Iterator[m.Effect]:
        waiting = [a for a in self if not a.is_committing]
        if len(waiting) > MAX_OPEN_ATTEMPTS:
            oldest = min(waiting, key=lambda a: a.id.step)
            yield from self.drop(oldest, Unavailable(f"Step {oldest.id.step} was overtaken by newer saves."))

    patch.setattr(OpenAttempts, "bound", bound)


def wait_for_silent_holders(patch: pytest.MonkeyPatch) -> None:
    """A sender waits for a silent peer for as long as four tries took, and drops the oldest of many."""
    patch.setattr(silences, "SILENT_S", 123.0)
    drop_the_oldest_of_many(patch)


def never_use_another_holder(patch: pytest.MonkeyPatch) -> None:
    """A copy that failed is not sent elsewhere."""
    patch.setattr(Attempt, "others", lambda self, node_index, live: [])


def forget_who_is_silent(patch: pytest.MonkeyPatch) -> None:
    """Each copy waits for the silent peer again."""
    patch.setattr(NodeMachine, "reaches", lambda self, peer: True)


def a_living_launcher_is_called_dead(patch: pytest.MonkeyPatch) -> None:
    """A second launcher takes the run from one that lives."""
    real = Groups.launcher_seen

    def seen(self: Groups, event: LauncherSeen) -> None:
        real(self, replace(event, is_alive=False))

    patch.setattr(Groups, "launcher_seen", seen)


def nobody_looks_for_the_other_launcher(patch: pytest.MonkeyPatch) -> None:
    """A launcher waits for the death of another one, which is dead."""
    patch.setattr(Groups, "launcher_seen", lambda self, event: None)


def a_session_ends_with_its_launcher(patch: pytest.MonkeyPatch) -> None:
    """The session of a launcher ends as soon as it is found dead, although its group may still save."""
    patch.setattr(launchers, "OWNER_DEAD_S", 0.0)


def a_session_ends_with_its_job(patch: pytest.MonkeyPatch) -> None:
    """The death of a job ends the session of the job's detached actors."""
    real = LauncherWatch.seen

    def seen(self: LauncherWatch, event: LauncherSeen) -> None:
        real(self, replace(event, ends_runs=True))

    patch.setattr(LauncherWatch, "seen", seen)


def a_dead_launchers_group_stays(patch: pytest.MonkeyPatch) -> None:
    """The machine gets only the first event of a launcher's death: the session ends, its group does not."""
    real, reported = RunMachine.handle, set[tuple[int, str]]()

    def handle(self: RunMachine, event: m.Event) -> tuple[m.Effect, ...]:
        if isinstance(event, m.OwnerDied):
            if (id(self), event.owner) in reported:
                return ()
            reported.add((id(self), event.owner))
        return real(self, event)

    patch.setattr(RunMachine, "handle", handle)


def parts_in_the_order_in_which_they_come(patch: pytest.MonkeyPatch) -> None:
    """The ranks of a group are not in the order of its parts."""
    real = Groups.join

    def join(self: Groups, event: PartRequested) -> None:
        names = [*self._joins, *({event.part} - self._joins.keys())]
        known = {part.name: part for part in event.parts}
        same = {part.name for part in self._parts} == known.keys()
        self._parts = event.parts if same or not self._joins else self._parts
        if len(names) == len(event.parts) and self._parts == event.parts:
            event = replace(event, parts=tuple(known[name] for name in names))
            self._parts = event.parts
        real(self, event)

    patch.setattr(Groups, "join", join)


def a_part_keeps_the_nodes_of_its_first_try(patch: pytest.MonkeyPatch) -> None:
    """A part whose workers have started anew, on other nodes, is taken for the old one."""
    real = Groups.join

    def join(self: Groups, event: PartRequested) -> None:
        known = self._joins.get(event.part) if event.parts == self._parts else None
        real(self, event if known is None else replace(event, nodes=known.nodes))

    patch.setattr(Groups, "join", join)


def nodes_of_a_group_count_as_idle(patch: pytest.MonkeyPatch) -> None:
    """No node is needed, and agents end although a group is at work."""
    patch.setattr(RunHost, "needed_nodes", lambda self: frozenset())
    patch.setitem(node_machine._HANDLERS, n.ExitOrdered, lambda self, event: ())


def ranks_do_not_report_their_group(patch: pytest.MonkeyPatch) -> None:
    """All agents of a group are lost while the coordinator restarts, and no rank reports the group."""
    patch.setattr(simulator.World, "_plans_of_ranks", lambda self, name: ())


def a_new_agent_gets_no_session(patch: pytest.MonkeyPatch) -> None:
    """The run is opened on a node with a new agent, and nobody sends the agent the group's plan."""
    patch.setattr(OpenedNodes, "renew", lambda self: None)


def a_launcher_takes_back_what_it_has_lost(patch: pytest.MonkeyPatch) -> None:
    """A cluster opens the log of a run that another cluster has taken over."""
    for module in (ownership, sessions):
        patch.setattr(module, "check_claim", lambda history, **_: None)


def groups_open_before_the_group_at_work_is_found(patch: pytest.MonkeyPatch) -> None:
    """A restarted coordinator does not look for the group of the coordinator before it."""
    patch.setattr(RunHost, "_recover", lambda self, event, found: setattr(self, "_found", None))


def a_service_stops_while_a_group_is_opened(patch: pytest.MonkeyPatch) -> None:
    """A launcher that waits for agents, or for another launcher, is no reason not to stop the service."""
    patch.setattr(Groups, "is_wanted", False)
    patch.setattr(OpenedNodes, "is_wanted", False)


def a_service_stops_under_a_group(patch: pytest.MonkeyPatch) -> None:
    """A service stops when its checkpoints are safe, whatever its groups do."""
    patch.setattr(stopping, "run_state", lambda machine, owner_lives: "idle")


def one_answer_ends_all_deletes_of_an_order(patch: pytest.MonkeyPatch) -> None:
    """A node has answered, so all folders of the order count as deleted, whatever it answered for each."""

    def deleted(self: RunHost, work: NodeDeletes, answer: Answered) -> None:
        for delete in work.deletes:
            self._end(Answered(to=delete, failure=answer.failure))

    patch.setattr(RunHost, "_deleted", deleted)


def a_late_start_replaces_a_newer_session(patch: pytest.MonkeyPatch) -> None:
    """A node takes the plan that comes last."""
    patch.setattr(NodeMachine, "is_over", lambda self, session_key: False)


def survivors_save_whatever_step_they_have(patch: pytest.MonkeyPatch) -> None:
    """A salvage takes the live state of every rank that makes an offer."""
    real = salvage.choose

    def choose(plan: SessionPlan, reports: Mapping[str, m.SurvivorsReported]) -> Salvage:
        offers = {rank for report in reports.values() for rank in report.offers}
        return replace(real(plan, reports), savers=tuple(sorted(offers)))

    patch.setattr(salvage, "choose", choose)


def _whole_if(patch: pytest.MonkeyPatch, change: Callable[[Any, int], Any]) -> None:
    """Let a salvage be decided by reports that are changed before they are read."""
    real = salvage._whole

    def whole(plan: Any, reports: Mapping[str, Any], step: int, savers: Any) -> Any:
        return real(plan, {node: change(report, step) for node, report in reports.items()}, step, savers)

    patch.setattr(salvage, "_whole", whole)


def a_salvage_ignores_classes(patch: pytest.MonkeyPatch) -> None:
    """A salvage takes every rank's live state as that of all the others."""

    def change(report: m.SurvivorsReported, step: int) -> m.SurvivorsReported:
        kept = {k: dict.fromkeys(steps, "") for k, steps in report.kept.items()}
        return replace(report, kept=kept)

    _whole_if(patch, change)


def the_state_of_another_step_is_taken(patch: pytest.MonkeyPatch) -> None:
    """A node files the own state of a rank one step too late, as it does for the simulated ranks."""
    real = step_states.keep

    def keep(states: dict[int, dict[int, Any]], rank: int, step: int, state: Any) -> None:
        real(states, rank, step, state)
        if step - 1 in states[rank]:
            states[rank][step] = states[rank][step - 1]

    for module in (node_machine, survivors):
        patch.setattr(module, "keep", keep)


def orders_do_not_wait_for_their_epoch(patch: pytest.MonkeyPatch) -> None:
    """A node obeys a higher epoch while its disk still writes it."""

    def persist(self: NodeHost) -> None:
        held, self._held = self._held, []
        for event in held:
            self.ports.start(n.PersistEpoch(epoch=event.order.epoch))
            self._apply(n.EpochPersisted(epoch=event.order.epoch))
            self._obey(event)

    patch.setattr(NodeHost, "_persist", persist)


def an_epoch_that_cannot_be_written_counts(patch: pytest.MonkeyPatch) -> None:
    """A node whose disk has failed obeys the epoch all the same."""
    real = NodeHost._persisted
    patch.setattr(NodeHost, "_persisted", lambda self, epoch, error: real(self, epoch, None))


def an_outcome_wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    """A rank has its outcome only if it comes after it."""
    real = NodeHost._reply_outcomes

    def reply(self: NodeHost, *tokens: Token) -> None:
        if len(tokens) == 1 and tokens[0] == next(reversed(self._outcomes), None):
            real(self, *tokens)

    patch.setattr(NodeHost, "_reply_outcomes", reply)


def the_end_of_a_session_wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    """A rank has the end of its session only if it comes after it."""

    def end(self: NodeHost, session_key: SessionKey, error: CheckpointError) -> None:
        self._end = (session_key, error)

    patch.setattr(NodeHost, "_end_session", end)


def the_end_of_a_session_wakes_all(patch: pytest.MonkeyPatch) -> None:
    """The end of a session ends the ranks of any session."""

    def reply(self: NodeHost) -> None:
        ends, self._ends = (self._ends, {}) if self._end is not None else ({}, self._ends)
        for token in ends:
            assert self._end is not None
            self.ports.reply(token, self._end[1])

    patch.setattr(NodeHost, "_reply_ends", reply)


def the_end_of_a_run_wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    """The ranks of a run that has ended wait for good."""

    def change(machine: NodeMachine, event: Any, effect: Any) -> Iterator[Any]:
        if not isinstance(event, n.RunReleased) or not isinstance(effect, n.EndSession):
            yield effect

    plant_effects(patch, NodeMachine, change)


def a_node_comes_to_a_barrier_with_its_first_rank(patch: pytest.MonkeyPatch) -> None:
    """A node reports all its ranks at a barrier when one of them comes."""
    real = NodeSession._came

    def came(self: NodeSession, event: RankMet) -> None:
        real(self, event)
        self._barriers[event.number].ranks.update(self._ranks)
        self._begin_report(event.number, self._barriers[event.number])

    patch.setattr(NodeSession, "_came", came)


def a_node_answers_its_ranks_at_a_barrier_itself(patch: pytest.MonkeyPatch) -> None:
    """A node lets its ranks enter a barrier when all of them have come, whatever other nodes do."""

    def begin(self: NodeSession, number: int, barrier: Any) -> None:
        self._end_barrier(number, ())

    patch.setattr(NodeSession, "_begin_report", begin)


def ranks_train_when_those_of_their_node_have_restored(patch: pytest.MonkeyPatch) -> None:
    """A node lets its ranks train without the other nodes."""
    real = NodeSession._rank_restored

    def restored(self: NodeSession, event: RankRestored) -> None:
        real(self, event)
        if len(self._restored) == len(self._ranks):
            self._restore_answered(ReportAnswered(report=m.RunWanted()))

    patch.setattr(NodeSession, "_rank_restored", restored)


def sources_that_were_not_reached_are_lost(patch: pytest.MonkeyPatch) -> None:
    """A group falls back to an older checkpoint although the newest one is intact."""
    patch.setattr(sessions.Sessions, "_may_reread", lambda self, ranks: False)


SILENCES: tuple[tuple[Plant, str], ...] = (
    (wait_for_silent_holders, "nothing was committed|complete and is dropped"),
    (never_use_another_holder, "has no copies"),
    (forget_who_is_silent, "has no copies"),
)


def a_relay_that_dies_takes_orders_along(patch: pytest.MonkeyPatch) -> None:
    """A coordinator does not send again what a relay has not answered."""
    patch.setattr(Batch, "give_up", lambda self: ())


def a_relay_forgets_its_own_order(patch: pytest.MonkeyPatch) -> None:
    """A relay passes orders on, but does not obey the one that is addressed to itself."""
    real = OrderRelays.divide

    def divide(self: OrderRelays, *args: Any) -> Iterator[Call | Batch]:
        for part in real(self, *args):
            if isinstance(part, Batch):
                part.calls = {number: c for number, c in part.calls.items() if c.node != part.relay}
            yield part

    patch.setattr(OrderRelays, "divide", divide)


BUGS: tuple[tuple[Plant, str], ...] = (
    (an_end_recorded_twice, "P3"),
    (a_finished_run_keeps_nothing, "P5"),
    (commit_before_fsync, "P1"),
    (any_version_of_a_fragment_is_as_good, "P2"),
    (missing_fence_in_the_log, "P3"),
    (missing_fence_on_the_nodes, "P2|P5|P6|P7"),
    (delete_before_retire, "P5"),
    (retire_the_last_durable, "P5"),
    (guess_on_unknown, "P3|P6"),
    (restore_without_a_session, "P3"),
    (sources_that_were_not_reached_are_lost, "P2"),
    (drop_what_is_being_committed, "P2|P5|P6"),
    (sweep_without_a_note, "P5"),
    (sweep_without_an_age, "P5"),
    (sweep_older_logs, "P5"),
    (never_sweep, "P8"),
    (acknowledge_before_the_log, "P6"),
    (annotate_what_is_retired, "P3"),
    (a_living_launcher_is_called_dead, "P7"),
    (nobody_looks_for_the_other_launcher, "P7"),
    (a_session_ends_with_its_launcher, "P7"),
    (a_session_ends_with_its_job, "P7"),
    (a_dead_launchers_group_stays, "P7"),
    (parts_in_the_order_in_which_they_come, "P7"),
    (a_part_keeps_the_nodes_of_its_first_try, "P7"),
    (nodes_of_a_group_count_as_idle, "P7"),
    (ranks_do_not_report_their_group, "P7"),
    (a_new_agent_gets_no_session, "P7"),
    (a_service_stops_while_a_group_is_opened, "P7"),
    (a_service_stops_under_a_group, "P7"),
    (a_launcher_takes_back_what_it_has_lost, "P7"),
    (groups_open_before_the_group_at_work_is_found, "P7"),
    (a_late_start_replaces_a_newer_session, "P7"),
    (survivors_save_whatever_step_they_have, "P10"),
    (a_salvage_ignores_classes, "P10"),
    (the_state_of_another_step_is_taken, "P10"),
    (orders_do_not_wait_for_their_epoch, "P3"),
    (an_epoch_that_cannot_be_written_counts, "P3"),
    (an_outcome_wakes_nobody, "P7"),
    (the_end_of_a_session_wakes_nobody, "P7"),
    (the_end_of_a_session_wakes_all, "P7"),
    (the_end_of_a_run_wakes_nobody, "P7"),
    (a_node_comes_to_a_barrier_with_its_first_rank, "P9"),
    (a_node_answers_its_ranks_at_a_barrier_itself, "P9"),
    (ranks_train_when_those_of_their_node_have_restored, "P3|P7"),
    (one_answer_ends_all_deletes_of_an_order, "P8"),
    (a_relay_that_dies_takes_orders_along, "P8"),
    (a_relay_forgets_its_own_order, "P8"),
)


@pytest.mark.parametrize(("plant", "promise"), every_few(BUGS), ids=[plant.__name__ for plant, _ in BUGS])
def test_a_planted_bug_is_found(plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    first = FIRST_SEEDS.get(plant.__name__, 0)
    seeds: Iterable[int] = range(first, max(first + 1, NUM_SEEDS))
    if promise == "P10":
        seeds = filter(salvages, range(first, MAX_SALVAGE_SEED))
    with pytest.raises(Violation, match=f"^({promise}): "):
        for seed in seeds:
            play(seed)


@pytest.mark.parametrize(("plant", "message"), SILENCES, ids=[plant.__name__ for plant, _ in SILENCES])
def test_a_bug_that_shows_in_silence_is_found(
    plant: Plant, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation, match=message):
        for seed in SILENT_SEEDS[FIRST_SEEDS.get(plant.__name__, 0) :]:
            silences.play(seed)
