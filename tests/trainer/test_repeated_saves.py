"""A step for which both `step` and `save` are called, in either order."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import nn

from ray_ckpt.config import RunOptions
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import GOES_ON
from ray_ckpt.errors import ConfigError, Unavailable
from ray_ckpt.format.names import make_attempt
from ray_ckpt.trainer import outcomes
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.types import AttemptId, Level
from tests.capture.local import LocalLink


class SlowCommits(LocalLink):
    """A link whose saves have no outcome until the test gives it."""

    def outcome(self, attempt: AttemptId, level: Level) -> Future[SaveOutcome]:
        return self.commits.setdefault(attempt.attempt, Future())

    commits: dict[str, Future[SaveOutcome]]

    def end(self, error: Unavailable | None = None) -> None:
        self.commits[self.sealed[-1].attempt.attempt].set_result(
            SaveOutcome(level=None if error else Level.LOCAL, error=error)
        )


def slow(world_size: int = 1) -> SlowCommits:
    made = SlowCommits(RunOptions(memory="double", every_steps=4), world_size=world_size)
    made.commits = {}
    return made


@pytest.fixture
def link() -> SlowCommits:
    return slow()


def begun(link: LocalLink) -> tuple[Checkpointer, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    ckpt.step(4)
    ckpt.flush()
    assert [s.attempt.step for s in link.sealed] == [4]
    return ckpt, optimizer


def test_a_step_that_is_committed_is_saved(link: SlowCommits) -> None:
    ckpt, _ = begun(link)
    link.end()
    assert ckpt.save(4, {"loss": 0.5})
    ckpt.wait("local", timeout_s=1.0)
    assert ckpt.finish()
    ckpt.close()
    assert [s.attempt.step for s in link.sealed] == [4] and not link.skipped
    assert [(step, metrics) for step, metrics, *_ in link.annotated] == [(4, {"loss": 0.5})]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_that_goes_on_is_waited_for_and_the_other_ranks_hear_of_it(world_size: int) -> None:
    link = slow(world_size)
    ckpt, _ = begun(link)
    assert ckpt.save(4)
    assert link.skipped == ({4: GOES_ON} if world_size > 1 else {}) and len(link.sealed) == 1
    with pytest.raises(Unavailable, match="did not become local within"):
        ckpt.wait("local", timeout_s=0.1)
    link.end()
    ckpt.wait("local", timeout_s=1.0)
    ckpt.close()


def test_a_step_is_saved_again_only_behind_an_optimizer_step(link: SlowCommits) -> None:
    """As at the end of an epoch, where a program saves whether its cadence has or not."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    optimizer.step()
    assert ckpt.save(4)
    ckpt.flush()
    link.end()
    assert ckpt.save(4, {"loss": 0.5})
    assert [s.attempt.step for s in link.sealed] == [4] and link.annotated[0][:2] == (4, {"loss": 0.5})
    optimizer.step()
    with pytest.raises(ConfigError, match="Step 4 comes twice"):
        ckpt.save(4)
    ckpt.close()


def test_a_save_that_was_dropped_is_made_again(link: SlowCommits) -> None:
    ckpt, _ = begun(link)
    link.end(Unavailable("rank 1 was busy"))
    assert ckpt.save(4)
    ckpt.flush()
    assert [s.attempt.step for s in link.sealed] == [4, 4]
    assert len({s.attempt.attempt for s in link.sealed}) == 2
    ckpt.close()


def test_a_state_that_an_optimizer_has_changed_since_is_another_one(link: SlowCommits) -> None:
    ckpt, optimizer = begun(link)
    link.end()
    optimizer.step()
    assert ckpt.save(4)
    ckpt.flush()
    assert [s.attempt.step for s in link.sealed] == [4, 4]
    ckpt.close()


@pytest.mark.parametrize("call", ["step", "save"])
def test_a_step_of_any_optimizer_makes_another_state(link: SlowCommits, call: str) -> None:
    """As in a GAN, whose discriminator has made more steps than the generator that steps now."""
    models = nn.ModuleList((nn.Linear(2, 2), nn.Linear(2, 2)))
    often, seldom = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    ckpt = Checkpointer(link=link, models=models, often=often, seldom=seldom)
    ckpt.restore()
    for _ in range(5):
        often.step()
    getattr(ckpt, call)(4)
    ckpt.flush()
    assert [s.attempt.step for s in link.sealed] == [4]
    assert ckpt._progress().updates == ckpt._progress().saved_updates == 5
    link.end()
    seldom.step()
    if call == "save":
        with pytest.raises(ConfigError, match="Step 4 comes twice"):
            ckpt.save(4)
    else:
        assert ckpt.save(4)
        ckpt.flush()
        assert [s.attempt.step for s in link.sealed] == [4, 4]
    ckpt.close()


def test_a_change_under_the_lock_after_the_capture_is_left_to_the_next_step(link: SlowCommits) -> None:
    """As an average is swapped in to evaluate it; a second save of a step that is committed is dropped."""
    ckpt, optimizer = begun(link)
    link.end()
    with ckpt.lock(), torch.no_grad():
        optimizer.param_groups[0]["params"][0].fill_(7.0)
    assert ckpt.save(4, {"loss": 0.5})
    assert ckpt.finish()
    ckpt.close()
    assert [s.attempt.step for s in link.sealed] == [4]
    assert [(step, metrics) for step, metrics, *_ in link.annotated] == [(4, {"loss": 0.5})]


@pytest.mark.parametrize("is_in_time", [True, False])
def test_the_last_save_may_take_longer_than_the_limit_for_missing_ranks(
    is_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second save would be dropped if the first one is committed."""
    monkeypatch.setattr(outcomes, "OUTCOME_SLACK_S", 0.1)
    link = slow()
    limit_s = 60.0 if is_in_time else 0.3
    link.options = replace(link.options, attempt_timeout_s=0.1, goal_timeout_s=0.1, finish_timeout_s=limit_s)
    ckpt, _ = begun(link)
    if is_in_time:
        threading.Timer(0.3, link.end).start()
    assert ckpt.finish() is is_in_time
    assert len(link.sealed) == 1
    ckpt.close()


def test_the_last_save_is_made_again_if_it_was_dropped(link: SlowCommits) -> None:
    ckpt, _ = begun(link)
    link.end(Unavailable("rank 1 was busy"))
    second = make_attempt(run_uid="0" * 32, epoch=1, session=1, step=4, attempt=1)
    link.outcome(second, Level.LOCAL).set_result(SaveOutcome(level=Level.LOCAL, error=None))
    assert ckpt.finish()
    assert [s.attempt.step for s in link.sealed] == [4, 4]
    ckpt.close()


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_step_that_save_has_captured_is_not_captured_again_because_it_is_due(
    link: SlowCommits, is_committed: bool
) -> None:
    ckpt = Checkpointer(link=link, model=nn.Linear(2, 2))
    ckpt.restore()
    assert ckpt.save(4, {"accuracy": 0.9})
    ckpt.flush()
    if is_committed:
        link.end()
    ckpt.step(4, {"loss": 0.5})
    ckpt.flush()
    assert [s.attempt.step for s in link.sealed] == [4]
    assert [(step, metrics) for step, metrics, *_ in link.annotated] == [(4, {"loss": 0.5})]
    if not is_committed:
        link.end()
    ckpt.wait("local", timeout_s=1.0)
    assert ckpt.finish()
    ckpt.close()
