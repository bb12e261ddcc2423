"""Waiting for other ranks: whoever waits for long says for whom, and does not wait for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from ray_ckpt.core.awaited import Awaited, What, ranks_text
from ray_ckpt.errors import CheckpointError, CollectiveError
from ray_ckpt.trainer.link import Link

log = logging.getLogger("ray_ckpt")

LOOK_S = 5.0  # between questions whom the group waits for
AGAIN_S = 15.0  # until the same is said again; twice that after each time
MAX_AGAIN_S = 600.0

T = TypeVar("T")


class WaitingLog:
    """What one rank has said about ranks that are missing: each thing once, then seldom."""

    def __init__(self, link: Link, *whats: What) -> None:
        self._link = link
        self._whats = whats
        self._logged_s: dict[What, float] = {}  # monotonic
        self._again_s: dict[What, float] = {}
        self.found: tuple[Awaited, ...] = ()  # at the last look

    def log_waiting(self) -> None:
        """Log whom the group waits for, if this rank is the one that says so. Never raises."""
        try:
            self.found = tuple(awaited for awaited in self._link.awaited() if awaited.what in self._whats)
        except CheckpointError as error:
            log.debug("nobody can tell which ranks are missing: %s", error)
            return
        for awaited in self._due():
            log.warning("%s", awaited.text)

    def _due(self) -> Iterator[Awaited]:
        now_s = time.monotonic()
        mine = [awaited for awaited in self.found if awaited.speaker == self._link.identity.rank]
        for awaited in {each.what: each for each in reversed(mine)}.values():  # the oldest of each kind
            again_s = self._again_s.get(awaited.what, 0.0)
            if now_s - self._logged_s.get(awaited.what, -again_s) >= again_s:
                self._logged_s[awaited.what] = now_s
                self._again_s[awaited.what] = min(2 * again_s or AGAIN_S, MAX_AGAIN_S)
                yield awaited


def wait_for_restore(answer: Future[T], link: Link, limit_s: float) -> T:
    """The group's answer to this rank's restore. CollectiveError if ranks are missing for `limit_s`."""
    words, end_s = WaitingLog(link, "restore"), time.monotonic() + limit_s
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            return answer.result(min(LOOK_S, left_s))
        except FutureTimeout:
            if answer.done():
                raise
            words.log_waiting()
    ranks = tuple(rank for awaited in words.found for rank in awaited.ranks)
    who = f"rank(s) {ranks_text(ranks)}" if ranks else "other ranks"
    raise CollectiveError(
        f"This rank has restored and has waited {limit_s:.0f} s for {who}.",
        hint="Every rank must make a Checkpointer and call restore() or steps(); if they are only slow, "
        "raise restore_timeout_s.",
        missing_ranks=ranks,
    )
