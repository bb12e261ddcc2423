"""Random schedules with parity groups keep the promises, and bugs in the groups are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ray_ckpt.core import holders, parity_files, saves
from ray_ckpt.core.attempts import Attempt
from ray_ckpt.core.values import GroupPlaces
from ray_ckpt.testing.oracle import Violation
from ray_ckpt.testing.schedules import PARITY_NODES, play
from ray_ckpt.types import ParityGroup

NUM_SEEDS = 6  # more: python -m ray_ckpt.testing --parity 6:2000
MAX_SEEDS = 400  # within which a planted bug must show

Plant = Callable[[pytest.MonkeyPatch], None]


def test_promises_hold_in_random_schedules_with_parity() -> None:
    coded = commits = 0
    for seed in range(NUM_SEEDS):
        played = play(seed, sizes=PARITY_NODES, with_parity=True)
        coded, commits = coded + played.num_coded, commits + played.num_commits
    assert coded > NUM_SEEDS and commits > NUM_SEEDS


def test_damage_of_a_checkpoint_that_is_no_longer_live_ends_the_count_of_its_copy() -> None:
    play(760572, sizes=PARITY_NODES, with_parity=True)


def test_a_schedule_without_parity_makes_no_parity_files() -> None:
    assert not any(play(seed).num_coded for seed in range(5))


def a_failed_parity_file_counts(patch: pytest.MonkeyPatch) -> None:
    handle = saves.Saves.code_ended
    patch.setattr(saves.Saves, "code_ended", lambda self, event: handle(self, replace(event, error=None)))


def a_group_tolerates_one_loss_more(patch: pytest.MonkeyPatch) -> None:
    tolerance = parity_files.tolerance

    def more(places: GroupPlaces) -> int:
        found = tolerance(places)
        return found + 1 if 0 <= found < places.group.parity else found

    patch.setattr(holders, "tolerance", more)


def a_parity_file_counts_when_it_is_ordered(patch: pytest.MonkeyPatch) -> None:
    order = saves.Saves._code

    def early(self: saves.Saves, attempt: Attempt, group: ParityGroup) -> object:
        for code in order(self, attempt, group):
            self._context.holders.report_parity(code.attempt.attempt, group, code.node_index, code.node_id)
            yield code

    patch.setattr(saves.Saves, "_code", early)


BUGS: tuple[tuple[Plant, str], ...] = (
    (a_failed_parity_file_counts, "P2"),
    (a_group_tolerates_one_loss_more, "P2"),
    (a_parity_file_counts_when_it_is_ordered, "P2"),
)


@pytest.mark.parametrize(("plant", "promise"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
def test_a_planted_bug_is_found(plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation, match=f"^({promise}): "):
        for seed in range(MAX_SEEDS):
            play(seed, sizes=PARITY_NODES, with_parity=True)
