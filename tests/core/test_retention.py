"""Retention: what stays, whatever the history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.core.retention import choose_retirements
from ray_ckpt.types import AttemptId, CheckpointInfo, Level


def checkpoint(step: int, level: Level, *, session: int = 1) -> CheckpointInfo:
    return CheckpointInfo(
        id=AttemptId(run_uid="0" * 32, session=session, step=step, attempt=f"{step:016x}"),
        seq=step,
        level=level,
        world_size=1,
        num_nodes=1,
        size_bytes=1,
        root_digest="0" * 32,
        committed_at_s=0.0,
        metrics={},
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[CheckpointInfo], list[CheckpointInfo], int, set[str]]:
    levels = draw(st.lists(st.sampled_from(Level), max_size=12))
    live = [checkpoint(step, level) for step, level in enumerate(levels, 1)]
    on_lineage = draw(st.lists(st.booleans(), min_size=len(live), max_size=len(live)))
    lineage = [c for c, on in zip(live, on_lineage, strict=True) if on]
    busy = draw(st.sets(st.sampled_from([c.id.attempt for c in live]))) if live else set()
    return live, lineage, draw(st.integers(1, 5)), busy


@given(histories())
def test_what_must_stay_stays(
    history: tuple[list[CheckpointInfo], list[CheckpointInfo], int, set[str]],
) -> None:
    live, lineage, keep_last, busy = history
    chosen = choose_retirements(live=live, lineage=lineage, keep_last=keep_last, busy=busy)
    gone = [choice.attempt for choice in chosen]
    assert gone == [c.id.attempt for c in live if c.id.attempt in gone], "oldest first, each once"
    assert not busy & set(gone)
    assert not {c.id.attempt for c in lineage[-keep_last:]} & set(gone)
    for level in Level:
        if reached := [c for c in lineage if c.level >= level]:
            assert reached[-1].id.attempt not in gone
        elif others := [c for c in live if c.level >= level]:
            assert others[-1].id.attempt not in gone, "the last one of its level, even off the lineage"


@given(histories())
def test_what_may_go_goes(history: tuple[list[CheckpointInfo], list[CheckpointInfo], int, set[str]]) -> None:
    """P8: what stays is bounded by keep_last, one per level, and what is busy."""
    live, lineage, keep_last, busy = history
    chosen = choose_retirements(live=live, lineage=lineage, keep_last=keep_last, busy=busy)
    assert len(live) - len(chosen) <= keep_last + len(Level) + len(busy)
    left = [c for c in live if c.id.attempt not in {x.attempt for x in chosen}]
    still = [c for c in lineage if c in left]
    assert not choose_retirements(live=left, lineage=still, keep_last=keep_last, busy=busy)


def test_reasons_are_for_people() -> None:
    old, new = [checkpoint(s, Level.REPLICATED) for s in (1, 2)]
    off = checkpoint(3, Level.LOCAL, session=2)
    chosen = choose_retirements(live=[old, new, off], lineage=[old, new], keep_last=1, busy=())
    assert [(c.attempt[-1], c.reason) for c in chosen] == [
        ("1", "older than the last 1"),
        ("3", "off the lineage"),
    ]
