"""What the coordinator makes of notices that a node is about to go."""

from __future__ import annotations

import asyncio
import time

from ray_ckpt.actors import ray_state
from ray_ckpt.actors.coordinator import MAX_NOTICE_S, NOTICE_HOLDS_S, Coordinator
from ray_ckpt.notices import Notice

NODES = ray_state.NodesNow(live=("n",), draining=frozenset(), left_s={}, domains={})


def told(*notices: Notice) -> Coordinator:
    async def tell() -> Coordinator:
        coordinator = Coordinator()
        for notice in notices:
            await coordinator.node_leaves("n", notice)
        return coordinator

    return asyncio.run(tell())


def test_of_several_notices_the_soonest_counts_whatever_their_order() -> None:
    now_s = time.time()
    soon, late, vague = (
        Notice("sigterm", "", now_s + 25),
        Notice("aws", "", now_s + 120),
        Notice("gcp", "", None),
    )
    assert told(soon, late, vague)._left_s(NODES)["n"] < 26
    assert told(vague, late, soon)._left_s(NODES)["n"] < 26


def test_a_time_in_ten_years_is_forgotten_unless_it_is_said_again() -> None:
    coordinator = told(Notice("aws", "", time.time() + 3e8))
    (until_s,) = (until_s for _, until_s in coordinator._leaving.values())
    assert until_s <= time.time() + MAX_NOTICE_S + NOTICE_HOLDS_S


def test_a_signal_to_a_process_of_the_last_group_says_nothing_of_the_next_one() -> None:
    now_s = time.time()
    coordinator = told(Notice("sigterm", "", now_s + 25), Notice("aws", "", now_s + 120))
    coordinator._forget_signals({"m"})
    assert len(coordinator._leaving) == 2
    coordinator._forget_signals({"n"})
    assert list(coordinator._leaving) == [("n", "aws")]
