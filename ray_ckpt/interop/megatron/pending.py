"""The wait for an asynchronous save, in the form in which Megatron waits.

Megatron runs a function in another process, forked or spawned, and checks at each step whether the process
has ended. The function here waits for a lock on a file that this process holds until the save has ended;
the kernel frees the lock also if this process dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread


class Pending:
    """A save that a thread waits for."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """Call `wait` in a thread. Other processes can wait for its end with `wait_for_end(path)`."""
        self._file, self.path = tempfile.mkstemp(prefix="ray_ckpt-save-")
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # not inherited by a fork, other than flock
        self._done: Future[None] = Future()
        Thread(target=self._run, args=(wait,), name="ray_ckpt-pending", daemon=True).start()

    def result(self) -> None:
        """Wait for the end; raise the error of `wait`."""
        self._done.result()

    def _run(self, wait: Callable[[], None]) -> None:
        try:
            wait()
            self._done.set_result(None)
        except BaseException as error:
            self._done.set_exception(error)
        finally:
            Path(self.path).unlink(missing_ok=True)
            os.close(self._file)  # frees the lock


def wait_for_end(path: str) -> None:
    """Wait in another process until a save has ended; return at once in the process that saves."""
    with suppress(FileNotFoundError), Path(path).open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
