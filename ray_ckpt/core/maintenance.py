"""Maintenance between saves: repair of copies, eviction, scrubbing, and the recording of lost checkpoints.

Every decision here follows from the log and the holders, so a new coordinator continues the maintenance. The
work is not urgent: it runs at most once in MAINTENANCE_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.parity_files import lost_members
from ray_ckpt.core.parity_repair import ParityRepairs
from ray_ckpt.core.placement import place_groups
from ray_ckpt.core.rate_budget import Budget
from ray_ckpt.core.repair import Losses, Repairs, worth_copies
from ray_ckpt.core.retention import choose_evictions, choose_evictions_for_space, pinned_aside
from ray_ckpt.core.scrub import Scrubs, damage_text
from ray_ckpt.core.values import DiskSpace, GroupPlaces
from ray_ckpt.format import records as r
from ray_ckpt.format.names import PARITY_PREFIX, is_still_name
from ray_ckpt.types import AttemptId, CheckpointInfo, Level, ParityGroup

MAINTENANCE_S = 1.0  # between two runs, or longer: a run visits all live nodes, fragments and checkpoints
RESTART_S = 30.0  # after a loss, repair waits for the next group to begin: it would slow the start
RESTORE_S = 120.0  # after a loss, repair leaves disks, network and cores to a group that restores
MAX_DAMAGED = 1000  # damaged copies that are remembered, so that their repair is counted


@dataclass(slots=True)
class _Doubt:
    """A fragment of which a computation gave wrong bytes."""

    unread: set[m.Scrub]  # copies of its group that were not read since
    is_read: bool = False  # a computation has failed when all were read


class Maintenance:
    """The maintenance of one run: repair, eviction, scrub and the recording of losses."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._repairs, self._coding = Repairs(), ParityRepairs()
        self._losses = Losses()
        self._scrubs = Scrubs()
        self._copying, self._reading = Budget(0, 0), Budget(0, 0)
        self._next_s = self._next_compute_s = 0.0
        self._lost_s: float | None = None  # first loss since a group trained with all nodes, or first call
        self._has_trained = False  # a group has trained with all its nodes since `_lost_s`
        self._disks: dict[str, DiskSpace] = {}  # by node; readings not used yet
        self._last_disks: dict[str, DiskSpace] = {}  # by node; the last readings
        self._crowded: set[str] = set()  # by last readings: full disks with checkpoints, and none to evict
        self._damaged: deque[tuple[str, int]] = deque(maxlen=MAX_DAMAGED)  # fragments to be copied again
        self._doubts: dict[tuple[str, int, bool], _Doubt] = {}  # by file that was to be computed
        self._unread: dict[str, set[int]] = {}  # as `bad_remote`: see `unread`
        self._recorded: dict[str, str] = {}  # attempt -> damaged fragments in the log; without those of none
        self._guessed: set[tuple[int, int]] = set()  # (num_nodes, fragment) of suspects by the log alone
        self.has_news = False  # what is damaged on the storage path may differ from `_recorded`
        self.found_crowded = False  # a reading that the last `decide` used is of a crowded disk
        self.is_stranded = False  # part of the newest checkpoint is only on nodes that leave, and not copied

    @property
    def is_due(self) -> bool:
        """True if it is time to call `decide`, or `compute`."""
        return self._context.now_s >= self._next_s

    @property
    def is_crowded(self) -> bool:
        """True if a disk with checkpoints of the run is above its high watermark and has nothing to evict."""
        return bool(self._crowded)

    def is_on_crowded(self, attempt: str) -> bool:
        """Return True if a node with such a disk holds a part of an attempt."""
        return not self._crowded.isdisjoint(self._context.holders.anywhere(attempt))

    @property
    def copies_missing(self) -> int:
        """Number of copies of fragments, and of files of parity groups, that repair still has to make."""
        return self._repairs.deficit + self._coding.deficit

    @property
    def is_computing(self) -> bool:
        """True while a node makes a file of a parity group."""
        return bool(self._context.holders.parity.makers)

    @property
    def mending(self) -> set[str]:
        """Attempts of which a scrub may write files anew on the storage path, also one that is late."""
        return self._scrubs.read_remote | self._context.holders.unsafe_remote

    def opened(self) -> None:
        """Let what an earlier coordinator has found damaged on the storage path be read again, at once.

        Until then it is not known to be intact, so that retention keeps older checkpoints that are. Others
        may share its damaged still files, if it has some: the log names fragments, and no files.
        """
        for checkpoint in (c for c in self._context.history.live() if c.damaged):
            name = checkpoint.id.attempt
            self._recorded[name] = checkpoint.damaged
            fragments = set(range(checkpoint.num_nodes))
            bad = fragments.intersection(map(int, checkpoint.damaged.split(",")))
            self._guessed |= {(checkpoint.num_nodes, index) for index in bad}
            self._unread[name] = fragments if len(bad) == r.MAX_DAMAGED else bad  # perhaps there are more
            self._scrubs.suspect_stored(checkpoint.id, self._unread[name])
        for num_nodes, index in sorted(self._guessed):
            for scrub in self._remote_copies(num_nodes, index):
                self._scrubs.suspect(scrub)
        self._context.holders.suspect_remote = self._scrubs.suspect_remote

    def record_damage(self) -> Iterable[m.Effect]:
        """Append what has changed of the fragments that are damaged on the storage path."""
        self.has_news, bad = False, self._context.holders.bad_remote
        for name in sorted({*bad, *self._unread, *self._recorded}):
            checkpoint = self._context.history.checkpoints.get(name)
            is_live = checkpoint is not None and checkpoint.state == "live"
            found = bad.get(name, set()) | self._unread.get(name, set()) if is_live else set()
            recorded = self._recorded.get(name, "")
            text = damage_text(found, recorded)
            if text != recorded and is_live:
                self._context.ledger.append(r.Damaged(attempt=name, fragments=text))
            self._recorded[name] = text
            if not text:
                del self._recorded[name]
        return ()

    @property
    def unread(self) -> set[str]:
        """Attempts with fragments on the storage path that are recorded as damaged until they are read again.

        An earlier coordinator has found them damaged, or a round could not read them.
        """
        return {name for name, fragments in self._unread.items() if fragments}

    def decide(self, *, busy: Collection[str], is_training: bool) -> Iterator[m.Effect]:
        """Yield the work that is due; call while no record is pending and a group has the run.

        `busy` are the attempts that uploads or the current session read. From the loss of a node until the
        next group trains, repair waits, unless nodes are leaving; see RESTART_S and RESTORE_S.
        """
        context = self._context
        period_s = self._period_s()
        self._next_s = context.now_s + period_s
        if self._lost_s is None:
            self._lost_s = context.now_s
        is_intact = context.holders.live.issuperset(context.session_nodes())
        self._has_trained |= is_training and is_intact
        wait_s = RESTORE_S if not is_training else 0.0 if is_intact else RESTART_S
        is_waiting = not context.draining and context.now_s < self._lost_s + wait_s
        self._copying.set_rate(0 if is_waiting else context.options.repair_bytes_per_s, period_s)
        self._reading.set_rate(context.options.scrub_bytes_per_s, period_s)
        yield from self._evict(busy)
        yield from self._repair(busy)
        self.is_stranded = self._strands_newest()
        yield from self._scrub()
        live, lineage = context.history.live(), context.history.lineage()
        for lost in self._losses.due(
            live=live, lineage=lineage, holders=context.holders, now_s=context.now_s
        ):
            context.ledger.append(r.Lost(attempt=lost.id.attempt, reason="no live node holds all of it"))
            context.measure(telemetry.LOST)

    def _period_s(self) -> float:
        return max(self._context.paced(MAINTENANCE_S), self._context.live_pause_s)

    def compute(self, busy: Collection[str]) -> Iterator[m.Effect]:
        """Yield computations of what uploads wait for, if some are due; call while no group has the run."""
        groups_of = self._context.holders.parity.groups
        if self._context.now_s < self._next_compute_s or not any(map(groups_of, busy)):
            return
        self._next_compute_s = self._context.now_s + self._period_s()
        budget = None if self._context.options.repair_bytes_per_s else self._copying  # nobody trains
        yield from self._compute((), busy, budget)
        yield from self._scrub(has_rounds=False)

    def _compute(
        self, checkpoints: Sequence[CheckpointInfo], busy: Collection[str], budget: Budget | None
    ) -> Iterator[m.Effect]:
        """Yield computations of files of parity groups, and of lost members of checkpoints that are read."""
        context, known = self._context, {c.id.attempt for c in checkpoints}
        read = [context.history.checkpoints[name] for name in sorted({*busy} - known)]
        unsafe = context.holders.unsafe_remote
        live = {c.id.attempt for c in context.history.live()} if self._doubts else set()
        self._doubts = {
            (name, member, is_parity): doubt
            for (name, member, is_parity), doubt in self._doubts.items()
            if name in live and (is_parity or not context.holders.of(name, member))
        }
        for code in self._coding.assign(
            checkpoints=checkpoints,
            read=[c for c in read if c.level < Level.DURABLE or c.id.attempt in unsafe],
            holders=context.holders,
            domains=context.domains,
            draining=context.draining,
            budget=budget,
            now_s=context.now_s,
        ):
            context.holders.parity.ordered(code)
            context.holders.expect(code.attempt.attempt, code.node_index, code.node_id)
            yield code

    def _repair(self, busy: Collection[str]) -> Iterator[m.Effect]:
        context, view = self._context, self._context.retention_view()
        checkpoints = (*worth_copies(view.lineage), *pinned_aside(view))
        self._place_groups(checkpoints)
        yield from self._compute(checkpoints, busy, self._copying)
        for copy in self._repairs.assign(
            checkpoints=checkpoints,
            holders=context.holders,
            replicas=context.options.num_copies,
            domains=context.domains,
            draining=context.draining,
            links=context.links,
            budget=self._copying,
            now_s=context.now_s,
            spares=self._spares(),
            may_hold=context.may_hold,
            limit_bytes_per_s=context.options.replicate_bytes_per_s,
        ):
            context.holders.expect(copy.attempt.attempt, copy.node_index, copy.holder)
            yield copy

    def _strands_newest(self) -> bool:
        context = self._context
        newest = context.newest if context.draining else None
        if newest is None:
            return False
        held = context.holders.fragments(newest.id.attempt)
        leaving = [index for index, nodes in held.items() if nodes and nodes <= context.draining]
        return any(not self._repairs.is_copying(newest.id, index) for index in leaving)

    def _spares(self) -> frozenset[str]:
        """Return the idle spares that have room for the newest checkpoint without evicting anything."""
        context, lineage = self._context, self._context.history.lineage()
        if not context.spares or not lineage:
            return frozenset()
        low_watermark, attempt = context.options.low_watermark, lineage[-1].id.attempt

        def has_room(node: str) -> bool:
            disk = self._last_disks.get(node)
            missing = lineage[-1].size_bytes - self._bytes_on(node, attempt)
            return disk is None or disk.free_bytes - missing >= (1 - low_watermark) * disk.total_bytes

        return frozenset(filter(has_room, context.spares - frozenset(context.session_nodes())))

    def _place_groups(self, checkpoints: Iterable[CheckpointInfo]) -> None:
        """Place parity groups of nodes without one, of checkpoints saved with other options or recovered."""
        holders, options = self._context.holders, self._context.options
        if options.parity is None:
            return
        num_data, parity = options.parity
        for checkpoint in checkpoints:
            name, num_nodes = checkpoint.id.attempt, checkpoint.num_nodes
            left = [index for index in range(num_nodes) if holders.parity.group_of(name, index) is None]
            if not left or not holders.holds_all(checkpoint):
                continue
            if holders.num_copies(name, num_nodes) < options.max_losses:
                homes = [min(holders.of(name, index)) for index in left]
                for group in place_groups(
                    homes, num_data=num_data, parity=parity, domains=self._context.domains
                ):
                    members = tuple(left[at] for at in group.members)
                    holders.parity.know(name, [ParityGroup(members=members, parity=parity)])

    def _scrub(self, *, has_rounds: bool = True) -> Iterator[m.Effect]:
        context = self._context
        for step in self._scrubs.assign(
            live=context.history.live(),
            holders=context.holders,
            every_s=context.options.scrub_every_s,
            budget=self._reading,
            now_s=context.now_s,
            wall_s=context.wall_s,
            has_rounds=has_rounds,
        ):
            if isinstance(step, r.Verified):
                context.ledger.append(step)
            else:
                yield step
        for scrub in self._scrubs.unanswered:
            yield from self._could_not_read(scrub, "no answer")
        self._scrubs.unanswered.clear()
        if self._scrubs.is_behind:
            yield from context.warn_once(
                f"Stored copies cannot be read again within scrub_every_s, {context.options.scrub_every_s:g} "
                "s, so damage may stay unknown for more than twice as long."
            )
        context.holders.suspect_remote = self._scrubs.suspect_remote

    def _evict(self, busy: Collection[str]) -> Iterator[m.Effect]:
        """Evict durable checkpoints from nodes: all but the last `keep_local`, and more if a disk is full."""
        context, options = self._context, self._context.options
        view = context.retention_view(busy)
        for attempt in choose_evictions(view, keep_local=options.keep_local):
            for node in sorted(context.holders.may_have(attempt)):
                yield self._evicted(attempt, node)
        disks, self._disks = self._disks, {}  # use each reading once: the next reading shows the effect
        for node, disk in sorted(disks.items()):
            held_bytes = self._freed_on(node, view.live)
            chosen = choose_evictions_for_space(
                view,
                held_bytes=held_bytes,
                free_bytes=disk.free_bytes,
                total_bytes=disk.total_bytes,
                high_watermark=options.high_watermark,
                low_watermark=options.low_watermark,
            )
            for attempt in chosen:
                yield self._evicted(attempt, node)
            is_full = disk.total_bytes - disk.free_bytes > options.high_watermark * disk.total_bytes
            if is_full and held_bytes and not chosen:  # else others fill it
                self._crowded.add(node)
            else:
                self._crowded.discard(node)
        self.found_crowded = not self._crowded.isdisjoint(disks)

    def _evicted(self, attempt: str, node: str) -> m.Evict:
        self._context.holders.remove_all(attempt, node)
        return m.Evict(attempt=self._context.history.checkpoints[attempt].id, node_id=node)

    def _bytes_on(self, node: str, attempt: str) -> int:
        """Estimate the bytes of a checkpoint on a node, because fragments have about the same size."""
        checkpoint, holders = self._context.history.checkpoints[attempt], self._context.holders
        held = holders.count(attempt, node) + holders.parity.share(attempt, node)
        return int(checkpoint.size_bytes * held / checkpoint.num_nodes)

    def _freed_on(self, node: str, live: Sequence[CheckpointInfo]) -> dict[str, int]:
        """Estimate the bytes that a node's disk gains by deleting each checkpoint, without what others share.

        A file is shared with the checkpoint before or the one after; its space is free once all are gone.
        """
        found = {}
        for checkpoint, after in pairwise((*live, None)):
            assert checkpoint is not None
            shared_bytes = max(checkpoint.shared_bytes, after.shared_bytes if after is not None else 0)
            share = 1 - min(1.0, shared_bytes / max(1, checkpoint.size_bytes))
            if freed_bytes := int(share * self._bytes_on(node, checkpoint.id.attempt)):
                found[checkpoint.id.attempt] = freed_bytes
        return found

    # -- answers -------------------------------------------------------------------------------------

    def copied(self, event: m.ReplicaEnded) -> None:
        self._copying.give_back(self._repairs.ended(event, self._context.now_s))
        fragment = event.attempt.attempt, event.node_index
        if event.error is None and fragment in self._damaged:
            self._damaged.remove(fragment)
            self._context.measure(telemetry.REPAIRED, place="node")
        if event.is_damage:
            self.suspect(event.attempt, {event.source})

    def coded(self, event: m.CodeEnded) -> Iterator[m.Effect]:
        """Note the end of a computation; after wrong bytes, find out what is damaged.

        First all files of the group are read. If that does not help, a file had changed on its disk before it
        was coded: the group's parity is wrong, and no longer counts.
        """
        self._coding.ended(event, self._context.now_s)
        holders, key = self._context.holders, (event.attempt.attempt, event.node_index, event.is_parity)
        places = holders.places_of(event.attempt.attempt, event.node_index)
        if event.error is None:
            self._doubts.pop(key, None)
        if not event.is_damage or places is None:
            return
        doubt = self._doubts.get(key)
        if doubt is None:
            doubt = self._doubt(event, places)
            if len(self._doubts) >= MAX_DAMAGED:
                self._doubts.clear()
            self._doubts[key] = doubt
            return
        unread = any(copy.place in holders.of(copy.attempt.attempt, copy.node_index) for copy in doubt.unread)
        if event.is_parity or unread:
            return
        if not doubt.is_read:  # this computation may have begun before all were read
            doubt.is_read = True
            return
        del self._doubts[key]
        holders.distrust_parity(event.attempt.attempt, places.group)
        yield m.Warn(
            text=f"Step {event.attempt.step}: fragment {event.node_index} cannot be computed, because a file "
            "of its parity group had changed on its disk before it was coded. The group's parity no longer "
            "counts."
        )

    def _doubt(self, event: m.CodeEnded, places: GroupPlaces) -> _Doubt:
        """Let all files of a group be read at once."""
        doubt = _Doubt(
            unread={
                m.Scrub(attempt=event.attempt, node_index=member, place=node)
                for member, nodes in zip(places.group.members, places.fragments, strict=True)
                for node in nodes
            }
        )
        for copy in sorted(doubt.unread, key=lambda copy: (copy.node_index, copy.place)):
            self._scrubs.suspect(copy)
        self._next_s = self._next_compute_s = 0.0
        return doubt

    def suspect(self, attempt: AttemptId, nodes: Set[str], *, is_restored: bool = False) -> None:
        """Let copies on nodes where an upload, a copy or a restore has found damage be read at once.

        Else the next saves on these nodes would link the damaged bytes. The only copies of a checkpoint that
        was restored all the same, with intact rows of several bad copies, are left to the next round, unless
        a parity group gives what they have.
        """
        known = self._context.history.checkpoints.get(attempt.attempt)
        is_sole = is_restored and known is not None and known.level < Level.DURABLE
        for index, names in self._context.holders.fragments(attempt.attempt).items():
            if is_sole and names <= nodes and not self._is_computed(attempt, index, nodes):
                continue
            for node in sorted(names & nodes):
                self._scrubs.suspect(m.Scrub(attempt=attempt, node_index=index, place=node))
                self._next_s = 0.0

    def suspect_stored(self, checkpoint: CheckpointInfo) -> None:
        """Let a checkpoint be read on the storage path; an upload that may share its files is damaged."""
        self._scrubs.suspect_stored(checkpoint.id, range(checkpoint.num_nodes))
        self._context.holders.suspect_remote = self._scrubs.suspect_remote
        self._next_s = 0.0

    def _is_computed(self, attempt: AttemptId, index: int, without: Set[str]) -> bool:
        """Return True if a fragment can be computed without the files on some nodes."""
        places = self._context.holders.places_of(attempt.attempt, index)
        return places is not None and index not in lost_members(places, without)

    def _could_not_read(self, scrub: m.Scrub, error: str | None) -> Iterator[m.Effect]:
        """Warn of a copy that a round has not read; on the storage path it proves nothing until it is."""
        yield m.Warn(
            text=f"Step {scrub.attempt.step}: the copy on {_where(scrub.place)} cannot be read: {error}"
        )
        if scrub.place == m.REMOTE:
            self._unread.setdefault(scrub.attempt.attempt, set()).add(scrub.node_index)
            self.has_news = True

    def scrubbed(self, event: m.ScrubEnded) -> Iterator[m.Effect]:
        """Note the end of a scrub; warn of a damaged copy and do not count this copy any more."""
        scrub = m.Scrub(attempt=event.attempt, node_index=event.node_index, place=event.place)
        for doubt in self._doubts.values() if event.error is None else ():
            doubt.unread.discard(scrub)
        unread = self._unread.get(event.attempt.attempt, set())  # those that share with it are no suspects
        suspects = self._scrubs.suspect_remote.get(event.attempt.attempt, set()) - unread
        was_suspect = event.node_index in suspects
        where = _where(event.place)
        if event.mended:
            files = ", ".join(event.mended[:5])
            yield m.Warn(text=f"Step {event.attempt.step}: the copy on {where} is mended: {files}.")
            for metric in (telemetry.CORRUPT, telemetry.REPAIRED):
                self._context.measure(metric, place=m.REMOTE)
            self._suspect_sharers(event, was_suspect)
        if event.place == m.REMOTE and event.error is None:
            if event.node_index in unread:
                unread.discard(event.node_index)
                self._read_recorded(event)
            self.has_news = True
        if event.place == m.REMOTE and event.error is None and not event.damage:
            self._found_intact(event)
        if self._scrubs.ended(event):
            yield from self._could_not_read(scrub, event.error)
        shared = tuple(file for file in event.damage if is_still_name(file)) or event.damage
        found = [(event.attempt, event.node_index, event.damage)] if event.damage else []
        found += [(attempt, node_index, shared) for attempt, node_index in event.shared]
        for attempt, node_index, damage in found:
            known = self._context.history.checkpoints.get(attempt.attempt)
            is_live = known is None or known.state == "live"
            if is_live:  # else its files may be being deleted, which is no damage
                files = ", ".join(event.damage[:5])
                yield m.Warn(text=f"Step {attempt.step}: the copy on {where} is damaged: {files}.")
            if event.place != m.REMOTE:
                self._found_on_node(attempt, node_index, event.place, damage, is_live)
            elif is_live:
                self._found_remote(event, was_suspect)
        self._context.holders.suspect_remote = self._scrubs.suspect_remote

    def _found_on_node(
        self, attempt: AttemptId, node_index: int, node: str, damage: Sequence[str], is_live: bool
    ) -> None:
        """Do not count a damaged fragment, or parity file, on a node any more."""
        if is_live:
            self._context.measure(telemetry.CORRUPT, place="node")
        coded = [file for file in damage if file.startswith(PARITY_PREFIX)]
        if coded:
            self._context.holders.remove_parity(attempt.attempt, node_index, node, self._context.now_s)
        if len(coded) < len(damage):
            self._damaged.append((attempt.attempt, node_index))
            self._context.holders.remove(attempt.attempt, node_index, node, self._context.now_s)
        self._next_s = 0.0  # the repair is due at once

    def _found_remote(self, event: m.ScrubEnded, was_suspect: bool) -> None:
        parts = self._context.holders.bad_remote.setdefault(event.attempt.attempt, set())
        if event.node_index not in parts:  # count each damaged fragment once
            parts.add(event.node_index)
            self._context.measure(telemetry.CORRUPT, place=m.REMOTE)
            self._suspect_sharers(event, was_suspect)

    def _read_recorded(self, event: m.ScrubEnded) -> None:
        """Forget the suspects of a fragment in the log if files of its own are bad, and no still file is.

        An intact fragment may have been replaced, which proves nothing about the files that it had.
        """
        group = self._context.history.checkpoints[event.attempt.attempt].num_nodes, event.node_index
        is_own = bool(event.damage) and not any(map(is_still_name, (*event.damage, *event.mended)))
        if not is_own:
            self._guessed.discard(group)
        elif group in self._guessed and group not in self._unread_groups():
            self._guessed.discard(group)
            for scrub in self._remote_copies(*group):
                self._scrubs.forget(scrub)

    def _unread_groups(self) -> set[tuple[int, int]]:
        """Return (num_nodes, fragment) of all fragments that an earlier coordinator found damaged."""
        known = self._context.history.checkpoints
        return {(known[name].num_nodes, index) for name, parts in self._unread.items() for index in parts}

    def _remote_copies(self, num_nodes: int, index: int) -> Iterator[m.Scrub]:
        """Yield the copies of a fragment on the storage path, of all live checkpoints that may share it."""
        for checkpoint in self._context.history.live():
            if checkpoint.num_nodes == num_nodes:
                yield m.Scrub(attempt=checkpoint.id, node_index=index, place=m.REMOTE)

    def _found_intact(self, event: m.ScrubEnded) -> None:
        """Note that a fragment on the storage path is intact, perhaps again."""
        attempt, bad = event.attempt.attempt, self._context.holders.bad_remote
        bad.get(attempt, set()).discard(event.node_index)
        if not bad.get(attempt):
            bad.pop(attempt, None)

    def _suspect_sharers(self, event: m.ScrubEnded, was_suspect: bool) -> None:
        """Let all fragments be read that may share a damaged still file on the storage path.

        Uploads that are under way are included, since they may have been ordered to share this file. If the
        event's fragment was a suspect itself, all others are suspects too, or were read since. Those that
        are known to be damaged may be mended if this one was.
        """
        history, bad = self._context.history, self._context.holders.bad_remote
        known = history.checkpoints.get(event.attempt.attempt)
        if known is None or not any(map(is_still_name, (*event.damage, *event.mended))):
            return
        self._guessed.discard((known.num_nodes, event.node_index))
        for scrub in self._remote_copies(known.num_nodes, event.node_index):
            is_new = bool(event.mended) if scrub.attempt.attempt in bad else not was_suspect
            if is_new and scrub.attempt != event.attempt:
                self._scrubs.suspect(scrub)
        self._next_s = 0.0

    def uploaded(self, checkpoint: CheckpointInfo, fragments: Set[int]) -> None:
        """Note that a checkpoint is complete on the storage path, after an upload of these fragments.

        Those of one that was durable before share no file there now, and are no suspects any more.
        """
        if checkpoint.level < Level.DURABLE:
            return
        attempt, holders = checkpoint.id.attempt, self._context.holders
        unread = self._unread.get(attempt, set())
        self._guessed -= {(checkpoint.num_nodes, index) for index in unread & fragments}
        unread -= fragments
        self._scrubs.renewed(checkpoint.id, fragments)
        holders.suspect_remote = self._scrubs.suspect_remote
        if mended := holders.bad_remote.get(attempt, set()) & fragments:
            holders.bad_remote[attempt] -= mended
            if not holders.bad_remote[attempt]:
                del holders.bad_remote[attempt]
            self._context.measure(telemetry.REPAIRED, len(mended), place=m.REMOTE)
        self.has_news = True

    def disks_seen(self, disks: Mapping[str, DiskSpace]) -> None:
        """Take readings of some disks; a disk without one is as it was."""
        self._disks |= disks
        self._last_disks |= disks

    def nodes_changed(self, lost: frozenset[str]) -> None:
        if lost and self._has_trained:
            self._lost_s, self._has_trained = self._context.now_s, False
        self._repairs.lost(lost)
        self._coding.lost(lost)
        self._context.holders.parity.makers_lost(lost)
        self._crowded -= lost
        for readings in (self._disks, self._last_disks):
            for node in lost & readings.keys():
                del readings[node]
        self._next_s = 0.0


def _where(place: str) -> str:
    return "the storage path" if place == m.REMOTE else f"node {place[:12]}"
