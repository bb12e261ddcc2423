"""Orders that reach an agent late: of a coordinator that was replaced, or for a group that has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ray_ckpt.actors.agent.arena import RankArena
from ray_ckpt.actors.messages import OpenRun, RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import SessionNode, SessionPlan
from ray_ckpt.errors import Fenced, RunSuperseded, Unavailable
from ray_ckpt.preemption.cloud import METADATA_ENV
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.types import AttemptId, Level
from tests.actors.test_captures import sealed
from tests.actors.test_hanging_storage import UID, make_agent

SIZE_BYTES = 1 << 16


def spec_of(tmp_path: Path, replicas: int) -> RunSpec:
    options = RunOptions(staging=str(tmp_path / "staging"), replicas=replicas, memory="single")
    return RunSpec(name="run", storage_path=str(tmp_path), options=options)


def test_the_options_of_a_replaced_coordinator_do_not_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METADATA_ENV, "off")
    monkeypatch.setattr(RemoteTier, "check_shared", lambda *_, **__: None)

    async def story() -> list[int]:
        agent, used = make_agent(), []
        for replicas, epoch in ((1, 4), (2, 3), (3, 5)):
            order = OpenRun(spec=spec_of(tmp_path, replicas), run_uid=UID, nonce="", epoch=epoch)
            try:
                await agent.open_run(order)
                assert epoch != 3
            except Fenced:
                assert epoch == 3
            used.append(agent._runs.get(UID).spec.options.replicas)
        return used

    assert asyncio.run(story()) == [1, 1, 3]


def test_no_memory_is_made_for_a_rank_of_a_released_run(tmp_path: Path) -> None:
    """It would stay until the next group comes or the run is put away."""

    async def story() -> dict[int, RankArena]:
        agent = make_agent()
        run = await agent._runs.take_up(spec_of(tmp_path, 1), UID)
        here = SessionNode(node_index=0, node_id="node", ranks=(0,), holders=())
        plan = SessionPlan(run_uid=UID, session=1, epoch=1, world_size=1, nodes=(here,), resume=None)
        await run.obey(n.SessionStarted(plan=plan, node_id="node", epoch=1))
        await agent.open_arena(UID, plan.session_key, 0, SIZE_BYTES, named=False)
        await run.obey(n.RunReleased(session_key=plan.session_key, is_finished=True, epoch=1))
        with pytest.raises(Unavailable, match="session is over"):
            await agent.open_arena(UID, plan.session_key, 0, SIZE_BYTES, named=False)
        return run.memory.arenas

    assert asyncio.run(story()) == {}


def test_an_ended_session_takes_no_memory_and_its_late_captures_get_its_end(tmp_path: Path) -> None:
    """A node without ranks of the next group would keep it, and count it against other runs."""

    async def story() -> None:
        agent = make_agent()
        run = await agent._runs.take_up(spec_of(tmp_path, 1), UID)
        here = SessionNode(node_index=0, node_id="node", ranks=(0, 1), holders=())
        plan = SessionPlan(run_uid=UID, session=1, epoch=1, world_size=2, nodes=(here,), resume=None)
        await run.obey(n.SessionStarted(plan=plan, node_id="node", epoch=1))
        for rank in here.ranks:
            await agent.reserve(UID, plan.session_key, rank, SIZE_BYTES, named=False)
        await agent.open_arena(UID, plan.session_key, 0, SIZE_BYTES, named=False)
        for _ in range(2):  # the order may be repeated
            await agent.end_session(UID, plan.session_key, RunSuperseded("over"), 1)
        await run.memory.freeing.wait()
        assert not run.memory.arenas and not run.memory._unfilled_bytes()
        late = AttemptId(run_uid=UID, epoch=1, session=1, step=10, attempt="late")
        await agent.seal(UID, sealed(0, late))
        outcome = await agent.await_outcome(UID, late, Level.LOCAL)
        assert isinstance(outcome.error, RunSuperseded)

    asyncio.run(story())
