"""All orders of a few steps, from worlds that are in the middle of something."""

from __future__ import annotations

import pytest

from ray_ckpt.testing.exhaustive import SCENES, explore

DEPTH = 6
NUM_STATES = 400  # of a scene, in the quick tests
MORE_STATES = 10_000  # of a scene, in the slow ones; all of them: python -m ray_ckpt.testing --exhaustive 12


@pytest.mark.parametrize("name", SCENES)
def test_the_promises_hold_in_every_order(name: str) -> None:
    found = explore(name, depth=DEPTH, max_states=NUM_STATES)
    assert found.num_states > 350
    assert found.is_complete or found.num_states == NUM_STATES


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENES)
def test_the_promises_hold_in_every_order_of_up_to_twelve_steps(name: str) -> None:
    found = explore(name, depth=12, max_states=MORE_STATES)
    print(f"{name}: {found}")
    assert found.is_complete or found.num_states == MORE_STATES
