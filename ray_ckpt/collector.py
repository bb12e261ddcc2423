"""Python's garbage collector, paused while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: it would look at all objects again and again while more are made.

    The objects of a process that has imported torch take it 0.1 s each time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
