"""How long training may go on without a new checkpoint."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from ray_ckpt.errors import Unprotected
from ray_ckpt.trainer.outcomes import UnprotectedGuard


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_a_limit_training_goes_on_forever(clock: Clock) -> None:
    protection = UnprotectedGuard(None, clock=clock)
    for step in range(1000):
        protection.failed(step, "no space")
    clock.now_s += 1e9
    protection.check(7)


def test_the_last_failure_that_is_allowed_ends_training_with_the_reason(clock: Clock) -> None:
    protection = UnprotectedGuard(3, clock=clock)
    for step, reason in ((6, "no space"), (7, "no agent")):
        protection.failed(step, reason)
        protection.check(step)
    protection.failed(8, "no disk")
    with pytest.raises(Unprotected, match=r"step 8: 3 saves have failed .*: no disk") as caught:
        protection.check(8)
    assert caught.value.hint and caught.value.fields["step"] == 8


def test_a_checkpoint_in_between_starts_the_count_again(clock: Clock) -> None:
    protection = UnprotectedGuard(2, clock=clock)
    for step in range(10):
        protection.failed(step, "no space")
        protection.check(step)
        protection.renew(step + 1)


def test_a_late_outcome_clears_only_the_failures_before_it(clock: Clock) -> None:
    protection = UnprotectedGuard(2, clock=clock)
    protection.failed(6, "no space")
    protection.renew(5)
    protection.failed(7, "no space")
    with pytest.raises(Unprotected):
        protection.check(7)
    protection.renew(7)
    protection.check(8)


def test_time_ends_training_though_no_save_has_failed(clock: Clock) -> None:
    protection = UnprotectedGuard(timedelta(minutes=10), clock=clock)
    clock.now_s += 599.0
    protection.check(1)
    clock.now_s += 1.0
    with pytest.raises(Unprotected, match="0 saves have failed and 600 s have passed"):
        protection.check(2)


def test_failures_alone_do_not_use_up_time(clock: Clock) -> None:
    protection = UnprotectedGuard(timedelta(minutes=10), clock=clock)
    for step in range(100):
        protection.failed(step, "no space")
        protection.check(step)


def test_halfway_it_warns_once_and_again_after_a_checkpoint(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    protection = UnprotectedGuard(timedelta(seconds=100), clock=clock)
    with caplog.at_level(logging.WARNING, "ray_ckpt"):
        for _ in range(5):
            clock.now_s += 15.0
            protection.check(1)
        assert len(caplog.records) == 1
        protection.renew()
        clock.now_s += 60.0
        protection.check(2)
        assert len(caplog.records) == 2
    assert "unprotected_after (0:01:40)" in caplog.text
