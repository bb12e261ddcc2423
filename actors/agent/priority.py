"""What keeps the agent out of the training's way on its own node."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator

import psutil

from ray_ckpt.transport.sending import Limiter

log = logging.getLogger("ray_ckpt.agent")

NICENESS = 10  # a tenth of a core where training wants all of them, all of it where it does not
IO_PRIORITY = 7  # the lowest of the best-effort class; an idle class could be starved for good
MAX_HEAPS = 2  # of malloc; each thread with one of its own would keep what it has freed
DRAIN_YIELDS_S = 0.25  # of a block of 8 MiB to copies between nodes: a drain goes on at 32 MB/s beside them
_M_ARENA_MAX = -8  # malloc.h


def yield_to_training() -> None:
    """Lower this thread's priority for cores and disks. For bulk work; control messages stay prompt."""
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
        psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_BE, IO_PRIORITY)
    except (OSError, psutil.Error, AttributeError) as error:  # a sandbox may refuse; work must go on
        log.warning("bulk work runs at the training's priority: %s", error)


def limit_heaps() -> None:
    """Keep memory that has been freed in few heaps, so that it is found again. Before threads are started."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every libc
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, MAX_HEAPS)


def trim_heaps() -> None:
    """Give freed memory back to the machine; what a run has taken is more than the next one needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every libc
    if trim is not None:
        trim(0)


class ActiveCopies:
    """Counts what is going on. Safe to use from many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def wait_until_none(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._count, timeout_s)


class DrainRateLimiter:
    """When bytes may leave for the storage path: after copies to other nodes, and not faster than allowed.

    A copy makes a checkpoint survive a node within seconds; a drain has minutes.
    """

    def __init__(self, limiter: Limiter, copies: ActiveCopies, *, yields_s: float = DRAIN_YIELDS_S) -> None:
        self._limiter = limiter
        self._copies = copies
        self._yields_s = yields_s
        self.sent_bytes = 0  # that it has let through

    def wait(self, nbytes: int) -> None:
        self._copies.wait_until_none(self._yields_s)
        self._limiter.wait(nbytes)
        self.sent_bytes += nbytes
