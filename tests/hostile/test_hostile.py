"""Seeds of `python -m tests.hostile`, and single faults that it has found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ray_ckpt.types import RootOf
from tests.hostile import mutations, readers
from tests.hostile.__main__ import NUM_READERS, some
from tests.hostile.play import Player
from tests.support.examples import every_few
from tests.support.roots import ROOTS

LIES = sorted(kind for kind in mutations.LIES if kind != "state: many small lists")


@pytest.mark.slow
def test_readers_of_damaged_runs_name_the_file_or_are_right(tmp_path: Path) -> None:
    player = Player(tmp_path / "at")
    found = [v for seed in range(100) for v in player.play(seed, some(seed, NUM_READERS))]
    assert not found, "\n".join(map(str, found))
    assert player.num_errors > player.num_answers / 10, "the damage has no effect"


def test_a_few_seeds(tmp_path: Path) -> None:
    player = Player(tmp_path / "at")
    assert [v for seed in (1, 2) for v in player.play(seed, some(seed, 2))] == []


@pytest.mark.parametrize(
    ("reader", "kind"),
    [*(("load", kind) for kind in LIES), *every_few((("diff", kind) for kind in LIES), 3)],
)
@pytest.mark.parametrize("root_of", ROOTS)
def test_a_lie_with_right_digests(kind: str, reader: str, root_of: RootOf, tmp_path: Path) -> None:
    run = mutations.build(tmp_path, mutations.LIES[kind](random.Random(1)), root_of=root_of)
    (answer,) = readers.answers_of(run, [reader])
    assert not answer.problem
    assert not answer.code or any(n in answer.text for n in (mutations.STATE, mutations.SHARD, "manifest-"))
