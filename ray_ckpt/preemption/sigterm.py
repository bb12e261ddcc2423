"""Delay the end of this process by SIGTERM, so that training can save once more."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from ray_ckpt.errors import ConfigError
from ray_ckpt.preemption.notice import Notice, left_s

log = logging.getLogger("ray_ckpt")

GRACE_S = 25.0  # Kubernetes kills 30 s after SIGTERM, unless the pod sets another time
MAIN_THREAD_S = 1.0  # wait for the main thread to end the process; afterwards another thread ends it

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers

# Bytes that the watching thread reads, in addition to the signal numbers that Python writes.
_HANDLED = b"\x00"
_ENDED = b"\xfe"


class TermSignal:
    """Delays the end of this process by SIGTERM, once, so that the time can be used for a last save.

    On SIGTERM `on_notice` is called in a separate thread. The signal is passed on after `grace_s`, at a
    second SIGTERM or at `uninstall`, whichever comes first. It goes to the previous handler (which raises
    SystemExit in Ray's workers) or to the default action, or is dropped if SIGTERM was ignored. Afterwards
    SIGTERM is handled as before `install`, and this object has no further use.

    Python runs handlers in the main thread, between two bytecodes. `time.sleep`, `Thread.join` and locks let
    handlers run; C code that does not return blocks them. The notice does not depend on the main thread,
    because the signal number arrives through the wakeup descriptor of the process (`signal.set_wakeup_fd`).
    If other code uses the descriptor, such as `loop.add_signal_handler` of an asyncio loop in the main
    thread, the notice waits for the handler. The previous handler always depends on the main thread. If the
    main thread does not run the default action, another thread ends the process with status 143 after
    MAIN_THREAD_S. While C code holds the GIL, no code of this module runs.

    In a Ray worker the main thread waits for tasks in C++ and runs the methods of actors that are not async.
    `install` works in such a method; in a training loop that runs in another thread `install` does nothing.

    Processes forked from this one handle SIGTERM as before `install`.
    """

    @classmethod
    def install(cls, on_notice: Callable[[Notice], None], *, grace_s: float = GRACE_S) -> TermSignal | None:
        """Watch SIGTERM. If this is impossible, log the reason and return None.

        Watching is impossible outside the main thread, if a handler was installed by code other than Python,
        and while another TermSignal is installed.
        """
        if not (0 <= grace_s < math.inf):
            raise ConfigError(f"grace_s is {grace_s!r}.", hint="Set it to a number of seconds, 0 or more.")
        if threading.current_thread() is not threading.main_thread():
            log.info("SIGTERM is not watched: only the main thread of a process can set that up.")
            return None
        if _installed is not None and _installed._is_off:
            _installed._restore()
        if _installed is not None or signal.getsignal(signal.SIGTERM) is None:
            log.info("SIGTERM is not watched: it is watched already, or not handled by Python.")
            return None
        return cls(on_notice, grace_s)

    def __init__(self, on_notice: Callable[[Notice], None], grace_s: float) -> None:
        global _installed
        self._on_notice = on_notice
        self._grace_s = grace_s
        self._is_off = False  # True: the handler passes signals on
        self._has_passed = False  # the handler has passed one on
        self._num_handled = 0  # calls of the handler: two signals that arrive together are one call
        self._num_woken = 0  # signal numbers that Python wrote, if the wakeup descriptor is ours
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._previous = cast(_Handler, signal.signal(signal.SIGTERM, self._handle))
        _replace_wakeup_fd(-1, self._outbox.fileno())
        _installed = self
        threading.Thread(target=self._watch, name="ray-ckpt-sigterm", daemon=True).start()

    def uninstall(self) -> None:
        """Restore the handling of SIGTERM from before `install`, and pass on a delayed signal at once.

        In any other thread than the main thread, the handler stays in place and only passes signals on.
        """
        self._is_off = True
        self._write(_ENDED)
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_off:
            self._write(_HANDLED)  # takes no lock, because the main thread may hold it
            return
        self._has_passed = True
        self._restore()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _write(self, byte: bytes) -> None:
        with contextlib.suppress(OSError):  # if the socket is full or closed, the thread needs no more bytes
            self._outbox.send(byte)

    def _watch(self) -> None:
        with self._inbox:
            if self._wait(num_signals=1, ends_s=None):
                now_s = time.monotonic()
                text = f"This process got SIGTERM; it is held for {self._grace_s:g} s."
                notice = Notice("sigterm", text, time.time() + self._grace_s)
                threading.Thread(
                    target=self._report, args=(notice,), name="ray-ckpt-notice", daemon=True
                ).start()
                self._wait(num_signals=2, ends_s=now_s + self._grace_s)
                self._pass_on()
            self._inbox.settimeout(None)
            while self._inbox.recv(64):  # Python warns of each signal number that is not read
                pass

    def _wait(self, *, num_signals: int, ends_s: float | None) -> bool:
        """Wait until `num_signals` have arrived. Return False at `ends_s`, or if the wait is ended early."""
        while max(self._num_handled, self._num_woken) < num_signals:
            try:
                self._inbox.settimeout(None if ends_s is None else left_s(ends_s))
                byte = self._inbox.recv(1)
            except TimeoutError:
                return False
            if byte == _HANDLED:
                self._num_handled += 1
            elif byte == bytes([signal.SIGTERM]):
                self._num_woken += 1
            elif byte in (_ENDED, b""):
                return False
        return True

    def _report(self, notice: Notice) -> None:
        try:
            self._on_notice(notice)
        except Exception:
            log.exception("A notice could not be passed on: %s", notice.text)

    def _pass_on(self) -> None:
        """Send the signal again, so that the main thread runs the previous handler or the default action."""
        if self._num_handled == 0 and signal.getsignal(signal.SIGTERM) != self._handle:
            return  # another handler got the signal and did not call ours
        self._is_off = True
        pid = os.getpid()
        if self._has_passed:
            return  # the main thread was late, and ran our handler after `uninstall`
        os.kill(pid, signal.SIGTERM)  # no other thread runs between the check and this call
        if self._previous == signal.SIG_DFL:
            time.sleep(MAIN_THREAD_S)
            os._exit(128 + signal.SIGTERM)

    def _restore(self) -> None:
        """Set the previous handler again; called in the main thread."""
        global _installed
        self._is_off = True
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        if _installed is self:
            _replace_wakeup_fd(self._outbox.fileno(), -1)
            _installed = None
        self._outbox.close()


_installed: TermSignal | None = None


def _replace_wakeup_fd(old: int, new: int) -> None:
    """Set the wakeup descriptor to `new` if it is `old`; otherwise leave it alone."""
    found = signal.set_wakeup_fd(new, warn_on_full_buffer=False)
    if found != old:
        with contextlib.suppress(ValueError, OSError):  # `found` is closed
            signal.set_wakeup_fd(found)


def _forget_in_child() -> None:
    """Restore the SIGTERM handler in a fork, whose signals would reach the parent by shared descriptors."""
    if _installed is not None:
        _installed._restore()


os.register_at_fork(after_in_child=_forget_in_child)
