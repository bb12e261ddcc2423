"""The run machine: everything the coordinator decides about one run (see PROTOCOL.md).

One door: `handle(event) -> effects`. A decision that others may see goes into the log first; its effects
follow when the store has confirmed the record. One record is in flight at a time, so the log is a total
order and a lost race is noticed at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import singledispatchmethod
from typing import Any

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.attempts import Attempt
from ray_ckpt.core.deletions import Deletions
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.ledger import Ledger
from ray_ckpt.core.placement import place_replicas
from ray_ckpt.core.retention import choose_retirements
from ray_ckpt.errors import (
    CheckpointError,
    CollectiveError,
    Fenced,
    RestoreError,
    RunSuperseded,
    SaveNotCollective,
    Unavailable,
)
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId, CheckpointInfo, Level, RankRestore

MAX_OPEN_ATTEMPTS = 8  # one save is in flight per rank; more means ranks that disagree on steps
MAX_WAITING_COMMITS = 2  # while the store is silent: the newest two stay held, older ones are dropped


class RunMachine:
    """State and decisions of one run. `writer` identifies this coordinator in the log."""

    def __init__(self, *, options: RunOptions, writer: str) -> None:
        self.options = options
        self._ledger = Ledger(writer)
        self._now_s = 0.0
        self._wall_s = 0.0
        self._fenced = False
        self._live: frozenset[str] = frozenset()
        self._holders: dict[str, dict[int, set[str]]] = {}  # attempt -> node_index -> nodes that hold it
        self._attempts: dict[str, Attempt] = {}
        self._dropped: deque[str] = deque(maxlen=256)  # attempts whose late messages are ignored
        self.plan: m.SessionPlan | None = None
        self._group: m.GroupOpened | None = None
        self._group_since_s = 0.0
        self._excluded: set[str] = set()  # found damaged by this group
        self._opening: tuple[m.Token, ...] = ()
        self._restored: dict[str, m.NodeRestored] = {}
        self.restores: tuple[RankRestore, ...] = ()  # how the current group got its state
        self._is_training = False  # the group has its `go`
        self._saved_before: set[int] = set()  # ranks that saved in this session
        self._strays: dict[str, tuple[str, ...]] = {}
        self._drains = Drains()
        self._deletions = Deletions()
        self._finishing: list[m.Token] = []
        self._warned: set[str] = set()

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        """Apply one event; the effects are to be carried out in order."""
        if self._fenced:
            return tuple(self._refuse(event))
        effects = [*self._on(event)]
        effects += self._check_finish()
        if (append := self._ledger.next(self._wall_s)) is not None:
            effects.append(append)
        return tuple(effects)

    @property
    def history(self) -> RunHistory:
        """What the log is known to say."""
        return self._ledger.history

    @property
    def is_open(self) -> bool:
        """This coordinator's epoch is in the log and nobody has taken over."""
        return self._ledger.is_open and not self._fenced

    @property
    def holders(self) -> dict[str, dict[int, tuple[str, ...]]]:
        """Who holds which fragment of which attempt, for people."""
        return {a: {i: tuple(sorted(n)) for i, n in f.items()} for a, f in self._holders.items()}

    # -- the log -------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: Any) -> Iterable[m.Effect]:
        raise TypeError(f"unknown event {event!r}")

    @_on.register
    def _(self, event: m.LogOpened) -> Iterable[m.Effect]:
        self._ledger.open(event)
        return ()

    @_on.register
    def _(self, event: m.Appended) -> Iterator[m.Effect]:
        op = self._ledger.settle(event, self._now_s)
        if op == "unknown":
            yield from self._shed_commits()
            yield from self._warn(f"The log did not answer for record {event.seq}; trying again.")
        elif op == "lost":
            yield from self._step_down(event.seq)
        elif not isinstance(op, str):
            yield from self._applied(op)

    def _step_down(self, seq: int) -> Iterator[m.Effect]:
        self._fenced = True
        error = Fenced(f"Another coordinator wrote record {seq} of run {self.history.run_name}.")
        for token in (*self._opening, *(e.token for e in self._restored.values()), *self._finishing):
            yield m.Fail(token=token, error=error)
        yield m.StepDown(error=error)

    def _refuse(self, event: m.Event) -> Iterator[m.Effect]:
        if isinstance(event, m.GroupOpened | m.NodeRestored | m.FinishAsked):
            name = self.history.run_name
            yield m.Fail(token=event.token, error=Fenced(f"Another coordinator owns run {name}."))

    def _shed_commits(self) -> Iterator[m.Effect]:
        waiting = [op for op in self._ledger.waiting() if isinstance(op, r.Commit)]
        for op in waiting[:-MAX_WAITING_COMMITS]:
            self._ledger.withdraw(op)
            error = Unavailable(f"Step {op.step}: the storage path did not take its commit record.")
            yield from self._drop(self._attempts[op.attempt], error)

    def _applied(self, op: r.Op) -> Iterator[m.Effect]:
        match op:
            case r.Session():
                yield from self._session_opened()
            case r.Commit(attempt=attempt):
                yield from self._committed(self.history.checkpoints[attempt])
            case r.Promote(attempt=attempt):
                yield from self._promoted(self.history.checkpoints[attempt])
            case r.Retired(attempt=attempt):
                yield from self._retired(self.history.checkpoints[attempt])
            case r.Collected(attempt=attempt):
                self._holders.pop(attempt, None)
            case _:
                return

    # -- a group opens, restores, trains ---------------------------------------------------------------

    @_on.register
    def _(self, event: m.GroupOpened) -> Iterator[m.Effect]:
        if self._group is None or self._group.token != event.token:
            self._group_since_s = self._now_s
            self._excluded = set()
            error = RunSuperseded("A newer training group has opened this run.")
            yield from self._end_session(error)
            self._opening = (event.token,)
            self._finishing = []
        self._group = event
        self._live = self._live | frozenset(event.inventories)
        self._learn(event)
        yield from self._choose()

    def _end_session(self, error: CheckpointError) -> Iterator[m.Effect]:
        for token in (*self._opening, *(e.token for e in self._restored.values())):
            yield m.Fail(token=token, error=error)
        self._opening = ()
        self._restored = {}
        for attempt in [a for a in self._attempts.values() if not a.committing]:
            yield from self._drop(attempt, error)
        self.plan = None

    def _learn(self, group: m.GroupOpened) -> None:
        for attempt in self._holders.values():
            for nodes in attempt.values():
                nodes &= self._live - set(group.inventories)
        live = {c.directory for c in self.history.live()}
        for node, inventory in group.inventories.items():
            for held in inventory.fragments:
                if held.attempt.run_uid == self.history.run_uid:
                    self._holder_set(held.attempt.attempt, held.node_index).add(node)
            busy = {a.id.directory for a in self._attempts.values()}
            self._strays[node] = tuple(d for d in inventory.directories if d not in live | busy)

    def _choose(self) -> Iterator[m.Effect]:
        """Pick the newest checkpoint that can be read, or wait for nodes that may bring a newer one."""
        assert self._group is not None
        group = self._group
        candidates = [] if group.resume == "never" else list(reversed(self.history.lineage()))
        candidates = [c for c in candidates if c.id.attempt not in self._excluded]
        chosen = next((c for c in candidates if self._has_sources(c)), None)
        waited_s = self._now_s - self._group_since_s
        if candidates and chosen is not candidates[0] and waited_s < self.options.inventory_wait_s:
            yield m.AskInventory(group=group)
            return
        if chosen is None and (candidates or self._excluded or group.resume == "must"):
            yield from self._nothing_intact(candidates)
            return
        if chosen is not None and chosen is not candidates[0]:
            skipped = candidates[0].step
            yield m.Warn(
                text=f"Step {skipped} has lost all copies of a part; step {chosen.step} is restored instead."
            )
        previous = self.history.session
        self._ledger.append(
            r.Session(
                session=previous.session + 1 if previous else 1,
                service=group.service,
                after=previous.session if previous else None,
                resumed_from=chosen.id.attempt if chosen else None,
                world_size=sum(len(n.ranks) for n in group.nodes),
                num_nodes=len(group.nodes),
            )
        )

    def _nothing_intact(self, candidates: list[CheckpointInfo]) -> Iterator[m.Effect]:
        steps = ", ".join(str(c.step) for c in candidates) or "none"
        error = RestoreError(
            f"No checkpoint of run {self.history.run_name} can be restored "
            f"(recorded steps without a full set of copies: {steps}).",
            hint="Bring back the nodes that held them, or start over with resume='never' or another name.",
        )
        tokens, self._opening = self._opening, ()
        for token in tokens:
            yield m.Fail(token=token, error=error)

    def _has_sources(self, checkpoint: CheckpointInfo) -> bool:
        if checkpoint.level >= Level.DURABLE:
            return True
        holders = self._holders.get(checkpoint.id.attempt, {})
        return all(holders.get(i) for i in range(checkpoint.num_nodes))

    def _session_opened(self) -> Iterator[m.Effect]:
        session = self.history.session
        assert session is not None
        assert self._group is not None
        group = self._group
        holders = place_replicas(
            training_nodes=[n.node_id for n in group.nodes],
            live_nodes=self._live,
            replicas=self.options.replicas,
        )
        self.plan = m.SessionPlan(
            run_uid=self.history.run_uid,
            session=session.session,
            world_size=session.world_size,
            nodes=tuple(
                m.SessionNode(node_id=n.node_id, node_index=i, ranks=n.ranks, holders=holders[n.node_id])
                for i, n in enumerate(group.nodes)
            ),
            resume=self._resume_point(session.resumed_from),
        )
        self._restored, self._is_training, self._saved_before = {}, False, set()
        copies = min(len(n.holders) for n in self.plan.nodes)
        if copies < self.options.replicas:
            level = f"replicated on {copies} other node(s)" if copies else "local"
            yield from self._warn(
                f"Checkpoints of run {self.history.run_name} are {level} until drained: "
                f"{len(self._live)} live node(s) cannot hold {self.options.replicas} replica(s)."
            )
        tokens, self._opening = self._opening, ()
        yield m.StartSession(tokens=tokens, plan=self.plan)

    def _resume_point(self, attempt: str | None) -> m.ResumePoint | None:
        if attempt is None:
            return None
        checkpoint = self.history.checkpoints[attempt]
        holders = self._holders.get(attempt, {})
        return m.ResumePoint(
            checkpoint=checkpoint,
            holders=tuple(tuple(sorted(holders.get(i, ()))) for i in range(checkpoint.num_nodes)),
        )

    @_on.register
    def _(self, event: m.NodeRestored) -> Iterator[m.Effect]:
        plan = self.plan
        if plan is None or event.session != plan.session:
            yield m.Fail(token=event.token, error=RunSuperseded("A newer session owns this run."))
            return
        self._restored[event.node_id] = event
        if len(self._restored) < len(plan.nodes):
            return
        reports, self._restored = list(self._restored.values()), {}
        ranks = sorted((rank for e in reports for rank in e.ranks), key=lambda k: k.rank)
        damage = sorted({d for rank in ranks for d in rank.damage})
        if not damage:
            self._is_training, self.restores = True, tuple(ranks)
            if plan.resume is not None:
                self._ledger.append(_restore_note(plan.resume.checkpoint, ranks))
            for report in reports:
                yield m.Reply(token=report.token, value=None)
            return
        assert plan.resume is not None
        bad = plan.resume.checkpoint
        self._excluded.add(bad.id.attempt)
        yield m.Warn(text=f"Step {bad.step} cannot be restored: no intact copy of {'; '.join(damage[:5])}.")
        self._opening = tuple(e.token for e in reports)
        yield from self._choose()

    # -- saves ---------------------------------------------------------------------------------------

    def _attempt(self, attempt: AttemptId) -> Attempt | None:
        """The open attempt of that id, opened now if new; None if it is settled or of another session."""
        plan = self.plan
        if plan is None or attempt.session != plan.session or attempt.run_uid != plan.run_uid:
            return None
        if attempt.attempt in self.history.checkpoints or attempt.attempt in self._dropped:
            return None
        if attempt.attempt not in self._attempts:
            self._attempts[attempt.attempt] = Attempt(id=attempt, nodes=plan.nodes, started_s=self._now_s)
        return self._attempts[attempt.attempt]

    @_on.register
    def _(self, event: m.NodeStored) -> Iterator[m.Effect]:
        attempt = self._attempt(event.attempt)
        if attempt is None:
            yield from self._answer_late(event.attempt, event.node_id)
            return
        attempt.stored[event.node_index] = event
        self._saved_before |= set(attempt.nodes[event.node_index].ranks)
        self._holder_set(event.attempt.attempt, event.node_index).add(event.node_id)
        oldest = min(self._attempts.values(), key=lambda a: a.id.step)
        if len(self._attempts) > MAX_OPEN_ATTEMPTS and not oldest.committing:
            yield from self._drop(oldest, Unavailable(f"Step {oldest.id.step} was overtaken by newer saves."))
        yield from self._try_commit(attempt)

    def _answer_late(self, attempt: AttemptId, node: str) -> Iterator[m.Effect]:
        known = self.history.checkpoints.get(attempt.attempt)
        level = known.level if known and known.state == "live" else None
        error = (
            None if level else RunSuperseded(f"Step {attempt.step} belongs to no open attempt of this run.")
        )
        yield m.Publish(attempt=attempt, level=level, error=error, nodes=(node,))

    @_on.register
    def _(self, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        name = event.attempt.attempt
        if event.error is None:
            self._holder_set(name, event.node_index).add(event.holder)
        if (attempt := self._attempt(event.attempt)) is not None:
            if event.error is None:
                attempt.copies.setdefault(event.node_index, set()).add(event.holder)
            else:
                yield from self._replace_holder(attempt, event)
            yield from self._try_commit(attempt)
        elif (known := self.history.checkpoints.get(name)) and known.state == "live" and event.error is None:
            yield from self._promote_copies(known)

    def _replace_holder(self, attempt: Attempt, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        index = event.node_index
        failed = attempt.failed.setdefault(index, set())
        failed.add(event.holder)
        yield m.Warn(
            text=f"Step {attempt.id.step}: no copy of fragment {index} on {event.holder[:12]}: {event.error}"
        )
        node = attempt.nodes[index]
        taken = failed | attempt.copies.get(index, set()) | set(node.holders) | {node.node_id}
        if others := sorted(self._live - taken):
            yield m.Replicate(attempt=attempt.id, node_index=index, source=node.node_id, holder=others[0])
        else:
            attempt.given_up.add(index)

    def _try_commit(self, attempt: Attempt) -> Iterator[m.Effect]:
        late = self._now_s - attempt.started_s > self.options.goal_timeout_s
        if attempt.committing or not (attempt.reaches_goal() or (attempt.is_local and late)):
            return
        if attempt.disagrees:
            error = CollectiveError(
                f"Step {attempt.id.step}: the ranks do not hold the same parameters outside their shards.",
                hint="Register the same items on every rank. Parameters that differ between ranks must be "
                "DTensors with a placement (fully_shard, parallelize_module), or one copy would be kept.",
                step=attempt.id.step,
            )
            yield from self._drop(attempt, error)
            return
        attempt.committing = True
        copies = attempt.num_copies
        self._ledger.append(
            r.Commit(
                session=attempt.id.session,
                step=attempt.id.step,
                attempt=attempt.id.attempt,
                level=Level.REPLICATED if copies else Level.LOCAL,
                replicas=copies,
                world_size=sum(len(n.ranks) for n in attempt.nodes),
                num_nodes=len(attempt.nodes),
                size_bytes=attempt.size_bytes(),
                root_digest=attempt.root(),
                metrics=attempt.metrics(),
            )
        )

    def _committed(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        attempt = self._attempts.pop(checkpoint.id.attempt)
        nodes = tuple(n.node_id for n in attempt.nodes)
        yield m.Publish(attempt=checkpoint.id, level=checkpoint.level, error=None, nodes=nodes)
        yield from self._promote_copies(checkpoint)
        for older in [a for a in self._attempts.values() if a.id.step < checkpoint.step and not a.committing]:
            yield from self._drop(older, Unavailable(f"Step {older.id.step} was overtaken by a newer save."))
        if len(self.history.checkpoints) % self.options.remote_every == 0:
            yield from self._start_drain(checkpoint)
        yield from self._retire()
        strays, self._strays = self._strays, {}
        for node, directories in strays.items():
            if directories:
                yield m.DeleteStrays(node_id=node, directories=directories)

    def _promote_copies(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        """Record copies that arrived after the commit."""
        holders = self._holders.get(checkpoint.id.attempt, {})
        copies = min(len(holders.get(i, ())) for i in range(checkpoint.num_nodes)) - 1
        if min(copies, self.options.replicas) > checkpoint.replicas and checkpoint.level < Level.DURABLE:
            op = r.Promote(attempt=checkpoint.id.attempt, level=Level.REPLICATED, replicas=copies)
            if op not in self._ledger.pending:
                self._ledger.append(op)
        yield from ()

    def _promoted(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        nodes = tuple(n.node_id for n in self.plan.nodes) if self.plan else ()
        yield m.Publish(attempt=checkpoint.id, level=checkpoint.level, error=None, nodes=nodes)
        yield from self._retire()

    def _drop(self, attempt: Attempt, error: CheckpointError) -> Iterator[m.Effect]:
        self._attempts.pop(attempt.id.attempt, None)
        self._holders.pop(attempt.id.attempt, None)
        self._dropped.append(attempt.id.attempt)
        yield m.Warn(text=f"Step {attempt.id.step} was not saved: {error}")
        nodes = {n.node_id for n in attempt.nodes}.union(
            *attempt.copies.values(), *(n.holders for n in attempt.nodes)
        )
        yield m.Publish(attempt=attempt.id, level=None, error=error, nodes=tuple(sorted(nodes & self._live)))

    @_on.register
    def _(self, event: m.SaveRefused) -> Iterator[m.Effect]:
        if (attempt := self._attempt(event.attempt)) is not None and not attempt.committing:
            ranks = ", ".join(map(str, event.ranks))
            error = Unavailable(f"Rank(s) {ranks} could not take part: {event.reason}.")
            yield from self._drop(attempt, error)

    @_on.register
    def _(self, event: m.RanksProgressed) -> Iterator[m.Effect]:
        if self.plan is None or event.session != self.plan.session:
            return
        for attempt in list(self._attempts.values()):
            step = attempt.id.step
            passed = {k for k, p in event.ranks.items() if p.step > step and p.saved_step < step}
            if missed := sorted(passed & set(attempt.missing_ranks)):
                yield from self._drop(attempt, self._not_collective(attempt, missed))

    def _not_collective(self, attempt: Attempt, missed: Iterable[int]) -> CheckpointError:
        ranks = ", ".join(map(str, missed))
        return SaveNotCollective(
            f"Step {attempt.id.step} was saved by some ranks only: rank(s) {ranks} did not save it.",
            hint="Call save (or step) on every rank; do not put it under `if rank == 0`.",
            step=attempt.id.step,
            missing_ranks=tuple(missed),
        )

    # -- retention and deletion ------------------------------------------------------------------------

    def _retire(self) -> Iterator[m.Effect]:
        waiting = {op.attempt for op in self._ledger.pending if isinstance(op, r.Retired)}
        busy = self._drains.attempts | waiting
        if self.plan and self.plan.resume and not self._is_training:
            busy.add(self.plan.resume.checkpoint.id.attempt)
        for choice in choose_retirements(
            live=self.history.live(),
            lineage=self.history.lineage(),
            keep_last=self.options.keep_last,
            busy=busy,
        ):
            self._ledger.append(r.Retired(attempt=choice.attempt, reason=choice.reason))
        yield from ()

    def _retired(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        holders = self._holders.get(checkpoint.id.attempt, {}).values()
        yield from self._deletions.start(checkpoint, set[str]().union(*holders))

    @_on.register
    def _(self, event: m.DeleteEnded) -> Iterator[m.Effect]:
        self._collected(self._deletions.ended(event))
        yield from ()

    def _collected(self, attempts: Iterable[str]) -> None:
        for attempt in attempts:
            self._ledger.append(r.Collected(attempt=attempt))

    def _redo_deletes(self) -> Iterator[m.Effect]:
        if self.is_open:
            collecting = {op.attempt for op in self._ledger.pending if isinstance(op, r.Collected)}
            checkpoints = self.history.checkpoints.values()
            retired = [c for c in checkpoints if c.state == "retired" and c.id.attempt not in collecting]
            yield from self._deletions.redo(retired, self._live, self._now_s)

    # -- draining to the storage path ------------------------------------------------------------------

    def _start_drain(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        if checkpoint.level < Level.DURABLE:
            self._drains.start(checkpoint)
            yield from self._assign_drains()

    def _assign_drains(self) -> Iterator[m.Effect]:
        yield from self._drains.assign(self._holders, self._live)

    @_on.register
    def _(self, event: m.DrainEnded) -> Iterator[m.Effect]:
        outcome = self._drains.ended(event)
        if event.error is not None:
            yield m.Warn(
                text=f"Step {event.attempt.step}: draining fragment {event.node_index}: {event.error}"
            )
        if outcome == "complete":
            yield m.WriteDescription(checkpoint=self.history.checkpoints[event.attempt.attempt])
        elif outcome == "given up":
            yield from self._drain_failed(event.attempt, event.error)

    def _drain_failed(self, attempt: AttemptId, reason: str | None) -> Iterator[m.Effect]:
        error = Unavailable(f"Step {attempt.step} did not reach the storage path: {reason}.")
        yield m.Warn(text=str(error))
        tokens, self._finishing = self._finishing, []
        for token in tokens:
            yield m.Fail(token=token, error=error)

    @_on.register
    def _(self, event: m.DescriptionWritten) -> Iterator[m.Effect]:
        checkpoint = self.history.checkpoints[event.attempt.attempt]
        self._drains.finish(event.attempt.attempt)
        if event.error is not None:
            yield from self._drain_failed(event.attempt, event.error)
        elif checkpoint.state == "live":
            self._ledger.append(
                r.Promote(attempt=event.attempt.attempt, level=Level.DURABLE, replicas=checkpoint.replicas)
            )

    @_on.register
    def _(self, event: m.FinishAsked) -> Iterator[m.Effect]:
        self._finishing.append(event.token)
        yield from ()

    def _check_finish(self) -> Iterator[m.Effect]:
        if not self._finishing or self._attempts or self._ledger.pending:
            return
        lineage = self.history.lineage()
        newest = lineage[-1] if lineage else None
        if newest is None or newest.level >= Level.DURABLE:
            tokens, self._finishing = self._finishing, []
            for token in tokens:
                yield m.Reply(token=token, value=newest)
        elif newest.id.attempt not in self._drains.attempts:
            yield from self._start_drain(newest)

    # -- time and nodes --------------------------------------------------------------------------------

    @_on.register
    def _(self, event: m.Ticked) -> Iterator[m.Effect]:
        self._now_s, self._wall_s = event.now_s, event.wall_s
        if (again := self._ledger.retry(self._now_s)) is not None:
            yield again
        for attempt in list(self._attempts.values()):
            age_s = self._now_s - attempt.started_s
            if age_s > self.options.attempt_timeout_s and attempt.missing_ranks:
                missing = attempt.missing_ranks
                never = [k for k in missing if k not in self._saved_before]
                ranks = ", ".join(map(str, missing))
                error = (
                    self._not_collective(attempt, never)
                    if never
                    else Unavailable(
                        f"Rank(s) {ranks} did not finish it within {self.options.attempt_timeout_s:.0f} s."
                    )
                )
                yield from self._drop(attempt, error)
            else:
                yield from self._try_commit(attempt)
        yield from self._redo_deletes()
        yield from self._assign_drains()

    @_on.register
    def _(self, event: m.NodesSeen) -> Iterator[m.Effect]:
        lost = self._live - event.live
        self._live = event.live
        if not lost:
            return
        for fragments in self._holders.values():
            for nodes in fragments.values():
                nodes -= lost
        for attempt in list(self._attempts.values()):
            gone = {n.node_id for n in attempt.nodes if n.node_index not in attempt.stored} & lost
            if gone:
                names = ", ".join(sorted(n[:12] for n in gone))
                yield from self._drop(attempt, Unavailable(f"Node(s) {names} died during the save."))
        self._collected(self._deletions.lost(lost))
        self._drains.lost(lost)
        yield from self._assign_drains()

    # -- small helpers ---------------------------------------------------------------------------------

    def _holder_set(self, attempt: str, node_index: int) -> set[str]:
        return self._holders.setdefault(attempt, {}).setdefault(node_index, set())

    def _warn(self, text: str) -> Iterator[m.Effect]:
        """Say something once per run."""
        if text not in self._warned:
            self._warned.add(text)
            yield m.Warn(text=text)


def _restore_note(checkpoint: CheckpointInfo, ranks: Iterable[RankRestore]) -> r.Note:
    """For people: how many bytes of the restore came from which tier, and the slowest rank's time."""
    tiers: dict[str, int] = {}
    for part in (part for rank in ranks for part in rank.parts):
        tiers[part.tier] = tiers.get(part.tier, 0) + part.size_bytes
    sources = ", ".join(f"{size:,} bytes from {tier}" for tier, size in sorted(tiers.items()))
    seconds = max(rank.seconds for rank in ranks)
    return r.Note(text=f"restored step {checkpoint.step} in {seconds:.2f} s: {sources}")
