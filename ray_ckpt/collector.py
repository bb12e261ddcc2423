"""Python's garbage collector, paused while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

_paused = 0  # by how many calls, in all threads


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection, which would look at all objects of the process again and again.

    A collection that is due follows when the pause ends. A process that is forked in it has no pause.
    """
    global _paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1
        gc.enable()


def _after_fork() -> None:
    global _paused
    if _paused:
        _paused = 0
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
