"""All orders of a few steps, from worlds that are in the middle of something."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.testing.exhaustive import SCENES, explore
from tests.support.examples import every_few

DEPTH = 6
NUM_STATES = 200  # of a scene, in the quick tests
MORE_STATES = 10_000  # of a scene, in the slow ones; all of them: python -m ray_ckpt.testing --exhaustive 12


@pytest.mark.parametrize("name", every_few(SCENES, 3))
def test_the_promises_hold_in_every_order(name: str) -> None:
    found = explore(name, depth=DEPTH, max_states=NUM_STATES)
    assert found.num_states > 175
    assert found.is_complete or found.num_states == NUM_STATES


@pytest.mark.parametrize("change", [{"now_s": 1.0}, {"domains": {"east-0": "rack-9"}}])
def test_a_change_of_what_the_parts_of_a_coordinator_share_is_another_state(change: dict[str, Any]) -> None:
    scene = SCENES["collector"]()
    before = scene.key()
    assert before == SCENES["collector"]().key()
    (coordinator,) = scene.world.coordinators.values()
    for name, value in change.items():
        setattr(coordinator.machine._context, name, value)
    assert scene.key() != before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENES)
def test_the_promises_hold_in_every_order_of_up_to_twelve_steps(name: str) -> None:
    found = explore(name, depth=12, max_states=MORE_STATES)
    print(f"{name}: {found}")
    assert found.is_complete or found.num_states == MORE_STATES
