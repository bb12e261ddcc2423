"""Waiting for other ranks: a rank that waits long logs the missing ranks, and gives up after a limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from ray_ckpt.core.awaited import Awaited, AwaitedKind, ranks_text
from ray_ckpt.errors import AgentLost, CheckpointError, CollectiveError
from ray_ckpt.trainer.link import RankLink

log = logging.getLogger("ray_ckpt")

CHECK_S = 5.0  # between requests for the ranks that the group waits for
REPEAT_S = 15.0  # until the same warning is logged again; doubled after each warning
MAX_REPEAT_S = 600.0  # REPEAT_S doubles up to this
RECOVER_POLL_S = 1.0  # between requests for a new agent; one starts in some seconds
RECOVER_S = 90.0  # without an agent, then the restore fails; a new one first takes stock of its disks

T = TypeVar("T")


class WaitingLog:
    """Warnings of one rank about missing ranks; each warning is repeated at growing intervals."""

    def __init__(self, link: RankLink, *whats: AwaitedKind) -> None:
        self._link = link
        self._whats = whats
        self._logged_s: dict[AwaitedKind, float] = {}  # monotonic time of the last warning
        self._repeat_s: dict[AwaitedKind, float] = {}
        self.found: tuple[Awaited, ...] = ()  # the result of the last request

    def log_waiting(self) -> None:
        """Log the ranks that the group waits for, if this rank has to log them. Never raises."""
        try:
            self.found = tuple(awaited for awaited in self._link.awaited() if awaited.what in self._whats)
        except CheckpointError as error:
            log.debug("the missing ranks are unknown: %s", error)
            return
        for awaited in self._due():
            log.warning("%s", awaited.text)

    def _due(self) -> Iterator[Awaited]:
        now_s = time.monotonic()
        mine = [awaited for awaited in self.found if awaited.speaker == self._link.identity.rank]
        for awaited in {each.what: each for each in reversed(mine)}.values():  # the oldest entry of each kind
            repeat_s = self._repeat_s.get(awaited.what, 0.0)
            if now_s - self._logged_s.get(awaited.what, -repeat_s) >= repeat_s:
                self._logged_s[awaited.what] = now_s
                self._repeat_s[awaited.what] = min(2 * repeat_s or REPEAT_S, MAX_REPEAT_S)
                yield awaited


class Recovering:
    """A rank of a restore that has lost its agent: it requests a new one, for up to RECOVER_S."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._end_s: float | None = None  # monotonic time at which to give up; None: nothing is lost

    def wait(self, error: AgentLost) -> None:
        """Request a new agent and wait a little; raise `error` if that was done for RECOVER_S."""
        now_s = time.monotonic()
        if self._end_s is None:
            log.warning("the agent of this node was lost during the restore; a new one is requested")
            self._end_s = now_s + RECOVER_S
        if now_s > self._end_s:
            raise error
        self._link.recover()
        time.sleep(RECOVER_POLL_S)


def wait_for_restore(report: Callable[[], Future[T]], link: RankLink, limit_s: float) -> T:
    """Report this rank's restore, and return the group's answer; report again to each new agent.

    Raises CollectiveError if ranks are missing for `limit_s`, AgentLost if there is no agent for RECOVER_S.
    """
    waiting, end_s = WaitingLog(link, "restore"), time.monotonic() + limit_s
    recovering, answer, lost = Recovering(link), None, None
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            answer = answer or report()
            return answer.result(min(CHECK_S, left_s))
        except AgentLost as error:
            answer, lost = None, error
            recovering.wait(error)
        except FutureTimeout:
            assert answer is not None
            if answer.done() and isinstance(answer.exception(), FutureTimeout):
                raise
            recovering = Recovering(link)
            waiting.log_waiting()
    if answer is None and lost is not None:
        raise lost
    ranks = tuple(rank for awaited in waiting.found for rank in awaited.ranks)
    who = f"rank(s) {ranks_text(ranks)}" if ranks else "other ranks"
    raise CollectiveError(
        f"This rank has restored and has waited {limit_s:.0f} s for {who}.",
        hint="Every rank must make a Checkpointer and call restore() or steps(); if they are only slow, "
        "raise restore_timeout_s.",
        missing_ranks=ranks,
    )
