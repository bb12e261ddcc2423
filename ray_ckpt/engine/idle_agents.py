"""End the agents of nodes that hold nothing needed, so that the autoscaler may remove these nodes."""

from __future__ import annotations

from collections.abc import Collection, Set

from ray_ckpt.config import RunOptions
from ray_ckpt.engine.run_host import RunHost


class IdleAgents:
    """The times at which the nodes of a service were last needed."""

    def __init__(self) -> None:
        self._needed_s: dict[str, float] = {}  # node -> when it was last needed (monotonic)

    def take(
        self, agents: Set[str], hosts: Collection[RunHost], now_s: float, *, is_opening: bool = False
    ) -> tuple[str, ...]:
        """Return the nodes whose agents are to end; the runs skip these nodes until their next groups.

        `agents` are the nodes with an agent, `hosts` the open runs. An agent ends when no run has needed its
        node for the longest `agent_idle_s` of the runs. While a run is being opened (`is_opening`), all nodes
        are needed: the run is not among `hosts` before its log is read.
        """
        if is_opening:
            self._needed_s |= dict.fromkeys(agents, now_s)
            return ()
        options = [host.machine.options for host in hosts] or [RunOptions()]
        idle_s = max(option.agent_idle_s for option in options)
        needed = {node for host in hosts for node in host.needed_nodes()}
        self._needed_s |= dict.fromkeys(needed, now_s)
        idle = tuple(
            node for node in sorted(agents) if now_s - self._needed_s.setdefault(node, now_s) > idle_s
        )
        for host in hosts:
            host.nodes.ended_idle({*idle})
        self._needed_s = {
            n: since_s for n, since_s in self._needed_s.items() if n in agents and n not in idle
        }
        return idle
