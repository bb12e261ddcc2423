"""`Checkpointer.wait`: it follows the last requested save, whatever its outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ray_ckpt.config import RunOptions
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import STILL_WRITING, SessionKey
from ray_ckpt.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    InsufficientSpace,
    RunSuperseded,
    Unavailable,
    UnsupportedItem,
)
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer import checkpointer as checkpointer_module
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.item_reader import ItemReader
from ray_ckpt.trainer.link import ArenaGrant, SealedShard
from ray_ckpt.types import AttemptId, CheckpointInfo, Level, RankRestore
from tests.capture.local import LocalLink

LEVELS = ("local", "replicated", "durable")


@dataclass(slots=True)
class Agent(LocalLink):
    """An agent that may have no arena, a full disk, or copies that never arrive."""

    has_arena: bool = True
    has_disk: bool = True
    level: Level = Level.DURABLE  # that saves reach
    texts: dict[int, str] = field(default_factory=dict)  # by step, the digest that all ranks must agree on

    def open_arena(self, session_key: SessionKey, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        if not self.has_arena:
            raise InsufficientSpace("There is no memory for captures.")
        return LocalLink.open_arena(self, session_key, size_bytes, named=named)

    def seal(self, shard: SealedShard) -> Future[bool]:
        self.texts[shard.attempt.step] = shard.replicated[0]
        if self.has_disk:
            return LocalLink.seal(self, shard)
        if self.arena is not None and shard.layout is not None:
            self.arena.buffers[shard.buffer].layout = shard.layout
        self.skip(shard.attempt, "the disk is full")
        done: Future[bool] = Future()
        done.set_result(False)
        return done


def checkpointer(agent: Agent) -> Checkpointer:
    model = torch.nn.Linear(4, 4)
    ckpt = Checkpointer(link=agent, model=model, optimizer=torch.optim.SGD(model.parameters()))
    ckpt.restore()
    return ckpt


@pytest.fixture
def agent() -> Agent:
    return Agent(RunOptions(every_steps=2, memory="single", max_block_s=10.0))


@pytest.fixture
def ckpt(agent: Agent) -> Iterator[Checkpointer]:
    made = checkpointer(agent)
    yield made
    made.close()


SaveCall = Callable[[Checkpointer, int], Any]
SAVE_CALLS: tuple[SaveCall, ...] = (lambda ckpt, step: ckpt.step(step), lambda ckpt, step: ckpt.save(step))


@pytest.mark.parametrize("level", LEVELS)
def test_before_the_first_save_there_is_nothing_to_wait_for(ckpt: Checkpointer, level: Any) -> None:
    with pytest.raises(Unavailable, match="no save has been requested yet"):
        ckpt.wait(level)
    ckpt.step(1)
    with pytest.raises(Unavailable, match="no save has been requested yet"):
        ckpt.wait(level)


def test_before_the_restore_it_is_misuse() -> None:
    ckpt = Checkpointer(link=Agent(), model=torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="before restore"):
        ckpt.wait()
    ckpt.close()


def test_ranks_compare_the_bytes_until_a_save_is_committed() -> None:
    """A first save that is skipped or dropped, maybe on one rank only, is not the last look at them."""
    agent = Agent(RunOptions(memory="single", max_block_s=10.0), world_size=2, has_arena=False)
    ckpt = checkpointer(agent)
    assert not ckpt.save(1)
    agent.has_arena, agent.has_disk = True, False
    for step in range(2, 7):
        agent.has_disk = step > 3
        assert ckpt.save(step)
        ckpt.flush(commit=True)
    ckpt.close()
    assert [step for step, text in agent.texts.items() if text.startswith("/content:")] == [2, 3, 4]
    assert sorted(agent.files) == [4, 5, 6] and sorted(agent.texts) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", SAVE_CALLS)
def test_a_save_that_ends_well_is_waited_for(
    ckpt: Checkpointer, agent: Agent, level: Any, call: SaveCall
) -> None:
    call(ckpt, 2)
    ckpt.wait(level)
    assert list(agent.files) == [2]


def test_without_copies_nobody_waits_for_them() -> None:
    agent = Agent(RunOptions(memory="single", max_block_s=10.0, replicas=0), level=Level.LOCAL)
    ckpt = checkpointer(agent)
    ckpt.save(1)
    with pytest.raises(ConfigError, match="replicas is 0, so no save becomes replicated"):
        ckpt.wait("replicated")
    with pytest.raises(ConfigError, match="replicas is 0, so no save becomes replicated"):
        ckpt.waiter()(Level.REPLICATED, 600.0)
    ckpt.wait("local")
    ckpt.close()


def test_parity_in_place_of_copies_can_be_waited_for() -> None:
    ckpt = checkpointer(Agent(RunOptions(memory="single", max_block_s=10.0, replicas=0, parity=(2, 1))))
    ckpt.save(1)
    ckpt.wait("replicated")
    ckpt.close()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", SAVE_CALLS)
def test_wait_reports_that_a_rank_has_no_memory_for_captures(
    agent: Agent, level: Any, call: SaveCall
) -> None:
    agent.has_arena = False
    ckpt = checkpointer(agent)
    for step in (2, 4, 6, 8):
        call(ckpt, step)
    assert (ckpt.stats.saved, ckpt.stats.dropped) == (0, 4)
    with pytest.raises(Unavailable, match=r"step 8 was not saved: .*no memory for captures"):
        ckpt.wait(level)
    ckpt.close()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", SAVE_CALLS)
def test_an_older_save_does_not_answer_for_the_last_one(
    ckpt: Checkpointer, agent: Agent, level: Any, call: SaveCall
) -> None:
    call(ckpt, 2)
    ckpt.wait(level)
    ckpt._objects["model"].state_dict = _raises  # what is registered gives no state any more
    call(ckpt, 4)
    with pytest.raises(Unavailable, match=r"step 4 was not saved: .*no state"):
        ckpt.wait(level)


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no state")


@pytest.mark.parametrize("level", LEVELS)
def test_wait_reports_a_skipped_save(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "FIRST_OUTCOME_S", 0.2)
    agent = Agent(RunOptions(every_steps=2, memory="single", max_block_s=0.2))
    agent.go.clear()
    ckpt = checkpointer(agent)
    assert ckpt.save(1) and not ckpt.save(3)
    with pytest.raises(Unavailable, match=f"step 3 was not saved: {STILL_WRITING}"):
        ckpt.wait(level)
    assert agent.skipped == {3: STILL_WRITING}
    agent.go.set()
    with pytest.raises(Unavailable, match="step 3"):
        ckpt.wait(level)
    ckpt.step(4)
    ckpt.close()


@dataclass(slots=True)
class ShortCalls(Agent):
    """The agent ends calls that wait for copies before the copies are there."""

    ends: int = 3  # calls that end without an answer

    def outcome(self, attempt: AttemptId, level: Level) -> Future[SaveOutcome]:
        if level is Level.LOCAL or self.ends == 0:
            return LocalLink.outcome(self, attempt, level)
        self.ends -= 1
        ended: Future[SaveOutcome] = Future()
        ended.set_exception(TimeoutError())
        return ended


def test_wait_goes_on_after_the_limit_of_a_call_until_its_own(agent: Agent) -> None:
    agent = ShortCalls(agent.options)
    ckpt = checkpointer(agent)
    ckpt.step(2)
    ckpt.wait("replicated", timeout_s=60.0)
    assert agent.ends == 0
    agent.go.clear()
    ckpt.step(4)
    with pytest.raises(Unavailable, match="Step 4 did not become local within 0 s"):
        ckpt.wait(timeout_s=0.1)
    agent.go.set()
    ckpt.close()


def test_wait_reports_a_save_that_the_disk_refuses(ckpt: Checkpointer, agent: Agent) -> None:
    ckpt.step(2)
    ckpt.wait()
    agent.has_disk = False
    ckpt.step(4)
    with pytest.raises(Unavailable, match="the disk is full"):
        ckpt.wait("durable")


def test_wait_reports_a_save_in_an_accumulation_window(ckpt: Checkpointer) -> None:
    model = ckpt._objects["model"]
    ckpt.step(1)
    model(torch.ones(4)).sum().backward()
    ckpt.step(2)
    with pytest.raises(Unavailable, match="step 2: its save waits for the end of the accumulation window"):
        ckpt.wait()
    ckpt._objects["optimizer"].step()
    ckpt.step(3)
    ckpt.wait()


def test_wait_reports_a_save_that_ends_with_an_error(ckpt: Checkpointer) -> None:
    ckpt.step(2)
    ckpt.wait()
    misuse: Future[SaveOutcome] = Future()
    misuse.set_result(SaveOutcome(level=None, error=CollectiveError("ranks differ")))
    pending = ckpt._outcomes.pending
    pending[-1] = replace(pending[-1], outcome=misuse, is_checked=False)
    with pytest.raises(CollectiveError):
        ckpt.save(4)
    with pytest.raises(Unavailable, match="step 4 was not saved"):
        ckpt.wait()


# -- after a restore -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Restores(Agent):
    """The run has a checkpoint of step 10."""

    restored_level: Level = Level.LOCAL
    brought: int = 0

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        checkpoint = CheckpointInfo(
            id=_attempt(),
            seq=1,
            level=self.restored_level,
            world_size=1,
            num_nodes=1,
            size_bytes=1,
            root_digest="1" * 32,
            committed_at_s=0.0,
            metrics={},
        )
        return RestoreTicket(session_key=(1, 2), checkpoint=checkpoint)

    def make_durable(self, attempt: AttemptId, timeout_s: float) -> Future[None]:
        assert attempt == _attempt() and 0.0 < timeout_s <= 600.0
        self.brought += 1
        return LocalLink.make_durable(self, attempt, timeout_s)


def _attempt() -> Any:
    from ray_ckpt.format.names import make_attempt

    return make_attempt(run_uid="0" * 32, session=1, step=10, attempt=0)


@pytest.mark.parametrize(
    "has, level, brought",
    [
        ("LOCAL", "local", 0),
        ("LOCAL", "durable", 1),
        ("DURABLE", "durable", 0),
        ("REPLICATED", "replicated", 0),
    ],
)
def test_a_run_that_has_nothing_left_to_do_waits_for_what_it_restored(
    monkeypatch: pytest.MonkeyPatch, has: str, level: Any, brought: int
) -> None:
    """A program that is started again when all its steps are done ends as well as the first time."""
    answer = RankRestore(rank=0, parts=(), seconds=0.0)
    monkeypatch.setattr(ItemReader, "read_all", lambda self, ticket: (answer, frozenset))
    agent = Restores(RunOptions(replicas=0), restored_level=Level[has])
    ckpt = Checkpointer(link=agent, model=torch.nn.Linear(2, 2))
    assert list(ckpt.steps(total=10)) == []
    ckpt.wait(level)
    assert agent.brought == brought
    ckpt.close()


# -- the end of a loop -----------------------------------------------------------------------------------


def test_a_loop_whose_last_step_cannot_be_saved_logs_it_at_its_end(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    ckpt = Checkpointer(link=agent, model=model)
    for step in ckpt.steps(total=3):
        agent.has_disk = step < 3
        ckpt.step(step)
        ckpt.flush()
    (line,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "training ends with step 3" in line.getMessage() and "the disk is full" in line.getMessage()
    assert "the newest of the run is that of step 2" in line.getMessage()
    ckpt.close()


def test_a_loop_whose_last_step_is_saved_logs_nothing(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = Checkpointer(link=agent, model=torch.nn.Linear(4, 4))
    for step in ckpt.steps(total=3):
        ckpt.step(step)
    ckpt.wait("local")
    assert not caplog.records
    ckpt.close()


def test_close_ends_everything_also_if_the_run_is_lost(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: Future[CheckpointError] = Future()
    monkeypatch.setattr(Agent, "ended", lambda self, session: ended)
    ckpt = checkpointer(agent)
    watch = ckpt._watch
    assert watch is not None
    ended.set_result(RunSuperseded("Another launcher has the run."))
    with pytest.raises(RunSuperseded):
        ckpt.close()
    assert not watch._thread.is_alive() and ckpt._saver is not None and not ckpt._saver._buffers
    with pytest.raises(ConfigError, match="after close"):
        ckpt.step(1)
    ckpt.close()


def test_a_restore_after_close_is_misuse(agent: Agent) -> None:
    ckpt = Checkpointer(link=agent, model=torch.nn.Linear(2, 2))
    ckpt.close()
    for call in (ckpt.restore, lambda: ckpt.steps(total=3)):
        with pytest.raises(ConfigError, match="restore was called after close"):
            call()
    assert agent.arena is None and ckpt._watch is None


def test_an_item_that_is_refused_is_not_registered(agent: Agent) -> None:
    ckpt = Checkpointer(link=agent, model=torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedItem):
        ckpt.add("loader", iter([1, 2]))
    ckpt.add("loader", {"position": 0})
    ckpt.restore()
    ckpt.close()
