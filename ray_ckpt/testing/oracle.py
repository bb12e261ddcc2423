"""Oracle: checks the promises after every step, from the store, the disks, and all replies.

The promises are P1 to P6 and P8 of the design, equal answers to all ranks (P9), and
salvages of one step (P10). The oracle replays the
log itself and does not use the state of the machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

from ray_ckpt.config import RunOptions, resume_step
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.messages import BarrierAnswer, BarrierReached, DeleteOrphans, GroupOpened
from ray_ckpt.core.missing_ranks import STAYS_OUT_S
from ray_ckpt.core.sessions import MAX_REREADS
from ray_ckpt.core.values import Salvage, SessionKey, SessionPlan
from ray_ckpt.engine.launchers import OWNER_DEAD_S
from ray_ckpt.errors import CheckpointError, FormatError
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import root_digest
from ray_ckpt.format.manifest import choose_fragments
from ray_ckpt.format.names import attempt_of, whole_directory
from ray_ckpt.format.records import LogRecord
from ray_ckpt.storage.log_store import read_run
from ray_ckpt.testing.parts import Launcher, Node, TakenInventory
from ray_ckpt.testing.reports import KnownCopies
from ray_ckpt.testing.stores import START_S, Copy, Disk, Storage, part_of
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, Level, ParityGroup

if TYPE_CHECKING:
    from ray_ckpt.testing.nodes import Nodes

MAX_SKEW_S = 7_200.0  # error of a coordinator's wall clock, allowed for when a pin expires
DAY_S = 24 * 3600.0  # time for which orphans stay on the storage path
MAX_PENDING = 64  # decided but unwritten records of a coordinator (P8)


class Violation(AssertionError):
    """Error: a promise is broken."""


def must(holds: bool, promise: str, text: str) -> None:
    if not holds:
        raise Violation(f"{promise}: {text}")


@dataclass(slots=True)
class _Opening:
    """A group that waits for its session, with the facts that its coordinator has received."""

    event: GroupOpened
    at: int  # number of the event that took its inventories
    agents: dict[str, int]  # node -> number of the agent that answered


def accused(attempt: AttemptId, since_s: float, options: RunOptions) -> None:
    """Check that misuse is reported only after a time-out, because all ranks of a world take part."""
    is_late = since_s >= min(options.attempt_timeout_s, STAYS_OUT_S)
    must(is_late, "P9", f"a rank was reported to stay out of step {attempt.step} after {since_s} s")


@dataclass(slots=True)
class Oracle:
    """Checker that follows all events of a world; raises Violation."""

    history: RunHistory = field(default_factory=RunHistory)
    num_commits: int = 0
    num_exported: int = 0
    committed_by: dict[str, str] = field(default_factory=dict)  # attempt -> coordinator
    committed: dict[str, tuple[FileEntry, ...]] = field(default_factory=dict)  # attempt -> its fragments
    plans: dict[str, SessionPlan] = field(default_factory=dict)  # attempt -> plan of the ranks that saved
    attempts: dict[str, AttemptId] = field(default_factory=dict)  # attempts saved by ranks
    # fragment -> version of its file, as written or altered since -> disks that ever had it fsynced
    stored_on: dict[Copy, dict[FileEntry, set[str]]] = field(default_factory=dict)
    groups: dict[Copy, ParityGroup] = field(default_factory=dict)  # of members of a group with a parity file
    coded_on: dict[Copy, set[str]] = field(default_factory=dict)  # member -> disks that had its parity file
    failed: dict[str, set[str]] = field(default_factory=dict)  # attempt -> disks that lost a fragment
    damaged: set[tuple[str, str]] = field(default_factory=set)  # (owner, attempt) without an intact source
    unread: dict[tuple[str, str], set[SessionKey]] = field(default_factory=dict)  # sessions that lacked parts
    dropped: dict[str, int] = field(default_factory=dict)  # attempt -> epoch in which it was dropped
    copies: KnownCopies = field(default_factory=KnownCopies)
    unlogged: dict[tuple[int, int], SessionPlan] = field(default_factory=dict)  # sessions opened without log
    trained: set[tuple[int, int]] = field(default_factory=set)  # (session, epoch) of groups that have trained
    openings: dict[str, _Opening] = field(default_factory=dict)  # coordinator -> the group being opened
    decided: dict[tuple[int, int], _Opening] = field(default_factory=dict)  # (session, epoch) of a record
    pins: set[tuple[str, str]] = field(default_factory=set)  # pins ever logged: attempt, owner
    annotated: dict[tuple[str, str], float] = field(default_factory=dict)  # attempt, metric -> last value
    annotations: set[tuple[int, str, float]] = field(default_factory=set)  # logged: step, metric, value
    drilled: set[str] = field(default_factory=set)  # texts of the drills in the log
    reached: dict[tuple[SessionKey, int], set[int]] = field(default_factory=dict)  # barrier -> its ranks
    # (coordinator, session, barrier) -> the coordinator's answer to the ranks
    answers: dict[tuple[str, SessionKey, int], BarrierAnswer] = field(default_factory=dict)
    sessions: list[SessionPlan] = field(default_factory=list)  # sessions in which ranks have trained
    num_classes: int = 1  # of ranks that hold the same tensors
    # attempt of a salvage -> rank -> step of its state, and whether the rank itself saved it
    salvages: dict[str, dict[int, tuple[int, bool]]] = field(default_factory=dict)
    salvaged: dict[str, SessionPlan] = field(default_factory=dict)  # attempt of a salvage -> its group
    writer: str = ""  # writer of the last epoch
    began_s: float = 0.0  # world time at the record of the first session
    stale: bool = True  # True: copies may have changed since their last check

    # -- the log -------------------------------------------------------------------------------------

    def logged(self, world: Nodes) -> None:
        """Check and apply the newest record in the store."""
        record, record_digest = world.storage.records[-1]
        self._check_record(record, world)
        try:
            self.history.apply(record, record_digest)
        except FormatError as error:
            raise Violation(f"P3: {error}") from error
        self.stale = True
        if isinstance(record.op, r.Commit):
            self.num_commits += 1
            self.committed_by[record.op.attempt] = record.writer
        self.num_exported += isinstance(record.op, r.Exported)

    def _check_record(self, record: LogRecord, world: Nodes) -> None:
        op, history = record.op, self.history
        if isinstance(op, r.Epoch):
            must(record.epoch > history.epoch, "P3", f"{record} repeats an epoch")
            self.writer = record.writer
        elif not isinstance(op, r.Create):
            must(record.writer == self.writer, "P3", f"{record} is of a fenced writer, not of {self.writer}")
        match op:
            case r.Session():
                self._check_session(op, record, world)
            case r.Commit():
                self._check_commit(op, record.epoch)
            case r.Promote(attempt=name, level=level, replicas=copies):
                checkpoint = history.checkpoints[name]
                if level is Level.DURABLE and checkpoint.state == "live":
                    must(world.storage.holds(checkpoint), "P1", f"{op} is not on the storage path")
                for index in range(checkpoint.num_nodes) if level is Level.REPLICATED else ():
                    disks = set().union(*self.stored_on.get((name, index), {}).values())
                    self._check_losses(op, (name, index), disks, copies)
            case r.Exported():
                self._check_exported(op, world)
            case r.Pin(attempt=name, owner=owner):
                self.pins.add((name, owner))
            case r.Annotated(attempt=name, metrics=metrics):
                checkpoint = history.checkpoints[name]
                must(checkpoint.state == "live", "P3", f"{op} is of a checkpoint that is {checkpoint.state}")
                for metric, value in metrics.items():
                    self.annotated[name, metric] = value
                    self.annotations.add((checkpoint.step, metric, value))
            case r.Retired(attempt=name):
                self._check_retired(op, history.checkpoints[name], record)
            case r.Restored() | r.Ended():
                self._check_session_change(op)
            case r.Drilled(text=text):
                self.drilled.add(text)
            case _:
                pass

    def _check_session(self, op: r.Session, record: LogRecord, world: Nodes) -> None:
        current, lineage = self.history.session, self.history.lineage()
        self.began_s = record.time_s - START_S if current is None else self.began_s
        must(op.after == (current.session if current else None), "P3", f"{op} does not follow the last one")
        names = [c.id.attempt for c in lineage]
        must(op.resumed_from is None or op.resumed_from in names, "P3", f"{op} leaves the lineage")
        opening = self.decided.get((op.session, record.epoch))
        if opening is None or opening.event.owner != op.owner or (op.session, op.opened_by) in self.unlogged:
            return  # the coordinator got no request for the session, or chose without the log
        skipped = lineage[names.index(op.resumed_from) + 1 :] if op.resumed_from else lineage
        if opening.event.resume == "never":
            return
        if (step := resume_step(opening.event.resume)) is not None:
            steps = [c.step for c in lineage if c.id.attempt == op.resumed_from]
            must(steps == [step], "P3", f"{op} does not go back to step {step}")
            return
        for checkpoint in skipped:
            wrong = self._could_serve(checkpoint, op.owner, opening, world)
            must(not wrong, "P2", f"{op} leaves out step {checkpoint.step}, which can be served")
        must(op.resumed_from is not None or not lineage, "P2", f"{op} starts from scratch")

    def _could_serve(self, checkpoint: CheckpointInfo, owner: str, opening: _Opening, world: Nodes) -> bool:
        """Return True if a checkpoint is surely readable: reported before the group opened, not changed."""
        name = checkpoint.id.attempt
        if (owner, name) in self.damaged:
            return False
        if checkpoint.level is Level.DURABLE:
            return world.storage.holds(checkpoint)
        return all(
            any(self._serves(node, opening, (name, index), world) for node in opening.agents)
            for index in range(checkpoint.num_nodes)
        )

    def _serves(self, name: str, opening: _Opening, copy: Copy, world: Nodes) -> bool:
        node = world.nodes[name]
        agent = node.agent
        return (
            node.is_alive
            and agent is not None
            and agent.number == opening.agents[name]
            and node.disk.has_intact(copy)
            and node.disk.since.get(copy, opening.at) < opening.at
            and not agent.machine.is_deleted(copy[0])
        )

    def _check_commit(self, op: r.Commit, epoch: int) -> None:
        current = self.history.session
        is_current = current is not None and current.session == op.session
        must(is_current, "P3", f"{op} is of a session that has ended")
        must(self.dropped.get(op.attempt, 0) < epoch, "P6", f"{op} was given up in this epoch")
        plan = self.plans.get(op.attempt)
        must(plan is not None, "P1", f"nobody has saved {op}")
        assert plan is not None
        must(self._is_logged(plan), "P3", f"{op} was saved in another session, {plan.session_key}")
        if op.attempt in self.salvaged:
            self._check_salvage(op)
        steps = [c.step for c in self.history.checkpoints.values() if c.id.session == op.session]
        must(not steps or max(steps) < op.step, "P3", f"{op} comes after step {max(steps, default=0)}")
        versions = [self.stored_on.get((op.attempt, index), {}) for index in range(op.num_nodes)]
        for index, found in enumerate(versions):
            must(bool(found), "P1", f"{op}: fragment {index} was never fsynced")
        names = [next(iter(found)).name for found in versions]
        known = {name: {v.digest: (v,) for v in found} for name, found in zip(names, versions, strict=True)}
        chosen = choose_fragments(known, op.root_digest, op.root_of)
        must(chosen is not None, "P1", f"{op} is of fragments that nobody has stored")
        self.committed[op.attempt] = tuple(
            next(v for v in found if chosen and v.digest == chosen[name])
            for name, found in zip(names, versions, strict=True)
        )
        for name, found in zip(names, versions, strict=True):
            disks = next(disks for v, disks in found.items() if chosen and v.digest == chosen[name])
            self._check_losses(op, (op.attempt, names.index(name)), disks, op.replicas)

    def _check_losses(self, op: r.Op, copy: Copy, disks: set[str], losses: int) -> None:
        """Check that a fragment survives the loss of any `losses` of the disks that ever had its group."""
        if len(disks) > losses:
            return
        name, index = copy
        group = self.groups.get(copy)
        must(group is not None, "P2", f"{op}: fragment {index} was on {sorted(disks)} only")
        assert group is not None
        held = [set().union(*self.stored_on.get((name, at), {}).values()) for at in group.members]
        coded = [self.coded_on.get((name, at), set()) for at in group.members]
        for lost in map(set, combinations(sorted(set().union(*held, *coded)), losses)):
            away = {at for at, found in enumerate(held) if found <= lost}
            left = {at for at, found in enumerate(coded) if not found <= lost}
            good = group.members.index(index) not in away or self._computes(group, away, left)
            must(good, "P2", f"{op}: the loss of {sorted(lost)} loses fragment {index}")

    def _computes(self, group: ParityGroup, lost: Set[int], parities: Set[int]) -> bool:
        """Return True if each stripe with a lost member has as many parity blocks left as lost members."""
        for stripe in range(group.size):
            gone = [at for at in lost if (at - stripe) % group.size >= group.parity]
            if len(gone) > sum((at - stripe) % group.size < group.parity for at in parities):
                return False
        return True

    def _check_exported(self, op: r.Exported, world: Nodes) -> None:
        """Check that all parts of uploaded items are there, taken from the committed fragments."""
        checkpoint = self.history.checkpoints[op.attempt]
        must(op.items == world.options.exported_items, "P3", f"{op} has items that nobody wants")
        if checkpoint.state in ("live", "lost"):
            root = world.storage.items_root(checkpoint, op.items)
            is_there = world.storage.exported.get(op.attempt) == op.items and root == op.root_digest
            must(is_there, "P1", f"{op} is not on the storage path")
        committed = self.committed[op.attempt]
        wanted = root_digest(part_of(entry, op.items).fragment for entry in committed)
        must(op.root_digest == wanted, "P4", f"{op} is not of the bytes that were committed")

    def _check_retired(self, op: r.Retired, checkpoint: CheckpointInfo, record: LogRecord) -> None:
        lineage, live = self.history.lineage(), self.history.live()
        for level in Level:
            reached = [c for c in lineage if c.level >= level] or [c for c in live if c.level >= level]
            newest = reached[-1] if reached else None
            must(newest != checkpoint, "P5", f"{op} is the newest {level.label}")
        if checkpoint.exported or checkpoint.state == "lost":
            there = [c for c in live if c.exported or c.level is Level.DURABLE]
            newer = [c for c in there if c.seq > checkpoint.seq]
            is_needed = not any(c.exported or c in lineage for c in newer)  # a durable branch may go too
            is_needed |= [c for c in there if c in lineage][-1:] == [checkpoint]
            if checkpoint.state == "lost":
                is_needed = not newer
            what = checkpoint.exported or "files"
            must(not is_needed, "P5", f"{op} is the newest with {what} on the storage path")
        surely_s = record.time_s + MAX_SKEW_S
        pins = [o for o, end in checkpoint.pins.items() if end is None or end > surely_s]
        must(not pins, "P5", f"{op} is pinned by {pins}")
        current = self.history.session
        if current is not None and current.resumed_from == op.attempt:
            trains = any(session == current.session for session, _ in self.trained)
            must(trains, "P5", f"{op} is being restored by session {current.session}")

    def _check_session_change(self, op: r.Restored | r.Ended) -> None:
        current = self.history.session
        is_current = current is not None and current.session == op.session
        must(is_current, "P3", f"{op} is not of the session at work")
        if isinstance(op, r.Ended) and current is not None:
            must(current.ended is None, "P3", f"{op} ends a session once more, after {current.ended}")

    # -- groups and saves ------------------------------------------------------------------------------

    def group_opened(self, coordinator: str, event: GroupOpened) -> None:
        """Record that a coordinator opens a group, with the inventories that were taken for it."""
        taken = {node: x for node, x in event.inventories.items() if isinstance(x, TakenInventory)}
        at = min((inventory.at for inventory in taken.values()), default=0)
        agents = {node: inventory.agent for node, inventory in taken.items()}
        self.openings[coordinator] = _Opening(event, at, agents)

    def owner_died(self, launcher: Launcher, now_s: float) -> None:
        """Check that a coordinator ends only the session of a launcher that has been dead for a while."""
        dead_s = -1.0 if launcher.died_s is None else now_s - launcher.died_s
        text = f"the session of {launcher.name} ends {dead_s} s after its launcher's death"
        must(dead_s >= OWNER_DEAD_S and not launcher.is_job, "P7", text)

    def appends(self, coordinator: str, record: LogRecord) -> None:
        """Record that a coordinator sends a record, for the first time or again."""
        if isinstance(record.op, r.Session) and coordinator in self.openings:
            key = record.op.session, record.epoch
            self.decided.setdefault(key, self.openings[coordinator])

    def begun(self, plan: SessionPlan, *, store_is_silent: bool) -> None:
        """Check a plan that a coordinator sends to a group's nodes."""
        if not self._is_logged(plan):
            must(store_is_silent, "P3", f"session {plan.session} begins before it is in the log")
            self.unlogged[plan.session, plan.epoch] = plan

    def _is_logged(self, plan: SessionPlan) -> bool:
        known = self.history.sessions.get(plan.session)
        resumed_from = plan.resume.checkpoint.id.attempt if plan.resume else None
        wanted = (plan.epoch, resumed_from, plan.owner)
        return known is not None and (known.opened_by, known.resumed_from, known.owner) == wanted

    def restores(self, plan: SessionPlan) -> None:
        """Check that ranks may read the checkpoint in a plan."""
        begun = self._is_logged(plan) or (plan.session, plan.epoch) in self.unlogged
        must(begun, "P3", f"ranks restore for session {plan.session}, which nobody has recorded")

    def read(self, plan: SessionPlan, damage: tuple[str, ...], *, is_unreachable: bool) -> None:
        """Record damage, which sources that were not reached become after MAX_REREADS sessions."""
        if damage and plan.resume is not None:
            name = plan.owner, plan.resume.checkpoint.id.attempt
            unread = self.unread.setdefault(name, set())
            unread.add(plan.session_key)
            if not is_unreachable or len(unread) > MAX_REREADS:
                self.damaged.add(name)

    def go(self, plan: SessionPlan) -> None:
        """Record that ranks begin to train."""
        self.restores(plan)
        self.trained.add((plan.session, plan.epoch))
        self.sessions.append(plan)

    def is_over(self, plan: SessionPlan) -> bool:
        """Return True if the log has a newer session than the plan's."""
        current = self.history.session
        return current is None or current.session != plan.session or not self._is_logged(plan)

    def saves(self, attempt: AttemptId, plan: SessionPlan) -> None:
        self.plans[attempt.attempt] = plan
        self.attempts[attempt.attempt] = attempt

    def class_of(self, rank: int) -> str:
        """Return the class of a rank: which tensors it holds in common with others."""
        return f"class {rank % self.num_classes}"

    def salvages_step(self, salvage: Salvage, plan: SessionPlan) -> None:
        """Record the decision on a salvage, which its fragments follow."""
        if salvage.attempt is not None:
            self.saves(salvage.attempt, replace(plan, nodes=salvage.nodes))
            self.salvaged[salvage.attempt.attempt] = plan

    def captures(self, attempt: AttemptId, rank: int, step: int, *, is_survivor: bool) -> None:
        """Record the state of a rank in a salvage: of the rank itself, or as a node keeps it."""
        self.salvages.setdefault(attempt.attempt, {})[rank] = step, is_survivor

    def _check_salvage(self, op: r.Commit) -> None:
        """Check P10: a salvage has the own state of each rank and all tensors, and all are of its step."""
        plan, parts = self.salvaged[op.attempt], self.salvages.get(op.attempt, {})
        ranks = {rank for node in plan.nodes for rank in node.ranks}
        must(parts.keys() == ranks, "P10", f"{op} has the ranks {sorted(parts)}, not all of {sorted(ranks)}")
        for rank, (step, _) in parts.items():
            must(step == op.step, "P10", f"{op} has the state of rank {rank} after step {step}")
        saved = {self.class_of(rank) for rank, (_, is_survivor) in parts.items() if is_survivor}
        lost = {self.class_of(rank) for rank in ranks} - saved
        must(not lost, "P10", f"{op} lacks what the ranks of {sorted(lost)} held")

    def gives_up(
        self, coordinator: str, attempt: AttemptId, error: CheckpointError | None, live: Set[str]
    ) -> None:
        """Check an "overtaken" drop: if the attempt is complete on `live`, a newer one must be complete.

        A salvage of the same step is as good.
        """
        if error is None or "overtaken" not in error.message:
            return
        if not self._is_complete(coordinator, attempt, live):
            return
        others = [p for p in self._session(attempt) if p.attempt != attempt.attempt]
        newer = [p for p in others if p.step >= attempt.step]
        must(
            any(self._is_complete(coordinator, other) for other in newer),
            "P6",
            f"step {attempt.step} was complete and is dropped for newer ones that are not",
        )

    def _session(self, attempt: AttemptId) -> Iterator[AttemptId]:
        """Yield the attempts of the same session, saved by ranks or found in the log."""
        session_key = (attempt.epoch, attempt.session)
        known = [c.id for c in self.history.checkpoints.values()]
        yield from (a for a in (*self.attempts.values(), *known) if (a.epoch, a.session) == session_key)

    def _is_complete(self, coordinator: str, attempt: AttemptId, live: Set[str] | None = None) -> bool:
        """Return True if a coordinator has reports of all fragments; for `live`, see `KnownCopies`."""
        name, plan = attempt.attempt, self.plans.get(attempt.attempt)
        fragments = self.copies.fragments(coordinator, name, live)
        return name in self.history.checkpoints or (plan is not None and len(fragments) == len(plan.nodes))

    def gave_up(self, attempt: str, epoch: int) -> None:
        """Record that a node reports a save as dropped; a later coordinator may find the save complete."""
        self.dropped[attempt] = epoch

    def settled(self, attempt: AttemptId, level: Level | None) -> None:
        """Check the level of a save that is reported to ranks; None promises nothing."""
        if level is not None:
            known = self.history.checkpoints.get(attempt.attempt)
            must(known is not None, "P6", f"step {attempt.step} was acknowledged and is not in the log")
            assert known is not None
            must(known.level >= level, "P6", f"step {attempt.step} was called {level.label} too early")

    def comes(self, session_key: SessionKey, number: int, rank: int) -> None:
        """Record that a rank reaches a barrier."""
        self.reached.setdefault((session_key, number), set()).add(rank)

    def entered(self, session_key: SessionKey, number: int) -> None:
        """Check that all ranks have reached a barrier which ranks may enter."""
        plan = next(plan for plan in reversed(self.sessions) if plan.session_key == session_key)
        ranks = {rank for node in plan.nodes for rank in node.ranks}
        missing = ranks - self.reached[session_key, number]
        what = f"barrier {number} of session {session_key}"
        must(not missing, "P9", f"{what} is entered without ranks {missing}")

    def met(self, coordinator: str, event: BarrierReached, answer: BarrierAnswer) -> None:
        """Check the answer that a coordinator sends to the ranks at a barrier."""
        what = f"barrier {event.number} of session {event.session_key}"
        if not answer.missing:
            self.entered(event.session_key, event.number)
        first = self.answers.setdefault((coordinator, event.session_key, event.number), answer)
        must(first == answer, "P9", f"{what} is entered by some ranks only")

    def finished(self, value: object) -> None:
        """Check the checkpoint that a launcher received as durable."""
        if isinstance(value, CheckpointInfo):
            known = self.history.checkpoints[value.id.attempt]
            must(known.level is Level.DURABLE, "P6", f"step {known.step} was called durable too early")

    def pin_acknowledged(self, attempt: str, owner: str) -> None:
        is_logged = (attempt, owner) in self.pins
        must(is_logged, "P6", f"the pin of {owner} was acknowledged and is not in the log")

    def annotation_acknowledged(self, step: int, metric: str, value: float) -> None:
        is_logged = (step, metric, value) in self.annotations
        must(is_logged, "P6", f"{metric}={value} of step {step} was acknowledged and is not in the log")

    def drill_acknowledged(self, text: str) -> None:
        must(text in self.drilled, "P6", f"the drill {text} was acknowledged and is not in the log")

    # -- bytes ---------------------------------------------------------------------------------------

    def stored(self, disk: Disk, copy: Copy) -> None:
        """Record a copy that is complete and fsynced."""
        version = disk.fragments[copy].fragment
        self.stored_on.setdefault(copy, {}).setdefault(version, set()).add(disk.name)
        self.copies.written(disk, copy)
        self.stale = True

    def coded(self, disk: Disk, copy: Copy, group: ParityGroup) -> None:
        """Record a complete and fsynced parity file."""
        self.groups |= {(copy[0], member): group for member in group.members}
        self.coded_on.setdefault(copy, set()).add(disk.name)
        self.stale = True

    def destroyed(self, disk: Disk) -> None:
        self.stale = True
        for (attempt, _), versions in self.stored_on.items():
            if any(disk.name in disks for disks in versions.values()):
                self.failed.setdefault(attempt, set()).add(disk.name)
        for (attempt, _), disks in self.coded_on.items():
            if disk.name in disks:
                self.failed.setdefault(attempt, set()).add(disk.name)

    def corrupted(self, disk: Disk, copy: Copy) -> None:
        self.stale = True
        self.failed.setdefault(copy[0], set()).add(disk.name)

    def deletes(self, node: Node, directory: str, storage: Storage) -> None:
        """Check that a node may delete a folder, as ordered."""
        self.stale = True
        gone = [copy for copy, held in node.disk.fragments.items() if held.attempt.directory == directory]
        for copy in gone:
            known = self.history.checkpoints.get(copy[0])
            if known is not None and known.state == "live":
                coordinators = {self.committed_by[copy[0]], self.writer}
                is_safe = not self.copies.counts(coordinators, copy, node) or (
                    known.level is Level.DURABLE and storage.holds(known)
                )
                what = f"fragment {copy[1]} of step {known.step}"
                must(is_safe, "P5", f"{node.disk.name} deletes {what}, which is live")
            self.copies.deleted(node, copy)

    def deletes_remote(self, attempt: str) -> None:
        known = self.history.checkpoints.get(attempt)
        gone = known is not None and known.state in ("retired", "collected")
        must(gone, "P5", f"the storage path loses {attempt}, which is not retired")
        self.stale = True

    def sweeps(self, order: DeleteOrphans, world: Nodes) -> None:
        """Check an order to delete from the storage path; entries that are already deleted do not count."""
        storage = world.storage
        for name in order.directories:
            known, at_s = self.history.checkpoints.get(attempt_of(name)), storage.written_s.get(name)
            if known is None and at_s is not None:
                must(world.now_s - at_s >= DAY_S, "P5", f"{name} goes after {world.now_s - at_s} s")
                must(at_s >= self.began_s - MAX_SKEW_S, "P5", f"{name} goes, which another log knew")
            must(known is None or known.state == "collected", "P5", f"{known} is taken for an orphan")
        for upload in order.uploads:
            whole, there = whole_directory(upload.directory), upload.upload_id
            known = self.history.checkpoints.get(attempt_of(whole)) if whole else None
            is_useless = there not in storage.uploads or world.now_s - storage.uploads[there].begun_s >= DAY_S
            if known is not None:
                is_there = known.exported if "." in upload.directory else known.level is Level.DURABLE
                is_useless |= bool(is_there) or known.state in ("retired", "collected")
            must(is_useless, "P5", f"{upload} is aborted, and {known} may need it")
        self.stale = True

    def orphans(self, world: Nodes) -> list[str]:
        """Return directories of no checkpoint that are older than a day and surely younger than the log."""
        orphans = []
        for name, at_s in world.storage.written_s.items():
            known = self.history.checkpoints.get(attempt_of(name))
            is_ours = known is not None or at_s >= self.began_s + MAX_SKEW_S
            is_needed = known is not None and known.state != "collected"
            if is_ours and not is_needed and world.now_s - at_s >= DAY_S:
                orphans.append(name)
        return orphans

    def check(self, world: Nodes) -> None:
        """Check P2: disks hold each live checkpoint at its logged level, except disks that have failed."""
        if not self.stale:
            return
        self.stale = False
        disks = world.disks()
        for checkpoint in (*self.history.live(), *self.history.lost_exported()):
            items, is_there = checkpoint.exported, world.storage.holds_items(checkpoint)
            must(not items or is_there, "P2", f"step {checkpoint.step} has lost its {items}")
        for checkpoint in self.history.live():
            name = checkpoint.id.attempt
            if checkpoint.level is Level.DURABLE:
                must(world.storage.holds(checkpoint), "P2", f"step {checkpoint.step} is not durable any more")
                continue
            if len(self.failed.get(name, ())) > checkpoint.replicas:
                continue  # more copies were lost than the checkpoint's level covers
            for index in range(checkpoint.num_nodes):
                is_there = any(disk.has_intact((name, index)) for disk in disks)
                is_there = is_there or self._is_computed((name, index), disks)
                what = f"fragment {index} at {checkpoint.level.label}"
                must(is_there, "P2", f"step {checkpoint.step} has lost {what}")

    def _is_computed(self, copy: Copy, disks: Iterable[Disk]) -> bool:
        """Return True if a lost fragment can be computed from what is left on disks."""
        group, disks = self.groups.get(copy), tuple(disks)
        if group is None:
            return False
        copies = [(copy[0], member) for member in group.members]
        lost = {at for at, other in enumerate(copies) if not any(disk.has_intact(other) for disk in disks)}
        left = {at for at, other in enumerate(copies) if any(other in disk.parities for disk in disks)}
        return self._computes(group, lost, left)

    def check_log(self, world: Nodes) -> None:
        """Check P3: a reader that starts from the bytes of the log gets the same history."""
        history, records = read_run(world.storage.log)
        for record, record_digest in records:
            history.apply(record, record_digest)
        must(history.checkpoints == self.history.checkpoints, "P3", "two readers of the log disagree")
        must(history.sessions == self.history.sessions, "P3", "two readers of the log disagree on sessions")
        for (attempt, metric), value in self.annotated.items():
            found = history.checkpoints[attempt].metrics[metric]
            must(found == value, "P3", f"{metric} of {attempt} is {found}, and {value} came last")
