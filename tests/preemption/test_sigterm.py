"""SIGTERM in real processes."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ray_ckpt.errors import ConfigError
from ray_ckpt.preemption.sigterm import TermSignal

SLACK_S = 4.0  # the machine has other work


BEGIN = """
import atexit, hashlib, os, signal, sys, threading, time
from ray_ckpt.preemption.sigterm import TermSignal

def emit(text):
    os.write(1, text.encode() + bytes([10]))  # print writes the end of a line by itself

def on_notice(notice):
    assert threading.current_thread() is not threading.main_thread()
    emit("notice")

def before(number, frame):
    assert threading.current_thread() is threading.main_thread()
    emit("before")
    sys.exit(7)

def nothing_is_left():
    assert signal.set_wakeup_fd(-1) == -1
    for thread in threading.enumerate():
        if thread.name == "ray-ckpt-sigterm":
            thread.join(10)
            assert not thread.is_alive()
"""


class Program:
    """A Python program that prints "ready"; its later lines, and its exit."""

    def __init__(self, text: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + textwrap.dedent(text)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # nothing is complained of either
            text=True,
        )
        self.expect("ready")

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def expect(self, line: str) -> None:
        assert self.line() == line

    def terminate(self) -> float:
        began_s = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        return began_s

    def write_nothing_and_wait(self, timeout_s: float = 20.0) -> int:
        rest, _ = self._process.communicate(timeout=timeout_s)
        assert rest == ""
        return self._process.returncode

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[[str], Program]]:
    programs: list[Program] = []

    def run(text: str) -> Program:
        program = Program.__new__(Program)
        programs.append(program)
        program.__init__(text)  # type: ignore[misc]
        return program

    yield run
    for program in programs:
        program.close()


Start = Callable[[str], Program]

MAIN_THREADS = {  # what the main thread of a training process may be doing
    "sleeps": "time.sleep(60)",
    "joins a thread": "worker = threading.Thread(target=time.sleep, args=(60,), daemon=True)\n"
    "worker.start()\n"
    "worker.join()",
    "waits for a lock": "threading.Event().wait()",
    "computes": "while True: sum(range(1000))",
    "runs an event loop": "import asyncio\nasyncio.run(asyncio.sleep(60))",
    "runs an event loop with signals of its own": "import asyncio\n"
    "async def wait():\n"
    "    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)\n"
    "    await asyncio.sleep(60)\n"
    "asyncio.run(wait())",
}


@pytest.mark.parametrize("main_thread", MAIN_THREADS.values(), ids=MAIN_THREADS.keys())
def test_sigterm_is_reported_and_after_the_grace_it_ends_the_process(start: Start, main_thread: str) -> None:
    program = start("TermSignal.install(on_notice, grace_s=0.5)\nemit('ready')\n" + main_thread)
    began_s = program.terminate()
    program.expect("notice")
    assert program.write_nothing_and_wait() == -signal.SIGTERM
    assert time.monotonic() - began_s >= 0.5


def test_the_handler_of_before_is_called_after_the_grace_in_the_main_thread(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        atexit.register(nothing_is_left)
        TermSignal.install(on_notice, grace_s=0.5)
        emit("ready")
        time.sleep(60)
        """
    )
    began_s = program.terminate()
    program.expect("notice")
    program.expect("before")
    assert time.monotonic() - began_s >= 0.5
    assert program.write_nothing_and_wait() == 7


def test_the_notice_has_the_time_that_the_process_is_held(start: Start) -> None:
    program = start(
        """
        def show(notice):
            emit(f"{notice.source} {notice.deadline_s}")
        TermSignal.install(show, grace_s=60)
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    source, deadline_s = program.line().split()
    assert source == "sigterm"
    assert float(deadline_s) == pytest.approx(time.time() + 60.0, abs=SLACK_S)


@pytest.mark.parametrize("callback", ["on_notice", "lambda notice: (on_notice(notice), time.sleep(60))"])
def test_a_second_sigterm_ends_the_grace_even_if_the_callback_hangs(start: Start, callback: str) -> None:
    program = start(f"TermSignal.install({callback}, grace_s=60)\nemit('ready')\ntime.sleep(60)")
    program.terminate()
    program.expect("notice")
    program.terminate()
    assert program.write_nothing_and_wait() == -signal.SIGTERM


@pytest.mark.slow
def test_a_callback_that_fails_is_logged_and_costs_nothing(start: Start) -> None:
    program = start("TermSignal.install(lambda notice: 1 / 0, grace_s=0.5)\nemit('ready')\ntime.sleep(60)")
    program.terminate()
    program.expect("A notice could not be passed on: This process got SIGTERM; it is held for 0.5 s.")
    while (line := program.line()) != "ZeroDivisionError: division by zero":
        assert line
    assert program.write_nothing_and_wait() == -signal.SIGTERM


def test_an_ignored_sigterm_is_reported_and_ignored_again(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        TermSignal.install(on_notice, grace_s=0.1)
        emit("ready")
        while signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            time.sleep(0.01)
        nothing_is_left()
        emit("ignored again")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.expect("ignored again")
    program.terminate()
    time.sleep(0.3)
    assert program.is_alive


# C code that neither returns at a signal nor keeps Python's lock.
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)"


@pytest.mark.slow
def test_the_notice_does_not_wait_for_a_main_thread_in_c_code_nor_does_the_end(start: Start) -> None:
    program = start(f"TermSignal.install(on_notice, grace_s=0.3)\nemit('ready')\n{IN_C}")
    began_s = program.terminate()
    program.expect("notice")
    assert time.monotonic() - began_s < SLACK_S
    assert program.write_nothing_and_wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_the_handler_of_before_waits_for_the_main_thread_in_c_code(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        TermSignal.install(on_notice, grace_s=0.1)
        data = b"x"
        began_s = time.process_time()
        hashlib.pbkdf2_hmac("sha256", data, data, 100_000)
        rounds = int(100_000 * 1.5 / (time.process_time() - began_s))  # 1.5 s
        emit("ready")
        hashlib.pbkdf2_hmac("sha256", data, data, rounds)
        emit("returned")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    first = program.line()
    assert first in ("before", "returned")  # after the C code
    if first == "returned":
        program.expect("before")
    assert program.write_nothing_and_wait() == 7


def test_uninstall_restores_all_and_a_new_install_works(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        for _ in range(50):
            TermSignal.install(on_notice, grace_s=60).uninstall()
        assert signal.getsignal(signal.SIGTERM) is before
        time.sleep(0.1)
        nothing_is_left()
        assert len(os.listdir("/proc/self/fd")) < 20
        TermSignal.install(on_notice, grace_s=0.1)
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.expect("before")
    assert program.write_nothing_and_wait() == 7


def test_after_uninstall_from_another_thread_sigterm_is_as_before(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        for _ in range(50):
            term = TermSignal.install(on_notice, grace_s=60)
            thread = threading.Thread(target=term.uninstall)
            thread.start()
            thread.join()
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)  # is still written to the descriptor, and taken
        assert len(os.listdir("/proc/self/fd")) < 20
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("before")
    assert program.write_nothing_and_wait() == 7


@pytest.mark.slow
def test_uninstall_hands_on_a_signal_that_is_held(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        notified = threading.Event()
        term = TermSignal.install(lambda notice: (on_notice(notice), notified.set()), grace_s=60)
        emit("ready")
        notified.wait()
        term.uninstall()
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.expect("before")
    assert program.write_nothing_and_wait() == 7


def test_a_main_thread_that_is_late_gets_the_signal_once(start: Start) -> None:
    program = start(
        """
        import ctypes
        signal.signal(signal.SIGTERM, lambda number, frame: emit("before"))
        getsignal = signal.getsignal
        def delay_the_watcher(number):
            handler = getsignal(number)
            if threading.current_thread().name == "ray-ckpt-sigterm":
                time.sleep(0.5)
            return handler
        signal.getsignal = delay_the_watcher
        term = TermSignal.install(lambda notice: (on_notice(notice), term.uninstall()), grace_s=60)
        other = threading.Thread(target=time.sleep, args=(60,), daemon=True)  # its C code is interrupted
        other.start()
        emit("ready")
        threading.Timer(0.1, signal.pthread_kill, (other.ident, signal.SIGTERM)).start()
        ctypes.CDLL(None).usleep(300_000)
        time.sleep(1)
        """
    )
    program.expect("notice")
    program.expect("before")
    assert program.write_nothing_and_wait() == 0


def test_a_handler_that_was_installed_on_top_and_calls_ours_works(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=1.0)  # the main thread may be late on a busy machine
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: (emit("top"), ours(number, frame)))
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    assert {program.line(), program.line()} == {"top", "notice"}
    program.expect("top")
    assert program.write_nothing_and_wait() == -signal.SIGTERM


@pytest.mark.slow
def test_a_handler_that_took_our_place_is_left_alone(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=0.1)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    time.sleep(1.5)
    assert program.is_alive


def test_a_wakeup_descriptor_of_others_stays_theirs_and_the_handler_notifies(start: Start) -> None:
    program = start(
        """
        import socket
        theirs, other = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        TermSignal.install(on_notice, grace_s=60).uninstall()
        TermSignal.install(on_notice, grace_s=60)
        found = signal.set_wakeup_fd(theirs.fileno())
        assert found == theirs.fileno(), found
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.terminate()
    assert program.write_nothing_and_wait() == -signal.SIGTERM


def test_other_signals_are_not_taken_for_it(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        TermSignal.install(on_notice, grace_s=60)
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    time.sleep(0.2)
    assert program.is_alive


def test_a_forked_process_ends_at_once_and_its_parent_takes_no_notice(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=60)
        child = os.fork()
        if child == 0:
            time.sleep(60)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        time.sleep(0.2)
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")


def test_only_one_is_installed(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=0.1)
        assert TermSignal.install(on_notice, grace_s=60) is None
        emit("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    assert program.write_nothing_and_wait() == -signal.SIGTERM


def test_outside_the_main_thread_it_is_not_installed_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found: list[object] = []
    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level(logging.INFO, "ray_ckpt"):
        thread = threading.Thread(target=lambda: found.append(TermSignal.install(lambda notice: None)))
        thread.start()
        thread.join()
    assert found == [None]
    assert "main thread" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("grace_s", [-1.0, float("inf"), float("nan")])
def test_a_grace_that_is_no_time_is_refused(grace_s: float) -> None:
    with pytest.raises(ConfigError, match="grace_s"):
        TermSignal.install(lambda notice: None, grace_s=grace_s)
