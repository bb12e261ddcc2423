"""Counts of what a server has done."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stats:
    """Since the start. `requests`: by operation and status; what was dropped counts as status 0."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, Counter[int]] = {}
        self._bytes_in = self._bytes_out = 0
        self._in_flight = self._most_in_flight = 0

    def received(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes_in += num_bytes

    def sent(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes_out += num_bytes

    @contextmanager
    def request(self) -> Iterator[None]:
        with self._lock:
            self._in_flight += 1
            self._most_in_flight = max(self._most_in_flight, self._in_flight)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def answered(self, operation: str, status: int) -> None:
        with self._lock:
            self._requests.setdefault(operation, Counter())[status] += 1

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            return {
                "requests": {name: dict(counts) for name, counts in self._requests.items()},
                "bytes_in": self._bytes_in,
                "bytes_out": self._bytes_out,
                "in_flight": self._in_flight,
                "most_in_flight": self._most_in_flight,
            }
