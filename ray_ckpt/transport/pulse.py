"""Signs of life, by which the sender of a copy distinguishes a lost peer from a slow peer.

The receiver sends a beat every BEAT_S while the receiver writes or fsyncs, however long this takes, and while
chunks arrive. The receiver sends no beat while no chunk arrives. For the sender each beat that arrives, and
each message that could be sent, is a sign of life. The sender thus detects an interruption in either
direction and a frozen peer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

SILENT_S = 5.0  # without a sign of life a peer is lost: five beats, or one message (2 MiB) at 400 KB/s
BEAT_S = 1.0  # time between two beats of a receiver
BEAT = b"."  # not a possible digest


class Pulse:
    """The time since a peer's last sign of life, without the time in which the caller itself is busy.

    A pulse may be used from several threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None  # start of the wait for the peer; None while the caller is busy
        self.was_alive = False  # true after the first sign of life

    def wait_for_peer(self) -> None:
        """Start to wait for the peer."""
        self._since_s = self._clock()

    def stop_waiting(self) -> None:
        """Note that the caller is busy."""
        self._since_s = None

    def beat(self) -> None:
        """Note a sign of life."""
        self.was_alive = True
        if self._since_s is not None:
            self._since_s = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds without a sign of life; 0 while the caller is busy."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s


class Beats:
    """Beats that the receiver of one file sends to its sender while the `with` block runs."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._is_waiting = False  # true while the receiver waits for the next chunk
        self._has_received = True  # true if a chunk arrived since the last beat
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="ray_ckpt-beats", daemon=True)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()  # before the caller sends the answer over the same writer

    def watched(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the same chunks; record when the receiver waits for a chunk."""
        self._is_waiting = True
        for chunk in chunks:
            self._is_waiting, self._has_received = False, True
            yield chunk
            self._is_waiting = True
        self._is_waiting = False

    def _send(self) -> None:
        with contextlib.suppress(flight.FlightError, pa.ArrowException, OSError):  # the sender may be gone
            while not self._is_over.wait(BEAT_S):
                if self._has_received or not self._is_waiting:
                    self._has_received = False
                    self._writer.write(BEAT)
