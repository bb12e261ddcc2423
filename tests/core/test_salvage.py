"""Which step survivors save, and how a run and its nodes go about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.salvage import ENDS_S, GATHER_S, MAX_ENDS_S, choose
from ray_ckpt.core.step_states import KEPT_STEPS, keep, salvage_of
from ray_ckpt.core.values import RankProgress, Salvage, SessionNode, SessionPlan, StoredFragment
from ray_ckpt.format.digest import digest
from ray_ckpt.types import AttemptId, FileEntry, SaveFacts
from tests.core.driver import Harness, of, one

KEY = (1, 1)
PLAN = SessionPlan(
    run_uid=digest(b"run"),
    session=1,
    epoch=1,
    world_size=3,
    nodes=(
        SessionNode(node_id="a", node_index=0, ranks=(0, 1), holders=("b",)),
        SessionNode(node_id="b", node_index=1, ranks=(2,), holders=("a",)),
    ),
    resume=None,
)


def report(node: str, offers: Mapping[int, Any], kept: Mapping[int, Any]) -> m.SurvivorsReported:
    """Return a report in which ranks of the class "all" have kept these steps, or steps with classes.

    A rank offers one step, or several.
    """
    steps = {k: x if isinstance(x, tuple) else (x,) for k, x in offers.items()}
    classes = {k: x if isinstance(x, dict) else dict.fromkeys(x, "all") for k, x in kept.items()}
    return m.SurvivorsReported(session_key=KEY, node_id=node, offers=steps, kept=classes)


def stored_alone(attempt: AttemptId) -> m.NodeStored:
    """Return the report of node a, which alone writes a salvage."""
    entry = FileEntry(name="manifest-00000-of-00001.parquet", size_bytes=1, digest=digest(b"f"))
    return m.NodeStored(
        attempt=attempt,
        node_index=0,
        node_id="a",
        fragment=entry,
        size_bytes=1,
        replicated=(),
        metrics=None,
    )


def decide(*reports: m.SurvivorsReported) -> Salvage:
    return choose(PLAN, {each.node_id: each for each in reports})


def test_a_rank_that_died_is_in_the_fragment_of_its_node() -> None:
    found = decide(report("a", {0: 7}, {0: [6, 7], 1: [6, 7]}), report("b", {2: 7}, {2: [6, 7]}))
    assert found.attempt is not None and found.attempt.step == 7
    assert found.savers == (0, 2)
    assert [(node.node_id, node.ranks) for node in found.nodes] == [("a", (0, 1)), ("b", (2,))]


def test_a_peer_writes_for_the_ranks_of_a_lost_node() -> None:
    found = decide(report("a", {0: 7, 1: 7}, {0: [7], 1: [7], 2: [6, 7]}))
    assert [(node.node_id, node.node_index, node.ranks) for node in found.nodes] == [("a", 0, (0, 1, 2))]


def test_of_two_offered_steps_the_newest_whole_one_is_taken() -> None:
    """Rank 2 died in step 8, of which only rank 0 got the gradients of all."""
    found = decide(report("a", {0: 8, 1: 7}, {0: [7, 8], 1: [6, 7]}), report("b", {}, {2: [6, 7]}))
    assert found.attempt is not None and found.attempt.step == 7
    assert found.savers == (1,), "rank 0 no longer has the tensors of step 7"


def test_nothing_is_saved_if_the_state_of_a_rank_is_of_an_older_step() -> None:
    found = decide(report("a", {0: 8, 1: 8}, {0: [7, 8], 1: [7, 8]}), report("b", {}, {2: [6, 7]}))
    assert found.attempt is None
    assert found.reason == "no live node keeps the own state of rank(s) 2 after step 8"


def test_a_step_of_which_only_copies_are_left_is_taken() -> None:
    """Rank 2 died in step 8, and the others finished it; rank 1 has no copy of step 7."""
    others = report("a", {0: (8, 7), 1: 8}, {0: [7, 8], 1: [7, 8]})
    found = decide(others, report("b", {}, {2: [6, 7]}))
    assert found.attempt is not None and found.attempt.step == 7
    assert found.savers == (0,)
    assert decide(others, report("b", {}, {2: [7, 8]})).savers == (0, 1), "of step 8"


def test_each_class_needs_a_survivor() -> None:
    shards = {0: {7: "left"}, 1: {7: "right"}}, {2: {7: "left"}}
    found = decide(report("a", {0: 7}, shards[0]), report("b", {2: 7}, shards[1]))
    assert found.reason == "no survivor holds what rank(s) 1 held of step 7"
    found = decide(report("a", {1: 7}, shards[0]), report("b", {2: 7}, shards[1]))
    assert found.savers == (1, 2)


def test_without_an_offer_nothing_is_saved() -> None:
    assert decide(report("a", {}, {0: [7]})).reason == "no rank offers a finished step"


def test_a_node_keeps_the_newest_states_of_a_rank() -> None:
    states: dict[int, dict[int, str]] = {}
    for step in range(1, 6):
        keep(states, 0, step, f"after {step}")
    assert states == {0: {step: f"after {step}" for step in range(6 - KEPT_STEPS, 6)}}


def started(node: str = "a") -> NodeMachine:
    machine = NodeMachine(epoch=1)
    machine.handle(n.SessionStarted(plan=PLAN, node_id=node, epoch=1))
    return machine


def kept(rank: int, step: int) -> n.StepStateKept:
    return n.StepStateKept(session_key=KEY, rank=rank, step=step, holds="all")


def test_a_node_sends_the_states_of_its_own_ranks_to_a_peer() -> None:
    machine = started()
    sent = n.SendStepState(session_key=KEY, rank=0, step=3, peer="b")
    assert machine.handle(kept(0, 3)) == (sent,)
    assert machine.handle(kept(2, 3)) == (), "that of the peer's rank"
    assert machine.handle(n.StepStateKept(session_key=(1, 0), rank=0, step=4, holds="all")) == ()
    (reported,) = machine.handle(n.SurvivorOffered(session_key=KEY, rank=1, steps=(3, 2)))
    kept_here = {0: {3: "all"}, 2: {3: "all"}}
    assert reported == n.ReportSurvivors(session_key=KEY, offers={1: (3, 2)}, kept=kept_here)


def test_a_node_writes_one_fragment_with_live_and_kept_states() -> None:
    machine = started()
    for rank in range(3):
        machine.handle(kept(rank, 3))
    at = salvage_of(PLAN, 3)
    here = SessionNode(node_id="a", node_index=0, ranks=(0, 1, 2), holders=("c",))
    salvage = Salvage(session_key=KEY, attempt=at, savers=(1,), nodes=(here,))
    order = n.SalvageOrdered(salvage=salvage, epoch=1)
    answer = n.AnswerOffers(salvage=salvage)
    first, second, last = machine.handle(order)
    assert (first, second) == (n.WriteStepState(attempt=at, rank=0), n.WriteStepState(attempt=at, rank=2))
    assert last == answer
    assert machine.handle(order) == (answer,), "a repeated order"
    effects: list[n.NodeEffect] = []
    effects += machine.handle(n.ShardSealed(attempt=at, rank=1, replicated=(), metrics=None))
    for rank in range(3):
        file = FileEntry(name=f"{rank}", size_bytes=1, digest=digest(b"x"))
        effects += machine.handle(n.ShardWritten(attempt=at, rank=rank, files=(file,), rows=()))
    fragment = one(effects, n.WriteFragment).fragment
    assert (fragment.node_index, fragment.num_nodes, fragment.ranks) == (0, 1, (0, 1, 2))
    assert machine.incomplete() == (), "no rank is missing in it"
    (reported,) = machine.handle(n.SurvivorOffered(session_key=KEY, rank=1, steps=(3,)))
    assert isinstance(reported, n.ReportSurvivors) and reported.was_decided


def test_an_agent_without_the_order_takes_no_part() -> None:
    """A new agent does not know which ranks belong to the fragment of its node."""
    machine, at = started(), salvage_of(PLAN, 3)
    sealed = n.ShardSealed(attempt=at, rank=1, replicated=(), metrics=None)
    assert not of(machine.handle(sealed), n.WriteShard)


def test_a_rank_whose_state_only_a_peer_keeps_does_not_save() -> None:
    """Its new agent would write another fragment than the peer does."""
    found = decide(report("a", {0: 7}, {1: [7]}), report("b", {2: 7}, {0: [7], 1: [7], 2: [7]}))
    assert found.savers == (2,)
    assert [(node.node_id, node.ranks) for node in found.nodes] == [("a", (1,)), ("b", (0, 2))]


# -- stories of a run ----------------------------------------------------------------------------------


def training(**options: Any) -> Harness:
    """Return a run whose group trains on nodes a and b, rank 0 on a and rank 1 on b."""
    run = Harness("ab", **{"salvage": True, **options})
    run.open("ab")
    for node in "ab":
        run.feed(run.restored(node))
    return run


def of_run(run: Harness, node: str, offers: Mapping[int, Any], kept: Mapping[int, Any]) -> Any:
    return replace(report(node, offers, kept), session_key=run.plan.session_key)


def test_survivors_of_a_lost_node_are_gathered_and_their_step_is_committed() -> None:
    run = training(replicas=0)
    asked = one(run.feed(of_run(run, "a", {0: 5}, {0: [4, 5], 1: [4, 5]})), m.AskSurvivors)
    assert asked.nodes == ("a", "b")
    run.lose("b")
    assert not of(run.tick(GATHER_S / 2), m.OrderSalvage)
    effects = run.tick(GATHER_S)
    (warning,) = of(effects, m.Warn)
    assert "rank(s) 0 save step 5" in warning.text
    salvage = one(effects, m.OrderSalvage).salvage
    assert salvage.attempt is not None and salvage.attempt.step == 5
    assert [(node.node_id, node.ranks) for node in salvage.nodes] == [("a", (0, 1))]
    run.feed(stored_alone(salvage.attempt))
    found = run.checkpoint(salvage.attempt)
    assert (found.step, found.num_nodes, found.world_size) == (5, 1, 2)
    assert of(run.feed(of_run(run, "a", {0: 5}, {})), m.OrderSalvage), "a late offer gets the same answer"


def test_ranks_without_a_part_in_a_salvage_are_not_missed() -> None:
    run = training()
    run.feed(of_run(run, "a", {0: 5}, {0: [5], 1: [5]}), of_run(run, "b", {}, {1: [5]}))
    run.tick(GATHER_S)
    progress = RankProgress(step=9, saved_step=-1, is_over=True)
    effects = run.feed(m.RanksProgressed(session_key=run.plan.session_key, ranks={1: progress}))
    assert not of((*effects, *run.tick(1.0), *run.tick(5.0)), m.NotifyOutcome)


def test_a_step_that_is_saved_is_not_saved_again() -> None:
    run = training()
    run.save(5)
    effects = run.feed(of_run(run, "a", {0: 5}, {0: [5], 1: [5]}), of_run(run, "b", {1: 5}, {1: [5]}))
    assert one(effects, m.OrderSalvage).salvage.reason == "step 5 is saved already"


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_save_that_lacks_copies_counts_for_nothing_if_one_of_its_nodes_is_silent(is_silent: bool) -> None:
    run = training(goal_timeout_s=1000.0)
    run.feed(*(replace(run.stored(run.attempt(5), node), replicated=()) for node in "ab"))
    run.feed(of_run(run, "a", {0: 5}, {0: [5], 1: [5]}))
    if not is_silent:
        run.feed(of_run(run, "b", {}, {1: [5]}))
    salvage = one(run.tick(GATHER_S), m.OrderSalvage).salvage
    assert salvage.reason == ("" if is_silent else "step 5 is saved already")


def test_a_restarted_coordinator_does_not_decide_again() -> None:
    run = training(replicas=0)
    found = run.plan
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=found, inventories=run.inventories()))
    run.feed(of_run(run, "b", {1: 5}, {1: [5]}))
    effects = run.feed(replace(of_run(run, "a", {0: 5}, {0: [5], 1: [5]}), was_decided=True))
    order = one(effects, m.OrderSalvage)
    reason = "it was decided before the coordinator was restarted"
    assert (order.salvage.attempt, order.salvage.reason, order.nodes) == (None, reason, ("a", "b"))
    assert reason in one(effects, m.Warn).text
    effects = (*run.feed(m.SalvageRequested(token="launcher")), *run.tick(GATHER_S))
    assert not of(effects, m.OrderSalvage)
    assert not of(effects, m.Reply), "savers of the earlier decision may be at work"
    assert of(run.tick(ENDS_S), m.Reply)


def test_a_save_that_is_complete_after_a_salvage_of_its_step_is_dropped() -> None:
    run = training(replicas=0)
    first = run.attempt(5)
    run.feed(run.stored(first, "a"))
    effects = run.feed(of_run(run, "a", {0: 5}, {0: [5], 1: [5]}), of_run(run, "b", {1: 5}, {1: [5]}))
    salvage = one(effects, m.OrderSalvage).salvage
    assert salvage.attempt is not None
    stored = [
        replace(run.stored(first, node), attempt=salvage.attempt, node_index=index)
        for index, node in enumerate("ab")
    ]
    effects = (*run.feed(*stored), *run.feed(run.stored(first, "b")))
    assert [c.id for c in run.machine.history.live()] == [salvage.attempt]
    assert {outcome.attempt: outcome.level for outcome in of(effects, m.NotifyOutcome)}[first] is None


def test_a_launcher_waits_until_a_salvage_has_ended() -> None:
    run = training()
    effects = run.feed(m.SalvageRequested(token="launcher"))
    assert of(effects, m.AskSurvivors) and not of(effects, m.Reply)
    (reply,) = of((*run.tick(GATHER_S), *run.tick(ENDS_S)), m.Reply)
    assert reply.token == "launcher"
    off = training(salvage=False)
    assert of(off.feed(m.SalvageRequested(token="launcher")), m.Reply)


@pytest.mark.parametrize(
    ("local_s", "attempt_timeout_s", "longest_s"),
    [
        (None, 60.0, ENDS_S),
        (1.0, 60.0, ENDS_S),
        (10.0, 60.0, 2 * 10.0 * 2),
        (100.0, 60.0, GATHER_S + 60.0),  # the attempt is dropped
        (100.0, 1000.0, MAX_ENDS_S),
    ],
)
def test_a_launcher_waits_longer_while_a_large_state_is_written(
    local_s: float | None, attempt_timeout_s: float, longest_s: float
) -> None:
    """One node writes what two nodes wrote before."""
    run = training(replicas=0, attempt_timeout_s=attempt_timeout_s)
    facts = SaveFacts(local_s=local_s)
    run.feed(*(replace(run.stored(run.attempt(4), node), facts=facts) for node in "ab"))
    run.feed(m.SalvageRequested(token="launcher"))
    salvaged(run)
    waited_s = GATHER_S + 0.1
    while not of(run.tick(0.5), m.Reply):
        waited_s += 0.5
    assert longest_s - 1.0 < waited_s < longest_s + 1.0


def test_a_launcher_waits_no_longer_for_a_large_state_that_is_written() -> None:
    """The next group commits it, and its copies are made then."""
    run = training(goal_timeout_s=1000.0)
    facts = SaveFacts(local_s=100.0)
    run.feed(*(replace(run.stored(run.attempt(4), node), facts=facts, replicated=()) for node in "ab"))
    run.feed(*(run.copied(run.attempt(4), node, holder) for node, holder in ("ab", "ba")))
    run.feed(m.SalvageRequested(token="launcher"))
    run.feed(of_run(run, "a", {0: 5}, {0: [5], 1: [5]}), of_run(run, "b", {}, {}))
    order = one(run.tick(GATHER_S + 0.1), m.OrderSalvage)
    assert order.salvage.attempt is not None
    assert not of(run.tick(ENDS_S), m.Reply)
    run.feed(replace(stored_alone(order.salvage.attempt), replicated=()))
    assert of(run.tick(0.5), m.Reply)


def salvaged(run: Harness) -> m.NodeStored:
    """Let one node write a salvage of a group of two; return its report, which has not arrived."""
    run.feed(of_run(run, "a", {0: 5}, {0: [5], 1: [5]}))
    run.lose("b")
    order = one(run.tick(GATHER_S + 0.1), m.OrderSalvage)
    attempt = order.salvage.attempt
    assert attempt is not None
    stored = replace(stored_alone(attempt), epoch=run.machine.epoch)
    fragment = StoredFragment(
        attempt=attempt, node_index=0, num_nodes=1, fragment=stored.fragment, size_bytes=1, ranks=(0, 1)
    )
    run.disks["a"].put(fragment)
    return stored


def test_a_salvage_survives_its_coordinator() -> None:
    run = training(replicas=0)
    stored, found = salvaged(run), run.plan
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=found, inventories=run.inventories()))
    run.feed(replace(stored, epoch=run.machine.epoch))
    run.feed(run.group("a"))
    assert stored.attempt.attempt in run.machine.history.checkpoints


def test_a_salvage_that_the_inventory_shows_complete_is_committed() -> None:
    run = training(replicas=0)
    stored = salvaged(run)
    run.feed(run.group("a"))
    assert stored.attempt.attempt in run.machine.history.checkpoints
