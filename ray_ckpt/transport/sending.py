"""Sending several files to a peer at a time, with a rate limit and retries."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from typing_extensions import Buffer

from ray_ckpt.errors import Unavailable
from ray_ckpt.transport import wire
from ray_ckpt.transport.client import SLOWEST_BYTES_PER_S, PeerClient
from ray_ckpt.transport.credentials import Credentials

log = logging.getLogger("ray_ckpt.transport")

MAX_STREAMS = 4  # connections to one peer: four together are as fast as the peer's disk
CORES_PER_STREAM = 4  # each end encrypts or decrypts in two threads; training needs the other cores
STREAMS = max(1, min(MAX_STREAMS, (os.cpu_count() or 1) // CORES_PER_STREAM))
BURST_S = 0.1  # burst of a limiter, in seconds of its rate: about one chunk of each stream
MAX_TRIES = 4  # tries of one file: a restarted peer is back in seconds; the coordinator handles longer losses
GONE_S = 10.0  # time until the kernel closes the connection: twice SILENT_S, which is detected first
MAX_SHARING = 16  # streams that may share a limiter: 4 peers at a time, MAX_STREAMS to each
RETRY_S = 0.5  # wait before the second try, doubled for each further try; plus a random 0 to 100 %


class Limiter:
    """A bandwidth that several streams share, from any threads; with `bytes_per_s=None` there is no limit.

    Each caller reserves the next free span of time and sleeps until the span begins (GCRA, ITU-T I.371).
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"the limit must be above 0 bytes per second, not {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = 0.0  # end of the spans reserved so far

    @property
    def slowest_bytes_per_s(self) -> float:
        """The rate below which a stream's peer counts as gone: the limiter alone allows more."""
        if self.bytes_per_s is None:
            return SLOWEST_BYTES_PER_S
        return min(SLOWEST_BYTES_PER_S, self.bytes_per_s / MAX_SHARING)

    def wait(self, nbytes: int) -> None:
        """Sleep until `nbytes` may be sent."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now_s = self._clock()
            start_s = max(self._free_at_s, now_s - BURST_S)
            self._free_at_s = start_s + nbytes / self.bytes_per_s
        if start_s > now_s:
            self._sleep(start_s - now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A file to send. `chunks` returns a new iterator over the bytes of the file for each try.

    The iterator may overwrite a chunk as soon as the next chunk is requested.
    """

    request: wire.PutRequest
    chunks: Callable[[], Iterable[Buffer]]


class _Stopped(Exception):
    """Sending another file failed, so this file is stopped."""


def send_files(
    endpoint: str,
    credentials: Credentials,
    files: Sequence[Outgoing],
    *,
    streams: int = STREAMS,
    limiter: Limiter | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Send `files` over up to `streams` connections at a time; return when the peer has stored all durably.

    Return the bytes that the peer did not need, because it has linked files instead (`PutRequest.is_link`).
    An interrupted file is sent again over a new connection, up to MAX_TRIES times in all. Raise Unavailable
    if the peer refuses or cannot be reached. Exceptions from `chunks` propagate without a retry. When one
    file fails, the others stop; files already stored stay. Send a fragment in a later call than the files
    that it lists.
    """
    sender = _Sender(endpoint, credentials, limiter or Limiter(), sleep)
    largest_first = sorted(files, key=lambda file: file.request.size_bytes, reverse=True)
    with ThreadPoolExecutor(max(1, streams), thread_name_prefix="ray_ckpt-send") as pool:
        sent = [pool.submit(sender.send, file) for file in largest_first]
    failures = [error for task in sent if (error := task.exception()) is not None]
    for failure in sorted(failures, key=lambda error: isinstance(error, _Stopped)):
        raise failure
    return sum(task.result() for task in sent)


class _Sender:
    """The state of one `send_files` call."""

    def __init__(
        self, endpoint: str, credentials: Credentials, limiter: Limiter, sleep: Callable[[float], object]
    ) -> None:
        self._endpoint = endpoint
        self._credentials = credentials
        self._limiter = limiter
        self._sleep = sleep
        self._stop = threading.Event()

    def send(self, file: Outgoing) -> int:
        """Send one file, in up to MAX_TRIES tries; return the bytes that were not needed."""
        try:
            for tried in range(1, MAX_TRIES + 1):
                if self._stop.is_set():  # checked before a connection, which may take seconds to fail
                    raise _Stopped
                try:
                    return self._try(file)
                except Unavailable as error:
                    if error.fields.get("refused", True) or tried == MAX_TRIES:
                        raise  # an error without this field comes from the source
                    log.info("copy %d of %d failed: %s", tried, MAX_TRIES, error)
                self._sleep(RETRY_S * 2 ** (tried - 1) * (1 + random.random()))
            raise AssertionError("the last try returns or raises")
        except BaseException:
            self._stop.set()
            raise

    def _try(self, file: Outgoing) -> int:
        request = file.request
        with PeerClient(self._endpoint, credentials=self._credentials, gone_s=GONE_S) as peer:
            if request.is_link and peer.link(request):
                return request.size_bytes
            slowest, plain = self._limiter.slowest_bytes_per_s, replace(request, is_link=False)
            peer.put(plain, self._paced(file.chunks()), slowest_bytes_per_s=slowest)
        return 0

    def _paced(self, blocks: Iterable[Buffer]) -> Iterator[memoryview]:
        for chunk in wire.split(blocks):
            if self._stop.is_set():
                raise _Stopped
            self._limiter.wait(chunk.nbytes)
            yield chunk
