"""The run machine and its nodes under random schedules: what must hold after every step, whatever happens.

A schedule is a function of its seed. To replay one: pytest tests/core/test_random.py -k "[seed]"
"""

from __future__ import annotations

import os
import random
import string
import time
from collections.abc import Callable

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core import node as n
from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format import records as r
from ray_ckpt.format.names import record_file
from ray_ckpt.format.records import encode_record
from ray_ckpt.storage.log_store import read_log
from ray_ckpt.types import AttemptId, CheckpointInfo, Level
from tests.core.driver import Cluster, Do, Message, ToCoordinator, ToNode

SOAK_S = float(os.environ.get("RAY_CKPT_SOAK_S", "60"))
NUM_SCHEDULES = 600
NUM_EVENTS = 60
NODES = "abcd"

Holding = tuple[str, int, int]  # node, its generation, fragment
TWICE = (
    m.NodeStored,
    m.ReplicaEnded,
    m.DrainEnded,
    m.DescriptionWritten,
    m.DeleteEnded,
    m.Appended,
    m.Publish,
    m.Delete,
    m.Drain,
    n.Published,
)


class Checked(Cluster):
    """A cluster that is checked against its log after every step."""

    def __init__(self, **options: int) -> None:
        self.history = RunHistory()  # a reader's own
        self.expected: dict[str, set[Holding]] = {}  # attempt -> who must have what while it is live
        self.captured: dict[str, dict[str, int]] = {}  # attempt -> node -> generation when it was captured
        self.dropped: set[str] = set()
        super().__init__(NODES, ranks_per_node=1, **options)

    def capture(self, step: int, *, number: int = 0) -> AttemptId:
        attempt = super().capture(step, number=number)
        self.captured[attempt.attempt] = {p.node_id: self.generations[p.node_id] for p in self.plan.nodes}
        return attempt

    def check(self) -> None:
        self._read_log()
        self._check_disks()
        assert self.machine.history.next_seq <= self.history.next_seq, "acts on a record that is not there"

    def _read_log(self) -> None:
        for record, digest in read_log(self.store, start=self.history.next_seq):
            self._check_record(record.op)
            self.history.apply(record, digest)  # raises if it is no chain
            if isinstance(record.op, r.Commit):
                self._note_holders(self.history.checkpoints[record.op.attempt])

    def _do(self, effect: m.Effect) -> None:
        if isinstance(effect, m.Publish):
            self._read_log()
            self._check_publish(effect)
        super()._do(effect)

    def _check_record(self, op: r.Op) -> None:
        lineage, live = self.history.lineage(), self.history.live()
        match op:
            case r.Session(resumed_from=attempt) if attempt is not None:
                assert attempt in {c.id.attempt for c in lineage}, f"{op} leaves the lineage"
            case r.Commit(attempt=attempt):
                assert attempt not in self.dropped, f"{op} was called dropped before"
            case r.Retired(attempt=attempt):
                for level in Level:
                    reached = [c for c in lineage if c.level >= level] or [
                        c for c in live if c.level >= level
                    ]
                    assert not reached or reached[-1].id.attempt != attempt, (
                        f"{op} is the newest {level.label}"
                    )
                resume = self.machine.plan.resume if self.machine.plan else None
                busy = resume is not None and f"restored-{self.plan.session}" not in self._replied
                assert not (busy and resume and resume.checkpoint.id.attempt == attempt), f"{op} is restored"
            case r.Collected(attempt=attempt):
                assert self.history.checkpoints[attempt].state == "retired"
            case _:
                pass

    @property
    def _replied(self) -> set[str]:
        return {token.rpartition("-")[0] for token in self.replies}

    def _note_holders(self, checkpoint: CheckpointInfo) -> None:
        name = checkpoint.id.attempt
        for index, (node, generation) in enumerate(self.captured[name].items()):
            if self.generations[node] == generation:
                self.expected.setdefault(name, set()).add((node, generation, index))

    def _check_publish(self, publish: m.Publish) -> None:
        name = publish.attempt.attempt
        known = self.history.checkpoints.get(name)
        if publish.level is not None:
            assert known is not None and known.level >= publish.level, f"{publish} is not in the log"
        elif isinstance(publish.error, CheckpointError):
            assert known is None or known.state != "live", f"{publish} is in the log"
            self.dropped.add(name)

    def _check_disks(self) -> None:
        """P5: nothing that is live is deleted where it was."""
        for checkpoint in self.history.live():
            name = checkpoint.id.attempt
            for node, generation, index in self.expected.get(name, ()):
                if self.generations[node] == generation:
                    assert (name, index) in self.disks[node].fragments, (
                        f"{node} has lost fragment {index} of step {checkpoint.step}"
                    )
            if checkpoint.level is Level.DURABLE:
                assert name in self.described, f"step {checkpoint.step} is not on the storage path"


class Schedule:
    """Random things that happen to a cluster."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.run = Checked(
            keep_last=self.random.choice([1, 2, 3]),
            replicas=self.random.choice([0, 1, 1, 2]),
            remote_every=self.random.choice([1, 2, 5]),
        )
        self.run.drain_error = lambda _: "slow" if self.random.random() < 0.2 else None
        self.run.copy_error = lambda _: "disk full" if self.random.random() < 0.1 else None
        self.run.settle()
        self.run.tell(self.run.group("ab"))
        self.run.settle()
        self.step = 0
        self.num_tokens = 0
        self.story: list[str] = []

    def happen(self) -> None:
        weights: dict[Callable[[], None], int] = {
            self.deliver_some: 50,
            self.save: 20,
            self.wait: 10,
            self.restart_group: 4,
            self.lose_node: 3,
            self.node_joins: 3,
            self.store_changes: 5,
            self.restart_coordinator: 2,
            self.finish: 3,
            self.rank_refuses: 2,
        }
        (what,) = self.random.choices(list(weights), list(weights.values()))
        self.story.append(what.__name__)
        what()
        self.run.check()

    def deliver_some(self) -> None:
        """Any messages, early, late or twice."""
        for _ in range(self.random.randint(1, 30)):
            if self.run.wire:
                index = self.random.randrange(min(len(self.run.wire), 6))
                message = self.run.wire[index]
                if not (self.random.random() < 0.1 and isinstance(_content(message), TWICE)):
                    del self.run.wire[index]
                self.run.deliver(message)
                self.run.check()

    def save(self) -> None:
        if self._is_training():
            self.step += self.random.randint(1, 3)
            self.run.capture(self.step)

    def rank_refuses(self) -> None:
        if self._is_training():
            self.step += 1
            attempt = self.run.attempt(self.step)
            node = self.random.choice(self.run.plan.nodes)
            failed = n.SaveFailed(attempt=attempt, rank=node.ranks[0], reason="busy")
            self.run.wire.append(ToNode(node.node_id, failed))

    def wait(self) -> None:
        self.run.tick(self.random.choice([0.5, 2, 2, 5, 31, 70]))
        self.run.tell(m.NodesSeen(live=frozenset(self.run.live)))

    def restart_group(self) -> None:
        live = sorted(self.run.live)
        nodes = self.random.sample(live, self.random.randint(1, min(3, len(live))))
        self.run.tell(self.run.group("".join(nodes)))

    def lose_node(self) -> None:
        if len(self.run.live) > 2:
            self.run.lose(self.random.choice(sorted(self.run.live)))

    def node_joins(self) -> None:
        if len(self.run.live) < len(NODES):
            self.run.join(string.ascii_letters[len(self.run.disks)])
            self.run.tell(m.NodesSeen(live=frozenset(self.run.live)))

    def store_changes(self) -> None:
        self.run.store_mode = self.random.choice(["ok", "ok", "ok", "silent", "answers lost"])

    def restart_coordinator(self) -> None:
        """The old process's last create may still arrive when the new one has read the log."""
        late = [w.effect for w in self.run.wire if isinstance(w, Do) and isinstance(w.effect, m.Append)]
        self.run.start_coordinator()
        if late and self.random.random() < 0.5:
            self.run.store.create(record_file(late[-1].record.seq), encode_record(late[-1].record))
        self.run.stepped_down = False
        if self.random.random() < 0.7:
            self.run.find_group()

    def finish(self) -> None:
        self.num_tokens += 1
        self.run.tell(m.FinishAsked(token=f"finish-{self.num_tokens}"))

    def _is_training(self) -> bool:
        plan = self.run.machine.plan
        if plan is None or not {p.node_id for p in plan.nodes} <= self.run.live:
            return False
        return all(f"restored-{plan.session}-{p.node_id}" in self.run.replies for p in plan.nodes)

    def heal(self) -> None:
        """All is well again: a group opens, restores the newest that is left, and saves."""
        run = self.run
        run.drain_error = lambda _: None
        run.copy_error = lambda _: None
        run.store_mode = "ok"
        for _ in range(4):
            if run.stepped_down or not run.machine.is_open:
                run.start_coordinator()
                run.stepped_down = False
            run.tick(70)
            run.tell(m.NodesSeen(live=frozenset(run.live)))
            run.settle()
            run.check()
        run.tell(run.group("".join(sorted(run.live)), token="last"))
        run.settle()
        if "last" in run.failed_tokens:  # nothing intact is left
            run.tell(run.group("".join(sorted(run.live)), token="fresh", resume="never"))
            run.settle()
        run.check()
        assert self._is_training(), f"nobody trains: {run.failed_tokens}"
        self.step += 1
        attempt = run.capture(self.step)
        run.settle()
        run.tick(70)  # at the level it has, if copies are late
        run.settle()
        run.tell(m.FinishAsked(token="finish"))
        run.settle()
        run.check()
        assert run.checkpoint(attempt).level is Level.DURABLE
        assert "finish" in run.replies
        for _ in range(3):
            run.tick(31)
            run.settle()
        states = {c.state for c in run.machine.history.checkpoints.values()}
        assert "retired" not in states, "what was retired is collected in the end"


def _content(message: Message) -> object:
    return message.effect if isinstance(message, Do) else message.event


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_invariants_hold_under_any_schedule(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 60)
def test_invariants_hold_for_as_long_as_asked() -> None:
    """Seeds beyond those of every run, for RAY_CKPT_SOAK_S seconds (`make soak SECONDS=...`)."""
    end_s, seed = time.monotonic() + SOAK_S, NUM_SCHEDULES
    while time.monotonic() < end_s:
        play(seed)
        seed += 1
    print(f"{seed - NUM_SCHEDULES} schedules of {NUM_EVENTS} events, seeds {NUM_SCHEDULES} to {seed - 1}")


def play(seed: int) -> None:
    schedule = Schedule(seed)
    try:
        for _ in range(NUM_EVENTS):
            schedule.happen()
        schedule.heal()
    except AssertionError as error:
        error.add_note(f"seed {seed}: {' '.join(schedule.story)}")
        raise


def test_the_checker_sees_a_deleted_checkpoint() -> None:
    """The checks are only worth something if they fail when they should."""
    schedule = Schedule(0)
    run = schedule.run
    run.settle()
    run.tell(run.group("ab"))
    run.settle()
    attempt = run.capture(5)
    run.settle()
    run.check()
    run.wire.append(ToCoordinator(m.Ticked(now_s=run.now_s, wall_s=0.0)))
    run.disks["a"].delete(attempt.attempt)
    with pytest.raises(AssertionError, match="a has lost fragment 0 of step 5"):
        run.check()
