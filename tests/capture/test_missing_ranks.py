"""A rank that waits for missing ranks logs a warning, and enters no barrier without them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
import torch

from ray_ckpt.config import RunOptions
from ray_ckpt.core.awaited import Awaited, awaited_restore, awaited_save
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import SessionKey
from ray_ckpt.errors import AgentLost, CollectiveError, ConfigError, SaveNotCollective, Unavailable
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer import reports, waiting
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import Connection, set_connection
from ray_ckpt.trainer.reports import FIRST_REPORT_STEPS
from ray_ckpt.types import RankRestore
from tests.capture.local import LocalLink
from tests.capture.test_missed_steps import Barrier

Warnings: TypeAlias = Callable[[], list[str]]


@dataclass(slots=True)
class Alone(LocalLink):
    """A link of rank 0 of two; the other rank joins nothing."""

    missing: tuple[Awaited, ...] = ()
    met: list[int] = field(default_factory=list)
    answer: Future[tuple[int, ...]] = field(default_factory=Future)
    answers_restore: bool = True

    def restored(self, session_key: SessionKey, report: RankRestore) -> Future[RestoreTicket | None]:
        return LocalLink.restored(self, session_key, report) if self.answers_restore else Future()

    def awaited(self) -> tuple[Awaited, ...]:
        return self.missing

    def reach_barrier(self, session_key: SessionKey, number: int) -> Future[tuple[int, ...]]:
        self.met.append(number)
        return self.answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "CHECK_S", 0.02)
    monkeypatch.setattr(reports, "CHECK_S", 0.02)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Warnings]:
    """Warnings so far."""
    with caplog.at_level(logging.WARNING, logger="ray_ckpt"):
        yield lambda: caplog.messages


def checkpointer(link: LocalLink, reporter: Barrier | None = None) -> Checkpointer:
    set_connection(Connection(link=link, reporter=reporter))
    try:
        return Checkpointer(model=torch.nn.Linear(2, 2))
    finally:
        set_connection(Connection())


def test_a_restore_names_who_is_missing_and_gives_up(warnings: Warnings) -> None:
    options = RunOptions(restore_timeout_s=0.3)
    link = Alone(world_size=2, options=options, answers_restore=False, missing=(awaited_restore((1,), 7.0),))
    ckpt = checkpointer(link)
    with pytest.raises(CollectiveError, match=r"waited 0 s for rank\(s\) 1\. Every rank must make") as caught:
        ckpt.restore()
    assert caught.value.fields["missing_ranks"] == (1,)
    assert [text for text in warnings() if "waits for" in text] == [awaited_restore((1,), 7.0).text], (
        "logged once"
    )


def test_one_rank_warns_and_seldom_repeats(warnings: Warnings, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("ray_ckpt.trainer.waiting.time.monotonic", lambda: now_s[0])
    link = Alone(world_size=3, rank=1)
    log = waiting.WaitingLog(link, "save")
    times: list[int] = []
    for second in range(0, 200, 5):
        now_s[0] = float(second)
        link.missing = (
            awaited_restore((0,), 9.0),
            awaited_save(10, (0,), 6.0, {}),
            awaited_save(20, (0,), 5.0, {}),
        )
        log.log_waiting()
        times += [second] * (len(warnings()) - len(times))
    assert times == [0, 15, 45, 105], "with doubled pauses"
    assert all(text.startswith("The save of step 10 waits for rank(s) 0") for text in warnings())
    other = waiting.WaitingLog(Alone(world_size=3, rank=2, missing=link.missing), "save")
    other.log_waiting()
    assert len(warnings()) == 4, "rank 1 waits too, and logs it"


def test_an_agent_that_is_away_costs_a_warning_only(
    warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Alone) -> tuple[Awaited, ...]:
        raise Unavailable("away")

    monkeypatch.setattr(Alone, "awaited", away)
    waiting.WaitingLog(Alone(), "save").log_waiting()
    assert not warnings()


@dataclass(slots=True)
class Deaths(LocalLink):
    """A link whose agent dies `num_deaths` times, with the report of the rank or before it."""

    num_deaths: int = 3
    reported: list[SessionKey] = field(default_factory=list)

    def restored(self, session_key: SessionKey, report: RankRestore) -> Future[RestoreTicket | None]:
        self.reported.append(session_key)
        if len(self.reported) > self.num_deaths:
            return LocalLink.restored(self, session_key, report)
        if len(self.reported) % 2:
            raise AgentLost("no agent at the moment")
        lost: Future[RestoreTicket | None] = Future()
        lost.set_exception(AgentLost("the agent died"))
        return lost


def test_a_rank_reports_again_to_each_new_agent(warnings: Warnings, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: the death of an agent in a restore costs no training."""
    monkeypatch.setattr(waiting, "RECOVER_POLL_S", 0.0)
    link = Deaths()
    ckpt = checkpointer(link)
    assert ckpt.restore() is None
    ckpt.close()
    assert link.reported == 4 * [(1, 1)] and link.recovered == 3
    assert [text for text in warnings() if "lost during the restore" in text] == warnings()[:1]


def test_a_node_that_gets_no_agent_ends_the_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "RECOVER_POLL_S", 0.0)
    monkeypatch.setattr(waiting, "RECOVER_S", 0.05)
    ckpt = checkpointer(Deaths(num_deaths=1_000_000))
    with pytest.raises(AgentLost):
        ckpt.restore()
    with pytest.raises(ConfigError, match="again after it had failed") as caught:
        ckpt.restore()
    assert "connect all ranks again" in str(caught.value)
    ckpt.close()


def test_an_answer_that_comes_as_a_wait_ends_is_taken() -> None:
    class Late(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            if not self.done():
                self.set_result("go")
                raise TimeoutError
            return Future.result(self, timeout)

    assert waiting.wait_for_restore(Late, Alone(), 5.0) == "go"


def train(ckpt: Checkpointer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        ckpt.step(step)


def test_no_report_is_entered_without_the_others(warnings: Warnings) -> None:
    link, barrier = Alone(world_size=2, options=RunOptions(every_steps=1000)), Barrier()
    ckpt = checkpointer(link, barrier)
    ckpt.restore()
    ckpt._reports.next_step = FIRST_REPORT_STEPS
    link.answer.set_result((1,))
    train(ckpt, 1, 75)
    assert barrier.steps == [] and link.met == [10, 20, 40], "after twice as many steps each time"
    assert all(
        re.search(r"not reported to Ray Train: rank\(s\) 1 did not come", text) for text in warnings()[-3:]
    )
    link.answer = Future()
    link.answer.set_result(())
    train(ckpt, 76, 80)
    assert barrier.steps == [80] and link.met[-1] == 80
    ckpt.close()


def test_misuse_that_is_found_meanwhile_ends_the_wait() -> None:
    link, barrier = Alone(world_size=2, options=RunOptions(every_steps=5)), Barrier()
    ckpt = checkpointer(link, barrier)
    ckpt.restore()
    train(ckpt, 1, 9)
    ckpt.flush()
    misuse: Future[SaveOutcome] = Future()
    misuse.set_result(
        SaveOutcome(level=None, error=SaveNotCollective("Step 5 was saved by some ranks only."))
    )
    pending = ckpt._outcomes.pending[-1]
    pending.outcome, pending.is_checked = misuse, False
    with pytest.raises(SaveNotCollective):
        train(ckpt, 10, 10)
    assert barrier.steps == []
    ckpt.close()


def test_a_rank_reports_what_proves_that_it_takes_part() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_connection(Connection(link=LocalLink(options=RunOptions(every_steps=4))))
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    set_connection(Connection())
    sent = []
    for step in ckpt.steps(total=10):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
        sent.append(ckpt._progress())
    assert (sent[2].saved_before, sent[2].updates, sent[2].saved_updates) == (None, 3, 0)
    assert (sent[4].saved_before, sent[4].saved_step, sent[4].saved_updates) == (0, 4, 4)
    assert (sent[9].saved_before, sent[9].saved_step, sent[9].updates, sent[9].is_over) == (4, 8, 10, False)
    assert ckpt._progress().is_over and ckpt._progress().saved_step == 10
    ckpt.close()
