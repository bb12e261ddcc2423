"""Training groups: which checkpoint one restores, the session it gets, and the common `go`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ray_ckpt import telemetry
from ray_ckpt.config import resume_step
from ray_ckpt.core import messages as m
from ray_ckpt.core.awaited import AWAITED_AFTER_S, Awaited, awaited_restore
from ray_ckpt.core.context import Context
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.ownership import check_claim
from ray_ckpt.core.placement import place_replicas
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
from ray_ckpt.errors import CheckpointError, RestoreError, RunInUse, RunSuperseded, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.texts import nearest_steps
from ray_ckpt.types import CheckpointInfo, RankRestore

MAX_WAITING_SESSIONS = 8  # begun while the store is away; each is a group that failed
SLOW_RESTORE_S = 15.0  # that some ranks have waited for others after their restore is worth a word


class Sessions:
    """The group at work, or the one that is being opened. A newer one ends an older one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._group: m.GroupOpened | None = None
        self._since_s = 0.0
        self._waiting: tuple[Token, ...] = ()  # those who wait for the session
        self._choosing = False  # a checkpoint is to be chosen as soon as nothing is pending in the log
        self._asked = False  # an inventory is on its way
        self._excluded: set[str] = set()  # found damaged by this group
        self._restored: dict[str, m.NodeRestored] = {}
        self._waiting_ranks: dict[str, tuple[int, ...]] = {}  # that have restored, of nodes with others
        self._first_s: float | None = None  # when the first rank had restored
        self._has_warned = False  # of ranks that do not restore
        self._orphans: dict[str, tuple[str, ...]] = {}
        self.is_training = False  # the group has its `go`
        self._sent_go: SessionKey | None = None  # the session that had it last
        self.restores: tuple[RankRestore, ...] = ()

    # -- opening -------------------------------------------------------------------------------------

    def objection(self, owner: str, dead_owner: str) -> CheckpointError | None:
        """Why this launcher may not open a group now; `dead_owner` was found dead."""
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
        """A group is at work or being opened."""
        return self._group is not None or self._context.plan is not None

    @property
    def owner(self) -> str:
        """The launcher whose group is at work or being opened."""
        if self._group is not None:
            return self._group.owner
        return self._context.plan.owner if self._context.plan else ""

    def end(self, error: CheckpointError) -> Iterator[m.Effect]:
        """The group is over, and nobody has the run until the next one comes; `error` for those who wait."""
        yield from self.fail(error)
        self._context.plan, self._group, self.is_training = None, None, False
        self._orphans = {}  # seen for that group; to another they may be its own

    def opened(self, event: m.GroupOpened) -> Iterator[m.Effect]:
        """A new group begins; the one before it, if any, has ended."""
        yield from self.fail(RunSuperseded("A newer training group has opened this run."))
        self._context.plan = None
        self._group, self._since_s = event, self._context.now_s
        self._waiting, self._choosing, self._asked = (event.token,), True, False
        self._excluded, self.is_training = set(), False
        self._learn(event.inventories)

    def inventory_taken(self, event: m.InventoryTaken) -> bool:
        """Nodes were asked again; False if it was not for the group that still waits."""
        if self._group is None or event.token != self._group.token or not self._choosing:
            return False
        self._asked = False
        self._learn(event.inventories)
        return True

    def found(self, event: m.GroupRecovered) -> Iterator[m.Effect]:
        """This coordinator was restarted while a group was at work."""
        context, plan = self._context, event.plan
        history = context.ledger.projected()
        current = history.session
        session_key = (current.opened_by, current.session) if current else (0, 0)
        number = current.session if current else 0
        is_over = False
        resumed_from = plan.resume.checkpoint.id.attempt if plan.resume else None
        if plan.session_key > session_key and (
            resumed_from is None or resumed_from in {c.id.attempt for c in history.lineage()}
        ):  # begun while the store was away; the old coordinator could not log it any more
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
        context.plan, context.found_session_key, self.is_training = plan, plan.session_key, True
        self._group = m.GroupOpened(
            token="",
            nodes=tuple(GroupNode(node_id=n.node_id, ranks=n.ranks) for n in plan.nodes),
            inventories={},
            resume="auto",
            owner=plan.owner,
        )

    def fail(self, error: CheckpointError) -> Iterator[m.Effect]:
        """Tell all who wait."""
        tokens = (*self._waiting, *(report.token for report in self._restored.values()))
        self._waiting, self._restored, self._choosing = (), {}, False
        self._forget_restored()
        for token in tokens:
            yield m.Fail(token=token, error=error)

    def decide(self) -> Iterator[m.Effect]:
        """Choose if a group waits for it. Called only while nothing is pending: the log is all there is."""
        if self._choosing and not self._asked:
            yield from self._choose(self._context.history)

    def decide_without_log(self) -> Iterator[m.Effect]:
        """The store is away: go on with what the nodes hold, by the log as it will be when it is back.

        The session is queued behind all that it builds on. If somebody else has written meanwhile, the queue
        never gets in, and the group hears that it was superseded.
        """
        context = self._context
        if not context.ledger.is_silent(context.now_s, context.options.store_wait_s):
            return
        if not self._waiting or context.now_s - self._since_s < context.options.store_wait_s:
            return
        waiting = sum(isinstance(op, r.Session) for op in context.ledger.pending)
        if self._choosing and not self._asked:
            if waiting >= MAX_WAITING_SESSIONS:
                error = Unavailable("The log of the run does not answer, and too many groups have failed.")
                yield from self.end(error)
                return
            yield from self._choose(context.ledger.projected(), from_nodes_only=True)
        if self._waiting and not self._choosing:
            yield m.Warn(
                text="The log does not answer: the group goes on with what the nodes hold, "
                "and its session is recorded when the storage path is back."
            )
            yield from self._begin(context.ledger.projected())

    def _learn(self, inventories: Mapping[str, Inventory]) -> None:
        history = self._context.history
        self._context.holders.learn(inventories, history.run_uid)
        live = {c.directory for c in history.live()}
        for node, inventory in inventories.items():
            self._orphans[node] = tuple(d for d in inventory.directories if d not in live)

    def _choose(self, history: RunHistory, *, from_nodes_only: bool = False) -> Iterator[m.Effect]:
        """Take the newest checkpoint that can be read, or wait for nodes that may bring a newer one."""
        assert self._group is not None
        group, context = self._group, self._context
        candidates = [] if group.resume == "never" else list(reversed(history.lineage()))
        if (step := resume_step(group.resume)) is not None:
            if all(c.step != step for c in candidates):
                yield from self.end(self._no_such_step(step, candidates))
                return
            candidates = [c for c in candidates if c.step == step]
        candidates = [c for c in candidates if c.id.attempt not in self._excluded]
        can_serve = context.holders.has_all if from_nodes_only else context.holders.can_serve
        chosen = next((c for c in candidates if can_serve(c)), None)
        waited_s = context.now_s - self._since_s
        if candidates and chosen is not candidates[0] and waited_s < context.options.inventory_wait_s:
            self._asked = True
            yield m.RequestInventory(token=group.token)
            return
        if chosen is None and (candidates or self._excluded or group.resume == "must"):
            error: CheckpointError = self._nothing_intact(candidates)
            if from_nodes_only:
                error = Unavailable(
                    "The storage path does not answer, and the nodes hold no checkpoint whole."
                )
            yield from self.end(error)
            return
        if chosen is not None and chosen is not candidates[0]:
            why = "is not on the nodes" if from_nodes_only else "has lost all copies of a part"
            yield m.Warn(text=f"Step {candidates[0].step} {why}; step {chosen.step} is restored instead.")
        self._choosing = False
        previous = history.session
        context.ledger.append(
            r.Session(
                session=previous.session + 1 if previous else 1,
                opened_by=context.ledger.epoch,
                service=context.ledger.service,
                owner=group.owner,
                retention=to_text(policies_of(context.options)),
                after=previous.session if previous else None,
                resumed_from=chosen.id.attempt if chosen else None,
                world_size=sum(len(n.ranks) for n in group.nodes),
                num_nodes=len(group.nodes),
            )
        )

    def _nothing_intact(self, candidates: list[CheckpointInfo]) -> RestoreError:
        steps = ", ".join(str(c.step) for c in candidates) or "none"
        return RestoreError(
            f"No checkpoint of run {self._context.history.run_name} can be restored "
            f"(recorded steps without a full set of copies: {steps}).",
            hint="Bring back the nodes that held them, or start over with resume='never' or another name.",
        )

    def _no_such_step(self, step: int, candidates: list[CheckpointInfo]) -> RestoreError:
        return RestoreError(
            f"Run {self._context.history.run_name} has no checkpoint of step {step} to go back to.",
            hint=nearest_steps((c.step for c in candidates), step),
        )

    # -- the session is in the log ---------------------------------------------------------------------

    def session_logged(self) -> Iterator[m.Effect]:
        """The record is confirmed: tell the group, unless it was told before or a newer one has come."""
        if self._group is not None and self._waiting and not self._choosing:
            yield from self._begin(self._context.history)

    def _begin(self, history: RunHistory) -> Iterator[m.Effect]:
        """Place the copies and send the plan of the history's last session to its group."""
        context, group, session = self._context, self._group, history.session
        assert group is not None and session is not None
        holders = place_replicas(
            training_nodes=[n.node_id for n in group.nodes],
            live_nodes=context.holders.live,
            replicas=context.options.replicas,
            domains=context.domains,
            draining=context.draining,
        )
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
        )
        self._restored, self.is_training, self._since_s = {}, False, context.now_s
        self._forget_restored()
        yield from self._warn_of_few_copies(context.plan)
        tokens, self._waiting = self._waiting, ()
        yield m.StartSession(tokens=tokens, plan=context.plan)

    def _warn_of_few_copies(self, plan: SessionPlan) -> Iterator[m.Effect]:
        context = self._context
        copies, num_live = min(len(n.holders) for n in plan.nodes), len(context.holders.live)
        if copies >= context.options.replicas:
            return
        if num_live == 1:
            yield from context.warn_once(
                "The cluster has one node, so no checkpoint has a copy on another: if the node is lost, "
                "training goes on from the newest one on the storage path. Set replicas=0 if it stays so.",
                is_expected=True,
            )
            return
        level = f"replicated on {copies} other node(s)" if copies else "local"
        yield from context.warn_once(
            f"Checkpoints are {level} until drained: {num_live} live node(s) cannot hold "
            f"{context.options.replicas} replica(s)."
        )

    def _resume_point(self, history: RunHistory, attempt: str | None) -> ResumePoint | None:
        if attempt is None:
            return None
        checkpoint, holders = history.checkpoints[attempt], self._context.holders
        nodes = tuple(tuple(sorted(holders.of(attempt, i))) for i in range(checkpoint.num_nodes))
        return ResumePoint(checkpoint=checkpoint, holders=nodes)

    # -- restored ------------------------------------------------------------------------------------

    def node_restored(self, event: m.NodeRestored) -> Iterator[m.Effect]:
        """One decision for all: `go` when every node is whole, else an older checkpoint for every node."""
        plan = self._context.plan
        if plan is None or event.session_key != plan.session_key:
            yield m.Fail(token=event.token, error=RunSuperseded("A newer session owns this run."))
            return
        self._restored[event.node_id] = event
        self._note_first()
        if len(self._restored) < len(plan.nodes):
            return
        reports, self._restored = list(self._restored.values()), {}
        ranks = sorted((rank for e in reports for rank in e.ranks), key=lambda k: k.rank)
        damage = sorted({d for rank in ranks for d in rank.damage})
        if not damage or plan.resume is None:
            is_new, self._sent_go = self._sent_go != plan.session_key, plan.session_key
            self.is_training, self.restores = True, tuple(ranks)
            if is_new and (restored := _restored(plan, ranks)) is not None:
                self._context.ledger.append(restored)
                self._context.measure(telemetry.RESTORES, restored.seconds)
                for tier, size in restored.read_bytes.items():
                    self._context.measure(telemetry.RESTORE_BYTES, size, tier=tier)
            for report in reports:
                yield m.Reply(token=report.token, value=None)
            return
        bad = plan.resume.checkpoint
        self._excluded.add(bad.id.attempt)
        yield m.Warn(text=f"Step {bad.step} cannot be restored: no intact copy of {'; '.join(damage[:5])}.")
        self._waiting, self._choosing = tuple(e.token for e in reports), True

    def ranks_restored(self, event: m.RanksRestored) -> Iterable[m.Effect]:
        """Some ranks of a node wait for others, of that node or elsewhere."""
        plan = self._context.plan
        if plan is not None and event.session_key == plan.session_key and not self.is_training:
            self._waiting_ranks[event.node_id] = event.ranks
            self._note_first()
        return ()

    def _forget_restored(self) -> None:
        self._waiting_ranks, self._first_s, self._has_warned = {}, None, False

    def _note_first(self) -> None:
        if self._first_s is None:
            self._first_s = self._context.now_s

    def awaited(self) -> Iterator[Awaited]:
        """Ranks that others have waited for after their restore, for a while."""
        plan = self._context.plan
        if plan is None or self.is_training or self._first_s is None:
            return
        since_s = self._context.now_s - self._first_s
        come = {rank for ranks in self._waiting_ranks.values() for rank in ranks}
        come |= {rank.rank for event in self._restored.values() for rank in event.ranks}
        missing = tuple(sorted(k for n in plan.nodes for k in n.ranks if k not in come))
        if missing and since_s >= AWAITED_AFTER_S:
            yield awaited_restore(missing, since_s)

    def ticked(self) -> Iterator[m.Effect]:
        """Say once which ranks a restore waits for, if it takes long."""
        if self._first_s is None or self._has_warned:
            return
        for awaited in self.awaited():
            if awaited.since_s > SLOW_RESTORE_S:
                self._has_warned = True
                yield m.Warn(text=awaited.text)

    # -- what an ended session left ----------------------------------------------------------------------

    def busy(self) -> set[str]:
        """Checkpoints that this group may still read."""
        plan = self._context.plan
        if plan is None or plan.resume is None or self.is_training:
            return set()
        return {plan.resume.checkpoint.id.attempt}

    def release_orphans(self) -> Iterator[m.Effect]:
        """The session has a commit of its own: what belongs to no checkpoint may go."""
        orphans, self._orphans = self._orphans, {}
        kept = {c.directory for c in self._context.history.live()}
        for node, directories in orphans.items():
            if gone := tuple(d for d in directories if d not in kept):
                yield m.DeleteLocalOrphans(node_id=node, directories=gone)


def _restored(plan: SessionPlan, ranks: Collection[RankRestore]) -> r.Restored | None:
    """The record of what a group has read: a checkpoint, or one of another run. None: it read nothing."""
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
    )
