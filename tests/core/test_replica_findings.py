"""The replica watch on the coordinator: which replicas differ, and what follows from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core import replica_findings
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.replica_findings import MAX_TEXT, finding, merged
from ray_ckpt.format import records as r
from ray_ckpt.format.snapshot import decode_snapshot, encode_snapshot
from ray_ckpt.types import Watched
from tests.core.driver import Harness

Finding = Callable[[Mapping[str, Sequence[Watched]]], str]


def report(digests: str, *, group: str = "g", names: str = "") -> Watched:
    return Watched(group=group, digests=tuple(digests), names=tuple(names))


def on_nodes(ranks: Mapping[int, Watched], per_node: int = 1) -> dict[str, tuple[Watched, ...]]:
    nodes: dict[str, dict[int, tuple[Watched, ...]]] = {}
    for rank, watched in ranks.items():
        nodes.setdefault(f"node{rank // per_node}", {})[rank] = (watched,)
    return {node: merged(found) for node, found in nodes.items()}


def test_equal_reports_of_a_node_are_one_and_need_few_bytes() -> None:
    found = merged({rank: (report("ab"),) for rank in range(8)})
    assert found == (replace(report("ab"), ranks=tuple(range(8))),)


def test_a_majority_names_the_tensor_the_rank_and_the_node() -> None:
    ranks = {0: report("ab", names="xy"), 1: report("ac"), 2: report("ab")}
    assert finding(on_nodes(ranks)) == "y: rank(s) 1 on node(s) node1 differ from 2 others"


@pytest.mark.parametrize("digests", ["ab", "aabb", "abc", "aabbc"])
def test_without_a_majority_no_side_is_accused(digests: str) -> None:
    ranks = {rank: report(digit) for rank, digit in enumerate(digests)}
    text = finding(on_nodes(ranks))
    assert "no majority" in text and "node0" not in text


def test_a_long_finding_is_cut() -> None:
    ranks = {0: report("a" * 8, names="x" * 8), 1: report("b" * 8), 2: report("a" * 8)}
    assert finding(on_nodes(ranks)).endswith("; 4 more")
    long = replace(ranks[0], names=("x" * 5000,) * 8)
    assert len(finding(on_nodes({**ranks, 0: long}))) == MAX_TEXT


def check(found: Finding, seed: int) -> None:
    """Compare a finding with what was planted: some ranks of one group of replicas that lost a bit."""
    dice = random.Random(seed)
    world_size, num_shards = dice.randint(2, 9), dice.randint(1, 2)
    per_node = dice.randint(1, 3)
    groups = {shard: [rank for rank in range(world_size) if rank % num_shards == shard] for shard in range(2)}
    wrong = dice.sample(groups[0], dice.randint(0, len(groups[0]) - 1)) if len(groups[0]) > 1 else []
    ranks = {
        rank: report("x" if rank in wrong else str(shard), group=str(shard))
        for shard, members in groups.items()
        for rank in members
    }
    text = found(on_nodes(ranks, per_node))
    assert (text != "") == bool(wrong), (seed, text)
    is_outvoted = len(groups[0]) >= 3 and len(wrong) * 2 < len(groups[0])
    is_majority = len(groups[0]) >= 3 and len(wrong) * 2 > len(groups[0])
    if wrong and not is_majority:
        assert ("no majority" not in text) == is_outvoted, (seed, text)
    if wrong and is_outvoted:
        accused = set(text.partition("node(s) ")[2].partition(" differ")[0].split(", "))
        assert accused == {f"node{rank // per_node}" for rank in wrong} or len(accused) == 4, (seed, text)


def test_findings_are_those_that_were_planted() -> None:
    for seed in range(2_000):
        check(finding, seed)


@pytest.mark.parametrize("bug", ["nodes vote", "groups are mixed", "the last report counts"])
def test_a_planted_bug_in_the_rule_is_found(bug: str) -> None:
    def broken(reports: Mapping[str, Sequence[Watched]]) -> str:
        changed = dict(reports)
        for node, found in reports.items():
            match bug:
                case "nodes vote":
                    changed[node] = tuple(replace(w, ranks=w.ranks[:1]) for w in found)
                case "groups are mixed":
                    changed[node] = tuple(replace(w, group="g") for w in found)
                case _:
                    changed[node] = found[-1:]
        return finding(changed)

    with pytest.raises(AssertionError):
        for seed in range(2_000):
            check(broken, seed)


# -- in the machine ----------------------------------------------------------------------------------


def saved(*digests: str) -> tuple[Harness, list[m.Effect], r.Commit2]:
    """Save one step on as many nodes with one rank each; return the commit and the effects."""
    nodes = "abc"[: len(digests)]
    run = Harness(nodes)
    run.open(nodes)
    attempt, effects = run.attempt(10), list[m.Effect]()
    for name, digit in zip(nodes, digests, strict=True):
        ranks = next(node.ranks for node in run.plan.nodes if node.node_id == name)
        watched = merged({rank: (report(digit, names="w" if rank == 0 else ""),) for rank in ranks})
        effects += run.feed(replace(run.stored(attempt, name), watched=watched))
    for node in run.plan.nodes:
        for holder in node.holders:
            effects += run.feed(run.copied(attempt, node.node_id, holder))
    return run, effects, next(op for op in run.records if isinstance(op, r.Commit2))


def test_a_finding_is_in_the_commit_and_drops_nothing() -> None:
    run, effects, commit = saved("a", "a", "b")
    assert commit.suspect is not None and commit.suspect.startswith("w: rank(s) ")
    checkpoint = run.machine.history.live()[-1]
    assert checkpoint.suspect == commit.suspect
    warnings = [effect.text for effect in effects if isinstance(effect, m.Warn)]
    assert [text for text in warnings if "drifted apart" in text] == [
        f"Step 10: data-parallel replicas have drifted apart: {commit.suspect}. Older checkpoints are "
        "deleted in time: to be able to go back, pin one from before step 10."
    ]


def test_equal_replicas_leave_nothing_in_the_log() -> None:
    run, effects, commit = saved("a", "a", "a")
    assert commit.suspect is None and run.machine.history.live()[-1].suspect == ""
    assert b"suspect" not in r.encode_record(
        r.LogRecord(seq=5, epoch=1, writer="w", prev="0" * 32, time_s=0.0, op=commit)
    )
    assert not [effect for effect in effects if isinstance(effect, m.Warn)]
    assert replica_findings.finding({"node0": (), "node1": (report("a"),)}) == "", "found without a report"


def test_a_finding_outlives_records_and_its_checkpoint() -> None:
    """The status names the newest finding also when its checkpoint is retired or only a snapshot has it."""
    run, _, commit = saved("a", "a", "b")
    for step in range(20, 70, 10):
        run.save(step)
    assert commit.attempt not in {c.id.attempt for c in run.machine.history.live()}
    snapshot = decode_snapshot(encode_snapshot(run.machine.history.to_snapshot(0.0)))
    for history in (run.machine.history, RunHistory.from_snapshot(snapshot)):
        assert history.suspect is not None and history.suspect.suspect == commit.suspect


def test_a_finding_outlives_restarts_that_continue_from_a_later_checkpoint() -> None:
    """The later checkpoints have bytes of both sides, and after a restore no replica differs any more."""
    run, _, commit = saved("a", "a", "b")
    for step in range(20, 70, 10):
        run.save(step)
    warnings = [effect.text for effect in run.open("abc") if isinstance(effect, m.Warn)]
    assert [text for text in warnings if "drifted apart" in text] == [
        "The run goes on from step 60, which may have wrong bytes: data-parallel replicas had drifted apart "
        f"at step 10: {commit.suspect}."
    ]
    snapshot = decode_snapshot(encode_snapshot(run.machine.history.to_snapshot(0.0)))
    for history in (run.machine.history, RunHistory.from_snapshot(snapshot)):
        assert history.suspect is not None and history.suspect.suspect == commit.suspect
    warnings = [effect.text for effect in run.open("abc", resume="never") if isinstance(effect, m.Warn)]
    assert not [text for text in warnings if "drifted apart" in text] and run.machine.history.suspect is None


def test_findings_are_counted_and_logged_again_when_twice_as_many() -> None:
    run, effects, _ = saved("a", "a", "b")
    for step in range(20, 100, 10):
        attempt = run.attempt(step)
        for node, digit in zip(run.plan.nodes, "aab", strict=True):
            watched = merged({rank: (report(digit),) for rank in node.ranks})
            effects += run.feed(replace(run.stored(attempt, node.node_id), watched=watched))
        for node in run.plan.nodes:
            effects += run.feed(*(run.copied(attempt, node.node_id, holder) for holder in node.holders))
    warned = [e.text for e in effects if isinstance(e, m.Warn) and "drifted apart" in e.text]
    assert [text.split(":")[0] for text in warned] == [f"Step {step}" for step in (10, 20, 40, 80)]
    samples = [s for s in run.machine.take_samples() if s.metric is telemetry.REPLICA_FINDINGS]
    assert len(samples) == 9
