"""Signs of life: how the sender of a copy notices that its peer is gone, while it may just be slow.

The receiver sends a beat each BEAT_S while it writes or fsyncs, however long that takes, and while chunks
arrive; it sends none while it waits for a chunk that does not come. The sender takes each beat, and each
message that has left, as a sign of life. So silence in either direction of the way is noticed, and so is a
peer that is frozen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

SILENT_S = 5.0  # without a sign of life: five beats, or one message (2 MiB) at 400 KB/s
BEAT_S = 1.0  # between two heartbeats of a holder
BEAT = b"."  # no digest


class Pulse:
    """When a peer was last heard of. Time in which the caller itself is busy does not count.

    Safe to use from several threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None  # since then the peer is waited for; None: it is the caller's turn
        self.heard = False  # there was a sign of life

    def wait_for_peer(self) -> None:
        """It is the peer's turn from now on."""
        self._since_s = self._clock()

    def rest(self) -> None:
        """It is the caller's turn."""
        self._since_s = None

    def beat(self) -> None:
        """Note a sign of life."""
        self.heard = True
        if self._since_s is not None:
            self._since_s = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds without a sign of life; 0 while it is the caller's turn."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s


class Beats:
    """Beats of a receiver to the sender of one file, sent from `taken` until the end of the block."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._is_waiting = False  # for the next chunk
        self._has_received = True  # a chunk, since the last beat
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="ray_ckpt-beats", daemon=True)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()  # the answer follows over the same writer

    def taken(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Return the same chunks, and note when one is waited for."""
        self._is_waiting = True
        for chunk in chunks:
            self._is_waiting, self._has_received = False, True
            yield chunk
            self._is_waiting = True
        self._is_waiting = False

    def _send(self) -> None:
        with contextlib.suppress(flight.FlightError, pa.ArrowException, OSError):  # nobody listens any more
            while not self._is_over.wait(BEAT_S):
                if self._has_received or not self._is_waiting:
                    self._has_received = False
                    self._writer.write(BEAT)
