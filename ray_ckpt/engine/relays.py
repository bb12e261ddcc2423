"""Relays: agents that pass orders on to other agents, and gather the reports of other agents.

With thousands of nodes, the messages of one process to and from all agents are too many. A relay has no
authority: orders keep their epochs and are obeyed or refused by the node to which they are addressed, and
reports reach the coordinator unchanged. A message that a relay does not answer in time is sent again without
a relay, so a relay that dies or hangs causes a delay only; a message that arrives twice does no harm
(PROTOCOL.md section 8). Any agent can be a relay: the first addressee of many orders passes the others on,
and gathers the reports of the nodes to which it has passed on the start of a session.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from ray_ckpt.engine.ports import Call

ORDERS_S = 5.0  # longest wait for a relay that passes orders on, before they are sent without it
REPORT_S = 2.0  # longest wait for a relay that gathers reports, before a report is sent without it
RELAY_AGAIN_S = 60.0  # until a relay that did not answer is used again


def relay_size(least: int, num_nodes: int) -> int:
    """Return the number of nodes of one relay, 0 for no relays.

    A cluster of more than `least` squared nodes has as many relays as each of them has nodes: the coordinator
    and a relay then have equally many messages.
    """
    return max(least, math.isqrt(num_nodes)) if least else 0


@dataclass(slots=True)
class Batch:
    """Calls that a relay passes on; each is answered through the relay, or is sent again without it."""

    relay: str
    calls: dict[int, Call]  # the calls without an answer, by number

    def answered(self, number: int) -> Call | None:
        """Return the call that this answer ends, or None if it has ended before."""
        return self.calls.pop(number, None)

    def give_up(self) -> tuple[Call, ...]:
        """End the wait for the relay; return the calls to be sent without it."""
        left, self.calls = self.calls, {}
        return tuple(left.values())


@dataclass(slots=True)
class OrderRelays:
    """The relays of a coordinator's orders; `size` is the number of nodes of one relay, 0 for no relays."""

    size: int
    _avoided_s: dict[str, float] = field(default_factory=dict)  # relay that failed -> until when (monotonic)

    def divide(self, calls: Iterable[Call], agents: Set[str], now_s: float) -> Iterator[Call | Batch]:
        """Yield the calls of one moment, as batches if they go to more than `size` of the known `agents`.

        The calls of one node are in one batch.
        """
        by_node: dict[str, list[Call]] = {}
        for call in calls:
            if self.size and call.node in agents:
                by_node.setdefault(call.node, []).append(call)
            else:
                yield call
        if len(by_node) <= self.size:
            for found in by_node.values():
                yield from found
            return
        self._avoided_s = {node: s for node, s in self._avoided_s.items() if s > now_s}
        nodes = sorted(by_node)
        for at in range(0, len(nodes), self.size):
            members = nodes[at : at + self.size]
            relay = next((node for node in members if node not in self._avoided_s), None)
            found = [call for node in members for call in by_node[node]]
            if relay is None or len(members) == 1:
                yield from found
            else:
                yield Batch(relay, dict(enumerate(found)))

    def failed(self, relay: str, now_s: float) -> None:
        """Avoid this relay for RELAY_AGAIN_S."""
        self._avoided_s[relay] = now_s + RELAY_AGAIN_S


@dataclass(slots=True)
class ReportRoute:
    """The way of a node's reports: through `relay`, or without a relay if that is ""."""

    relay: str = ""
    _direct_until_s: float = 0.0  # monotonic

    def use(self, relay: str) -> None:
        """Use the relay of a new session."""
        self.relay, self._direct_until_s = relay, 0.0

    def via(self, now_s: float) -> str:
        """Return the relay for a report that is sent now; "" for none."""
        return self.relay if now_s >= self._direct_until_s else ""

    def failed(self, now_s: float) -> None:
        """Send reports without the relay for some time."""
        self._direct_until_s = now_s + RELAY_AGAIN_S
