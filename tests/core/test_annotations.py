"""Stories of annotations: metrics that come after the save, in the log, for retention to use."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.log_requests import MAX_WAITING
from ray_ckpt.errors import ConfigError, Fenced, Unavailable
from ray_ckpt.format import records as r
from tests.core.driver import Harness, of, one, ops


def trained(*, saves: int = 1, keep_last: int = 3, **options: Any) -> Harness:
    """Steps 10, 20, ... are saved, and on the storage path."""
    run = Harness("ab", keep_last=keep_last, remote_every=1, **options)
    run.open("ab")
    for step in range(10, 10 * saves + 10, 10):
        save(run, step)
    return run


def save(run: Harness, step: int) -> None:
    run.drain_all(run.save(step))


def annotate(step: int, *, token: str = "eval", **metrics: float) -> m.AnnotateRequested:
    return m.AnnotateRequested(token=token, step=step, metrics=metrics)


def metrics_of(run: Harness, step: int) -> dict[str, float]:
    """Return the metrics of the newest live checkpoint of a step."""
    return dict([c for c in run.machine.history.live() if c.step == step][-1].metrics)


def live_steps(run: Harness) -> list[int]:
    return [c.step for c in run.machine.history.live()]


def test_metrics_that_come_later_are_added_and_the_later_value_counts() -> None:
    run = trained()
    assert metrics_of(run, 10) == {"loss": 0.1}
    assert one(run.feed(annotate(10, accuracy=0.5, loss=0.2)), m.Reply) == m.Reply(token="eval", value=None)
    run.feed(annotate(10, accuracy=0.75))
    assert metrics_of(run, 10) == {"loss": 0.2, "accuracy": 0.75}


def test_an_annotation_outlives_its_coordinator() -> None:
    run = trained()
    run.feed(annotate(10, accuracy=0.5))
    run.start_coordinator()
    assert metrics_of(run, 10)["accuracy"] == 0.5


def test_an_annotation_is_confirmed_when_it_is_in_the_log() -> None:
    run = trained()
    run.store_mode = "held"
    effects = run.feed(annotate(10, accuracy=0.5))
    attempt = run.machine.history.lineage()[-1].id.attempt
    assert ops(effects) == [r.Annotated(attempt=attempt, metrics={"accuracy": 0.5})]
    assert not of(effects, m.Reply)
    assert of(run.confirm(), m.Reply)


def test_the_best_are_those_by_the_latest_value() -> None:
    run = trained(saves=3, keep_best=("accuracy", "max", 1))
    run.feed(annotate(10, accuracy=0.9), annotate(20, accuracy=0.5))
    run.feed(annotate(10, accuracy=0.1))
    for step in range(40, 70, 10):
        save(run, step)
    assert live_steps(run) == [20, 40, 50, 60]


def test_what_is_no_longer_among_the_best_goes_when_that_is_known() -> None:
    """Retention looks when the metrics are in the log, not only at the next save."""
    run = trained(saves=1, keep_last=1, keep_best=("accuracy", "max", 1))
    run.feed(annotate(10, accuracy=0.5))
    save(run, 20)
    assert live_steps(run) == [10, 20]
    run.feed(annotate(20, accuracy=0.6))
    assert live_steps(run) == [20]


def test_the_newest_checkpoint_of_the_step_on_the_lineage_is_meant() -> None:
    run = trained(saves=3, keep_last=9)
    before = run.machine.history.lineage()[1].id
    run.feed(m.PinRequested(token="pin", attempt=before.attempt, owner="me", expires_at_s=None))
    run.open("ab", resume="step:10")
    failed = one(run.feed(annotate(20, accuracy=0.4)), m.Fail).error
    assert isinstance(failed, ConfigError) and "off the lineage" in failed.message
    save(run, 20)
    run.feed(annotate(20, accuracy=0.5))
    assert run.checkpoint(run.attempt(20)).metrics["accuracy"] == 0.5
    assert run.checkpoint(before).state == "live" and "accuracy" not in run.checkpoint(before).metrics


def test_a_save_that_is_on_its_way_is_waited_for() -> None:
    run = trained()
    attempt = run.attempt(20)
    run.feed(run.stored(attempt, "a"))
    assert not run.feed(annotate(20, accuracy=0.5))
    assert of(run.feed(annotate(10, token="other", accuracy=0.1)), m.Reply), "it holds up nobody else"
    effects = run.save(20)
    assert [reply.token for reply in of(effects, m.Reply)] == ["eval"]
    assert run.checkpoint(attempt).metrics == {"loss": 0.05, "accuracy": 0.5}


def test_retention_after_a_commit_uses_the_metrics_that_waited_for_it() -> None:
    run = trained(keep_last=1, keep_best=("accuracy", "max", 1))
    run.feed(annotate(10, accuracy=0.5))
    run.feed(run.stored(run.attempt(20), "a"))
    run.feed(annotate(20, accuracy=0.1))
    save(run, 20)
    assert live_steps(run) == [10, 20], "the best, and the last"
    save(run, 30)
    assert live_steps(run) == [10, 30]


def test_annotations_that_waited_for_one_save_are_written_in_their_order() -> None:
    run = trained()
    run.feed(run.stored(run.attempt(20), "a"))
    run.feed(annotate(20, token="one", accuracy=0.1), annotate(20, token="two", accuracy=0.2))
    effects = (*run.save(20), *run.feed(annotate(20, token="three", accuracy=0.3)))
    assert [reply.token for reply in of(effects, m.Reply)] == ["one", "two", "three"]
    assert metrics_of(run, 20)["accuracy"] == 0.3


def test_a_save_that_came_to_nothing_has_no_metrics() -> None:
    run = trained()
    attempt = run.attempt(20)
    run.feed(run.stored(attempt, "a"), annotate(20, accuracy=0.5))
    failed = one(run.feed(m.SaveRefused(attempt=attempt, ranks=(1,), reason="busy")), m.Fail)
    assert failed.token == "eval" and isinstance(failed.error, Unavailable)


def test_an_annotation_of_a_save_fails_when_its_session_ends() -> None:
    run = trained()
    run.feed(run.stored(run.attempt(20), "a"), annotate(20, accuracy=0.5))
    failed = one(run.open("ab"), m.Fail)
    assert failed.token == "eval" and isinstance(failed.error, Unavailable)
    save(run, 20)
    assert "accuracy" not in metrics_of(run, 20), "that of the session before was meant"


def test_of_too_many_that_wait_the_oldest_gives_way() -> None:
    run = trained()
    run.feed(run.stored(run.attempt(20), "a"))
    requested = [annotate(20, token=str(number), value=number) for number in range(MAX_WAITING + 2)]
    failed = of(run.feed(*requested), m.Fail)
    assert [fail.token for fail in failed] == ["0", "1"]
    assert all(isinstance(fail.error, Unavailable) for fail in failed)
    assert len(of(run.save(20), m.Reply)) == MAX_WAITING


def test_a_step_without_a_checkpoint_is_refused_with_the_reason() -> None:
    run = trained(saves=2, keep_last=1)
    records = run.records
    retired = one(run.feed(annotate(10, accuracy=0.5)), m.Fail).error
    unknown = one(run.feed(annotate(11, accuracy=0.5)), m.Fail).error
    assert isinstance(retired, ConfigError) and "retired" in retired.message
    assert isinstance(unknown, ConfigError) and "no checkpoint of it" in unknown.message
    assert "20" in unknown.hint and "20" in retired.hint
    assert run.records == records


def test_names_are_bounded_and_known_ones_can_still_be_written() -> None:
    run = trained()
    many = {f"metric {number}": 0.0 for number in range(r.MAX_METRICS - 1)}
    run.feed(m.AnnotateRequested(token="many", step=10, metrics=many))
    assert len(metrics_of(run, 10)) == r.MAX_METRICS
    failed = one(run.feed(annotate(10, one_more=1.0)), m.Fail)
    assert isinstance(failed.error, ConfigError) and str(r.MAX_METRICS) in failed.error.message
    assert of(run.feed(annotate(10, loss=0.7)), m.Reply)
    assert metrics_of(run, 10)["loss"] == 0.7


@pytest.mark.parametrize("metrics", [{"\ud800": 1.0}, {"loss": "low"}, {"loss": None}])
def test_what_no_record_can_hold_is_refused_and_does_not_hold_up_the_log(metrics: Any) -> None:
    run = trained()
    failed = one(run.feed(m.AnnotateRequested(token="bad", step=10, metrics=metrics)), m.Fail)
    assert isinstance(failed.error, ConfigError)
    assert of(run.feed(annotate(10, accuracy=0.5)), m.Reply)


def test_waiting_annotations_fail_when_the_coordinator_steps_down() -> None:
    run = trained()
    run.feed(run.stored(run.attempt(20), "a"), annotate(20, token="of a save", accuracy=0.5))
    run.store_mode = "held"
    run.feed(annotate(10, token="in flight", accuracy=0.5))
    Harness("ab", store=run.store)
    effects = run.confirm()
    assert {(fail.token, type(fail.error)) for fail in of(effects, m.Fail)} == {
        ("of a save", Fenced),
        ("in flight", Fenced),
    }
    assert isinstance(one(run.feed(annotate(10, token="late")), m.Fail).error, Fenced)


def test_an_annotation_that_comes_before_the_fence_is_taken_up_after_it() -> None:
    run = trained()
    run.store_mode = "held"
    run.start_coordinator()
    assert not run.feed(annotate(10, accuracy=0.5))
    assert of(run.confirm(), m.Reply)
    assert metrics_of(run, 10)["accuracy"] == 0.5
