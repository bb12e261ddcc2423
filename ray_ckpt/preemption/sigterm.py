"""Hold back the end of this process by SIGTERM, so that training can save once more."""

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
MAIN_THREAD_S = 1.0  # for the main thread to end the process; then another thread ends it

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers

# Bytes that the watching thread reads, besides the numbers of signals, which Python itself writes.
_HANDLED = b"\x00"
_RELEASED = b"\xff"
_ENDED = b"\xfe"


class TermSignal:
    """Holds back the end of this process by SIGTERM, once, so that the time can be used for a last save.

    On SIGTERM `on_notice` is called in a thread of its own. The signal is passed on after `grace_s`, at
    `release`, at a second SIGTERM or at `uninstall`, whichever comes first: to the previous handler (in Ray's
    workers: SystemExit), to the default action, or to nothing if SIGTERM was ignored. From then on this
    object is spent, and SIGTERM is handled as before `install`.

    Python runs handlers in the main thread, between two bytecodes. `time.sleep`, `Thread.join` and locks let
    them run; C code that does not return does not. The notice does not depend on that: the signal's number
    arrives through the process's wakeup descriptor (`signal.set_wakeup_fd`), unless something else uses the
    descriptor, such as `loop.add_signal_handler` of an asyncio loop in the main thread; then the notice waits
    for the handler. The previous handler does depend on the main thread, as it always has. If the main thread
    does not run the default action, another thread does, MAIN_THREAD_S later and with status 143. While C
    code holds the GIL, nothing here runs.

    In a Ray worker the main thread waits for tasks in C++ and runs the methods of actors that are not async.
    `install` works in such a method; in a training loop that has a thread of its own it does nothing.

    Processes forked from this one handle SIGTERM as before `install`.
    """

    @classmethod
    def install(cls, on_notice: Callable[[Notice], None], *, grace_s: float = GRACE_S) -> TermSignal | None:
        """Watch SIGTERM. Return None, with a line in the log, where that is impossible.

        It is impossible outside the main thread, over a handler that Python does not know, and beside
        another TermSignal.
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
        self._is_off = False  # then the handler passes signals on
        self._num_handled = 0  # signals that the handler saw: two that arrive together are one
        self._num_woken = 0  # signals that Python wrote, if the wakeup descriptor is ours
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._previous = cast(_Handler, signal.signal(signal.SIGTERM, self._handle))
        _replace_wakeup_fd(-1, self._outbox.fileno())
        _installed = self
        threading.Thread(target=self._watch, name="ray-ckpt-sigterm", daemon=True).start()

    def release(self) -> None:
        """Pass on a signal that is held, for training has saved. Does nothing before a signal has come."""
        self._write(_RELEASED)

    def uninstall(self) -> None:
        """Restore the handling of SIGTERM from before `install`, and pass on at once a signal that is held.

        If this is not the main thread, the handler stays in place and only passes signals on.
        """
        self._is_off = True
        self._write(_ENDED)
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_off:
            self._write(_HANDLED)  # takes no lock: the main thread may hold any
            return
        self._restore()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _write(self, byte: bytes) -> None:
        with contextlib.suppress(OSError):  # if it is full or closed, the thread has enough to act on
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
            while self._inbox.recv(64):  # Python warns of each signal number that nobody reads
                pass

    def _wait(self, *, num_signals: int, ends_s: float | None) -> bool:
        """Wait until `num_signals` have come. Return False at `ends_s`, and when waiting is to end early."""
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
            elif byte in (_ENDED, b"") or (byte == _RELEASED and num_signals > 1):
                return False
        return True

    def _report(self, notice: Notice) -> None:
        try:
            self._on_notice(notice)
        except Exception:
            log.exception("A notice could not be passed on: %s", notice.text)

    def _pass_on(self) -> None:
        """Let the main thread do what it would have done at the signal."""
        if self._num_handled == 0 and signal.getsignal(signal.SIGTERM) != self._handle:
            return  # the signal went to another handler, which did not call ours
        self._is_off = True
        os.kill(os.getpid(), signal.SIGTERM)
        if self._previous == signal.SIG_DFL:
            time.sleep(MAIN_THREAD_S)
            os._exit(128 + signal.SIGTERM)

    def _restore(self) -> None:
        """Put the previous handler back; called in the main thread."""
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
    """Restore SIGTERM in a forked process: it shares the descriptors, so its signal would look like ours."""
    if _installed is not None:
        _installed._restore()


os.register_at_fork(after_in_child=_forget_in_child)
