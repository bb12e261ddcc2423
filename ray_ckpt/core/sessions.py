"""Training groups: the checkpoint that a group restores, the group's session, and the common `go`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from ray_ckpt import telemetry
from ray_ckpt.config import resume_step
from ray_ckpt.core import messages as m
from ray_ckpt.core.awaited import AWAITED_AFTER_S, Awaited, awaited_restore
from ray_ckpt.core.context import CLOCK_S, Context
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.opening_warnings import warn_of_opening
from ray_ckpt.core.ownership import check_claim
from ray_ckpt.core.placement import place_groups
from ray_ckpt.core.placement_warnings import warn_of_placement
from ray_ckpt.core.recovery import phases_until_restored
from ray_ckpt.core.retention import policies_of, to_text
from ray_ckpt.core.values import (
    GroupNode,
    Inventory,
    ResumePoint,
    SessionKey,
    SessionNode,
    SessionPlan,
    Token,
)
from ray_ckpt.errors import CheckpointError, ConfigError, RestoreError, RunInUse, RunSuperseded, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import root_digest
from ray_ckpt.format.names import attempt_of, step_of
from ray_ckpt.texts import nearest_steps
from ray_ckpt.types import UNKNOWN_LAUNCH, AttemptId, CheckpointInfo, FileEntry, RankRestore

MAX_WAITING_SESSIONS = 8  # sessions begun while the store is away; each is a group that failed
MAX_REREADS = 4  # of a checkpoint with sources that were not reached; then an older one is restored
REREAD_S = 2.0  # until the first of these begins; doubled for each, so 30 s in all besides the reading
SLOW_RESTORE_S = 15.0  # after this time a restore that waits for ranks causes a warning


class Sessions:
    """The group at work, or the group that is being opened; a newer group ends an older one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._group: m.GroupOpened | None = None
        self._since_s = 0.0
        self._waiting: tuple[Token, ...] = ()  # callers that wait for the session
        self._choosing = False  # choose a checkpoint as soon as no record is pending
        self._requested = False  # an inventory was requested and has not arrived
        self._excluded: set[str] = set()  # attempts that this group found damaged
        self._num_rereads = 0  # of the checkpoint that was chosen last
        self._reread_s = -math.inf  # the earliest time of the next one
        self._restored: dict[str, m.NodeRestored] = {}
        self._calls: tuple[Token, ...] = ()  # of these reports, which nodes may repeat
        self._left: set[SessionKey] = set()  # sessions that this group has left for another checkpoint
        self._waiting_ranks: dict[str, tuple[int, ...]] = {}  # node -> its ranks that are done early
        self._first_s: float | None = None  # end of the restore of the first rank
        self._has_warned = False  # warned of ranks that do not restore
        self._inventories: dict[str, Inventory] = {}  # of the opening group's nodes, until it trains
        self._orphans: dict[str, tuple[str, ...]] = {}
        self._joined: dict[str, tuple[str, ...]] = {}  # node that joined this group -> folders to look at
        self.is_training = False  # the group has `go`, by this coordinator, the log or a rank's progress
        self._sent_go: SessionKey | None = None  # the last session that received `go`
        self.restores: tuple[RankRestore, ...] = ()
        self._bad_nodes: tuple[AttemptId, frozenset[str]] | None = None

    # -- opening -------------------------------------------------------------------------------------

    def objection(self, owner: str, dead_owner: str) -> CheckpointError | None:
        """Return the error that keeps this launcher from opening a group now, or None.

        `dead_owner` is a launcher that was found dead.
        """
        context, rival = self._context, self.owner
        try:
            check_claim(context.history, service=context.ledger.service, owner=owner)
        except RunSuperseded as error:
            return error
        if rival in ("", owner, dead_owner):
            return None
        return RunInUse(
            f"Run {context.history.run_name} is at work: its launcher {rival} is alive.",
            hint="Stop that one first, or choose another run name.",
            owner=rival,
        )

    @property
    def owner_has_run(self) -> bool:
        """True while a group is at work or being opened."""
        return self._group is not None or self._context.plan is not None

    @property
    def opening_token(self) -> Token:
        """The call of the group that waits for its plan; "" if none waits."""
        return self._group.token if self._group is not None and self._waiting else ""

    @property
    def opening_nodes(self) -> frozenset[str]:
        """The nodes of a group that waits for its plan."""
        group = self._group if self._waiting else None
        return frozenset(node.node_id for node in group.nodes) if group is not None else frozenset()

    @property
    def owner(self) -> str:
        """The launcher whose group is at work or being opened; empty if there is none."""
        if self._group is not None:
            return self._group.owner
        return self._context.plan.owner if self._context.plan else ""

    def end(self, error: CheckpointError) -> Iterator[m.Effect]:
        """End the group and send `error` to waiting callers; no group has the run until the next opens."""
        yield from self.fail(error)
        self._context.plan, self._group, self.is_training = None, None, False
        self._orphans, self._joined = {}, {}  # of the ended group; another group may own these folders
        self._inventories = {}

    def opened(self, event: m.GroupOpened) -> Iterator[m.Effect]:
        """Begin to open a new group; the previous group, if any, has ended."""
        yield from self.fail(RunSuperseded("A newer training group has opened this run."))
        self._context.plan = None
        self._group, self._since_s = event, self._context.now_s
        self._waiting, self._choosing, self._requested = (event.token,), True, False
        self._excluded, self.is_training, self._inventories, self._joined = set(), False, {}, {}
        self._num_rereads, self._reread_s, self._left = 0, -math.inf, set()
        self._learn(event.inventories, event.asked_s - CLOCK_S)

    def inventory_taken(self, event: m.InventoryTaken) -> bool:
        """Record a new inventory; return False if the inventory is not for the group that still waits."""
        if self._group is None or event.token != self._group.token or not self._choosing:
            return False
        self._requested = False
        self._learn(event.inventories)
        return True

    def found(self, event: m.GroupRecovered) -> Iterator[m.Effect]:
        """Continue with the group that was at work when this coordinator started."""
        context, plan = self._context, event.plan
        history = context.ledger.projected()
        current = history.session
        session_key = (current.opened_by, current.session) if current else (0, 0)
        number = current.session if current else 0
        is_over = False
        resumed_from = plan.resume.checkpoint.id.attempt if plan.resume else None
        follows = resumed_from is None or resumed_from in {c.id.attempt for c in history.lineage()}
        is_free = plan.session not in history.sessions  # else a session of another cluster has the number
        if plan.session_key > session_key and follows and is_free:
            # Begun while the store was away; the earlier coordinator could not log the session.
            context.ledger.append(
                r.Session(
                    session=plan.session,
                    opened_by=plan.epoch,
                    service=context.ledger.service,
                    owner=plan.owner,
                    retention=to_text(policies_of(context.options)),
                    after=number or None,
                    resumed_from=resumed_from,
                    world_size=plan.world_size,
                    num_nodes=len(plan.nodes),
                )
            )
        elif plan.session_key != session_key:
            is_over = True
        if is_over:
            yield m.Supersede(
                nodes=tuple(n.node_id for n in plan.nodes),
                session_key=plan.session_key,
                error=RunSuperseded(f"Session {plan.session} of run {history.run_name} is over."),
            )
            return
        context.plan, context.found_session_key = plan, plan.session_key
        self.is_training = self.has_go(plan.session_key)
        self._left = {*plan.left}
        self._group = m.GroupOpened(
            token="",
            nodes=tuple(GroupNode(node_id=n.node_id, ranks=n.ranks) for n in plan.nodes),
            inventories={},
            resume=plan.chosen_by,
            owner=plan.owner,
        )

    def fail(self, error: CheckpointError) -> Iterator[m.Effect]:
        """Send `error` to all waiting callers."""
        tokens = (*self._waiting, *self._calls)
        self._waiting, self._restored, self._calls, self._choosing = (), {}, (), False
        self._forget_restored()
        for token in tokens:
            yield m.Fail(token=token, error=error)

    @property
    def is_choosing(self) -> bool:
        """True if a group waits for the choice of its checkpoint, and it is time to choose."""
        return self._choosing and not self._requested and self._context.now_s >= self._reread_s

    def decide(self) -> Iterator[m.Effect]:
        """Choose a checkpoint for the group that waits; called only while no record is pending."""
        yield from self._choose(self._context.history)

    def decide_without_log(self) -> Iterator[m.Effect]:
        """Open the group from the copies on nodes while the store is away, as if pending records were logged.

        The session record is queued behind all records on which it depends. If another coordinator has
        written to the log in the meantime, the queue is never written, and the group is superseded.
        """
        context = self._context
        if not context.ledger.is_silent(context.now_s, context.options.store_wait_s):
            return
        if not self._waiting or context.now_s - self._since_s < context.options.store_wait_s:
            return
        waiting = sum(isinstance(op, r.Session) for op in context.ledger.pending)
        if self.is_choosing:
            if waiting >= MAX_WAITING_SESSIONS:
                error = Unavailable("The log of the run does not answer, and too many groups have failed.")
                yield from self.end(error)
                return
            # A checkpoint that is read again may be on the storage path alone.
            from_nodes_only = not self._num_rereads
            yield from self._choose(context.ledger.projected(), from_nodes_only=from_nodes_only)
        if self._waiting and not self._choosing:
            yield m.Warn(
                text="The log does not answer: the group goes on with what the nodes hold, "
                "and its session is recorded when the storage path is back."
            )
            yield from self._begin(context.ledger.projected())

    def _learn(self, inventories: Mapping[str, Inventory], asked_s: float = math.inf) -> None:
        history = self._context.history
        self._context.holders.learn(inventories, history.run_uid, asked_s=asked_s)
        self._inventories |= inventories
        live = {c.directory for c in history.live()}
        for node, inventory in inventories.items():
            self._orphans[node] = tuple(d for d in inventory.directories if d not in live)

    def _choose(self, history: RunHistory, *, from_nodes_only: bool = False) -> Iterator[m.Effect]:
        """Choose the newest readable checkpoint, or wait for nodes that may bring a newer checkpoint."""
        assert self._group is not None
        if history.session is None and (problem := self._missing_labels()):
            yield from self.end(problem)
            return
        candidates = self._candidates(history)
        if isinstance(candidates, RestoreError):
            yield from self.end(candidates)
            return
        can_serve = self._context.holders.has_all if from_nodes_only else self._context.holders.can_serve
        chosen = next((c for c in candidates if can_serve(c)), None)
        is_newest = not candidates or chosen is candidates[0]
        if not is_newest and self._context.now_s - self._since_s < self._context.options.inventory_wait_s:
            yield from self._request_inventory()
            return
        if chosen is None and (candidates or self._excluded or self._group.resume == "must"):
            yield from self.end(self._nothing_intact(candidates, from_nodes_only=from_nodes_only))
            return
        if chosen is not None and not is_newest:
            why = "is not on the nodes" if from_nodes_only else "has lost all copies of a part"
            yield m.Warn(text=f"Step {candidates[0].step} {why}; step {chosen.step} is restored instead.")
        self._choosing = False
        self._append_session(history, chosen)

    def _request_inventory(self) -> Iterator[m.Effect]:
        """Ask all nodes for what they have; the checkpoint is chosen after their answer."""
        assert self._group is not None
        self._requested = True
        yield m.RequestInventory(token=self._group.token)

    def _missing_labels(self) -> ConfigError | None:
        """Return the error of a run's first group if no live node has a label that its options name.

        A later group starts nevertheless, with a warning: its nodes may only be away.
        """
        context, options = self._context, self._context.options
        if options.replica_nodes and not context.replica_nodes & context.holders.live:
            return ConfigError(
                f"No live node has the label {options.replica_nodes}, so no node may hold copies.",
                hint=f"Start nodes with `ray start --labels {options.replica_nodes}`, or unset the option.",
                option="replica_nodes",
            )
        if "rack" in options.copies and not any(map(context.domains.get, context.holders.live)):
            return ConfigError(
                f"copies is {options.copies!r}, but no live node has a failure domain.",
                hint="Start nodes with a label such as `ray start --labels rack=r7`, name another label in "
                "failure_domain, or unset copies.",
                option="copies",
            )
        return None

    def _candidates(self, history: RunHistory) -> list[CheckpointInfo] | RestoreError:
        """Return the checkpoints that a group may restore, newest first, or an error for a missing step."""
        assert self._group is not None
        candidates = [] if self._group.resume == "never" else list(reversed(history.lineage()))
        if (step := resume_step(self._group.resume)) is not None:
            if all(c.step != step for c in candidates):
                return self._no_such_step(step, candidates)
            candidates = [c for c in candidates if c.step == step]
        return [c for c in candidates if c.id.attempt not in self._excluded]

    def _append_session(self, history: RunHistory, resumed: CheckpointInfo | None) -> None:
        """Append the session of the waiting group; the session follows the last session of the history."""
        assert self._group is not None
        context, previous = self._context, history.session
        context.ledger.append(
            r.Session(
                session=history.next_session,
                opened_by=context.ledger.epoch,
                service=context.ledger.service,
                owner=self._group.owner,
                retention=to_text(policies_of(context.options)),
                after=previous.session if previous else None,
                resumed_from=resumed.id.attempt if resumed else None,
                world_size=sum(len(n.ranks) for n in self._group.nodes),
                num_nodes=len(self._group.nodes),
                **asdict(self._group.launch),
            )
        )
        self._group = replace(self._group, launch=UNKNOWN_LAUNCH)  # a session after damage has none

    def _nothing_intact(self, candidates: list[CheckpointInfo], *, from_nodes_only: bool) -> CheckpointError:
        if from_nodes_only:
            return Unavailable("The storage path does not answer, and the nodes hold no checkpoint whole.")
        if not self._context.history.checkpoints:
            return RestoreError(
                f"Run {self._context.history.run_name} has no checkpoint to resume from.",
                hint="Check the run's name and storage_path, or use resume='auto'.",
            )
        steps = ", ".join(str(c.step) for c in candidates) or "none"
        return RestoreError(
            f"No checkpoint of run {self._context.history.run_name} can be restored "
            f"(recorded steps without a full set of copies: {steps}).",
            hint="Bring back the nodes that held them, or start over with another name, or with "
            "resume='never', which deletes the run's checkpoints from its first saves on.",
        )

    def _no_such_step(self, step: int, candidates: list[CheckpointInfo]) -> RestoreError:
        return RestoreError(
            f"Run {self._context.history.run_name} has no checkpoint of step {step} to go back to.",
            hint=nearest_steps((c.step for c in candidates), step),
        )

    # -- the session is in the log ---------------------------------------------------------------------

    def session_logged(self) -> Iterator[m.Effect]:
        """Send the plan to the group, unless the group has the plan already or a newer group has opened."""
        if self._group is not None and self._waiting and not self._choosing:
            yield from self._begin(self._context.history)

    def _begin(self, history: RunHistory) -> Iterator[m.Effect]:
        """Place the copies and send the plan of the history's last session to its group."""
        context, group, session = self._context, self._group, history.session
        assert group is not None and session is not None
        nodes, parity = [n.node_id for n in group.nodes], context.options.parity
        holders = context.place(nodes, context.options.num_copies)
        context.plan = SessionPlan(
            run_uid=context.history.run_uid,
            session=session.session,
            world_size=session.world_size,
            nodes=tuple(
                SessionNode(node_id=n.node_id, node_index=i, ranks=n.ranks, holders=holders[n.node_id])
                for i, n in enumerate(group.nodes)
            ),
            resume=self._resume_point(history, session.resumed_from),
            owner=group.owner,
            epoch=context.ledger.epoch,
            chosen_by=group.resume,
            left=tuple(sorted(self._left)),
            groups=(
                place_groups(nodes, num_data=parity[0], parity=parity[1], domains=context.domains)
                if parity is not None
                else ()
            ),
        )
        self._restored, self._calls, self.is_training, self._since_s = {}, (), False, context.now_s
        self._forget_restored()
        yield from warn_of_placement(context, context.plan)
        yield from warn_of_opening(context, history, group.resume)
        tokens, self._waiting = self._waiting, ()
        yield m.StartSession(tokens=tokens, plan=context.plan)

    def _resume_point(self, history: RunHistory, attempt: str | None) -> ResumePoint | None:
        if attempt is None:
            return None
        checkpoint, holders = history.checkpoints[attempt], self._context.holders
        nodes = tuple(tuple(sorted(holders.of(attempt, i))) for i in range(checkpoint.num_nodes))
        return ResumePoint(
            checkpoint=checkpoint,
            holders=nodes,
            fragments=self._committed(checkpoint),
            groups=holders.places(attempt),
        )

    def _committed(self, checkpoint: CheckpointInfo) -> tuple[str, ...]:
        """Return the digests of a checkpoint's fragments, if the inventories of all nodes prove them.

        Fragments are proven if their root digest is that of the commit. () without a proof: if an older
        version of ray_ckpt computed the root digest from all files, or if nodes list several versions of one
        fragment.
        """
        found: dict[int, set[FileEntry]] = {}
        for inventory in self._inventories.values():
            for held in inventory.fragments:
                if held.attempt.attempt == checkpoint.id.attempt:
                    found.setdefault(held.node_index, set()).add(held.fragment)
        if found.keys() != set(range(checkpoint.num_nodes)) or any(len(f) > 1 for f in found.values()):
            return ()
        fragments = [next(iter(found[index])) for index in range(checkpoint.num_nodes)]
        is_proven = root_digest(fragments, checkpoint.root_of) == checkpoint.root_digest
        return tuple(fragment.digest for fragment in fragments) if is_proven else ()

    # -- restored ------------------------------------------------------------------------------------

    def node_restored(self, event: m.NodeRestored) -> Iterator[m.Effect]:
        """Send `go` when all nodes have restored; after damage, choose a checkpoint again for all nodes."""
        plan = self._context.plan
        if event.session_key in self._left and (plan is not None or self._waiting):  # a repeated report
            if self._waiting:
                self._waiting += (event.token,)
            else:
                yield m.Reply(token=event.token, value=False)
            return
        if plan is None or event.session_key != plan.session_key:
            yield m.Fail(token=event.token, error=RunSuperseded("A newer session owns this run."))
            return
        if self.has_go(event.session_key):  # the node did not get the answer
            yield m.Reply(token=event.token, value=None)
            return
        self._restored[event.node_id] = event
        self._calls += (event.token,)
        self._note_first()
        if len(self._restored) < len(plan.nodes):
            return
        reports, self._restored = list(self._restored.values()), {}
        tokens, self._calls = self._calls, ()
        ranks = sorted((rank for e in reports for rank in e.ranks), key=lambda k: k.rank)
        damage = sorted({d for rank in ranks for d in rank.damage})
        if damage and plan.resume is not None and self._may_reread(ranks):
            self._waiting, self._choosing = tokens, True
            self._left.add(plan.session_key)
            yield from self._reread(plan.resume.checkpoint, damage)
            return
        if plan.resume is not None:
            bad_nodes = frozenset(node for rank in ranks for node in rank.bad_nodes)
            self._bad_nodes = plan.resume.checkpoint.id, bad_nodes
        if not damage or plan.resume is None:
            is_new, self._sent_go = self._sent_go != plan.session_key, plan.session_key
            self.is_training, self.restores, self._inventories = True, tuple(ranks), {}
            if is_new and (restored := _restored(plan, ranks)) is not None:
                self._context.ledger.append(restored)
                self._context.measure(telemetry.RESTORES, restored.seconds)
                recovery = phases_until_restored(self._context.history, restored, self._context.wall_s)
                for phase, time_s in recovery.items():
                    self._context.measure(telemetry.RECOVERY, time_s, phase=phase)
                for tier, size in restored.read_bytes.items():
                    self._context.measure(telemetry.RESTORE_BYTES, size, tier=tier)
            for token in tokens:
                yield m.Reply(token=token, value=None)
            return
        bad, self._num_rereads = plan.resume.checkpoint, 0
        self._excluded.add(bad.id.attempt)
        yield m.Warn(text=f"Step {bad.step} cannot be restored: no intact copy of {'; '.join(damage[:5])}.")
        self._waiting, self._choosing = tokens, True
        self._left.add(plan.session_key)

    def has_go(self, session_key: SessionKey) -> bool:
        """Return True if the group at work is of this session and has `go`, from any coordinator."""
        plan = self._context.plan
        if plan is None or session_key != plan.session_key:
            return False
        known = self._context.history.sessions.get(plan.session)
        is_logged = known is not None and known.opened_by == plan.epoch and known.restored_at_s is not None
        return self._sent_go == plan.session_key or is_logged

    def _may_reread(self, ranks: Iterable[RankRestore]) -> bool:
        """Return True if all that ranks could not read may be intact at a source that was not reached."""
        may_return = all(rank.is_unreachable for rank in ranks if rank.damage)
        return may_return and self._num_rereads < MAX_REREADS

    def _reread(self, checkpoint: CheckpointInfo, damage: Sequence[str]) -> Iterator[m.Effect]:
        """Choose a checkpoint again, after a pause and with new inventories: normally the same one."""
        wait_s = REREAD_S * 2**self._num_rereads
        self._num_rereads, self._reread_s = self._num_rereads + 1, self._context.now_s + wait_s
        self._since_s = self._reread_s  # nodes that are just away get `inventory_wait_s` again
        self._forget_restored()  # nobody waits for a rank
        parts = "; ".join(damage[:5])
        text = f"Step {checkpoint.step} is read again in {wait_s:.0f} s: no source was reached of {parts}."
        yield m.Warn(text=text)
        yield from self._request_inventory()

    def take_bad_nodes(self) -> tuple[AttemptId, frozenset[str]] | None:
        """Return, once, the checkpoint that all ranks have read, and the nodes that had bad bytes of it."""
        found, self._bad_nodes = self._bad_nodes, None
        return found

    def ranks_restored(self, event: m.RanksRestored) -> Iterable[m.Effect]:
        """Record that some ranks of a node have restored and wait for other ranks, on any node."""
        plan = self._context.plan
        if plan is not None and event.session_key == plan.session_key and not self.is_training:
            self._waiting_ranks[event.node_id] = event.ranks
            self._note_first()
        return ()

    def progressed(self, event: m.RanksProgressed) -> None:
        """Note that the group trains: its ranks report progress once they have `go`."""
        if (plan := self._context.plan) is not None and event.session_key == plan.session_key:
            self.is_training = True

    def _forget_restored(self) -> None:
        self._waiting_ranks, self._first_s, self._has_warned = {}, None, False

    def _note_first(self) -> None:
        if self._first_s is None:
            self._first_s = self._context.now_s

    def awaited(self) -> Iterator[Awaited]:
        """Yield the ranks for which restored ranks have been waiting for some time."""
        plan = self._context.plan
        if plan is None or self.is_training or self._first_s is None or self._waiting:
            return
        since_s = self._context.now_s - self._first_s
        if since_s < AWAITED_AFTER_S:
            return
        come = {rank for ranks in self._waiting_ranks.values() for rank in ranks}
        come |= {rank.rank for event in self._restored.values() for rank in event.ranks}
        missing = tuple(sorted(k for n in plan.nodes for k in n.ranks if k not in come))
        if missing:
            yield awaited_restore(missing, since_s)

    def ticked(self) -> Iterator[m.Effect]:
        """Warn once of the ranks for which a restore waits, if the restore takes long."""
        if self._first_s is None or self._has_warned:
            return
        for awaited in self.awaited():
            if awaited.since_s > SLOW_RESTORE_S:
                self._has_warned = True
                yield m.Warn(text=awaited.text)

    # -- leftovers of ended sessions ----------------------------------------------------------------------

    def busy(self) -> set[str]:
        """Return the attempts that the current group may still read."""
        plan = self._context.plan
        if plan is None or plan.resume is None or self.is_training:
            return set()
        return {plan.resume.checkpoint.id.attempt}

    def joined(self, inventories: Mapping[str, Inventory]) -> None:
        """Note the folders on nodes that join; some may be of saves that are under way."""
        self._joined |= {node: inventory.directories for node, inventory in inventories.items()}

    def release_orphans(
        self, committed: CheckpointInfo, is_open: Callable[[str], bool]
    ) -> Iterator[m.Effect]:
        """Delete folders that belong to no checkpoint; called after a commit of the session.

        On nodes that have joined since the group opened, a folder of a later step may be of a save of this
        group that no node has reported yet. It is looked at again after the next commit.
        """
        orphans, self._orphans = self._orphans, {}
        for node, directories in self._joined.items():
            later = tuple(d for d in directories if step_of(d) > committed.step or is_open(attempt_of(d)))
            orphans[node] = (*orphans.get(node, ()), *(d for d in directories if d not in later))
            self._joined[node] = later
        kept = {c.directory for c in self._context.history.live()}
        for node, directories in orphans.items():
            if gone := tuple(d for d in directories if d not in kept):
                yield m.DeleteLocalOrphans(node_id=node, directories=gone)


def _restored(plan: SessionPlan, ranks: Collection[RankRestore]) -> r.Restored | None:
    """Return the record of a restore, of this or another run's checkpoint; None if the group read nothing."""
    if plan.resume is None and not any(rank.parts or rank.origin_step is not None for rank in ranks):
        return None
    tiers: dict[str, float] = {}
    for part in (part for rank in ranks for part in rank.parts):
        tiers[part.tier] = tiers.get(part.tier, 0) + part.size_bytes
    return r.Restored(
        session=plan.session,
        seconds=max(rank.seconds for rank in ranks),
        read_bytes=tiers,
        origin_step=max((k.origin_step for k in ranks if k.origin_step is not None), default=None),
        connected_at_s=max((k.connected_at_s for k in ranks if k.connected_at_s is not None), default=None),
    )
