"""The end of an agent's process: no memory of its ranks is left in /dev/shm."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ray_ckpt.actors.agent import actor
from ray_ckpt.actors.agent.actor import NodeAgent
from ray_ckpt.actors.agent.arena import make_arena
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.runs import NodeRuns
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.core import node_messages as n
from ray_ckpt.errors import RunInUse
from ray_ckpt.transport.credentials import ServiceKeys

UID = "a" * 32


def exited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_refused: bool) -> tuple[int, list[int]]:
    """Order the agent of a run with an arena to end. Return how many files are left, and the exit codes."""
    codes: list[int] = []
    monkeypatch.setattr(actor, "EXIT_AFTER_S", 0.0)
    monkeypatch.setattr(os, "_exit", codes.append)

    async def story() -> int:
        agent = object.__new__(NodeAgent)  # its constructor needs Ray
        agent._runs = NodeRuns(Node("node", ServiceKeys.make(datetime.now(UTC))))
        options = RunOptions(staging=str(tmp_path / "staging"))
        run = await agent._runs.take_up(RunSpec(name="run", storage_path=str(tmp_path), options=options), UID)
        arena = make_arena(0, 4096, mode="single", all_bytes=1, free_bytes=1 << 30, named=True)
        run.memory.arenas[0] = arena
        page = Path(run.memory.signal_page(named=True))
        try:
            if is_refused:
                monkeypatch.setattr(run.machine, "handle", lambda order: (n.RefuseExit(),))
                with pytest.raises(RunInUse):
                    await agent.exit({})
            else:
                await agent.exit(None)
            ended = asyncio.Event()
            asyncio.get_running_loop().call_later(0, ended.set)  # behind the agent's own timer
            await ended.wait()
            return Path(arena.buffers[0].path).exists() + page.exists()
        finally:
            run.memory.close()

    return asyncio.run(story()), codes


def test_an_agent_that_ends_leaves_no_memory_in_dev_shm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files there would stay until another agent of this user starts."""
    assert exited(tmp_path, monkeypatch, is_refused=False) == (0, [0])


def test_an_agent_that_may_not_end_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exited(tmp_path, monkeypatch, is_refused=True) == (2, [])
