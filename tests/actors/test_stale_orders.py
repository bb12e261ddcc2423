"""Orders that reach an agent late: of a coordinator that was replaced, or for a group that has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ray_ckpt.actors.messages import OpenRun, RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import Fenced
from ray_ckpt.preemption.cloud import METADATA_ENV
from ray_ckpt.storage.remote.tier import RemoteTier
from tests.actors.test_hanging_storage import UID, make_agent


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
