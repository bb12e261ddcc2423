"""Checkpoints that a loss leaves, and those that must survive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ray_ckpt.core.loss_scenarios import (
    REMOTE_ONLY,
    LiveCheckpoint,
    leftovers,
    lose_node,
    lose_rack,
    scenarios,
)
from ray_ckpt.errors import ConfigError
from ray_ckpt.types import Level
from tests.core.records import checkpoint

A, B, C, D = (letter * 56 for letter in "abcd")
PAIR = ((A, B), (B, A))


def live(*holders: Sequence[str], level: Level = Level.REPLICATED, replicas: int = 1) -> LiveCheckpoint:
    info = replace(checkpoint(10, level=level, num_nodes=len(holders)), replicas=replicas)
    homes = tuple(nodes[0] if nodes else "" for nodes in holders)
    return LiveCheckpoint(checkpoint=info, holders=tuple(map(tuple, holders)), homes=homes)


def test_a_replicated_checkpoint_must_survive_the_loss_of_any_node() -> None:
    left = leftovers(live(*PAIR), lose_node("aa", [A, B]))
    assert left.is_covered and not left.problems
    assert left.holders == ((B,), (B,))


def test_the_node_that_holds_a_fragment_for_itself_comes_first() -> None:
    left = leftovers(live((C, A, B)), lose_node("d", [A, D]))
    assert left.holders == ((C, A, B),)
    assert leftovers(live((C, A, B)), lose_node("c", [C])).holders == ((A, B),)


def test_a_copy_that_repair_has_yet_to_make_is_missing() -> None:
    left = leftovers(live((A,), (B, A)), lose_node("a", [A, B]))
    assert left.is_covered
    assert left.problems == (f"fragment 0: its only copies are on {A[:12]}",)


def test_more_copies_lost_than_were_promised_need_not_survive() -> None:
    both = lose_rack("r1", {A: "r1", B: "r1", C: "r2"})
    left = leftovers(live(*PAIR), both)
    assert not left.is_covered and len(left.problems) == 2
    assert leftovers(live((A, B, C), replicas=2), both).is_covered


def test_a_rack_that_holds_one_copy_of_each_part_must_not_be_missed() -> None:
    left = leftovers(live((A, C), (B, D)), lose_rack("r1", {A: "r1", B: "r1", C: "r2", D: "r2"}))
    assert left.is_covered and left.holders == ((C,), (D,))


def test_a_local_checkpoint_is_promised_to_survive_no_node_that_holds_it() -> None:
    local = live((A,), (B,), level=Level.LOCAL, replicas=0)
    assert not leftovers(local, lose_node("a", [A, B, C])).is_covered
    assert leftovers(local, lose_node("c", [A, B, C])).is_covered
    gone = live((A,), (), level=Level.LOCAL, replicas=0)
    left = leftovers(gone, lose_node("c", [A, C]))
    assert not left.is_covered and left.problems == ("fragment 1: no live node holds it",)


def test_a_durable_checkpoint_must_survive_everything() -> None:
    durable = live((), (B,), level=Level.DURABLE)
    for scenario in (lose_node("b", [B]), REMOTE_ONLY):
        left = leftovers(durable, scenario)
        assert left.is_covered and left.is_remote and not left.problems
    assert leftovers(durable, REMOTE_ONLY).holders == ((), ())


def test_remote_only_reads_no_node_and_promises_nothing_of_what_is_not_durable() -> None:
    left = leftovers(live(*PAIR), REMOTE_ONLY)
    assert not left.is_covered and left.problems == ("it is not on the storage path",)


def test_a_node_is_named_by_the_beginning_of_its_id() -> None:
    other = "ab" + "0" * 54
    assert lose_node("aa", [A, other]).lost == {A}
    assert lose_node("aa", [A, other]).name == f"lose-node {A[:12]}"
    for prefix, what in (("a", "2 live nodes"), ("x", "No live node"), ("", "No live node")):
        with pytest.raises(ConfigError, match=what):
            lose_node(prefix, [A, other])


def test_a_domain_without_nodes_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'r3'.*There are r1, r2"):
        lose_rack("r3", {A: "r1", B: "r2", C: ""})
    with pytest.raises(ConfigError, match="failure_domain"):
        lose_rack("", {A: ""})


def test_a_schedule_has_each_loss_that_would_cost_a_copy() -> None:
    domains = {A: "r1", B: "r2", C: "r2", D: "r3"}
    found = scenarios([live((A, B))], domains)
    assert [s.name for s in found] == [
        f"lose-node {A[:12]}",
        f"lose-node {B[:12]}",
        "lose-rack r1",
        "lose-rack r2",
    ]
    assert found[3].lost == {B, C}
    assert REMOTE_ONLY in scenarios([live((A,), level=Level.DURABLE)], {})
    assert not scenarios([], domains)
