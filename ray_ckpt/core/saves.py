"""Saves of the current session: reports of nodes and ranks, applied to the open attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.attempts import Attempt, SaveUnderway
from ray_ckpt.core.context import Context, names_of
from ray_ckpt.core.missing_ranks import MissingRanks
from ray_ckpt.core.open_attempts import MAX_WAITING_COMMITS, OpenAttempts
from ray_ckpt.core.placement import domain_of, same_domain
from ray_ckpt.core.progress import SessionProgress
from ray_ckpt.core.values import GOES_ON, STILL_WRITING, Inventory, SessionNode, SessionPlan, StoredFragment
from ray_ckpt.errors import CheckpointError, RunSuperseded, Unavailable
from ray_ckpt.types import AttemptId, CheckpointInfo, ParityGroup

LOOK_S = 0.5  # time between checks for ranks that will never save; a check reads all ranks and attempts


class Saves:
    """Handler of the reports of nodes and ranks, which open, advance and end attempts."""

    def __init__(
        self, context: Context, *, progress: SessionProgress, attempts: OpenAttempts, missing: MissingRanks
    ) -> None:
        self._context = context
        self._progress, self._attempts, self._missing = progress, attempts, missing
        self._looked_s = 0.0

    def open(self) -> Iterator[str]:
        """Yield the open attempts: those that nodes are storing, or whose commit is being written."""
        return (attempt.id.attempt for attempt in self._attempts)

    def underway(self) -> tuple[SaveUnderway, ...]:
        """Return the open saves by step, including saves that ranks have captured but no node has stored."""
        now_s = self._context.now_s
        found = [attempt.underway(now_s, self._num_coded(attempt)) for attempt in self._attempts]
        captured = self._progress.num_saved()
        found = [replace(s, ranks_captured=max(captured[s.step], s.ranks_captured)) for s in found]
        settled = max((self._progress.ended_step, self._last_logged(), *(save.step for save in found)))
        world_size = self._context.plan.world_size if self._context.plan else 0
        found += [
            SaveUnderway(
                step=step, phase="writing", ranks_captured=ranks, ranks_stored=0, world_size=world_size
            )
            for step, ranks in captured.items()
            if step > settled
        ]
        return tuple(sorted(found, key=lambda save: save.step))

    def _num_coded(self, attempt: Attempt) -> int:
        """Return the number of members of parity groups whose parity file a live node has."""
        members = (member for group in attempt.groups for member in group.members)
        return sum(bool(self._context.holders.parity.of(attempt.id.attempt, member)) for member in members)

    def _last_logged(self) -> int:
        """Return the newest logged step of the session, or the step that it resumed from; 0 if neither."""
        plan, lineage = self._context.plan, self._context.history.lineage()
        if plan is None or not lineage:
            return 0
        own = [c.step for c in lineage if (c.id.epoch, c.id.session) == plan.session_key]
        return max(own, default=plan.resume.checkpoint.step if plan.resume else 0)

    def end_session(self, error: CheckpointError) -> Iterator[m.Effect]:
        """End the open attempts for a newer group: commit attempts stored by all nodes, drop others."""
        for attempt in sorted(self._attempts, key=lambda a: a.id.step):
            if attempt.state == "copying":
                yield from self._attempts.commit(attempt)
            elif attempt.state == "writing":
                yield from self._attempts.drop(attempt, error)

    # -- inventories -----------------------------------------------------------------------------------

    def count_reports(self, since_s: float) -> None:
        """Count again what nodes have reported since they were asked for inventories, which may lack it."""
        for attempt in self._attempts:
            for (index, node), reported_s in attempt.reported_s.items():
                if reported_s >= since_s:
                    self._context.holders.report(attempt.id.attempt, index, node)

    def recover(self, inventories: Mapping[str, Inventory]) -> Iterator[m.Effect]:
        """Commit attempts of the log's last session that are complete on the nodes but not in the log.

        The earlier coordinator could not record these attempts: the coordinator died, or the store was away.
        The fragments themselves show that an attempt is complete. Attempts of older sessions are left out,
        because a newer session did not build on them.
        """
        context, current = self._context, self._context.ledger.projected().session
        if current is None:
            return
        session = (current.opened_by, current.session)
        parts: dict[AttemptId, dict[int, list[tuple[str, StoredFragment]]]] = {}
        for node in sorted(inventories):
            for held in inventories[node].fragments:
                mine = (held.attempt.epoch, held.attempt.session) == session
                if mine and self._attempts.is_unknown(held.attempt):
                    parts.setdefault(held.attempt, {}).setdefault(held.node_index, []).append((node, held))
        complete = [a for a, found in parts.items() if len(found) == found[min(found)][0][1].num_nodes]
        for attempt in sorted(complete, key=lambda a: a.step)[-MAX_WAITING_COMMITS:]:
            copies = [parts[attempt][index] for index in sorted(parts[attempt])]
            found = [held[0] for held in copies]
            nodes = tuple(
                SessionNode(node_id=node, node_index=held.node_index, ranks=held.ranks, holders=())
                for node, held in found
            )
            recovered = Attempt(id=attempt, nodes=nodes, started_s=context.now_s)
            for node, held in found:
                recovered.store(_stored(held, node), context.now_s)
            for _, held in chain.from_iterable(copies):
                recovered.list_version(held.node_index, held.fragment)
            self._attempts.add(recovered)
            yield from self._attempts.commit(recovered)
            if recovered.is_committing:
                yield m.Warn(
                    text=f"Step {attempt.step} is complete on its nodes and not recorded; it will be."
                )

    def count_inventory(self, inventories: Mapping[str, Inventory]) -> Iterator[m.Effect]:
        """Count the fragments on the nodes of the current group as if the nodes had just stored them."""
        plan = self._context.plan
        if plan is None:
            return
        held = [(node, h) for node in sorted(inventories) for h in inventories[node].fragments]
        held = [(node, h) for node, h in held if self._belongs(h, plan)]
        held.sort(key=lambda found: found[1].attempt.step)
        for node, copy in held:
            attempt = self._attempts.get(copy.attempt.attempt)
            if attempt is not None:
                attempt.list_version(copy.node_index, copy.fragment)
                if node != attempt.nodes[copy.node_index].node_id:
                    attempt.arrive(copy.node_index, node)
        found: dict[str, Attempt] = {}
        for node, part in held:
            attempt = self._attempts.get(part.attempt.attempt)
            if attempt is not None and part.node_index not in attempt.stored:
                found[attempt.id.attempt] = attempt
                yield from self._take(attempt, _stored(part, node))
        yield from self._settle(*found.values())

    def _belongs(self, held: StoredFragment, plan: SessionPlan) -> bool:
        """Return whether a fragment is of an attempt that may be open; a new attempt is opened."""
        known = self._attempts.get(held.attempt.attempt)
        num_nodes = len(plan.nodes if known is None else known.nodes)  # fewer nodes write a salvage
        return held.num_nodes == num_nodes and self._attempts.find(held.attempt) is not None

    # -- reports of nodes ------------------------------------------------------------------------------

    def stored(self, event: m.NodeStored) -> Iterator[m.Effect]:
        """Record that a node has fsynced its part of an attempt."""
        attempt = self._attempts.find(event.attempt)
        if attempt is None:
            if self._context.ledger.is_open:  # until the log is open, its commits are unknown
                yield from self._answer_late(event)
            return
        yield from self._take(attempt, event)
        yield from self._settle(attempt)

    def _take(self, attempt: Attempt, event: m.NodeStored) -> Iterator[m.Effect]:
        is_new = event.node_index not in attempt.stored
        attempt.store(event, self._context.now_s)
        self._progress.took_part(attempt.nodes[event.node_index].ranks)
        self._context.holders.report(event.attempt.attempt, event.node_index, event.node_id)
        if is_new and (group := attempt.completed_group(event.node_index)) is not None:
            yield from self._code(attempt, group)
        if self._context.draining:
            yield from self._copy_elsewhere(attempt, event.node_index)

    def _settle(self, *attempts: Attempt) -> Iterator[m.Effect]:
        """Commit the attempts that are ready, after all reports about them have been counted."""
        yield from self._attempts.bound()
        for attempt in attempts:
            yield from self._attempts.try_commit(attempt)

    def _answer_late(self, event: m.NodeStored) -> Iterator[m.Effect]:
        """Repeat the outcome of an attempt that has ended, or report that the attempt's session has ended."""
        name, nodes = event.attempt.attempt, (event.node_id,)
        if self._attempts.is_open(name):
            return  # the attempt was recovered, and its commit is being written
        known = self._context.history.checkpoints.get(name)
        if known is not None and known.state == "live":
            yield self._attempts.outcome(event.attempt, known.level, None, nodes)
        elif known is None and self._is_of_the_past(event.attempt):
            error: CheckpointError = RunSuperseded(
                f"Step {event.attempt.step} belongs to no open attempt of this run."
            )
            yield self._attempts.drop_unopened(event.attempt, error, nodes)
        elif self._attempts.is_dropped(name):  # the node has not received the outcome
            error = Unavailable(f"Step {event.attempt.step} was dropped.")
            yield self._attempts.outcome(event.attempt, None, error, nodes)

    def _is_of_the_past(self, attempt: AttemptId) -> bool:
        """Return True if the attempt's session has ended.

        Two sessions may be active although no group has been found yet: the current session, and a session
        that was begun while the store was away and is not in the log.
        """
        history = self._context.history
        if attempt.run_uid != history.run_uid:
            return True
        plan, current = self._context.plan, history.session
        newest = plan.session_key if plan else (current.opened_by, current.session) if current else (0, 0)
        return (attempt.epoch, attempt.session) < newest

    def replica_ended(self, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        """Record that a copy has arrived, or send a failed copy to another node."""
        name = event.attempt.attempt
        attempt = self._attempts.get(name) or self._attempts.find(event.attempt)
        known = self._context.history.checkpoints.get(name)
        if attempt is None and (known is None or known.state != "live"):
            yield from self._drop_late(event.attempt, event.holder)
            return
        has_arrived = event.error is None and event.holder in self._context.holders.live
        if event.error is not None:
            self._context.holders.note_tried(name, event.holder)
        if has_arrived:
            self._context.holders.report(name, event.node_index, event.holder)
        if attempt is not None:
            if has_arrived:
                attempt.arrive(event.node_index, event.holder)
                attempt.reported_s[event.node_index, event.holder] = self._context.now_s
                if event.fragment is not None:
                    attempt.list_version(event.node_index, event.fragment)
            else:
                yield from self._replace_holder(attempt, event)
            yield from self._attempts.try_commit(attempt)
        elif known is not None and event.error is None:
            self._attempts.promote_copies(known)

    def note_link(self, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        """Record if the holder answered the source, so that no copy is sent over a silent link."""
        links, source, holder = self._context.links, event.source, event.holder
        if event.error is None:
            links.worked(source, holder)
        elif event.is_unreachable and links.failed(source, holder, self._context.now_s):
            yield m.Warn(
                text=f"Node {source[:12]} does not reach node {holder[:12]}: {event.error} "
                "Copies go to other nodes if there are any, else they are made when it answers again."
            )

    def _drop_late(self, attempt: AttemptId, node: str) -> Iterator[m.Effect]:
        """Let a node delete what it has stored, or a part of it, if the attempt has ended without a level."""
        name = attempt.attempt
        is_gone = name in self._context.history.checkpoints or self._attempts.is_dropped(name)
        if (is_gone or self._is_of_the_past(attempt)) and self._context.ledger.is_open:
            error = Unavailable(f"Step {attempt.step} was dropped.")
            yield self._attempts.drop_unopened(attempt, error, (node,))

    def _replace_holder(self, attempt: Attempt, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        context, index, why = self._context, event.node_index, event.error or "the node died"
        if event.error is not None:
            context.measure(telemetry.FAILURES, cause="copy")
        if not event.is_unreachable:  # a silent link causes one warning, not one per step
            yield m.Warn(
                text=f"Step {attempt.id.step}: no copy of fragment {index} on {event.holder[:12]}: {why}"
            )
        source = attempt.nodes[index].node_id
        reached = {node for node in context.may_hold if context.links.works(source, node, context.now_s)}
        order = self._order_in_place_of(event.holder, attempt, index)
        holder = attempt.replace(index, event.holder, reached, order)
        if holder is not None:
            self._context.holders.expect(attempt.id.attempt, index, holder)
            yield m.Replicate(attempt=attempt.id, node_index=index, source=source, holder=holder)

    def _copy_elsewhere(self, attempt: Attempt, index: int) -> Iterator[m.Effect]:
        """Replace holders that are about to leave, if there are nodes that stay."""
        leaving = sorted(attempt.awaited.get(index, set()) & self._context.draining)
        staying = self._context.may_hold if leaving else frozenset()
        for holder in leaving:
            if not attempt.others(index, staying):
                return
            other = attempt.replace(index, holder, staying, self._order_in_place_of(holder, attempt, index))
            assert other is not None
            source = attempt.nodes[index].node_id
            self._context.holders.expect(attempt.id.attempt, index, other)
            yield m.Replicate(attempt=attempt.id, node_index=index, source=source, holder=other)

    def _order_in_place_of(
        self, holder: str, attempt: Attempt, index: int
    ) -> Callable[[str], tuple[int, int, str]]:
        """Return the order of the nodes that may take a copy in place of `holder`.

        A copy in the source's failure domain, if the option `copies` asks for one, stays in it. Others go to
        domains without a copy as far as possible, then to the nodes that await the fewest.
        """
        domains, source = self._context.domains, attempt.nodes[index].node_id
        is_near = "rack" in self._context.options.copies and same_domain(source, holder, domains)
        others = attempt.copies.get(index, set()) | attempt.awaited.get(index, set())
        taken = Counter(domain_of(node, domains) for node in {source, *others} - {holder})
        load = Counter(chain.from_iterable(attempt.awaited.values()))

        def order(node: str) -> tuple[int, int, str]:
            is_far = not same_domain(node, source, domains)
            return is_far if is_near else taken[domain_of(node, domains)], load[node], node

        return order

    # -- parity ----------------------------------------------------------------------------------------

    def _code(self, attempt: Attempt, group: ParityGroup) -> Iterator[m.Code]:
        """Let the nodes of a group make their parity files, which some may have made before."""
        holders, name = self._context.holders, attempt.id.attempt
        places = holders.places_of(name, group.members[0])
        assert places is not None  # `OpenAttempts.find` has noted the groups
        stored = [attempt.stored[member] for member in group.members]
        size_bytes = sum(event.size_bytes for event in stored)
        if is_anew := any(event.facts.is_rewritten or event.facts.bad_copies for event in stored):
            holders.parity.may_not_link(name, group)
        for member in group.members:
            node = attempt.nodes[member].node_id
            if node in holders.live and node not in holders.parity.of(name, member):
                attempt.coding[member] = node
                order = m.Code(
                    attempt=attempt.id,
                    num_nodes=len(attempt.nodes),
                    node_index=member,
                    node_id=node,
                    is_parity=True,
                    places=places,
                    read_bytes=size_bytes * group.parity // len(group.members),
                    is_anew=is_anew,
                )
                holders.parity.ordered(order)
                yield order

    def code_ended(self, event: m.CodeEnded) -> Iterator[m.Effect]:
        """Record a parity file or a member's files that a node has computed, or the failure."""
        name, holders = event.attempt.attempt, self._context.holders
        holders.parity.ended(event)
        attempt, known = self._attempts.get(name), self._context.history.checkpoints.get(name)
        if attempt is None and (known is None or known.state != "live"):
            yield from self._drop_late(event.attempt, event.node_id)
            return
        if event.error is not None:
            holders.note_tried(name, event.node_id)
        elif event.is_parity:
            holders.report_parity(name, event.group, event.node_index, event.node_id)
        else:
            holders.report(name, event.node_index, event.node_id)
        if attempt is not None:
            if attempt.coding.get(event.node_index) == event.node_id:
                del attempt.coding[event.node_index]
                if event.error is not None:
                    self._context.measure(telemetry.FAILURES, cause="copy")
                    yield m.Warn(
                        text=f"Step {event.attempt.step}: no parity for fragment {event.node_index} on "
                        f"{event.node_id[:12]}: {event.error}"
                    )
            yield from self._attempts.try_commit(attempt)
        elif known is not None and event.error is None:
            self._attempts.promote_copies(known)

    def refused(self, event: m.SaveRefused) -> Iterator[m.Effect]:
        """Drop an attempt in which some ranks could not take part."""
        if not self._attempts.may_open(event.attempt):
            return
        self._progress.took_part(event.ranks)
        ranks = ", ".join(map(str, event.ranks))
        error = Unavailable(f"Rank(s) {ranks} could not take part: {event.reason}")
        if event.reason == GOES_ON and not self._attempts.is_open(event.attempt.attempt):
            yield self._attempts.drop_unopened(event.attempt, error, self._context.session_nodes())
            return  # no save is lost
        attempt = self._attempts.find(event.attempt)
        if attempt is None or attempt.is_committing:
            return
        yield from self._attempts.drop(attempt, error)
        if event.reason == STILL_WRITING:
            yield from self._warn_of_skipped(event.attempt)

    def _warn_of_skipped(self, attempt: AttemptId) -> Iterator[m.Effect]:
        """Count a skipped save; warn of the first one, and each time that the number has doubled."""
        self._context.measure(telemetry.SKIPPED_SAVES)
        skipped, ended = self._progress.attempt_skipped()
        if skipped.bit_count() == 1:
            yield m.Warn(
                text=f"{skipped} of {ended} saves of session {attempt.session} were skipped because the save "
                "before was still being written: save less often, or see where the time goes with "
                "`ray-ckpt show`."
            )

    # -- reports of ranks, time and nodes --------------------------------------------------------------

    def progressed(self, event: m.RanksProgressed) -> Iterator[m.Effect]:
        """Drop attempts at steps that ranks have passed without a save: such a save was not collective."""
        if not self._progress.progressed(event, self._attempts.may_open):
            return
        for attempt in self._attempts:
            if attempt.is_committing or attempt.is_salvage:
                continue
            passed = {rank for rank in event.ranks if self._progress.has_passed(rank, attempt.id.step)}
            if passed and (missed := sorted(passed.intersection(self._missing.of(attempt.id)))):
                yield from self._attempts.drop(attempt, self._missing.why_missed(attempt.id, missed))

    def ticked(self) -> Iterator[m.Effect]:
        """Drop attempts that ranks will never complete or that are too old; commit attempts that are due."""
        if abs(self._context.now_s - self._looked_s) >= self._context.paced(LOOK_S):
            self._looked_s = self._context.now_s
            for id_, missed in self._missing.never_come():
                if (found := self._attempts.find(id_)) is not None:
                    yield from self._attempts.drop(found, self._missing.why_missed(id_, missed))
        limit_s = self._context.options.attempt_timeout_s
        for attempt in self._attempts:
            if attempt.state == "writing" and self._context.now_s - attempt.started_s > limit_s:
                yield from self._attempts.drop(attempt, self._missing.why_incomplete(attempt, limit_s))
            else:
                yield from self._attempts.try_commit(attempt)

    def nodes_lost(self, lost: frozenset[str]) -> Iterator[m.Effect]:
        """Drop attempts that cannot be complete without the lost nodes; replace lost holders of copies."""
        for attempt in self._attempts:
            if attempt.is_committing:
                yield from self._attempts.reconsider(attempt)
                continue
            yield from self._attempts.drop_if_lost(attempt, lost)
            if attempt.state == "dropped":
                continue
            for index in attempt.stored:
                gone = (attempt.copies.get(index, set()) | attempt.awaited.get(index, set())) & lost
                for holder in sorted(gone):
                    event = m.ReplicaEnded(attempt=attempt.id, node_index=index, holder=holder, error=None)
                    yield from self._replace_holder(attempt, event)
            attempt.coding = {at: node for at, node in attempt.coding.items() if node not in lost}
            yield from self._attempts.try_commit(attempt)

    def agents_lost(self, nodes: frozenset[str]) -> Iterator[m.Effect]:
        """Drop attempts not yet stored by nodes with new agents: the old agents wrote these attempts."""
        for attempt in self._attempts:
            gone = {n.node_id for n in attempt.nodes if n.node_index not in attempt.stored} & nodes
            if gone and not attempt.is_committing:
                error = Unavailable(f"The agent of {names_of(gone)} died during it.")
                yield from self._attempts.drop(attempt, error)

    def promoted(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        """Notify the current group that a checkpoint's new level is in the log."""
        nodes = self._context.session_nodes()
        yield self._attempts.outcome(checkpoint.id, checkpoint.level, None, nodes)


def _stored(held: StoredFragment, node: str) -> m.NodeStored:
    return m.NodeStored(
        attempt=held.attempt,
        node_index=held.node_index,
        node_id=node,
        fragment=held.fragment,
        size_bytes=held.size_bytes,
        replicated=held.replicated,
        metrics=held.metrics,
    )
