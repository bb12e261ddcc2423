"""One list of the cluster's nodes for all runs of a coordinator, read again periodically."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import replace

from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.ray_cluster import NodesNow
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m

LEAST_PERIOD_S = 0.5  # between two readings, while the cluster is small
PERIOD_PER_NODE_S = 0.001  # a reading costs this process 12 us of CPU per node, and Ray's control store 8 us
MOST_PERIOD_S = 5.0  # short, compared with the 14 s until Ray reports a dead node


class NodeList:
    """The nodes of the cluster. Calls to Ray block, so they run in the threads of `control_io`."""

    def __init__(self, control_io: Executor) -> None:
        self._control_io = control_io
        self._turn = asyncio.Lock()  # held during a reading
        self._next: asyncio.Task[NodesNow] | None = None  # a reading that has not begun
        self._last: NodesNow | None = None

    async def recent(self) -> NodesNow:
        """Return the last reading, or a new one if the last one is older than `period_s`."""
        last = self._last
        if last is None or time.monotonic() - last.read_s >= period_s(len(last.live)):
            return await self.now()
        return last

    async def now(self) -> NodesNow:
        """Return a reading that begins after this call; calls at the same time share the reading."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._next)

    async def _read(self) -> NodesNow:
        async with self._turn:
            self._next = None
            found = await in_thread(self._control_io, ray_cluster.nodes_now)
            if self._last is not None and found.live == self._last.live:
                found = replace(found, live=self._last.live)  # equal sets are one object, to compare fast
            self._last = found
            return found


def seen_by(nodes: NodesNow, options: RunOptions) -> m.NodesSeen:
    """Return a reading for a run, with what the labels of the run's options say."""
    wall_s = time.time()
    return m.NodesSeen(
        live=nodes.live,
        draining=nodes.draining,
        left_s={node: max(at_s - wall_s, 0.0) for node, at_s in nodes.gone_at_s.items()},
        domains=nodes.domains(options.failure_domain),
        spares=nodes.with_label(options.spare_nodes),
        replica_nodes=nodes.with_label(options.replica_nodes),
    )


def period_s(num_nodes: int) -> float:
    """Return the time between two readings of a cluster of this size."""
    return min(max(num_nodes * PERIOD_PER_NODE_S, LEAST_PERIOD_S), MOST_PERIOD_S)
