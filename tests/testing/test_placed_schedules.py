"""Random schedules keep the promises wherever the options `replica_nodes` and `copies` place the copies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ray_ckpt.config import RunOptions
from ray_ckpt.testing import parts, schedules

NUM_SEEDS = 6
SIZES = range(2, 6)  # nodes; half of the live ones have the label, in two racks


def test_promises_hold_with_labelled_holders_and_copies_in_the_rack(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = parts.random_options

    def options(chance: random.Random, *, keep_local_at_end: bool) -> RunOptions:
        found = drawn(chance, keep_local_at_end=keep_local_at_end)
        found = replace(found, replicas=max(found.replicas, 1))
        if seed % 3:
            found = replace(found, replica_nodes="role=storage")
        if seed % 3 != 1:
            found = replace(found, copies=("rack", *["spread"] * (found.replicas - 1)))
        return found

    monkeypatch.setattr(schedules, "random_options", options)
    commits = 0
    for seed in range(NUM_SEEDS):
        commits += schedules.play(seed, sizes=SIZES).num_commits
    assert commits > 3 * NUM_SEEDS
