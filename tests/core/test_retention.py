"""Retention: what stays, whatever the history, and what each policy is for."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.config import RunOptions
from ray_ckpt.core import retention as r
from ray_ckpt.errors import FormatError
from ray_ckpt.types import AttemptId, CheckpointInfo, Level

NOW_S = 1_000_000.0


def checkpoint(
    step: int,
    level: Level = Level.LOCAL,
    *,
    age_s: float = 0.0,
    metrics: Mapping[str, float] | None = None,
    pins: Mapping[str, float | None] | None = None,
    seq: int | None = None,
) -> CheckpointInfo:
    return CheckpointInfo(
        id=AttemptId(run_uid="0" * 32, session=1, step=step, attempt=f"{seq or step:016x}"),
        seq=seq or step,
        level=level,
        world_size=1,
        num_nodes=1,
        size_bytes=1,
        root_digest="0" * 32,
        committed_at_s=NOW_S - age_s,
        metrics=metrics or {},
        pins=pins or {},
    )


def view_of(*lineage: CheckpointInfo, off: Sequence[CheckpointInfo] = (), busy: str = "") -> r.RetentionView:
    live = sorted((*lineage, *off), key=lambda c: c.seq)
    return r.RetentionView(live=tuple(live), lineage=lineage, now_s=NOW_S, busy={busy} if busy else set())


def kept_steps(policy: r.Keeper, *lineage: CheckpointInfo) -> list[int]:
    kept = policy.kept(view_of(*lineage))
    return [c.step for c in lineage if c.id.attempt in kept]


def reasons(view: r.RetentionView, *policies: r.Policy, pressure: bool = False) -> dict[int, tuple[str, ...]]:
    """Step -> why it stays, of those that stay."""
    decisions = r.decide(view, policies, pressure=pressure)
    return {d.checkpoint.step: d.reasons for d in decisions if d.kept}


def gone(view: r.RetentionView, *policies: r.Policy, pressure: bool = False) -> dict[int, str]:
    """Step -> why it goes."""
    decisions = r.decide(view, policies, pressure=pressure)
    return {d.checkpoint.step: d.reasons[0] for d in decisions if not d.kept}


# Each policy


def test_last() -> None:
    lineage = [checkpoint(step) for step in (10, 20, 30)]
    assert kept_steps(r.KeepLast(2), *lineage) == [20, 30]
    assert kept_steps(r.KeepLast(5), *lineage) == [10, 20, 30]


def test_every_steps_takes_the_first_at_or_after_each_multiple() -> None:
    lineage = [checkpoint(step) for step in (90, 110, 190, 200, 250, 460, 490)]
    assert kept_steps(r.KeepEverySteps(100), *lineage) == [110, 200, 460]


def test_every_seconds_takes_the_first_of_each_period() -> None:
    ages_s = {
        1: 250.0,
        2: 201.0,
        3: 200.0,
        4: 150.0,
        5: 0.0,
    }  # periods of 100 s end with the ages 200, 100, 0
    lineage = [checkpoint(step, age_s=age_s) for step, age_s in ages_s.items()]
    assert kept_steps(r.KeepEverySeconds(100.0), *lineage) == [1, 3, 5]


def test_milestones() -> None:
    lineage = [checkpoint(step) for step in (2, 3, 8, 24, 30)]
    assert kept_steps(r.KeepMilestones(30, (0.8, 0.1, 0.2)), *lineage) == [3, 8, 24], "3 of 30 is 0.1"
    assert kept_steps(r.KeepMilestones(30, (0.2, 0.25)), *lineage) == [8], "one for two of them"
    assert kept_steps(r.KeepMilestones(300, (0.5,)), *lineage) == []


def test_epochs_keep_the_last_of_each_that_is_over() -> None:
    epochs = [0.0, 0.9, 1.0, math.nan, 1.7, 2.0, 2.1]
    lineage = [checkpoint(step, metrics={"epoch": epoch}) for step, epoch in enumerate(epochs, 1)]
    assert kept_steps(r.KeepEpochs(), *lineage) == [2, 5]
    assert kept_steps(r.KeepEpochs(), *lineage, checkpoint(9)) == [2, 5, 7], "it may be over"
    assert kept_steps(r.KeepEpochs(), checkpoint(9)) == []


def test_best_prefers_the_older_of_equals_and_never_nan_or_nothing() -> None:
    losses = [3.0, math.nan, 1.0, 2.0, 1.0, 1.0]
    lineage = [checkpoint(step, metrics={"loss": loss}) for step, loss in enumerate(losses, 1)]
    lineage.append(checkpoint(7))
    assert kept_steps(r.KeepBest("loss", "min", 2), *lineage) == [3, 5]
    assert kept_steps(r.KeepBest("loss", "max", 2), *lineage) == [1, 4]
    assert kept_steps(r.KeepBest("loss", "min", 9), *lineage) == [1, 3, 4, 5, 6]
    assert kept_steps(r.KeepBest("accuracy", "max", 2), *lineage) == []


# Together


def test_reasons_are_for_people() -> None:
    old = checkpoint(1, metrics={"loss": 0.5})
    new = checkpoint(3, Level.REPLICATED)
    view = view_of(old, checkpoint(2), new, off=[checkpoint(4)])
    policies = (r.KeepLast(1), r.KeepBest("loss", "min", 2))
    assert reasons(view, *policies) == {
        1: ("1 of 2 best by loss (min)",),
        3: ("newest local", "newest replicated", "last 1"),
    }
    assert gone(view, *policies) == {2: "no policy keeps it", 4: "off the lineage"}


def test_ttl_overrules_policies_but_not_what_must_stay() -> None:
    old = [
        checkpoint(1, Level.DURABLE, age_s=20),
        checkpoint(2, Level.REPLICATED, age_s=20, pins={"eval": None}),
        checkpoint(3, age_s=20),
        checkpoint(4, age_s=20),
        checkpoint(5, Level.REPLICATED, age_s=20),
    ]
    view = view_of(*old, checkpoint(6, age_s=10), checkpoint(7, age_s=5), busy=old[3].id.attempt)
    kept = reasons(view, r.KeepLast(10), r.TimeToLive(10.0), r.TimeToLive(30.0))
    assert list(kept) == [1, 2, 4, 5, 6, 7]
    assert kept[1] == ("newest durable",) and kept[2] == ("pinned by eval",) and kept[4] == ("in use",)
    assert gone(view, r.KeepLast(10), r.TimeToLive(10.0)) == {3: "older than 10 s"}


def test_durable_ones_stay_until_a_newer_one_is_known_to_be_intact() -> None:
    lineage = [checkpoint(step, Level.DURABLE) for step in (1, 2, 3, 4)] + [checkpoint(5)]
    attempts = {c.step: c.id.attempt for c in lineage}

    def kept(*unsafe: int) -> dict[int, tuple[str, ...]]:
        view = replace(view_of(*lineage), unsafe_remote={attempts[step] for step in unsafe})
        return reasons(view, r.KeepLast(1))

    assert list(kept()) == list(kept(1, 2, 3)) == [4, 5]
    assert kept(4)[3] == ("newest durable",) and list(kept(4)) == [3, 4, 5]
    assert list(kept(2, 3, 4)) == list(kept(1, 2, 3, 4)) == [1, 2, 3, 4, 5]


def test_lost_ones_go_when_a_newer_one_is_intact_on_the_storage_path() -> None:
    lost = [checkpoint(1, Level.DURABLE), checkpoint(2, pins={"a": None}), checkpoint(3), checkpoint(5)]
    view = view_of(checkpoint(4, Level.DURABLE), checkpoint(6))
    assert [c.step for c in r.outlived(lost, view)] == [1, 3]
    assert not r.outlived(lost, view_of(checkpoint(6)))
    assert not r.outlived(lost, replace(view, unsafe_remote={view.live[0].id.attempt}))


def test_pins_hold_until_they_expire() -> None:
    pinned = [
        checkpoint(1, pins={"a": NOW_S + 1, "b": None}),
        checkpoint(2, pins={"a": NOW_S}),
        checkpoint(3, pins={"a": NOW_S - 1, "b": NOW_S + 1}),
    ]
    kept = reasons(view_of(*pinned[:2], checkpoint(9), off=pinned[2:]), r.KeepLast(1))
    assert kept[1] == ("pinned by a", "pinned by b") and kept[3] == ("pinned by b",) and 2 not in kept


def test_pressure_gives_up_what_only_policies_keep_and_only_nodes_hold() -> None:
    lineage = [
        checkpoint(1, Level.DURABLE),
        checkpoint(2, pins={"a": None}),
        checkpoint(3),
        checkpoint(4),
        checkpoint(5, Level.DURABLE),
        checkpoint(6, Level.REPLICATED),
        checkpoint(7),
        checkpoint(8),
    ]
    view = view_of(*lineage, busy=lineage[2].id.attempt)
    assert not gone(view, r.KeepLast(8))
    assert list(reasons(view, r.KeepLast(8), pressure=True)) == [1, 2, 3, 5, 6, 8]
    assert list(reasons(view, r.KeepLast(1), pressure=True)) == [2, 3, 5, 6, 8], "durable ones get no favour"
    assert gone(view, r.KeepLast(8), pressure=True)[4] == "makes room on the nodes"


# Whatever the history

METRIC_VALUES = st.sampled_from([math.nan, -math.inf, 0.0, 1.0, 2.0, math.inf])
POLICIES = st.one_of(
    st.builds(r.KeepLast, st.integers(1, 5)),
    st.builds(r.KeepEverySteps, st.integers(1, 20)),
    st.builds(r.KeepEverySeconds, st.floats(1e-3, 1e9)),
    st.builds(
        r.KeepMilestones,
        st.integers(1, 200),
        st.lists(st.floats(0, 1, exclude_min=True), min_size=1, max_size=5).map(tuple),
    ),
    st.just(r.KeepEpochs()),
    st.builds(
        r.KeepBest, st.sampled_from(["loss", "epoch"]), st.sampled_from(["min", "max"]), st.integers(1, 4)
    ),
    st.builds(r.TimeToLive, st.floats(1e-3, 1e9)),
)


@st.composite
def views(draw: st.DrawFn) -> r.RetentionView:
    count = draw(st.integers(0, 12))
    step = 0
    live, lineage = [], []
    for seq in range(1, count + 1):
        step += draw(st.integers(1, 15))
        c = checkpoint(
            step,
            draw(st.sampled_from(Level)),
            age_s=draw(st.floats(-10, 1000)),
            metrics=draw(st.dictionaries(st.sampled_from(["loss", "epoch"]), METRIC_VALUES)),
            pins=draw(st.dictionaries(st.sampled_from("ab"), st.none() | st.floats(NOW_S - 9, NOW_S + 9))),
            seq=seq,
        )
        live.append(c)
        if draw(st.booleans()):
            lineage.append(c)
    some = st.sets(st.sampled_from([c.id.attempt for c in live])) if live else st.just(set())
    busy, unsafe = draw(some), draw(some)
    return r.RetentionView(
        live=tuple(live), lineage=tuple(lineage), now_s=NOW_S, busy=busy, unsafe_remote=unsafe
    )


def without(view: r.RetentionView, attempts: set[str]) -> r.RetentionView:
    return r.RetentionView(
        live=tuple(c for c in view.live if c.id.attempt not in attempts),
        lineage=tuple(c for c in view.lineage if c.id.attempt not in attempts),
        now_s=view.now_s,
        busy=view.busy,
        unsafe_remote=view.unsafe_remote,
    )


def retired(view: r.RetentionView, policies: Sequence[r.Policy], *, pressure: bool = False) -> set[str]:
    decisions = r.decide(view, policies, pressure=pressure)
    assert [d.checkpoint for d in decisions] == list(view.live), "each once, in log order"
    assert all(d.reasons for d in decisions)
    return {d.checkpoint.id.attempt for d in decisions if not d.kept}


@given(views(), st.lists(POLICIES, max_size=4), st.booleans())
def test_what_must_stay_stays(view: r.RetentionView, policies: list[r.Policy], pressure: bool) -> None:
    """P5: no policy, no age and no full disk takes what is in use, pinned, or the newest of its level."""
    going = retired(view, policies, pressure=pressure)
    assert not going & set(view.busy)
    assert not going & {c.id.attempt for c in view.live if r.pinned_by(c, view.now_s)}
    for level in Level:
        if reached := [c for c in view.lineage if c.level >= level]:
            assert reached[-1].id.attempt not in going
        elif others := [c for c in view.live if c.level >= level]:
            assert others[-1].id.attempt not in going, "the last one of its level, even off the lineage"
    intact = [c for c in view.lineage if c.level is Level.DURABLE and c.id.attempt not in view.unsafe_remote]
    assert not going & {c.id.attempt for c in intact[-1:]}


@given(views(), st.lists(POLICIES, max_size=4), st.booleans())
def test_what_a_policy_keeps_stays(view: r.RetentionView, policies: list[r.Policy], pressure: bool) -> None:
    going = retired(view, policies, pressure=pressure)
    if not pressure and not any(isinstance(p, r.TimeToLive) for p in policies):
        for policy in policies:
            assert not isinstance(policy, r.TimeToLive) and not going & set(policy.kept(view))
    assert going >= retired(view, [*policies, r.KeepLast(3)], pressure=pressure), "more policies keep more"
    assert going >= retired(view, policies), "a full disk never keeps more"


@given(views(), st.lists(POLICIES, max_size=4), st.booleans())
def test_deciding_again_changes_nothing(
    view: r.RetentionView, policies: list[r.Policy], pressure: bool
) -> None:
    """P6: what is left after a decision is all there is to keep."""
    going = retired(view, policies, pressure=pressure)
    assert not retired(without(view, going), policies, pressure=pressure)


@given(views(), st.integers(1, 5))
def test_what_may_go_goes(view: r.RetentionView, count: int) -> None:
    """P8: what stays is bounded by the policy, one per level, what is busy, pinned or perhaps damaged."""
    pinned = [c for c in view.live if r.pinned_by(c, view.now_s)]
    left = len(view.live) - len(retired(view, [r.KeepLast(count)]))
    assert left <= count + len(Level) + len(view.busy) + len(pinned) + len(view.unsafe_remote)


# Tiers


def test_only_older_durable_checkpoints_leave_the_nodes() -> None:
    lineage = [
        checkpoint(1, Level.DURABLE),
        checkpoint(2),
        checkpoint(3, Level.DURABLE),
        checkpoint(4, Level.DURABLE),
        checkpoint(5),
    ]
    off = [checkpoint(6, Level.DURABLE)]
    view = view_of(*lineage, off=off)
    attempts = {c.step: c.id.attempt for c in view.live}
    assert r.choose_evictions(view, keep_local=2) == (attempts[1], attempts[3], attempts[6])
    assert r.choose_evictions(view, keep_local=3) == (attempts[1], attempts[6])
    busy = view_of(*lineage, off=off, busy=attempts[1])
    assert r.choose_evictions(busy, keep_local=3) == (attempts[6],)


def test_before_a_new_lineage_begins_the_newest_stays_on_the_nodes() -> None:
    view = view_of(off=[checkpoint(1, Level.DURABLE), checkpoint(2, Level.DURABLE)])
    assert r.choose_evictions(view, keep_local=1) == (view.live[0].id.attempt,)


@given(views(), st.integers(1, 4))
def test_eviction_never_lowers_the_level_in_the_log(view: r.RetentionView, keep_local: int) -> None:
    going = set(r.choose_evictions(view, keep_local=keep_local))
    assert all(c.level is Level.DURABLE for c in view.live if c.id.attempt in going)
    assert not going & {*view.busy, *view.unsafe_remote}
    for newest in (view.lineage or view.live)[-1:]:
        assert newest.id.attempt not in going


@pytest.mark.parametrize(
    ("free_bytes", "chosen"),
    [(100, ""), (99, "1"), (50, "12"), (40, "124"), (0, "124")],  # of 1,000: 0.9 and 0.8 in use are too much
)
def test_a_full_disk_gives_up_the_oldest_first(free_bytes: int, chosen: str) -> None:
    lineage = [checkpoint(step, Level.LOCAL if step == 3 else Level.DURABLE) for step in range(1, 7)]
    held_bytes = {c.id.attempt: {1: 101, 2: 50}.get(c.step, 10) for c in lineage if c.step != 5}
    going = r.choose_evictions_for_space(
        view_of(*lineage),
        held_bytes=held_bytes,
        free_bytes=free_bytes,
        total_bytes=1000,
        high_watermark=0.9,
        low_watermark=0.8,
    )
    assert "".join(attempt[-1] for attempt in going) == chosen


# Text


WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
ANY_METRIC = st.builds(r.KeepBest, WORDS, st.sampled_from(["min", "max"]), st.integers(1, 10**17))


@given(st.lists(POLICIES | ANY_METRIC, max_size=6).map(tuple))
def test_a_policy_survives_its_text(policies: tuple[r.Policy, ...]) -> None:
    assert r.from_text(r.to_text(policies)) == policies


def test_the_text_of_all_options() -> None:
    options = RunOptions(
        keep_every=1000,
        keep_every_s=3600,
        keep_milestones=(0.25, 1),
        total_steps=8000,
        keep_epochs=True,
        keep_best=("val/loss 2", "min", 2),
        ttl_s=86400,
    )
    text = r.to_text(r.policies_of(options))
    assert text == (
        "last=3 every_steps=1000 every_s=3600.0 milestones=8000:0.25,1.0 epochs"
        " best=val/loss%202:min:2 ttl_s=86400.0"
    )
    assert r.to_text(r.from_text(text)) == text
    assert r.policies_of(RunOptions()) == (r.KeepLast(3),)
    assert r.from_text("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "first=3",
        "last",
        "last=",
        "last=0",
        "last=-1",
        "last=1_0",
        "last=" + "9" * 5000,
        "every_steps=1.5",
        "every_s=0",
        "every_s=nan",
        "ttl_s=inf",
        "ttl_s=x",
        "milestones=0.5",
        "milestones=100:",
        "milestones=100:1.5",
        "milestones=0:0.5",
        "epochs=2",
        "best=loss",
        "best=:min:2",
        "best=loss:mid:2",
        "best=loss:min:0",
        "best=%ff:min:1",
        "last=3 " * 5000,
    ],
)
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(FormatError, match=r"(?i)retention policy") as caught:
        r.from_text(text)
    assert len(str(caught.value)) < 400


@given(
    st.sampled_from(["last", "every_s", "milestones", "epochs", "best"]),
    st.text("=:,%1e-.mina ", max_size=20),
)
def test_no_text_does_more_than_raise_a_format_error(key: str, rest: str) -> None:
    with contextlib.suppress(FormatError):
        assert r.to_text(r.from_text(f"{key}={rest}"))


# Size


@pytest.mark.slow
def test_the_time_to_decide_grows_with_the_length_of_a_run_and_not_with_its_square() -> None:
    """`jobs.bench --only retention` has the time itself."""
    lineage = tuple(
        checkpoint(
            step, Level(1 + step % 3), age_s=2e5 - step, metrics={"loss": 1 / step, "epoch": step // 99}
        )
        for step in range(1, 100_001)
    )
    policies = r.from_text(
        "last=3 every_steps=100 every_s=60 milestones=100000:0.5 epochs best=loss:min:5 ttl_s=190000"
    )

    def decide(length: int) -> tuple[float, Sequence[r.Decision]]:
        part = lineage[:length]
        view = r.RetentionView(live=part, lineage=part, now_s=NOW_S)
        began_s = time.process_time()
        decisions = r.decide(view, policies)
        r.choose_evictions(view, keep_local=2)
        return time.process_time() - began_s, decisions

    short_s = min(decide(10_000)[0] for _ in range(3))  # the best: others may need the processor
    long_s = min(decide(100_000)[0] for _ in range(3))
    assert long_s < 30 * short_s
    decisions = decide(100_000)[1]
    assert 2000 < sum(d.kept for d in decisions) < 5000
