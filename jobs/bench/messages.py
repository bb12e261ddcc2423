"""Cost of Ray per message to an async actor, compared with the cost of the event in the run machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import ray

from jobs.bench.context import Context
from jobs.bench.coordinator import stored_events
from jobs.bench.row import Row, first_line, measure, skipped

NUM_MESSAGES = 1_000
QUICK_MESSAGES = 50
UNIT = "ms"


class Listener:
    """An actor that accepts every message and does nothing."""

    async def hear(self, message: object) -> None:
        return None


def rows(context: Context) -> Iterator[Row]:
    """Measure an empty message and a report of 17 files; all are sent at once and awaited."""
    num_messages = QUICK_MESSAGES if context.quick else NUM_MESSAGES
    try:
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # the row shows the reason why Ray does not start
        yield skipped(
            "message", "a message to an async actor of Ray", f"Ray does not start: {first_line(error)}"
        )
        return
    try:
        listener = ray.remote(Listener).options(num_cpus=0).remote()
        ray.get(listener.hear.remote(None))
        empty: list[object] = [None] * num_messages
        stored: list[object] = list(stored_events(num_messages))
        yield _row(
            "message",
            f"{num_messages:,} empty messages to an async actor, each",
            listener,
            empty,
            context.repeat,
        )
        yield _row(
            "message-stored",
            f"{num_messages:,} NodeStored of 17 files, each",
            listener,
            stored,
            context.repeat,
        )
    finally:
        ray.shutdown()


def _row(name: str, what: str, listener: Any, messages: list[object], repeat: int) -> Row:
    def message_ms() -> float:
        started_s = time.perf_counter()
        ray.get([listener.hear.remote(message) for message in messages])
        return (time.perf_counter() - started_s) * 1e3 / len(messages)

    return measure(name, what, UNIT, message_ms, repeat=repeat)
