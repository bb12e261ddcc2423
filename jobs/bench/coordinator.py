"""Cost of a save in the run machine, by the number of nodes: CPU time, without Ray and without a store.

Beside it, the cost of Ray per message to an actor, and the speed of the simulator, which drives the machines.

A `Fleet` sends a real RunMachine the events that `ray_ckpt.actors.coordinator.actor` would send: time passes
before events, in steps of CLOCK_S, and each effect that requires an answer is answered. Every step takes a
second and is saved.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from jobs.bench.context import Context
from jobs.bench.row import Row, measure
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import CLOCK_S
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import GroupNode, Inventory, RankProgress, SessionNode, SessionPlan, StoredFragment
from ray_ckpt.format.names import fragment_file, make_attempt
from ray_ckpt.testing.schedules import NUM_EVENTS, play
from ray_ckpt.types import AttemptId, FileEntry, Level, RankRestore

RANKS_PER_NODE = 8
SIZES = (100, 1_000, 10_000)  # nodes
QUICK_SIZES = (100,)
LIMIT_MS = 50.0  # limit of CPU time per commit, at LIMIT_NODES
LIMIT_NODES = 1_000
STEP_S = 1.0  # interval between saves; every rank reports its progress once a second
WARM_SAVES = 5  # saves before the first sample; after them each commit retires a checkpoint
FILE_BYTES = 1 << 20
NUM_FILES = 2 * RANKS_PER_NODE + 1  # a shard and a state file of each rank, and the fragment
NUM_MESSAGES = 1_000
QUICK_MESSAGES = 50
NUM_SCHEDULES = 50  # per sample; schedules differ
QUICK_SCHEDULES = 2
RUN_UID = "0" * 32


class Fleet:
    """A run machine and a training group of `num_nodes` nodes that has begun to train."""

    def __init__(self, num_nodes: int) -> None:
        options = RunOptions(retire_grace_s=0.0, scrub_bytes_per_s=0, remote_every=1_000_000)
        self.machine = RunMachine(options=options, writer="bench", service="bench")
        self.nodes = tuple(f"{index:056x}" for index in range(num_nodes))  # as long as Ray's ids
        self.now_s = 0.0
        self.ticked_s = -math.inf
        self.step = 0
        self.answers: deque[m.Event] = deque()  # answers of nodes and storage path; the log answers at once
        self.handle(m.NodesSeen(live=frozenset(self.nodes)))
        self.handle(m.LogOpened(records=(), run_name="bench", fresh_uid=RUN_UID))
        self.open_group()

    def open_group(self) -> float:
        """Return the CPU milliseconds from the choice of checkpoint until a new group on all nodes trains."""
        width = RANKS_PER_NODE
        nodes = tuple(
            GroupNode(node_id=node, ranks=tuple(range(i * width, (i + 1) * width)))
            for i, node in enumerate(self.nodes)
        )
        opened = m.GroupOpened(token="group", nodes=nodes, inventories=self._inventories(), resume="auto")
        used_ms = self._cpu_ms([opened], after_s=0.0)
        restored = [
            m.NodeRestored(
                token=node.node_id,
                session_key=self.plan.session_key,
                node_id=node.node_id,
                ranks=tuple(RankRestore(rank=rank) for rank in node.ranks),
            )
            for node in self.plan.nodes
        ]
        return used_ms + self._cpu_ms(restored, after_s=STEP_S / len(restored))

    def _inventories(self) -> dict[str, Inventory]:
        """Return the inventory of each node: its fragments of live checkpoints."""
        held: dict[str, list[StoredFragment]] = {node: [] for node in self.nodes}
        live, holders = self.machine.history.live(), self.machine.view.holders
        for checkpoint in live:
            for index, nodes in holders[checkpoint.id.attempt].items():
                fragment = StoredFragment(
                    attempt=checkpoint.id,
                    node_index=index,
                    num_nodes=checkpoint.num_nodes,
                    fragment=_fragment(checkpoint.id, index, checkpoint.num_nodes),
                    size_bytes=NUM_FILES * FILE_BYTES,
                )
                for node in nodes:
                    held[node].append(fragment)
        folders = tuple(checkpoint.directory for checkpoint in live)
        return {n: Inventory(fragments=tuple(parts), directories=folders) for n, parts in held.items()}

    @property
    def plan(self) -> SessionPlan:
        assert self.machine.plan is not None
        return self.machine.plan

    def handle(self, event: m.Event, *, after_s: float = 0.0) -> None:
        """Let time pass, then handle the event."""
        self.now_s += after_s
        todo = deque([event])
        if self.now_s - self.ticked_s >= CLOCK_S:
            self.ticked_s = self.now_s
            todo.appendleft(m.Ticked(now_s=self.now_s, wall_s=self.now_s))
        while todo:
            for effect in self.machine.handle(todo.popleft()):
                if isinstance(effect, m.Append):
                    todo.append(m.Appended(seq=effect.record.seq, outcome="ok"))
                elif (answer := _answer(effect)) is not None:
                    self.answers.append(answer)

    def save_events(self) -> list[m.Event]:
        """Return the events of all nodes while the next step is saved.

        First all nodes store, then all copies arrive, both in the order of the nodes: in this order the
        machine searches longest for a copy that is still missing.
        """
        self.step += 1
        plan = self.plan
        attempt = make_attempt(
            run_uid=plan.run_uid, epoch=plan.epoch, session=plan.session, step=self.step, attempt=0
        )
        reports_stored: list[m.Event] = [stored(attempt, node, plan) for node in plan.nodes]
        copied: list[m.Event] = [
            m.ReplicaEnded(
                attempt=attempt,
                node_index=node.node_index,
                holder=holder,
                error=None,
                fragment=_fragment(attempt, node.node_index, len(plan.nodes)),
            )
            for node in plan.nodes
            for holder in node.holders
        ]
        progress = RankProgress(step=self.step, saved_step=self.step)
        reports: list[m.Event] = [
            m.RanksProgressed(session_key=plan.session_key, ranks=dict.fromkeys(node.ranks, progress))
            for node in plan.nodes
        ]
        seen = m.NodesSeen(live=frozenset(self.nodes))
        half = len(reports) // 2
        return [*_mixed(reports_stored, reports[:half]), seen, *_mixed(copied, reports[half:]), seen]

    def save(self) -> float:
        """Return the CPU milliseconds of one save, from its first event to the retention after it."""
        events = self.save_events()
        used_ms = self._cpu_ms(events, after_s=STEP_S / len(events))
        newest = self.machine.history.lineage()[-1]
        assert (newest.step, newest.level) == (self.step, Level.REPLICATED)
        return used_ms

    def answer_all(self) -> float:
        """Return the CPU milliseconds to answer all requests of the machine, and of the consequences."""
        used_ms = 0.0
        while self.answers:
            events = list(self.answers)
            self.answers.clear()
            used_ms += self._cpu_ms(events, after_s=STEP_S / len(events))
        return used_ms

    def finish(self) -> float:
        """Return the CPU milliseconds to drain the newest checkpoint to the storage path."""
        used_ms = self._cpu_ms([m.FinishRequested(token="finish")], after_s=0.0) + self.answer_all()
        assert self.machine.history.lineage()[-1].level is Level.DURABLE
        return used_ms

    def _cpu_ms(self, events: Sequence[m.Event], *, after_s: float) -> float:
        started_s = time.process_time()
        for event in events:
            self.handle(event, after_s=after_s)
        return (time.process_time() - started_s) * 1e3


def _mixed(events: Sequence[m.Event], others: Sequence[m.Event]) -> list[m.Event]:
    """Merge both sequences evenly; the order within each is kept."""
    placed = [(i / len(part), event) for part in (events, others) for i, event in enumerate(part)]
    return [event for _, event in sorted(placed, key=lambda pair: pair[0])]


def stored(attempt: AttemptId, node: SessionNode, plan: SessionPlan) -> m.NodeStored:
    return m.NodeStored(
        attempt=attempt,
        node_index=node.node_index,
        node_id=node.node_id,
        fragment=_fragment(attempt, node.node_index, len(plan.nodes)),
        size_bytes=NUM_FILES * FILE_BYTES,
        replicated=("f" * 32,),
        metrics={"loss": 1.0} if node.node_index == 0 else None,
    )


def _fragment(attempt: AttemptId, index: int, num_nodes: int) -> FileEntry:
    name = fragment_file(index, num_nodes)
    return FileEntry(name=name, size_bytes=FILE_BYTES, digest=f"{attempt.step:016x}{index:016x}")


def stored_events(num_nodes: int) -> tuple[m.NodeStored, ...]:
    """Return the events that the nodes of a fleet send when they have stored a step."""
    return tuple(event for event in Fleet(num_nodes).save_events() if isinstance(event, m.NodeStored))


def _answer(effect: m.Effect) -> m.Event | None:
    match effect:
        case m.Delete(attempt=name, place=place):
            return m.DeleteEnded(attempt=name, place=place, error=None)
        case m.Drain(attempt=attempt, node_index=index, node_id=node):
            return m.DrainEnded(attempt=attempt, node_index=index, node_id=node, error=None)
        case m.WriteDescription(checkpoint=checkpoint):
            return m.DescriptionWritten(attempt=checkpoint.id, error=None)
        case _:
            return None


def rows(context: Context, sizes: Iterable[int] = ()) -> Iterator[Row]:
    """Measure a save, the deletes it causes, a drain and the restore of a group, at each size."""
    for size in sizes or (QUICK_SIZES if context.quick else SIZES):
        yield from _rows_at(size, context.repeat)


def _rows_at(size: int, repeat: int) -> Iterator[Row]:
    fleet = Fleet(size)

    def save() -> float:
        used_ms = fleet.save()
        fleet.answer_all()
        return used_ms

    def retire() -> float:
        fleet.save()
        return fleet.answer_all()

    def drain() -> float:
        save()
        return fleet.finish()

    for _ in range(WARM_SAVES):
        save()
    for name, what, sample in (
        ("save", "a save up to its commit", save),
        ("retire", "the deletes of one", retire),
        ("drain", "the drain of one", drain),
        ("open", "a group's begin", fleet.open_group),
    ):
        what = f"CPU of {what}, {size:,} nodes x {RANKS_PER_NODE} ranks"
        limit = LIMIT_MS if (name, size) == ("save", LIMIT_NODES) else None
        yield measure(f"{name}-{size}", what, "ms", sample, repeat=repeat, limit=limit)


def message_rows(context: Context) -> Iterator[Row]:
    """Measure the cost of Ray per message to an async actor: an empty one, and the report of a stored save.

    All messages are sent at once and awaited.
    """
    import ray

    from jobs.bench.training import local_ray

    class Listener:
        async def take(self, message: object) -> None:
            """Accept every message and do nothing."""

    num = QUICK_MESSAGES if context.quick else NUM_MESSAGES
    with context.temporary() as folder, local_ray(folder):
        listener: Any = ray.remote(Listener).options(num_cpus=0).remote()
        ray.get(listener.take.remote(None))
        for name, what, messages in (
            ("message", "empty messages to an async actor", [None] * num),
            ("message-stored", "NodeStored", stored_events(num)),
        ):

            def message_ms(messages: Sequence[object] = messages) -> float:
                started_s = time.perf_counter()
                ray.get([listener.take.remote(message) for message in messages])
                return (time.perf_counter() - started_s) * 1e3 / num

            yield measure(name, f"{num:,} {what}, each", "ms", message_ms, repeat=context.repeat)


def schedule_rows(context: Context) -> Iterator[Row]:
    """Measure the simulator: random schedules with all faults and with the checks after each event."""
    num, seeds = QUICK_SCHEDULES if context.quick else NUM_SCHEDULES, count()

    def schedule_ms() -> float:
        started_s = time.process_time()
        for _ in range(num):
            play(next(seeds))
        return (time.process_time() - started_s) * 1e3 / num

    what = f"CPU of a schedule of {NUM_EVENTS} events with its checks, mean of {num}"
    yield measure("schedule", what, "ms", schedule_ms, repeat=context.repeat)
