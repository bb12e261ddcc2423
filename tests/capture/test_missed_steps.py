"""Ranks that miss an agreed step, since the signal was late or its agent has died."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from threading import Event

import pytest
import torch

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import RankProgress, SessionKey
from ray_ckpt.errors import CheckpointError, SaveNotCollective
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.trainer import connection
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import Connection, set_connection
from ray_ckpt.trainer.save_signal import SaveSignals
from tests.capture.local import LocalLink
from tests.core.driver import Harness, of


class Barrier:
    """A reporter that notes at which steps its rank enters the barrier."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def report(self, newest: object, step: int) -> int:
        self.steps.append(step)
        return step + 20


@dataclass
class Rank:
    link: LocalLink
    ckpt: Checkpointer = field(init=False)
    barrier: Barrier = field(default_factory=Barrier)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        set_connection(Connection(link=self.link, reporter=self.barrier))
        self.ckpt = Checkpointer(model=torch.nn.Linear(4, 4))
        set_connection(Connection())
        self.ckpt.restore()
        self.ckpt._signals.refresh()


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[Rank, ...]]:
    """Return two ranks after 60 steps; rank 1 has not seen the signal of step 10, but those of 20, 30, ..."""
    options = RunOptions(every_s=1e9)
    group = tuple(Rank(LocalLink(options=options, rank=rank, world_size=2)) for rank in range(2))
    for step in range(1, 61):
        for rank, each in enumerate(group):
            if step % 10 == 7 and (rank, step) != (1, 7):
                assert each.link.page is not None
                each.link.page.show(SaveSignal(step=step + 3, number=step, urgent=True).word)
            each.ckpt.step(step)
        for each in group:
            each.ckpt.flush()
    yield group
    for each in group:
        each.ckpt.close()


def test_the_ranks_report_at_the_same_steps(ranks: tuple[Rank, ...]) -> None:
    first, second = (rank.barrier.steps for rank in ranks)
    assert first == second == [10, 30, 50]


def test_a_rank_at_its_first_save_is_not_taken_for_one_with_other_parameters(ranks: tuple[Rank, ...]) -> None:
    counts = [{s.attempt.step: s.replicated for s in rank.link.sealed} for rank in ranks]
    assert [sorted(each) for each in counts] == [[10, 20, 30, 40, 50, 60], [20, 30, 40, 50, 60]]
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(20)
    stored = (run.stored(attempt, node, replicated=each[20]) for node, each in zip("ab", counts, strict=True))
    effects = run.feed(*stored)
    copied = (run.copied(attempt, node.node_id, holder) for node in run.plan.nodes for holder in node.holders)
    effects += run.feed(*copied)
    assert not [publish.error for publish in of(effects, m.NotifyOutcome) if publish.error]


def test_the_pace_after_an_evaluation_is_that_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("ray_ckpt.trainer.save_signal.time.monotonic", lambda: now_s[0])
    agreed = SaveSignals(LocalLink())
    for took_s in (*[0.5] * 20, 600.0, 0.5):
        now_s[0] += took_s
        agreed.completed()
    assert agreed.progress(step=22, saved_step=0, stall_s=0.0).step_s == pytest.approx(0.5)


def test_a_page_that_is_no_page_is_logged_once_and_progress_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The descriptor of a dead agent may have become another file. Without reports the rank seems to hang."""
    (tmp_path / "empty").touch()
    reported: Queue[int] = Queue()
    monkeypatch.setattr(connection, "REFRESH_S", 0.0)
    monkeypatch.setattr(LocalLink, "signal_page", lambda self, *, named=False: str(tmp_path / "empty"))

    class Reporting(LocalLink):  # not those of other tests, whose threads may still report
        def progress(self, session_key: SessionKey, progress: RankProgress) -> None:
            reported.put(progress.step)

    ckpt = Checkpointer(link=Reporting(), model=torch.nn.Linear(2, 2))
    ckpt.restore()
    assert ckpt._watch is not None
    for _ in range(3):
        ckpt._watch.wake()
        assert reported.get(timeout=10) == 0
    monkeypatch.setattr(LocalLink, "signal_page", _raises)
    for _ in range(3):
        ckpt._watch.wake()
        assert reported.get(timeout=10) == 0
    ckpt.close()
    assert caplog.text.count("saves by time and emergency saves are off") == 1


def _raises(self: LocalLink, *, named: bool = False) -> str:
    raise RuntimeError("a bug of another package")


def test_a_loop_that_only_calls_due_reports_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise no step ahead of the rank could be announced for saves by time or in an emergency."""
    now_s = [0.0]
    monkeypatch.setattr("ray_ckpt.trainer.save_signal.time.monotonic", lambda: now_s[0])
    rank = Rank(LocalLink(options=RunOptions(every_s=1e9)))
    page = rank.link.page
    assert page is not None
    for step in range(1, 21):
        now_s[0] += 0.5
        if step == 17:
            page.show(SaveSignal(step=19, number=1, urgent=False).word)
        if rank.ckpt.due(step):
            assert rank.ckpt.due(step), "a second call gives the same answer"
            rank.ckpt.save(step)
    progress = rank.ckpt._progress()
    rank.ckpt.close()
    assert (progress.step, progress.saved_step, progress.step_s) == (20, 19, 0.5)


def test_a_loop_that_only_calls_due_gets_the_error_of_a_failed_save() -> None:
    rank = Rank(LocalLink(options=RunOptions(every_steps=2)))
    rank.ckpt.save(1)
    rank.ckpt.flush()
    misuse = SaveNotCollective("Step 1 was saved by some ranks only.")
    pending = rank.ckpt._outcomes.pending
    pending[-1] = replace(pending[-1], outcome=_failed(misuse), is_checked=False)
    with pytest.raises(SaveNotCollective):
        rank.ckpt.due(3)
    rank.ckpt.close()


def _failed(error: CheckpointError) -> Future[SaveOutcome]:
    ended: Future[SaveOutcome] = Future()
    ended.set_result(SaveOutcome(level=None, error=error))
    return ended


def test_a_rank_that_saves_no_tensor_reads_what_all_share_before_training_goes_on() -> None:
    """Small tensors are saved once on each node; a step would change what another rank digests."""
    digests = []
    for rank in range(2):
        link = LocalLink(options=RunOptions(every_steps=1), rank=rank, world_size=2)
        link.identity = replace(link.identity, node_ranks=(0, 1))
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        set_connection(Connection(link=link))
        ckpt = Checkpointer(model=model, optimizer=optimizer)
        set_connection(Connection())
        ckpt.restore()
        assert ckpt._saver is not None
        go = Event()
        if rank == 1:  # which has nothing to copy, so its step does not wait for the thread that copies
            ckpt._saver._snapshotter._thread.submit(go.wait, 30)
        for number in range(1, 3):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                ckpt.step(number)
        go.set()
        ckpt.flush()
        ckpt.close()
        (shard,) = link.sealed
        digests.append(shard.replicated)
    assert digests[0] == digests[1]
