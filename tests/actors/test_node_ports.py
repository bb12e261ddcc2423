"""Work of a node's host on Ray, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from ray_ckpt.actors.agent.ports import RayNodePorts
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.step_states import keep


def test_the_newest_state_is_sent_when_newer_ones_came_during_the_lookup_of_the_peer() -> None:
    """Of each rank only the states of a few steps are kept."""
    sent: list[tuple[str, tuple[int, int], str]] = []
    run: Any = SimpleNamespace(run_uid="uid", step_states={0: {1: "state 1"}}, sending_states=set())

    async def keep_state(run_uid: str, session_key: tuple[int, int], state: str) -> None:
        sent.append((run_uid, session_key, state))

    async def find(nodes: list[str]) -> dict[str, Any]:
        if not sent:
            for step in range(2, 6):
                keep(run.step_states, 0, step, f"state {step}")
        return {"peer": SimpleNamespace(keep_state=SimpleNamespace(remote=keep_state))}

    node = cast(Any, SimpleNamespace(agents=SimpleNamespace(find=find)))
    work = n.SendStepState(session_key=(1, 1), rank=0, step=1, peer="peer")
    asyncio.run(RayNodePorts(node, run, {})._send_step_state(work))
    assert sent == [("uid", (1, 1), "state 5")] and not run.sending_states


def test_no_state_is_sent_when_a_new_session_began_during_the_lookup_of_the_peer() -> None:
    run: Any = SimpleNamespace(run_uid="uid", step_states={0: {1: "state 1"}}, sending_states=set())

    async def find(nodes: list[str]) -> dict[str, Any]:
        run.step_states = {}
        return {"peer": SimpleNamespace()}

    node = cast(Any, SimpleNamespace(agents=SimpleNamespace(find=find)))
    work = n.SendStepState(session_key=(1, 1), rank=0, step=1, peer="peer")
    asyncio.run(RayNodePorts(node, run, {})._send_step_state(work))
