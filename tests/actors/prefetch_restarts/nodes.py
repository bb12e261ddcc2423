"""Machines of this process: a disk, and the real agent of a node, whose coordinator is in this process."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray

from ray_ckpt.actors.agent.actor import NodeAgent
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import ADDRESS_ENV, RunOptions
from ray_ckpt.core import node_messages as n
from ray_ckpt.errors import Unavailable
from ray_ckpt.types import AttemptId
from tests.transport.peers import PLAIN_KEYS, UID

Requested = Callable[..., Awaitable[Any]]  # (node id, method, arguments)


class Machine:
    """A machine. Its node id changes when it dies, as a machine that comes back is a new node to Ray."""

    def __init__(self, number: int, root: Path, options: RunOptions, requested: Requested) -> None:
        self.number = number
        self.disk = root / f"disk{number}"
        self.disk.mkdir(mode=0o700)
        self.is_away = False  # nobody reaches it; its agent lives
        self.num_boots = 0
        self.agent: NodeAgent | None = None
        self._root = root
        self._options = options
        self._requested = requested

    @property
    def name(self) -> str:
        return "abcdefgh"[self.number]

    @property
    def node_id(self) -> str:
        return f"{self.name}{self.num_boots:02d}".ljust(56, "0")

    @property
    def is_live(self) -> bool:
        return self.agent is not None and not self.is_away

    @property
    def spec(self) -> RunSpec:
        options = {**vars_of(self._options), "staging": str(self.disk)}
        return RunSpec(name="run", storage_path=str(self._root / "remote"), options=RunOptions(**options))

    async def start(self) -> None:
        """Start an agent, and open the run."""
        context = SimpleNamespace(get_node_id=lambda: self.node_id)
        with (
            patch.object(ray, "get_runtime_context", lambda: context),
            patch.dict(os.environ, {ADDRESS_ENV: "127.0.0.1"}),
        ):
            agent = NodeAgent(self.node_id, PLAIN_KEYS, "service")
        node, node_id = agent._node, self.node_id

        async def request(method: str, *args: Any, may_wait_s: float = 0.0) -> Any:
            if self.agent is not agent or self.is_away:
                raise Unavailable("The coordinator did not answer.")
            return await self._requested(node_id, method, *args)

        node.request = request  # type: ignore[method-assign]
        node.count_bytes = lambda *args: None  # type: ignore[method-assign]
        await agent._runs.take_up(self.spec, UID)
        self.agent = agent

    def require_agent(self) -> NodeAgent:
        if self.agent is None:
            raise Unavailable("The agent is dead.")
        return self.agent

    @property
    def run(self) -> NodeRun:
        return self.require_agent()._runs.get(UID)

    @property
    def endpoint(self) -> str:
        server = self.require_agent()._server
        assert server is not None
        return server.endpoint

    async def kill_agent(self) -> None:
        """End the agent as the end of its process does: nothing of it is left but the disk."""
        agent, self.agent = self.agent, None
        if agent is not None:
            await _end(agent)

    async def kill(self, *, wipe: bool = False) -> None:
        """End the machine. A wiped one has lost its disk as well."""
        await self.kill_agent()
        self.num_boots, self.is_away = self.num_boots + 1, False
        if wipe:
            shutil.rmtree(self.disk)
            self.disk.mkdir(mode=0o700)

    def files(self, attempt: AttemptId) -> dict[str, Path]:
        """Return the files of a checkpoint on the disk by name."""
        folder = self.disk / UID / attempt.directory
        return {path.name: path for path in folder.iterdir()} if folder.exists() else {}


async def _end(agent: NodeAgent) -> None:
    run, node = agent._runs.get(UID), agent._node
    if agent._server is not None:
        agent._server.shutdown()
    restore = run.restore
    if restore is not None:
        restore.close_shared()
        if restore._prefetching is not None:
            await asyncio.wait({restore._prefetching})
    await asyncio.sleep(0)  # a task that has not begun would leave its work unawaited
    tasks = list(node._tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pools = (node.stream_io, node.disk_io, node.peer_io, node.probe_io)
    await asyncio.gather(*(asyncio.to_thread(pool.shutdown, cancel_futures=True) for pool in pools))
    for pool in (node.code_io, node._cloud_io):
        pool.shutdown(wait=False)
    run.memory.free_arenas()
    await run.memory.freeing.wait()
    run.memory.close()
    run.staging.close()


def vars_of(options: RunOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


async def order(machine: Machine, event: n.Order) -> None:
    """Send an order of the coordinator."""
    await machine.run.obey(event)
