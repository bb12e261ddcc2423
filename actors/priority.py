"""What keeps the agent out of the training's way on its own node."""

from __future__ import annotations

import ctypes
import logging
import os
import threading

import psutil

log = logging.getLogger("ray_ckpt.agent")

NICENESS = 10  # a tenth of a core where training wants all of them, all of it where it does not
IO_PRIORITY = 7  # the lowest of the best-effort class; an idle class could be starved for good
MAX_HEAPS = 2  # of malloc; each thread with one of its own would keep what it has freed
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
