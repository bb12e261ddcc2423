"""Reports of several nodes merged into one by a relay."""

from __future__ import annotations

import random
from dataclasses import replace

from ray_ckpt.core import messages as m
from ray_ckpt.core.progress import merge
from ray_ckpt.core.values import Captured, RankProgress
from ray_ckpt.types import AttemptId

KEY = (1, 2)
ATTEMPT = AttemptId(run_uid="u", epoch=1, session=2, step=5, attempt="a")


def report(first: int, *progress: RankProgress, **more: object) -> m.RanksProgressed:
    ranks = {first + k: found for k, found in enumerate(progress)}
    return replace(m.RanksProgressed(session_key=KEY, ranks=ranks), **more)  # type: ignore[arg-type]


def test_ranks_in_step_share_one_progress_with_the_largest_times() -> None:
    quick, slow = (
        RankProgress(step=7, saved_step=5, since_s=0.1, step_s=2.0, stall_s=0.3),
        RankProgress(step=7, saved_step=5, since_s=0.4, step_s=1.0, stall_s=0.5),
    )
    behind = RankProgress(step=6, saved_step=5, since_s=1.5)
    (merged,) = merge([report(0, quick, slow), report(2, slow, behind)])
    common = RankProgress(step=7, saved_step=5, since_s=0.4, step_s=2.0, stall_s=0.5)
    assert merged.ranks == {0: common, 1: common, 2: common, 3: behind}
    assert merged.ranks[0] is merged.ranks[2], "so that it is sent once"


def test_captures_are_kept_and_barriers_and_sessions_stay_apart() -> None:
    progress = RankProgress(step=7, saved_step=5)
    captured = [Captured(attempt=ATTEMPT, ranks=(rank,)) for rank in (0, 1)]
    first = report(0, progress, captured=(captured[0],))
    others = report(1, progress, captured=(captured[1],)), report(2, progress, met=4), report(3, progress)
    merged = merge([first, *others, replace(report(4, progress), session_key=(1, 1))])
    assert [(e.session_key, e.met, sorted(e.ranks)) for e in merged] == [
        (KEY, 0, [0, 1, 3]),
        (KEY, 4, [2]),
        ((1, 1), 0, [4]),
    ]
    assert merged[0].captured == tuple(captured)


def test_no_step_or_count_of_a_rank_is_lost() -> None:
    chance = random.Random(1)
    for _ in range(100):
        events = [
            report(
                8 * node,
                *(
                    RankProgress(
                        step=chance.randrange(3),
                        saved_step=chance.randrange(3),
                        since_s=chance.random(),
                        missed=chance.randrange(2),
                        updates=chance.randrange(2),
                        is_over=chance.random() < 0.1,
                    )
                    for _ in range(8)
                ),
            )
            for node in range(4)
        ]
        (merged,) = merge(events)
        for event in events:
            for rank, progress in event.ranks.items():
                found = merged.ranks[rank]
                assert found.since_s >= progress.since_s
                assert replace(found, since_s=progress.since_s) == progress
