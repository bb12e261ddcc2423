"""Notices of clouds and signals that a node is about to go."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ray_ckpt.preemption.notice import Notice

log = logging.getLogger("ray_ckpt.coordinator")

NOTICE_HOLDS_S = 60.0  # how long a notice counts after its deadline, or after its last repetition
MAX_NOTICE_S = 600.0  # how far ahead a deadline counts without repetition; clouds give 2 to 5 minutes


@dataclass(frozen=True, slots=True)
class _Notified:
    at_s: float | None  # Unix time at which the node goes; None: not known
    until_s: float  # Unix time until which the notice counts, unless it is repeated


class Notices:
    """Notices by node, source and run; a notice expires if its source stops repeating it.

    A notice of a cloud counts for all runs: its run is "". A signal counts for the run whose process got it.

    `now_s` and all times of this class are Unix times.
    """

    def __init__(self) -> None:
        self._notified: dict[tuple[str, str, str], _Notified] = {}  # by node, source and run

    def nodes(self, run_uid: str) -> frozenset[str]:
        """Return the nodes that are about to go for a run."""
        return frozenset(node for node, _, run in self._notified if run in ("", run_uid))

    def add(self, node: str, notice: Notice, now_s: float, run_uid: str = "") -> None:
        key = (node, notice.source, run_uid)
        if key not in self._notified:
            log.warning("node %s is about to go: %s (%s)", node[:12], notice.text, notice.source)
        until_s = min(max(now_s, notice.deadline_s or 0.0), now_s + MAX_NOTICE_S) + NOTICE_HOLDS_S
        self._notified[key] = _Notified(notice.deadline_s, until_s)

    def forget_signals(self, run_uid: str, nodes: Set[str]) -> None:
        """Discard a run's signals on nodes that its new group uses; processes of its last group got them.

        Ray ends a worker by SIGTERM, and by SIGKILL a moment later, also on a node that stays.
        """
        forgotten = {(node, "sigterm", run_uid) for node in nodes}
        self._notified = {key: v for key, v in self._notified.items() if key not in forgotten}

    def expire(self, live: Set[str], now_s: float) -> None:
        """Discard nodes that are gone, and notices that are no longer repeated."""
        self._notified = {k: v for k, v in self._notified.items() if k[0] in live and now_s < v.until_s}

    def left_s(self, run_uid: str, by_ray: Mapping[str, float], now_s: float) -> dict[str, float]:
        """Return the seconds until each node is gone: the least by Ray, the clouds and the run's signals."""
        left_s = dict(by_ray)
        for (node, _, run), notified in self._notified.items():
            if notified.at_s is not None and run in ("", run_uid):
                left_s[node] = min(max(notified.at_s - now_s, 0.0), left_s.get(node, math.inf))
        return left_s

    def leaving(self, now_s: float) -> tuple[tuple[str, str, float | None], ...]:
        """Return each notice as node, source and the seconds until the node is gone; None: not known."""
        return tuple(
            (node, source, None if notified.at_s is None else notified.at_s - now_s)
            for (node, source, _), notified in sorted(self._notified.items(), key=lambda item: item[0])
        )
