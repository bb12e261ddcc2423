"""Read-only view of a run machine's state, for status, metrics and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ray_ckpt import telemetry
from ray_ckpt.core.attempts import SaveUnderway
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.barriers import Barriers
from ray_ckpt.core.context import Context
from ray_ckpt.core.drain import Drains, DrainUnderway
from ray_ckpt.core.exposure import exposure
from ray_ckpt.core.finishing import Finishing
from ray_ckpt.core.gauges import gauges
from ray_ckpt.core.maintenance import Maintenance
from ray_ckpt.core.missing_ranks import MissingRanks
from ray_ckpt.core.progress import SessionProgress
from ray_ckpt.core.retention import NEWEST_ITEMS, decide_at_end, pinned_by, policies_of
from ray_ckpt.core.save_intervals import SaveIntervals
from ray_ckpt.core.save_times import SaveTimes
from ray_ckpt.core.saves import Saves
from ray_ckpt.core.session_end import SessionEnd
from ray_ckpt.core.sessions import Sessions
from ray_ckpt.core.values import GroupPlaces, SessionKey, Token
from ray_ckpt.errors import CheckpointError
from ray_ckpt.telemetry import Sample
from ray_ckpt.types import CheckpointInfo, EndCause, Exposure, Level, RankRestore

AWAITED_EVERY_S = 1.0  # longest age of an answer, which visits all ranks; every node requests one each second


@dataclass(slots=True, kw_only=True)
class MachineParts:
    """The parts of one run machine that MachineView reads."""

    context: Context
    sessions: Sessions
    progress: SessionProgress
    times: SaveTimes
    saves: Saves
    missing: MissingRanks
    barriers: Barriers
    intervals: SaveIntervals
    session_end: SessionEnd
    drains: Drains
    item_uploads: Drains
    maintenance: Maintenance
    finishing: Finishing


@dataclass(slots=True)
class MachineView:
    """A view that reads the parts of one run machine, changes none of them and makes no decision."""

    _parts: MachineParts
    _awaited: tuple[float, tuple[Awaited, ...]] | None = field(default=None, init=False)  # with its time

    # -- the run and its launcher ------------------------------------------------------------------

    @property
    def owner(self) -> str:
        """The launcher whose group is at work or being opened; "" if there is no such group."""
        return self._parts.sessions.owner

    @property
    def is_idle(self) -> bool:
        """True if no group has the run and this coordinator has no record left to write."""
        return not self.has_group and self._parts.context.ledger.is_settled

    @property
    def has_group(self) -> bool:
        """True while a group is at work or being opened."""
        return self._parts.sessions.owner_has_run

    @property
    def opening_token(self) -> Token:
        """The call of the group that waits for its session; "" if none waits."""
        return self._parts.sessions.opening_token

    @property
    def opening_nodes(self) -> frozenset[str]:
        """The nodes of that group."""
        return self._parts.sessions.opening_nodes

    @property
    def end_cause(self) -> EndCause | None:
        """The end that the launcher reported; None before the report and after the next group opens."""
        return self._parts.finishing.end_cause

    @property
    def is_training(self) -> bool:
        """True if the ranks of the group at work have restored their state and may train."""
        return self._parts.sessions.is_training

    def has_go(self, session_key: SessionKey) -> bool:
        """Return True if all ranks of the group at work, which is of this session, have restored."""
        return self._parts.sessions.has_go(session_key)

    @property
    def restores(self) -> tuple[RankRestore, ...]:
        """The restores of the ranks of the group at work."""
        return self._parts.sessions.restores

    def objection(self, owner: str, dead_owner: str) -> CheckpointError | None:
        """Return the error that prevents launcher `owner` from opening a group now; None if it may open one.

        `dead_owner` is a launcher that was found dead.
        """
        return self._parts.sessions.objection(owner, dead_owner)

    # -- steps and saves ---------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The last optimizer step that a rank of the group has reported; 0 if no rank has reported one."""
        return self._parts.progress.last_step

    @property
    def step_s(self) -> float:
        """Recent duration of a step of the group in seconds; 0: not known."""
        return self._parts.progress.step_s

    @property
    def save_interval_s(self) -> float:
        """Seconds between saves with the current settings and duration of a step; 0: not known."""
        by_time_s = self._parts.intervals.interval_s or 0.0
        by_steps_s = (self._parts.context.options.steps_between_saves or 0) * self.step_s
        return min((s for s in (by_time_s, by_steps_s) if s > 0), default=0.0)

    @property
    def saves_underway(self) -> tuple[SaveUnderway, ...]:
        """Saves that are neither committed nor dropped, in the order of their steps."""
        return self._parts.saves.underway()

    @property
    def drains_underway(self) -> tuple[DrainUnderway, ...]:
        """Checkpoints, or items of these, on their way to the storage path."""
        return self._parts.drains.underway() + self._parts.item_uploads.underway()

    @property
    def copies_missing(self) -> int:
        """Number of copies of fragments that repair still has to make."""
        return self._parts.maintenance.copies_missing

    @property
    def records_waiting(self) -> int:
        """Number of records that are not confirmed in the log; it grows if the store does not answer."""
        return len(self._parts.context.ledger.pending)

    def awaited(self) -> tuple[Awaited, ...]:
        """Return the ranks for which other ranks wait at a restore, a save or a report.

        The answer is up to AWAITED_EVERY_S old, or older with thousands of nodes, since all are visited.
        """
        parts, now_s = self._parts, self._parts.context.now_s
        if self._awaited is None or abs(now_s - self._awaited[0]) >= parts.context.paced(AWAITED_EVERY_S):
            saves, reported = parts.missing.awaited(), parts.progress.by_rank()
            found = (*parts.sessions.awaited(), *saves, *parts.barriers.awaited(reported))
            self._awaited = (now_s, found)
        return self._awaited[1]

    # -- nodes and copies --------------------------------------------------------------------------

    @property
    def live_nodes(self) -> frozenset[str]:
        """The live nodes, by the last report."""
        return self._parts.context.holders.live

    @property
    def domains(self) -> dict[str, str]:
        """The failure domain of each node; "" if the domain is not known."""
        return dict(self._parts.context.domains)

    @property
    def leaving(self) -> dict[str, float | None]:
        """Live nodes that will leave soon -> seconds until they leave; None: not known."""
        context = self._parts.context
        return {
            node: context.leaves_at_s[node] - context.now_s if node in context.leaves_at_s else None
            for node in sorted(context.draining & context.holders.live)
        }

    @property
    def holders(self) -> dict[str, dict[int, tuple[str, ...]]]:
        """The nodes that hold each fragment of each attempt."""
        return self._parts.context.holders.table()

    def holders_of(self, attempt: str, node_index: int) -> frozenset[str]:
        """Return the nodes that hold a fragment."""
        return frozenset(self._parts.context.holders.of(attempt, node_index))

    def parity_groups(self, attempt: str) -> tuple[GroupPlaces, ...]:
        """Return the nodes that hold the files of each parity group of an attempt."""
        return self._parts.context.holders.places(attempt)

    @property
    def in_cluster_only(self) -> tuple[CheckpointInfo, ...]:
        """Live checkpoints that are not on the storage path, in log order."""
        return tuple(c for c in self._parts.context.history.live() if c.level < Level.DURABLE)

    def exposure(self) -> tuple[Exposure, ...]:
        """Return, for each node of the group at work, the steps that its death would cost now."""
        context = self._parts.context
        nodes = context.plan.nodes if context.plan else ()
        return exposure(nodes, context.history.lineage(), context.holders, self.last_step)

    def needed_nodes(self) -> frozenset[str]:
        """Return the nodes that the group at work or a live checkpoint needs.

        These are the nodes on which the group runs or is being opened, the holders of its copies, and the
        nodes that hold open attempts, uploads under way, or checkpoints which are not durable or may be
        damaged on the storage path; while no group is at work, only `_kept_alone` of the latter. While one is
        at work, all nodes with the label of `replica_nodes` or `spare_nodes` are needed for later copies.
        """
        context = self._parts.context
        nodes = {
            n for node in (context.plan.nodes if context.plan else ()) for n in (node.node_id, *node.holders)
        }
        nodes |= self._parts.sessions.opening_nodes
        if context.plan:
            nodes |= (context.replica_nodes | context.spares) & context.holders.live
        kept = context.history.live() if context.plan else self._kept_alone()
        unsafe = context.holders.unsafe_remote
        alone = [c.id.attempt for c in kept if c.level < Level.DURABLE or c.id.attempt in unsafe]
        alone += [drain.attempt for drain in self.drains_underway]
        alone += self._parts.saves.open()
        nodes |= context.holders.parity.makers
        return frozenset(nodes.union(*(context.holders.anywhere(attempt) for attempt in alone)))

    def _kept_alone(self) -> Iterator[CheckpointInfo]:
        """Yield the checkpoints that are kept while no group is at work.

        These are the one from which the next group would resume, the one that is uploaded, pinned ones, and
        once the run has finished those that are to be uploaded before its nodes are emptied.
        """
        context, history = self._parts.context, self._parts.context.history
        yield from history.lineage()[-1:]  # nodes that hold parts of it may be away for a while
        if (newest := context.newest) is not None:
            yield newest
        if (older := context.newest_readable(without=self._parts.drains.put_off)) is not None:
            yield older  # it is uploaded in place of the newest one
        yield from (c for c in history.live() if pinned_by(c, context.wall_s))
        if self.end_cause == "finished":
            view = context.retention_view()
            kept = (d for d in decide_at_end(view, policies_of(context.options)) if d.kept)
            yield from (d.checkpoint for d in kept if d.reasons != (NEWEST_ITEMS,))

    # -- metrics -----------------------------------------------------------------------------------

    def gauges(self) -> Iterator[Sample]:
        """Yield the state of the run as metrics; the time grows with the nodes and the live checkpoints."""
        parts, history = self._parts, self._parts.context.history
        yield from gauges(
            history=history,
            is_active=self.is_training and not parts.session_end.is_over,
            last_step=self.last_step,
            wall_s=parts.context.wall_s,
            exposure=self.exposure(),
        )
        yield Sample(metric=telemetry.INTERVAL, value=self.save_interval_s)
        yield Sample(metric=telemetry.LATENCY, value=parts.times.last_save_s)
        yield Sample(metric=telemetry.COPIES_MISSING, value=self.copies_missing)
        yield Sample(metric=telemetry.DRAINS, value=len(parts.drains.attempts))
        damaged = parts.context.holders.bad_remote.keys() & {c.id.attempt for c in history.live()}
        yield Sample(metric=telemetry.DAMAGED, value=len(damaged))
