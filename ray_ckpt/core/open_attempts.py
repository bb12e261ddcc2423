"""The open attempts of a run: which may be opened, and when each is committed or dropped.

An attempt that all nodes have stored is committed when all of its copies have arrived or `goal_timeout_s` has
passed (`try_commit`), when too many attempts are open (`bound`), and when its session ends (`Saves`).
`Attempt` has the table of its states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.attempts import Attempt
from ray_ckpt.core.context import Context, names_of
from ray_ckpt.core.progress import SessionProgress
from ray_ckpt.core.save_times import SaveTimes
from ray_ckpt.core.step_states import salvage_of
from ray_ckpt.errors import CheckpointError, CollectiveError, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId, CheckpointInfo, Level, parity_text

MAX_OPEN_ATTEMPTS = 8  # one save is in flight per rank; more means ranks that disagree on steps
MAX_WAITING_COMMITS = 2  # the newest commits that wait while the store is silent; older ones are dropped
MAX_DROPPED = 256  # ids of dropped attempts whose late messages are recognised


class OpenAttempts:
    """Attempts that are neither committed nor dropped, in the order in which they were opened."""

    def __init__(self, context: Context, *, progress: SessionProgress, times: SaveTimes) -> None:
        self._context, self._progress, self._times = context, progress, times
        self._attempts: dict[str, Attempt] = {}
        self._dropped: deque[str] = deque(maxlen=MAX_DROPPED)
        self._num_findings = 0  # saves of this coordinator at which replicas differed

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        """Iterate over the attempts that are open now; the loop may commit or drop attempts."""
        return iter(list(self._attempts.values()))

    def get(self, attempt: str) -> Attempt | None:
        return self._attempts.get(attempt)

    def is_open(self, attempt: str) -> bool:
        """Return True while an attempt is being stored, or its commit record is being written."""
        return attempt in self._attempts

    def is_dropped(self, attempt: str) -> bool:
        """Return True for an attempt that this coordinator has dropped."""
        return attempt in self._dropped

    def is_busy(self, for_s: float) -> bool:
        """Return True if an attempt has been open for less than `for_s` seconds."""
        return any(self._context.now_s - attempt.started_s < for_s for attempt in self._attempts.values())

    def has_step(self, step: int) -> bool:
        """Return True if an attempt at that step is open."""
        return any(attempt.id.step == step for attempt in self._attempts.values())

    def open_at(self, step: int) -> str | None:
        """Return the name of the newest open attempt at that step, or None."""
        return next((name for name, a in reversed(self._attempts.items()) if a.id.step == step), None)

    # -- opening -------------------------------------------------------------------------------------

    def may_open(self, attempt: AttemptId) -> bool:
        """Return True if an attempt of the current session is neither committed nor dropped."""
        plan, name = self._context.plan, attempt.attempt
        if plan is None or not plan.has(attempt):
            return False
        return name not in self._context.history.checkpoints and name not in self._dropped

    def find(self, attempt: AttemptId) -> Attempt | None:
        """Return the open attempt, after opening it if it is new; return None if it may not be opened."""
        if not self.may_open(attempt):
            return None
        plan = self._context.plan
        assert plan is not None
        if attempt.attempt not in self._attempts:
            if attempt == salvage_of(plan, attempt.step):
                return None  # only a decision opens a salvage
            started_s = self._context.now_s
            self.add(Attempt(id=attempt, nodes=plan.nodes, groups=plan.groups, started_s=started_s))
            self._context.holders.parity.know(attempt.attempt, plan.groups)
        return self._attempts[attempt.attempt]

    def add(self, attempt: Attempt) -> None:
        self._attempts[attempt.id.attempt] = attempt

    def is_unknown(self, attempt: AttemptId) -> bool:
        """Return True for an attempt of this run that is not open, not dropped and not in the log."""
        name, history = attempt.attempt, self._context.history
        known = name in self._attempts or name in self._dropped or name in history.checkpoints
        return attempt.run_uid == history.run_uid and not known

    def bound(self) -> Iterator[m.Effect]:
        """If too many attempts are open, commit the newest complete one as it is, or else drop one.

        The commit drops the older attempts; copies that arrive later promote the committed checkpoint.
        """
        while len(waiting := [a for a in self if not a.is_committing]) > MAX_OPEN_ATTEMPTS:
            complete = [a for a in waiting if a.is_local and not self._is_overtaken(a)]
            if complete:
                yield from self.commit(max(complete, key=lambda a: a.id.step))
            else:
                oldest = min(waiting, key=lambda a: a.id.step)
                error = Unavailable(f"Step {oldest.id.step} was overtaken by newer saves.")
                yield from self.drop(oldest, error)

    # -- commits -------------------------------------------------------------------------------------

    def try_commit(self, attempt: Attempt) -> Iterator[m.Effect]:
        """Commit an attempt that has all its copies, or has waited for copies long enough."""
        is_late = self._context.now_s - attempt.started_s > self._context.options.goal_timeout_s
        if attempt.state == "copying" and (attempt.is_ready or is_late):
            yield from self.commit(attempt)

    def commit(self, attempt: Attempt) -> Iterator[m.Effect]:
        """Queue the commit record with the level reached; drop the attempt if it must not be committed."""
        copies = self._num_copies(attempt)
        if (error := self._objection(attempt, copies)) is not None:
            yield from self.drop(attempt, error)
            return
        attempt.change("queued")
        attempt.commit_s = self._context.now_s
        facts, suspect = attempt.facts(), attempt.finding
        if suspect:
            yield from self._warn_of_replicas(attempt.id.step, suspect)
        self._context.ledger.append(
            r.Commit2(
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
                mesh=facts.mesh or None,
                stall_s=facts.stall_s,
                capture_s=facts.capture_s,
                local_s=facts.local_s,
                replicate_s=self._context.now_s - attempt.stored_s,
                suspect=suspect or None,
                shared_bytes=facts.shared_bytes or None,
                parity=self._parity(attempt.id.attempt, copies),
            )
        )

    def _warn_of_replicas(self, step: int, suspect: str) -> Iterator[m.Effect]:
        """Count a finding; warn of the first one, and each time that the number has doubled."""
        self._context.measure(telemetry.REPLICA_FINDINGS)
        self._num_findings += 1
        if self._num_findings.bit_count() == 1:
            yield m.Warn(
                text=f"Step {step}: data-parallel replicas have drifted apart: {suspect}. Older checkpoints "
                f"are deleted in time: to be able to go back, pin one from before step {step}."
            )

    def _objection(self, attempt: Attempt, copies: int) -> CheckpointError | None:
        """Return the error that forbids the commit of an attempt with `copies` copies, or None."""
        step = attempt.id.step
        if counts := attempt.counts():
            return CollectiveError(
                f"Step {step} is not the same step on all ranks. Steps counted since the restore: {counts}.",
                hint="Count completed optimizer steps over the whole run, alike on every rank, and give each "
                "of them to step, due or save.",
                step=step,
            )
        if attempt.disagrees:
            return CollectiveError(
                f"Step {step}: the ranks do not hold the same parameters outside their shards.",
                hint="Register the same items on every rank. Parameters that differ between ranks must be "
                "DTensors with a placement (fully_shard, parallelize_module), or one copy would be kept.",
                step=step,
            )
        if differing := attempt.differing:
            which = ", ".join(map(str, differing[:5]))
            return Unavailable(f"Step {step}: nodes hold different versions of fragment(s) {which}.")
        if self._is_overtaken(attempt):
            return _overtaken(step)
        return _on_no_node(step) if copies < 0 else None

    def _num_copies(self, attempt: Attempt) -> int:
        return self._context.holders.num_copies(attempt.id.attempt, len(attempt.nodes))

    def _parity(self, name: str, copies: int) -> str | None:
        """Return a text about the parity groups that `copies` counts; None if it counts copies, or is 0."""
        holders = self._context.holders
        has_copies = all(
            len(holders.of(name, member)) > copies
            for group in holders.parity.groups(name)
            for member in group.members
        )
        return None if has_copies or not copies else parity_text(holders.parity.groups(name))

    def _is_overtaken(self, attempt: Attempt) -> bool:
        """Return True if this or a newer step of the session is committed or being committed.

        Two attempts have one step if survivors have saved it while a save of it was under way.
        """
        step, session = attempt.id.step, (attempt.id.epoch, attempt.id.session)
        others = [a.id for a in self._attempts.values() if a.is_committing]
        others += [c.id for c in self._context.history.live()]
        return any(
            (a.epoch, a.session) == session and a.step >= step and a.attempt != attempt.id.attempt
            for a in others
        )

    def committed(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        """Notify the nodes of a commit that is now in the log, and drop older open attempts."""
        attempt = self._attempts.pop(checkpoint.id.attempt)
        attempt.change("logged")
        self._progress.attempt_ended(attempt.id)
        self._times.committed(attempt, checkpoint)
        nodes = tuple(n.node_id for n in attempt.nodes)
        yield self.outcome(checkpoint.id, checkpoint.level, None, nodes)
        self.promote_copies(checkpoint)
        for older in self:
            is_same = (older.id.epoch, older.id.session) == (checkpoint.id.epoch, checkpoint.id.session)
            if is_same and older.id.step <= checkpoint.step and not older.is_committing:
                yield from self.drop(older, _overtaken(older.id.step))

    def promote_copies(self, checkpoint: CheckpointInfo) -> None:
        """Record copies that arrived after the commit."""
        context, name, num_nodes = self._context, checkpoint.id.attempt, checkpoint.num_nodes
        pending = (op for op in context.ledger.pending if isinstance(op, r.Promote) and op.attempt == name)
        recorded = max([checkpoint.replicas, *(op.replicas for op in pending)])
        if checkpoint.level >= Level.DURABLE or recorded >= context.options.max_losses:
            return
        if context.holders.tolerates(name, num_nodes, recorded + 1):
            copies = min(context.holders.num_copies(name, num_nodes), context.options.max_losses)
            parity = self._parity(name, copies)
            context.ledger.append(
                r.Promote(attempt=name, level=Level.REPLICATED, replicas=copies, parity=parity)
            )

    def reconsider(self, attempt: Attempt) -> Iterator[m.Effect]:
        """After the death of a node, correct a waiting commit: a record must be true when it is sent."""
        queue = self._context.ledger.waiting()
        op = next((q for q in queue if isinstance(q, r.Commit) and q.attempt == attempt.id.attempt), None)
        if op is None:
            return  # the record is already being written
        copies = self._num_copies(attempt)
        is_built_on = any(isinstance(q, r.Session) and q.resumed_from == op.attempt for q in queue)
        if copies < 0 and not is_built_on:
            yield from self._withdraw(op, _on_no_node(op.step))
        elif copies < op.replicas:
            copies = max(copies, 0)
            level = Level.REPLICATED if copies else Level.LOCAL
            parity = self._parity(op.attempt, copies)
            self._context.ledger.amend(op, replace(op, level=level, replicas=copies, parity=parity))

    def drop_excess(self, reason: str) -> Iterator[m.Effect]:
        """Keep the newest of the commits that wait for a store without an answer; drop the others."""
        queue = self._context.ledger.waiting()
        built_on = {op.resumed_from for op in queue if isinstance(op, r.Session)}
        waiting = [op for op in queue if isinstance(op, r.Commit) and op.attempt not in built_on]
        for op in waiting[:-MAX_WAITING_COMMITS]:
            text = f"Step {op.step}: the storage path did not take its commit record. {reason}"
            yield from self._withdraw(op, Unavailable(text.rstrip()))

    def _withdraw(self, op: r.Commit, error: CheckpointError) -> Iterator[m.Effect]:
        self._context.ledger.withdraw(op)
        self._attempts[op.attempt].change("withdrawn")
        yield from self.drop(self._attempts[op.attempt], error)

    # -- drops ---------------------------------------------------------------------------------------

    def drop(self, attempt: Attempt, error: CheckpointError) -> Iterator[m.Effect]:
        """Drop an attempt; its nodes delete its files."""
        context, name = self._context, attempt.id.attempt
        attempt.change("dropped")
        nodes = {n.node_id for n in attempt.nodes} | context.holders.may_have(name)
        nodes = nodes.union(*(n.holders for n in attempt.nodes)) & context.holders.live
        self._attempts.pop(name, None)
        self._progress.attempt_ended(attempt.id)
        context.holders.forget(name)
        self._progress.captures.forget(name)
        self._dropped.append(name)
        context.measure(telemetry.SAVES, outcome="dropped")
        context.measure(telemetry.FAILURES, cause="save")
        yield m.Warn(text=f"Step {attempt.id.step} was not saved: {error}")
        yield self.outcome(attempt.id, None, error, tuple(sorted(nodes)))

    def drop_unopened(
        self, attempt: AttemptId, error: CheckpointError, nodes: tuple[str, ...]
    ) -> m.NotifyOutcome:
        """Drop an attempt that is not open, or was never opened by this coordinator."""
        if attempt.attempt not in self._dropped:
            self._dropped.append(attempt.attempt)
        return self.outcome(attempt, None, error, nodes)

    def drop_if_lost(self, attempt: Attempt, lost: frozenset[str]) -> Iterator[m.Effect]:
        """Drop an attempt that cannot become complete without the lost nodes."""
        gone = {n.node_id for n in attempt.nodes if n.node_index not in attempt.stored} & lost
        if gone or (attempt.is_local and self._num_copies(attempt) < 0):
            error = Unavailable(f"Node(s) {names_of(gone or lost)} died during the save.")
            yield from self.drop(attempt, error)

    def outcome(
        self, attempt: AttemptId, level: Level | None, error: CheckpointError | None, nodes: tuple[str, ...]
    ) -> m.NotifyOutcome:
        epoch = self._context.ledger.epoch
        return m.NotifyOutcome(attempt=attempt, level=level, error=error, nodes=nodes, epoch=epoch)


def _overtaken(step: int) -> Unavailable:
    return Unavailable(f"Step {step} was overtaken by a newer save.")


def _on_no_node(step: int) -> Unavailable:
    return Unavailable(f"Step {step}: a part of it is on no live node.")
