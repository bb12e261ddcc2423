"""Keep the agent from slowing the training on its node: cores, disks, memory, network."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import threading
from collections.abc import Iterator

import psutil

from ray_ckpt.transport.sending import Limiter

log = logging.getLogger("ray_ckpt.agent")

NICENESS = 10  # a tenth of a core while training uses all cores
IO_PRIORITY = 7  # the lowest of the best-effort class; the idle class could starve
MAX_HEAPS = 2  # heaps of malloc; each keeps the memory that its threads free, so there is not one per thread
DRAIN_YIELDS_S = 0.25  # wait per block of 8 MiB while copies between nodes run; drains still get 32 MB/s
GC_OBJECTS = 200_000  # new objects between two collections of garbage, some 20 MB; Python's default is 700
_M_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def yield_to_training() -> None:
    """Lower this thread's priority for cores and disks; for bulk work, not for control messages."""
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
        psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_BE, IO_PRIORITY)
    except (OSError, psutil.Error, AttributeError) as error:  # a sandbox may refuse the change
        log.warning("bulk work runs at the training's priority: %s", error)


def limit_heaps() -> None:
    """Keep freed memory in few heaps, so that the memory is used again. Call this before threads start."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every libc
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, MAX_HEAPS)


def trim_heaps() -> None:
    """Return freed memory to the operating system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every libc
    if trim is not None:
        trim(0)


def collect_seldom() -> None:
    """Collect garbage less often in this process: messages make many objects, of which few are in cycles."""
    gc.set_threshold(GC_OBJECTS)


def settle_heap() -> None:
    """Collect garbage once; later collections skip the objects that exist now.

    Otherwise each save of a large group would cause several collections of all objects.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class ActiveCopies:
    """Count of copies in flight. Safe to use from many threads."""

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
    """Rate limiter of an upload to the storage path; copies between nodes go first.

    A copy protects a checkpoint against the loss of a node within seconds; a drain has minutes.
    """

    def __init__(self, limiter: Limiter, copies: ActiveCopies, *, yields_s: float = DRAIN_YIELDS_S) -> None:
        self._limiter = limiter
        self._copies = copies
        self._yields_s = yields_s
        self.sent_bytes = 0

    def wait(self, nbytes: int) -> None:
        self._copies.wait_until_none(self._yields_s)
        self._limiter.wait(nbytes)
        self.sent_bytes += nbytes
