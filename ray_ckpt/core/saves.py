"""Attempts at saves: who has stored what, and when one may be committed or has to be dropped."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.attempts import Attempt, SaveUnderway
from ray_ckpt.core.awaited import AWAITED_AFTER_S, Awaited, awaited_save, ranks_text, where_text
from ray_ckpt.core.captures import Captures
from ray_ckpt.core.context import Context, names_of
from ray_ckpt.core.values import (
    STILL_WRITING,
    Inventory,
    RankProgress,
    SessionKey,
    SessionNode,
    StoredFragment,
)
from ray_ckpt.errors import CheckpointError, CollectiveError, RunSuperseded, SaveNotCollective, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId, CheckpointInfo, Level

MAX_OPEN_ATTEMPTS = 8  # one save is in flight per rank; more means ranks that disagree on steps
MAX_WAITING_COMMITS = 2  # while the store is silent the newest two wait, older ones are dropped
MAX_DROPPED = 256  # ids of dropped attempts whose late messages are recognised
LATENCIES = 16  # commits whose time from the first word counts
FRESH_PROGRESS_S = 10.0  # ranks speak once a second; older words prove nothing
LOOK_S = 0.5  # between looks for ranks that will never come; each costs time by ranks and open attempts
STAYS_OUT_S = 30.0  # that a rank may be behind by two steps or more and in its first one, if no step binds it


class Saves:
    """The open attempts of the current session."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._attempts: dict[str, Attempt] = {}
        self._dropped: deque[str] = deque(maxlen=MAX_DROPPED)
        self._saved_before: set[int] = set()  # ranks that took part in a save of this session
        self._progress: dict[int, tuple[RankProgress, float]] = {}  # with the time of the message
        self._captures = Captures()
        self._idle_since_s: dict[int, float] = {}  # ranks that attempts lack and that have not begun
        self._looked_s = 0.0
        self._session_key: SessionKey = (0, 0)  # of the session that these three are of
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES)
        self.last_save_s = 0.0  # from the beginning of the last save to its commit; 0: there was none
        self._ended_step = 0  # the highest step of the session whose attempt was committed or dropped
        self._num_ended = 0  # attempts of the session that were
        self._num_skipped = 0  # of these, attempts that a rank skipped: it was busy with the one before

    @property
    def ended_step(self) -> int:
        """The highest step of the session whose attempt was committed or dropped; 0: none."""
        self._enter_session()
        return self._ended_step

    @property
    def last_step(self) -> int:
        """The last optimizer step that a rank of the session has told of, 0 if none has."""
        self._enter_session()
        return max((progress.step for progress, _ in self._progress.values()), default=0)

    def underway(self) -> tuple[SaveUnderway, ...]:
        """Saves that are on their way, by step; also what ranks have captured and no node has stored."""
        now_s = self._context.now_s
        found = [attempt.underway(now_s) for attempt in self._attempts.values()]
        captured = self._captured()
        found = [replace(s, ranks_captured=max(captured.get(s.step, 0), s.ranks_captured)) for s in found]
        settled = max((self._ended_step, self._last_logged(), *(save.step for save in found)))
        for step in sorted(step for step in captured if step > settled):
            found.append(
                SaveUnderway(
                    step=step,
                    phase="writing",
                    ranks_captured=captured[step],
                    ranks_stored=0,
                    world_size=self._context.plan.world_size if self._context.plan else 0,
                )
            )
        return tuple(sorted(found, key=lambda save: save.step))

    def _captured(self) -> dict[int, int]:
        """How many ranks have saved a step last, by that step."""
        self._enter_session()
        return dict(Counter(progress.saved_step for progress, _ in self._progress.values()))

    def _last_logged(self) -> int:
        """The step of the session that the log has last, or from which it went on; 0: none."""
        plan, lineage = self._context.plan, self._context.history.lineage()
        if plan is None or not lineage:
            return 0
        own = [c.step for c in lineage if (c.id.epoch, c.id.session) == plan.session_key]
        return max(own, default=plan.resume.checkpoint.step if plan.resume else 0)

    def __bool__(self) -> bool:
        return bool(self._attempts)

    @property
    def step_s(self) -> float:
        """Seconds that a step takes, of late; 0 if no rank has told."""
        self._enter_session()
        reported = [progress.step_s for progress, _ in self._progress.values() if progress.step_s > 0]
        return statistics.median(reported) if reported else 0.0

    @property
    def latency_s(self) -> float:
        """Seconds from a capture to its commit, about; 0 if there was none yet.

        The first word of an attempt comes when a node has written it. From then on copies travel, which takes
        about as long again: the median of late, doubled.
        """
        return 2 * statistics.median(self._latencies_s) if self._latencies_s else 0.0

    def is_busy(self, for_s: float) -> bool:
        """An attempt is open, and not for longer than that."""
        return any(self._context.now_s - attempt.started_s < for_s for attempt in self._attempts.values())

    def has_step(self, step: int) -> bool:
        """An attempt at that step is open."""
        return any(attempt.id.step == step for attempt in self._attempts.values())

    def open_at(self, step: int) -> str | None:
        """The newest open attempt at that step, if there is one."""
        return next((name for name, a in reversed(self._attempts.items()) if a.id.step == step), None)

    def is_open(self, attempt: str) -> bool:
        """It is being stored, or its commit is on its way."""
        return attempt in self._attempts

    def _enter_session(self) -> None:
        """What ranks have said counts for their own session."""
        session_key = self._context.plan.session_key if self._context.plan else (0, 0)
        if session_key != self._session_key:
            self._session_key, self._saved_before, self._progress, self._ended_step = (
                session_key,
                set(),
                {},
                0,
            )
            self._num_ended = self._num_skipped = 0
            self._captures, self._idle_since_s = Captures(), {}

    def _note_end(self, attempt: AttemptId) -> None:
        self._enter_session()
        if (attempt.epoch, attempt.session) == self._session_key:
            self._ended_step = max(self._ended_step, attempt.step)
            self._num_ended += 1

    def end_session(self, error: CheckpointError) -> Iterator[m.Effect]:
        """A newer group comes: what is complete everywhere is committed as it is, the rest is dropped."""
        for attempt in sorted(self._attempts.values(), key=lambda a: a.id.step):
            if attempt.is_local and not attempt.committing:
                yield from self._commit(attempt)
            elif not attempt.committing:
                yield from self.drop(attempt, error)

    # -- what is held ----------------------------------------------------------------------------------

    def recover(self, inventories: Mapping[str, Inventory]) -> Iterator[m.Effect]:
        """Commit attempts of the log's last session that are complete on the nodes and not in the log.

        Their coordinator could not record them: it died, or the store was away. Completeness is a fact that
        the fragments show. Attempts of older sessions stay out; a newer session did not build on them.
        """
        context, current = self._context, self._context.ledger.projected().session
        if current is None:
            return
        session = (current.opened_by, current.session)
        parts: dict[AttemptId, dict[int, tuple[str, StoredFragment]]] = {}
        for node in sorted(inventories):
            for held in inventories[node].fragments:
                mine = (held.attempt.epoch, held.attempt.session) == session
                if mine and self._is_new(held.attempt):
                    parts.setdefault(held.attempt, {}).setdefault(held.node_index, (node, held))
        complete = [a for a, found in parts.items() if len(found) == found[min(found)][1].num_nodes]
        for attempt in sorted(complete, key=lambda a: a.step)[-MAX_WAITING_COMMITS:]:
            found = [parts[attempt][index] for index in sorted(parts[attempt])]
            nodes = tuple(
                SessionNode(node_id=node, node_index=held.node_index, ranks=held.ranks, holders=())
                for node, held in found
            )
            recovered = Attempt(id=attempt, nodes=nodes, started_s=context.now_s)
            for node, held in found:
                recovered.store(_stored(held, node), context.now_s)
            self._attempts[attempt.attempt] = recovered
            yield from self._commit(recovered)
            if recovered.committing:
                yield m.Warn(
                    text=f"Step {attempt.step} is complete on its nodes and not recorded; it will be."
                )

    def _is_new(self, attempt: AttemptId) -> bool:
        name, history = attempt.attempt, self._context.history
        known = name in self._attempts or name in self._dropped or name in history.checkpoints
        return attempt.run_uid == history.run_uid and not known

    def count_inventory(self, inventories: Mapping[str, Inventory]) -> Iterator[m.Effect]:
        """What nodes of the group at work are found to hold counts as if they had just stored it."""
        plan = self._context.plan
        if plan is None:
            return
        held = [(node, h) for node in sorted(inventories) for h in inventories[node].fragments]
        held = [(node, h) for node, h in held if h.num_nodes == len(plan.nodes) and self._find(h.attempt)]
        held.sort(key=lambda found: found[1].attempt.step)
        for node, copy in held:
            if node != plan.nodes[copy.node_index].node_id:
                self._attempts[copy.attempt.attempt].arrive(copy.node_index, node)
        found: dict[str, Attempt] = {}
        for node, part in held:
            attempt = self._attempts.get(part.attempt.attempt)
            if attempt is not None and part.node_index not in attempt.stored:
                found[attempt.id.attempt] = attempt
                yield from self._take(attempt, _stored(part, node))
        yield from self._settle(*found.values())

    # -- messages ------------------------------------------------------------------------------------

    def stored(self, event: m.NodeStored) -> Iterator[m.Effect]:
        attempt = self._find(event.attempt)
        if attempt is None:
            if self._context.ledger.is_open:  # before that nothing is known of what was committed
                yield from self._answer_late(event)
            return
        yield from self._take(attempt, event)
        yield from self._settle(attempt)

    def _take(self, attempt: Attempt, event: m.NodeStored) -> Iterator[m.Effect]:
        """Note that a node has its part."""
        attempt.store(event, self._context.now_s)
        self._enter_session()
        self._saved_before |= set(attempt.nodes[event.node_index].ranks)
        self._context.holders.add(event.attempt.attempt, event.node_index, event.node_id)
        if self._context.draining:
            yield from self._copy_elsewhere(attempt, event.node_index)

    def _settle(self, *attempts: Attempt) -> Iterator[m.Effect]:
        """Commit what is ready, once all that is known of it has been taken."""
        yield from self._bound_open()
        for attempt in attempts:
            yield from self._try_commit(attempt)

    def _bound_open(self) -> Iterator[m.Effect]:
        """Commit the newest complete attempt as it is if too many are open; drop one if none is complete.

        The commit drops the older attempts, and copies that arrive later promote it.
        """
        while len(waiting := [a for a in self._attempts.values() if not a.committing]) > MAX_OPEN_ATTEMPTS:
            complete = [a for a in waiting if a.is_local and not self._is_overtaken(a)]
            if complete:
                yield from self._commit(max(complete, key=lambda a: a.id.step))
            else:
                oldest = min(waiting, key=lambda a: a.id.step)
                error = Unavailable(f"Step {oldest.id.step} was overtaken by newer saves.")
                yield from self.drop(oldest, error)

    def _find(self, attempt: AttemptId) -> Attempt | None:
        """The open attempt of that id, opened now if new; None if it is settled or of another session."""
        name = attempt.attempt
        if not self._may_open(attempt):
            return None
        plan = self._context.plan
        assert plan is not None
        if name not in self._attempts:
            now_s = self._context.now_s
            self._attempts[name] = Attempt(id=attempt, nodes=plan.nodes, started_s=now_s)
        return self._attempts[name]

    def _may_open(self, attempt: AttemptId) -> bool:
        """It is of the session at work, and neither committed nor dropped."""
        plan, name = self._context.plan, attempt.attempt
        if plan is None or not plan.has(attempt):
            return False
        return name not in self._context.history.checkpoints and name not in self._dropped

    def _answer_late(self, event: m.NodeStored) -> Iterator[m.Effect]:
        """Repeat what was told already; a message of an ended session is told so."""
        name, nodes = event.attempt.attempt, (event.node_id,)
        if name in self._attempts:
            return  # it was recovered, and its commit is on the way
        known = self._context.history.checkpoints.get(name)
        if known is not None and known.state == "live":
            yield self._publish(event.attempt, known.level, None, nodes)
        elif known is None and self._is_of_the_past(event.attempt):
            error: CheckpointError = RunSuperseded(
                f"Step {event.attempt.step} belongs to no open attempt of this run."
            )
            self._dropped.append(name)
            yield self._publish(event.attempt, None, error, nodes)
        elif name in self._dropped:  # the node has not heard of it
            error = Unavailable(f"Step {event.attempt.step} was dropped.")
            yield self._publish(event.attempt, None, error, nodes)

    def _is_of_the_past(self, attempt: AttemptId) -> bool:
        """Of a session that has ended.

        The current one may be at work although its group is not found yet, and so may one that was begun
        while the store was away and is not in the log.
        """
        history = self._context.history
        if attempt.run_uid != history.run_uid:
            return True
        plan, current = self._context.plan, history.session
        newest = plan.session_key if plan else (current.opened_by, current.session) if current else (0, 0)
        return (attempt.epoch, attempt.session) < newest

    def replica_ended(self, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        name = event.attempt.attempt
        attempt = self._attempts.get(name) or self._find(event.attempt)
        known = self._context.history.checkpoints.get(name)
        if attempt is None and (known is None or known.state != "live"):
            gone = known is not None or name in self._dropped or self._is_of_the_past(event.attempt)
            if gone and self._context.ledger.is_open:  # so the copy, or what there is of it, may go too
                error = Unavailable(f"Step {event.attempt.step} was dropped.")
                self._dropped.append(name)
                yield self._publish(event.attempt, None, error, (event.holder,))
            return
        alive = event.holder in self._context.holders.live
        if event.error is not None:
            self._context.holders.note_tried(name, event.holder)
        if event.error is None and alive:
            self._context.holders.add(name, event.node_index, event.holder)
        if attempt is not None:
            if event.error is None and alive:
                attempt.arrive(event.node_index, event.holder)
            else:
                yield from self._replace_holder(attempt, event)
            yield from self._try_commit(attempt)
        elif known is not None and event.error is None:
            self.promote_copies(known)

    def _replace_holder(self, attempt: Attempt, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        context, index, why = self._context, event.node_index, event.error or "the node died"
        if event.error is not None:
            context.measure(telemetry.FAILURES, cause="copy")
        if not event.is_unreachable:  # that is said once for a link, not for each step
            yield m.Warn(
                text=f"Step {attempt.id.step}: no copy of fragment {index} on {event.holder[:12]}: {why}"
            )
        source, staying = attempt.nodes[index].node_id, context.holders.live - context.draining
        reached = {node for node in staying if context.links.works(source, node, context.now_s)}
        holder = attempt.replace(index, event.holder, reached)
        if holder is not None:
            yield m.Replicate(attempt=attempt.id, node_index=index, source=source, holder=holder)

    def _copy_elsewhere(self, attempt: Attempt, index: int) -> Iterator[m.Effect]:
        """Holders that are about to go are as good as none, if there are nodes that stay."""
        staying = self._context.holders.live - self._context.draining
        for holder in sorted(attempt.awaited.get(index, set()) & self._context.draining):
            if not attempt.others(index, staying):
                return
            other = attempt.replace(index, holder, staying)
            assert other is not None
            source = attempt.nodes[index].node_id
            yield m.Replicate(attempt=attempt.id, node_index=index, source=source, holder=other)

    def refused(self, event: m.SaveRefused) -> Iterator[m.Effect]:
        if (attempt := self._find(event.attempt)) is not None and not attempt.committing:
            self._saved_before |= set(event.ranks)
            ranks = ", ".join(map(str, event.ranks))
            yield from self.drop(attempt, Unavailable(f"Rank(s) {ranks} could not take part: {event.reason}"))
            if event.reason == STILL_WRITING:
                yield from self._warn_of_skipped()

    def _warn_of_skipped(self) -> Iterator[m.Effect]:
        """Count a skipped save. Warn of the first one, and each time that the number has doubled."""
        self._context.measure(telemetry.SKIPPED_SAVES)
        self._num_skipped += 1
        if self._num_skipped.bit_count() == 1:
            yield m.Warn(
                text=f"{self._num_skipped} of {self._num_ended} saves of session {self._session_key[1]} were "
                "skipped because the save before was still being written: save less often, or see where "
                "the time goes with `ray-ckpt show`."
            )

    def progressed(self, event: m.RanksProgressed) -> Iterator[m.Effect]:
        """Ranks that are past a step without saving it prove that the save was not collective."""
        plan = self._context.plan
        self._enter_session()
        if plan is None or event.session_key != plan.session_key:
            return
        now_s = self._context.now_s
        self._progress |= {rank: (progress, now_s) for rank, progress in event.ranks.items()}
        captured = [reported for reported in event.captured if self._may_open(reported.attempt)]
        self._captures.reported(captured, event.ranks, now_s)
        self._saved_before |= {rank for reported in captured for rank in reported.ranks}
        for attempt in [a for a in self._attempts.values() if not a.committing]:
            step = attempt.id.step
            passed = {k for k, p in event.ranks.items() if self._captures.has_passed(p, step)}
            if passed and (missed := sorted(passed.intersection(self._missing(attempt.id)))):
                yield from self.drop(attempt, self._why_missed(attempt, missed))

    # -- time and nodes --------------------------------------------------------------------------------

    def ticked(self) -> Iterator[m.Effect]:
        if abs(self._context.now_s - self._looked_s) >= LOOK_S:
            self._looked_s = self._context.now_s
            yield from self._end_misuse()
        limit_s = self._context.options.attempt_timeout_s
        for attempt in list(self._attempts.values()):
            if not attempt.is_local and self._context.now_s - attempt.started_s > limit_s:
                yield from self.drop(attempt, self._why_incomplete(attempt, limit_s))
            else:
                yield from self._try_commit(attempt)

    def _why_incomplete(self, attempt: Attempt, limit_s: float) -> CheckpointError:
        """Misuse only if ranks say themselves that they go on without saving; else they are slow or gone."""
        missing = self._missing(attempt.id)
        idle = [k for k in missing if self._skips(k)]
        if idle:
            return self._why_missed(attempt, idle)
        where = f"; {where_text(missing[0], self.reported())}" if missing else ""
        ranks = ranks_text(missing or attempt.missing_ranks)
        return Unavailable(f"Rank(s) {ranks} did not finish it within {limit_s:.0f} s{where}.")

    # -- ranks that do not come ------------------------------------------------------------------------

    def awaited(self) -> Iterator[Awaited]:
        """Ranks that attempts lack for a while."""
        self._enter_session()
        for attempt, since_s, missing in self._lacking():
            if since_s >= AWAITED_AFTER_S:
                yield awaited_save(attempt.step, missing, since_s, self.reported())

    def _lacking(self) -> Iterator[tuple[AttemptId, float, tuple[int, ...]]]:
        """Attempts that some ranks have captured and others have not: since how many seconds, and which."""
        now_s = self._context.now_s
        started_s = {a.id: a.started_s for a in self._attempts.values() if not (a.is_local or a.committing)}
        found = {attempt: now_s for attempt in self._captures.fresh(now_s) if self._may_open(attempt)}
        for attempt, since_s in sorted((found | started_s).items(), key=lambda item: item[0].step):
            if missing := self._missing(attempt):
                yield attempt, now_s - self._captures.since_s(attempt.attempt, since_s), missing

    def _missing(self, attempt: AttemptId) -> tuple[int, ...]:
        """Ranks of the group that are not known to have captured it."""
        plan, known = self._context.plan, self._attempts.get(attempt.attempt)
        stored = known.stored if known is not None else {}
        captured = self._captures.ranks_of(attempt.attempt)
        return tuple(
            sorted(
                rank
                for node in (plan.nodes if plan is not None else ())
                if node.node_index not in stored
                for rank in node.ranks
                if rank not in captured and not self._has_saved(rank, attempt.step)
            )
        )

    def _has_saved(self, rank: int, step: int) -> bool:
        """By its own word: its capture may still be on its way to its node's disk."""
        progress, _ = self._progress.get(rank, (None, 0.0))
        return progress is not None and progress.saved_step == step and self._takes_part(rank, progress)

    def _end_misuse(self) -> Iterator[m.Effect]:
        """Drop attempts that ranks will never take part in, by what they tell of themselves."""
        self._enter_session()
        reported, lacking, now_s = self.reported(), list(self._lacking()), self._context.now_s
        self._idle_since_s = {  # over all attempts: a node forgets the older ones of many
            k: min(self._idle_since_s.get(k, now_s), now_s - since_s)
            for _, since_s, missing in lacking
            for k in missing
            if self._skips(k)
        }
        for id_, _, missing in lacking:
            missed = [
                k
                for k in missing
                if (k in reported and self._captures.has_passed(reported[k], id_.step))
                or self._never_comes(k, id_.step)
            ]
            if missed and (attempt := self._find(id_)) is not None:
                yield from self.drop(attempt, self._why_missed(attempt, missed))

    def _never_comes(self, rank: int, step: int) -> bool:
        """It lives and has not begun to take part, for longer than the slowest start."""
        since_s = self._context.now_s - self._idle_since_s.get(rank, self._context.now_s)
        if since_s <= STAYS_OUT_S:
            return False
        is_far_behind = self._progress[rank][0].step + 2 <= step
        return is_far_behind or since_s > self._context.options.attempt_timeout_s

    def reported(self) -> dict[int, RankProgress]:
        """Where ranks are, by their last words."""
        return {rank: progress for rank, (progress, _) in self._progress.items()}

    def _why_missed(self, attempt: Attempt, missed: list[int]) -> CheckpointError:
        """Misuse, unless the step was agreed on: then these ranks were past it when they saw that."""
        if self._may_be_agreed(attempt.id):
            ranks = ", ".join(map(str, missed))
            return Unavailable(f"Rank(s) {ranks} had passed step {attempt.id.step} when it was named.")
        return _not_collective(attempt, missed, where_text(missed[0], self.reported()))

    def _may_be_agreed(self, attempt: AttemptId) -> bool:
        """It was named by this coordinator, or may have been by the one before, whose words are nowhere."""
        context, session_key = self._context, (attempt.epoch, attempt.session)
        every = context.options.steps_between_saves
        is_by_number = every is not None and attempt.step % every == 0
        return (session_key, attempt.step) in context.save_signals or (
            session_key == context.found_session_key and not is_by_number
        )

    def _skips(self, rank: int) -> bool:
        """The rank lives, has never saved in this session and has completed no step that it told of."""
        progress, told_s = self._progress.get(rank, (None, 0.0))
        if progress is None or self._context.now_s - told_s > FRESH_PROGRESS_S:
            return False
        return not self._takes_part(rank, progress) and progress.step == progress.saved_step

    def _takes_part(self, rank: int, progress: RankProgress) -> bool:
        """It has saved in this session."""
        return rank in self._saved_before or progress.saved_before is not None

    def nodes_lost(self, lost: frozenset[str]) -> Iterator[m.Effect]:
        for attempt in list(self._attempts.values()):
            if attempt.committing:
                yield from self._reconsider(attempt)
                continue
            gone = {n.node_id for n in attempt.nodes if n.node_index not in attempt.stored} & lost
            if gone or (attempt.is_local and self._num_copies(attempt) < 0):
                error = Unavailable(f"Node(s) {names_of(gone or lost)} died during the save.")
                yield from self.drop(attempt, error)
                continue
            for index in attempt.stored:
                gone = (attempt.copies.get(index, set()) | attempt.awaited.get(index, set())) & lost
                for holder in sorted(gone):
                    event = m.ReplicaEnded(attempt=attempt.id, node_index=index, holder=holder, error=None)
                    yield from self._replace_holder(attempt, event)
            yield from self._try_commit(attempt)

    def agents_lost(self, nodes: frozenset[str]) -> Iterator[m.Effect]:
        """Nodes have new agents: what the old ones were writing will never be complete."""
        for attempt in list(self._attempts.values()):
            gone = {n.node_id for n in attempt.nodes if n.node_index not in attempt.stored} & nodes
            if gone and not attempt.committing:
                yield from self.drop(attempt, Unavailable(f"The agent of {names_of(gone)} died during it."))

    def _reconsider(self, attempt: Attempt) -> Iterator[m.Effect]:
        """A node died while a commit waits for the store: it is to say what there is when it goes out."""
        queue = self._context.ledger.waiting()
        op = next((q for q in queue if isinstance(q, r.Commit) and q.attempt == attempt.id.attempt), None)
        if op is None:
            return  # on its way already
        copies = self._num_copies(attempt)
        is_built_on = any(isinstance(q, r.Session) and q.resumed_from == op.attempt for q in queue)
        if copies < 0 and not is_built_on:
            self._context.ledger.withdraw(op)
            yield from self.drop(attempt, Unavailable(f"Step {op.step}: a part of it is on no live node."))
        elif copies < op.replicas:
            copies = max(copies, 0)
            level = Level.REPLICATED if copies else Level.LOCAL
            self._context.ledger.amend(op, replace(op, level=level, replicas=copies))

    # -- the end of an attempt -------------------------------------------------------------------------

    def _try_commit(self, attempt: Attempt) -> Iterator[m.Effect]:
        late = self._context.now_s - attempt.started_s > self._context.options.goal_timeout_s
        ready = attempt.reaches_goal() or (attempt.is_local and late)
        if ready and not attempt.committing and attempt.id.attempt in self._attempts:
            yield from self._commit(attempt)

    def _commit(self, attempt: Attempt) -> Iterator[m.Effect]:
        """Queue the commit record, at the level reached; never behind a newer step of the session."""
        step, copies = attempt.id.step, self._num_copies(attempt)
        if counts := attempt.counts():
            error: CheckpointError = CollectiveError(
                f"Step {step} is not the same step on all ranks. Steps counted since the restore: {counts}.",
                hint="Count completed optimizer steps over the whole run, alike on every rank, and give each "
                "of them to step, due or save.",
                step=step,
            )
            yield from self.drop(attempt, error)
        elif attempt.disagrees:
            error = CollectiveError(
                f"Step {step}: the ranks do not hold the same parameters outside their shards.",
                hint="Register the same items on every rank. Parameters that differ between ranks must be "
                "DTensors with a placement (fully_shard, parallelize_module), or one copy would be kept.",
                step=step,
            )
            yield from self.drop(attempt, error)
        elif self._is_overtaken(attempt):
            yield from self.drop(attempt, Unavailable(f"Step {step} was overtaken by a newer save."))
        elif copies < 0:
            yield from self.drop(attempt, Unavailable(f"Step {step}: a part of it is on no live node."))
        else:
            attempt.committing, attempt.commit_s = True, self._context.now_s
            facts = attempt.facts()
            self._context.ledger.append(
                r.Commit(
                    session=attempt.id.session,
                    step=step,
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
                )
            )

    def _num_copies(self, attempt: Attempt) -> int:
        return self._context.holders.num_copies(attempt.id.attempt, len(attempt.nodes))

    def _is_overtaken(self, attempt: Attempt) -> bool:
        step, session = attempt.id.step, (attempt.id.epoch, attempt.id.session)
        newer = [a.id for a in self._attempts.values() if a.committing]
        newer += [c.id for c in self._context.history.live()]
        return any((a.epoch, a.session) == session and a.step > step for a in newer)

    def committed(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        """The record is confirmed: tell the nodes, and give up what is older and still open."""
        attempt = self._attempts.pop(checkpoint.id.attempt)
        self._note_end(attempt.id)
        self._latencies_s.append(self._context.now_s - attempt.started_s)
        self._measure(checkpoint, commit_s=self._context.now_s - attempt.commit_s)
        nodes = tuple(n.node_id for n in attempt.nodes)
        yield self._publish(checkpoint.id, checkpoint.level, None, nodes)
        self.promote_copies(checkpoint)
        for older in list(self._attempts.values()):
            is_same = (older.id.epoch, older.id.session) == (checkpoint.id.epoch, checkpoint.id.session)
            if is_same and older.id.step < checkpoint.step and not older.committing:
                error = Unavailable(f"Step {older.id.step} was overtaken by a newer save.")
                yield from self.drop(older, error)

    def promoted(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        """Notify the group at work of a level that is in the log."""
        yield self._publish(checkpoint.id, checkpoint.level, None, self._context.session_nodes())

    def _measure(self, checkpoint: CheckpointInfo, *, commit_s: float) -> None:
        measure, phase = self._context.measure, telemetry.PHASE
        measure(telemetry.SAVES, outcome="committed")
        if checkpoint.stall_s is not None:
            measure(telemetry.STALL, checkpoint.stall_s)
        if checkpoint.capture_s is not None:
            measure(phase, checkpoint.capture_s, phase="capture")
        if checkpoint.local_s is not None:
            measure(phase, checkpoint.local_s, phase="local")
        measure(phase, checkpoint.replicate_s or 0.0, phase="replicate")
        measure(phase, commit_s, phase="commit")
        self.last_save_s = sum(
            time_s or 0.0
            for time_s in (checkpoint.capture_s, checkpoint.local_s, checkpoint.replicate_s, commit_s)
        )

    def promote_copies(self, checkpoint: CheckpointInfo) -> None:
        """Record copies that arrived after the commit."""
        context, name = self._context, checkpoint.id.attempt
        copies = min(context.holders.num_copies(name, checkpoint.num_nodes), context.options.replicas)
        if copies > checkpoint.replicas and checkpoint.level < Level.DURABLE:
            op = r.Promote(attempt=name, level=Level.REPLICATED, replicas=copies)
            if op not in context.ledger.pending:
                context.ledger.append(op)

    def drop_excess(self) -> Iterator[m.Effect]:
        """The store is silent: keep the newest commits waiting, drop the others."""
        queue = self._context.ledger.waiting()
        built_on = {op.resumed_from for op in queue if isinstance(op, r.Session)}
        waiting = [op for op in queue if isinstance(op, r.Commit) and op.attempt not in built_on]
        for op in waiting[:-MAX_WAITING_COMMITS]:
            self._context.ledger.withdraw(op)
            error = Unavailable(f"Step {op.step}: the storage path did not take its commit record.")
            yield from self.drop(self._attempts[op.attempt], error)

    def drop(self, attempt: Attempt, error: CheckpointError) -> Iterator[m.Effect]:
        """Give an attempt up; its nodes delete what they have of it."""
        context, name = self._context, attempt.id.attempt
        nodes = {n.node_id for n in attempt.nodes} | context.holders.may_have(name)
        nodes = nodes.union(*(n.holders for n in attempt.nodes)) & context.holders.live
        self._attempts.pop(name, None)
        self._note_end(attempt.id)
        context.holders.forget(name)
        self._captures.forget(name)
        self._dropped.append(name)
        context.measure(telemetry.SAVES, outcome="dropped")
        context.measure(telemetry.FAILURES, cause="save")
        yield m.Warn(text=f"Step {attempt.id.step} was not saved: {error}")
        yield self._publish(attempt.id, None, error, tuple(sorted(nodes)))

    def _publish(
        self, attempt: AttemptId, level: Level | None, error: CheckpointError | None, nodes: tuple[str, ...]
    ) -> m.NotifyOutcome:
        epoch = self._context.ledger.epoch
        return m.NotifyOutcome(attempt=attempt, level=level, error=error, nodes=nodes, epoch=epoch)


def _stored(held: StoredFragment, node: str) -> m.NodeStored:
    return m.NodeStored(
        attempt=held.attempt,
        node_index=held.node_index,
        node_id=node,
        files=held.files,
        replicated=held.replicated,
        metrics=held.metrics,
    )


def _not_collective(attempt: Attempt, missed: Iterable[int], where: str) -> CheckpointError:
    missing_ranks = tuple(missed)
    ranks = ", ".join(map(str, missing_ranks))
    return SaveNotCollective(
        f"Step {attempt.id.step} was saved by some ranks only: rank(s) {ranks} did not save it; {where}.",
        hint="Call save (or step) on every rank, with the same number; do not put it under `if rank == 0`.",
        step=attempt.id.step,
        missing_ranks=missing_ranks,
    )
