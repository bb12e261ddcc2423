"""Salvages: a last save of a finished step by the ranks that outlive others of their group.

A state that several ranks hold alike is not lost with some of these ranks. What each rank has alone, such as
random state and data position, it has sent to its node after each step, and the node to a peer. A salvage
commits a step only if all of it is that step's: see PROTOCOL.md section 4. One salvage is tried per session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ray_ckpt.core import messages as m
from ray_ckpt.core.attempts import Attempt
from ray_ckpt.core.awaited import ranks_text
from ray_ckpt.core.context import Context
from ray_ckpt.core.open_attempts import OpenAttempts
from ray_ckpt.core.step_states import salvage_of
from ray_ckpt.core.values import Salvage, SessionKey, SessionNode, SessionPlan, Token
from ray_ckpt.errors import CheckpointError

GATHER_S = 2.0  # wait for the offers of survivors, whose collective operations fail at almost the same time
DECIDED_BEFORE = "it was decided before the coordinator was restarted"
ENDS_S = 20.0  # longest wait of a launcher for a salvage; then the group ends in any case
MAX_ENDS_S = 90.0  # the same for a large state that nodes are writing; `client.CALL_S` is longer than that


class Salvages:
    """The salvage of the group at work."""

    def __init__(self, context: Context, *, attempts: OpenAttempts) -> None:
        self._context, self._attempts = context, attempts
        self._session_key: SessionKey = (0, 0)
        self._since_s: float | None = None  # when the first report or request came
        self._reports: dict[str, m.SurvivorsReported] = {}  # by node
        self._decided: Salvage | None = None
        self._waiting: list[Token] = []

    def requested(self, event: m.SalvageRequested) -> Iterator[m.Effect]:
        """Begin a salvage for a launcher whose group has lost ranks, unless one has begun."""
        yield from self._enter_session()
        if self._context.plan is None or not self._context.options.salvage:
            yield m.Reply(token=event.token, value=None)
            return
        self._waiting.append(event.token)
        yield from self._begin()

    def reported(self, event: m.SurvivorsReported) -> Iterator[m.Effect]:
        """Take the report of a node; decide when all ranks have made an offer."""
        plan = self._context.plan
        if plan is None or event.session_key != plan.session_key:
            return
        yield from self._enter_session()
        if self._decided is None and event.was_decided:  # two decisions may divide the tensors differently
            yield from self._begin()
            yield from self._announce(plan, Salvage(session_key=plan.session_key, reason=DECIDED_BEFORE))
            return
        if self._decided is not None:
            yield m.OrderSalvage(salvage=self._decided, nodes=(event.node_id,))
            return
        self._reports[event.node_id] = event
        yield from self._begin()
        if sum(len(report.offers) for report in self._reports.values()) >= plan.world_size:
            yield from self._decide(plan)

    def ticked(self) -> Iterator[m.Effect]:
        """Decide when the survivors have had time for their offers; answer launchers at the end."""
        yield from self._enter_session()
        plan, now_s = self._context.plan, self._context.now_s
        if self._since_s is None or plan is None:
            return
        if self._decided is None and now_s - self._since_s >= GATHER_S:
            yield from self._decide(plan)
        if self._waiting and (self._is_over() or now_s - self._since_s >= self._longest_wait_s()):
            yield from self._answer()

    def _longest_wait_s(self) -> float:
        """Return how long a launcher waits at most: ENDS_S, or longer while nodes write a large state.

        It is twice the time that the writing of the newest checkpoint would take on the nodes of the savers.
        """
        decided = self._decided
        attempt = self._attempts.get(decided.attempt.attempt) if decided and decided.attempt else None
        if decided is None or attempt is None or attempt.is_local:  # the next group commits what is stored
            return ENDS_S
        lineage = reversed(self._context.history.lineage())
        work_s = next((c.local_s * c.num_nodes for c in lineage if c.local_s is not None), 0.0)
        num_nodes = sum(not set(decided.savers).isdisjoint(node.ranks) for node in decided.nodes)
        return min(MAX_ENDS_S, max(ENDS_S, 2 * work_s / num_nodes))

    def _is_over(self) -> bool:
        decided = self._decided
        if decided is None or decided.reason == DECIDED_BEFORE:  # nobody knows when that one has ended
            return False
        return decided.attempt is None or not self._attempts.is_open(decided.attempt.attempt)

    def _begin(self) -> Iterator[m.Effect]:
        if self._since_s is None and self._decided is None and self._context.plan is not None:
            self._since_s = self._context.now_s
            key, nodes = self._context.plan.session_key, self._context.session_nodes()
            yield m.AskSurvivors(session_key=key, nodes=nodes)

    def _decide(self, plan: SessionPlan) -> Iterator[m.Effect]:
        """Decide, and open the attempt if there is one: all nodes learn the decision."""
        live = self._context.holders.live
        salvage = choose(plan, {node: report for node, report in self._reports.items() if node in live})
        attempt = salvage.attempt
        if attempt is not None and (saved := self._saved_step()) >= attempt.step:
            reason = f"step {saved} is saved already"
            attempt, salvage = None, Salvage(session_key=plan.session_key, reason=reason)
        if attempt is not None:
            salvage = replace(salvage, nodes=self._placed(salvage.nodes))
            now_s = self._context.now_s
            self._attempts.add(Attempt(id=attempt, nodes=salvage.nodes, started_s=now_s, is_salvage=True))
            yield m.Warn(
                text=f"Session {plan.session} ends early: rank(s) {ranks_text(salvage.savers)} save "
                f"step {attempt.step}."
            )
        yield from self._announce(plan, salvage)

    def _announce(self, plan: SessionPlan, salvage: Salvage) -> Iterator[m.Effect]:
        if salvage.attempt is None:
            yield m.Warn(text=f"The survivors of session {plan.session} save no last step: {salvage.reason}.")
        self._decided = salvage
        yield m.OrderSalvage(salvage=salvage, nodes=self._context.session_nodes())

    def _saved_step(self) -> int:
        """Return the newest step of the session that is committed, or complete on live nodes; -1 for none."""
        saved = [a.id for a in self._attempts if a.is_committing or (a.is_local and self._lives(a))]
        saved += [checkpoint.id for checkpoint in self._context.history.live()]
        return max((a.step for a in saved if (a.epoch, a.session) == self._session_key), default=-1)

    def _lives(self, attempt: Attempt) -> bool:
        """Return whether nodes have all of an attempt, not counting those of the group that are silent."""
        silent = set(self._context.session_nodes()) - self._reports.keys()
        fragments = self._context.holders.fragments(attempt.id.attempt)
        return all(fragments.get(node.node_index, set()) - silent for node in attempt.nodes)

    def _placed(self, nodes: Sequence[SessionNode]) -> tuple[SessionNode, ...]:
        """Return the nodes with holders for their copies among the nodes that are left."""
        context = self._context
        holders = context.place([node.node_id for node in nodes], context.options.num_copies)
        return tuple(replace(node, holders=holders[node.node_id]) for node in nodes)

    def _answer(self) -> Iterator[m.Effect]:
        waiting, self._waiting = self._waiting, []
        for token in waiting:
            yield m.Reply(token=token, value=None)

    def _enter_session(self) -> Iterator[m.Effect]:
        """Forget the salvage of an older session."""
        plan = self._context.plan
        session_key = plan.session_key if plan is not None else (0, 0)
        if session_key != self._session_key:
            yield from self._answer()
            self._session_key, self._since_s, self._decided = session_key, None, None
            self._reports.clear()

    def fail(self, error: CheckpointError) -> Iterator[m.Effect]:
        """Fail the launchers that wait."""
        waiting, self._waiting = self._waiting, []
        for token in waiting:
            yield m.Fail(token=token, error=error)


def choose(plan: SessionPlan, reports: Mapping[str, m.SurvivorsReported]) -> Salvage:
    """Return the salvage of the newest step that is whole, else one without an attempt.

    A step is whole if a node keeps the own state of each rank after this step, and if a rank of each class
    offers this step.
    """
    offers = {
        (step, rank)
        for report in reports.values()
        for rank, steps in report.offers.items()
        for step in steps
        if step in report.kept.get(rank, {})  # otherwise another node writes the files of this rank
    }
    reason = "no rank offers a finished step"
    for step in sorted({step for step, _ in offers}, reverse=True):
        savers = tuple(sorted(rank for offered, rank in offers if offered == step))
        found = _whole(plan, reports, step, savers)
        if not isinstance(found, str):
            attempt = salvage_of(plan, step)
            return Salvage(session_key=plan.session_key, attempt=attempt, savers=savers, nodes=found)
        reason = found if reason.startswith("no rank") else reason
    return Salvage(session_key=plan.session_key, reason=reason)


def _whole(
    plan: SessionPlan, reports: Mapping[str, m.SurvivorsReported], step: int, savers: Sequence[int]
) -> tuple[SessionNode, ...] | str:
    """Return the nodes that write the fragments of a whole step, without holders, or why it is not whole."""
    classes: dict[int, str] = {}
    writers: dict[int, str] = {}  # rank -> node
    for home in plan.nodes:
        for rank in home.ranks:
            keepers = [node for node in sorted(reports) if step in reports[node].kept.get(rank, {})]
            if keepers:
                writers[rank] = home.node_id if home.node_id in keepers else keepers[0]
                classes[rank] = reports[writers[rank]].kept[rank][step]
    ranks = sorted(rank for home in plan.nodes for rank in home.ranks)
    if unkept := [rank for rank in ranks if rank not in writers]:
        return f"no live node keeps the own state of rank(s) {ranks_text(unkept)} after step {step}"
    offered = {classes[rank] for rank in savers}
    if alone := [rank for rank in ranks if classes[rank] not in offered]:
        return f"no survivor holds what rank(s) {ranks_text(alone)} held of step {step}"
    used = [home.node_id for home in plan.nodes if home.node_id in writers.values()]
    return tuple(
        SessionNode(
            node_id=node,
            node_index=index,
            ranks=tuple(rank for rank in ranks if writers[rank] == node),
            holders=(),
        )
        for index, node in enumerate(used)
    )
