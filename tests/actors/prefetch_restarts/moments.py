"""Moments of a prefetch at which a schedule acts: a gate holds up a node's prefetch after some rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from ray_ckpt.actors.agent import ports, prefetch, restoring, shared_reads
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.core.values import SessionPlan

GATE_S = 20.0  # a gate that is not opened by then shows a schedule that waits for nothing
PLENTY_BYTES = 1 << 40


@dataclass(slots=True)
class Gate:
    """Holds up the threads of a prefetch once they have verified `num_rows` rows."""

    num_rows: int
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _passed: int = 0

    def enter(self) -> None:
        with self._lock:
            self._passed += 1
            is_free = self._passed <= self.num_rows
        if not is_free:
            self.reached.set()
            assert self.opened.wait(GATE_S), "nobody opens the gate"


@dataclass(slots=True)
class Moments:
    """The gates of the sessions that begin next, and the free memory that their prefetches find, by node."""

    gates: dict[str, Gate] = field(default_factory=dict)
    free_bytes: dict[str, int] = field(default_factory=dict)
    _by_prefetch: WeakKeyDictionary[prefetch.Prefetch, Gate] = field(default_factory=WeakKeyDictionary)
    _rooms: WeakKeyDictionary[prefetch.PrefetchRoom, str] = field(default_factory=WeakKeyDictionary)  # nodes

    def open_gates(self) -> None:
        for gate in (*self.gates.values(), *list(self._by_prefetch.values())):
            gate.opened.set()
        self.gates.clear()

    def gate_of(self, found: prefetch.Prefetch) -> Gate | None:
        return self._by_prefetch.get(found)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let prefetches of this process pass these gates, and wait briefly for processes that are gone."""
        moments, write, real_join = self, prefetch._Landing.write, prefetch.PrefetchRoom.join

        class GatedRestore(restoring.NodeRestore):
            def __init__(self, node: Node, run: NodeRun, plan: SessionPlan, **more: Any) -> None:
                moments._rooms[node.prefetch_room] = node.node_id
                super().__init__(node, run, plan, **more)
                if (gate := moments.gates.pop(node.node_id, None)) is not None:
                    moments._by_prefetch[self._prefetch] = gate

        def gated_write(landing: prefetch._Landing, view: memoryview) -> None:
            if (gate := moments._by_prefetch.get(landing._prefetch)) is not None:
                gate.enter()
            write(landing, view)

        def join(room: prefetch.PrefetchRoom) -> prefetch._Share:
            share = real_join(room)
            share.free_bytes = moments.free_bytes.get(moments._rooms[room], PLENTY_BYTES)
            return share

        with (
            patch.object(ports, "NodeRestore", GatedRestore),
            patch.object(prefetch._Landing, "write", gated_write),
            patch.object(prefetch.PrefetchRoom, "join", join),
            patch.object(prefetch, "WRITERS_S", 0.05),
            patch.object(prefetch, "POLL_S", 0.005),
            patch.object(shared_reads, "LOAD_BYTES", 1 << 20),  # so much more is made huge, and cleared
        ):
            yield
