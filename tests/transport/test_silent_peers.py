"""Peers that fall silent are noticed within seconds, and distinguished from slow peers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from typing_extensions import Buffer

from ray_ckpt.errors import InsufficientSpace, Unavailable
from ray_ckpt.transport import client as client_module
from ray_ckpt.transport import pulse, wire
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.pulse import Pulse
from ray_ckpt.transport.sending import Limiter, send_files
from ray_ckpt.transport.server import PeerServer
from tests.transport.peers import KEYS, OURS, UID, Folder, SilentWire, announce, shard
from tests.transport.test_sending import outgoing

MIB = 1 << 20
SILENT_S = 1.0  # in tests of what is no silence; a beat each tenth of it
GIVEN_UP_S = 0.6  # in tests of silence
LATE_S = 6.0  # a machine with much to do may take that much longer

PEER = """
import sys, time
from pathlib import Path
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.transport.server import PeerServer
from tests.transport.peers import Folder
cert, key, secret = (bytes.fromhex(text) for text in sys.argv[2:])
keys = ServiceKeys(cert=cert, key=key, secret=secret)
server = PeerServer("127.0.0.1", keys=keys, files=Folder(Path(sys.argv[1])))
print(server.endpoint, flush=True)
time.sleep(120)
"""


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENT_S", SILENT_S)
    monkeypatch.setattr(pulse, "BEAT_S", SILENT_S / 10)


class Slow(Folder):
    """A receiver that is slow where a test sets it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before_chunk: Callable[[int], object] = lambda number: None
        self.before_answer: Callable[[], object] = lambda: None

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> str:
        def slowly() -> Iterator[Buffer]:
            for number, chunk in enumerate(chunks):
                self.before_chunk(number)
                yield chunk

        answer = super().put(request, slowly())
        self.before_answer()
        return answer


@pytest.fixture
def folder(tmp_path: Path) -> Slow:
    return Slow(tmp_path)


@pytest.fixture
def server(folder: Slow) -> Iterator[PeerServer]:
    opened = PeerServer("127.0.0.1", keys=KEYS, files=folder)
    yield opened
    opened.shutdown()


def send(endpoint: str, *files: bytes, limiter: Limiter | None = None) -> None:
    def no_second_try(pause_s: float) -> None:
        pytest.fail("tried again")

    batch = [outgoing(rank, data) for rank, data in enumerate(files)]
    send_files(endpoint, OURS, batch, streams=1, limiter=limiter, sleep=no_second_try)


@contextlib.contextmanager
def given_up_soon() -> Iterator[None]:
    started_s = time.monotonic()
    with (
        pytest.MonkeyPatch.context() as patched,
        pytest.raises(Unavailable, match="no sign of life") as caught,
    ):
        patched.setattr(client_module, "SILENT_S", GIVEN_UP_S)
        yield
    assert GIVEN_UP_S <= time.monotonic() - started_s < GIVEN_UP_S + LATE_S
    assert caught.value.fields["unreachable"] is True


@pytest.fixture
def unopened() -> Iterator[str]:
    """An endpoint whose connections do not open, as if packets to its port were dropped: the queue of the
    listener is full.
    """
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"grpc+tls://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("num_files", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_a_peer_whose_connections_do_not_open_is_given_up(unopened: str, num_files: int) -> None:
    with given_up_soon():
        send(unopened, *[b"1"] * num_files)
    with PeerClient(unopened, credentials=OURS) as peer:
        assert not peer.is_there(UID, within_s=0.5)


@pytest.mark.parametrize("size", [100, 20 * MIB])
@pytest.mark.parametrize("cut", ["there", "back", "both"])
def test_a_way_that_falls_silent_in_the_middle_is_given_up(
    server: PeerServer, folder: Slow, cut: str, size: int
) -> None:
    """Connections stay open, and bytes of one direction or of both arrive no more."""
    cut_once = threading.Event()
    with SilentWire(server.port) as proxy:

        def fall_silent() -> None:
            proxy.cut(there=cut != "back", back=cut != "there")
            cut_once.set()

        data = os.urandom(size)
        half = data[: size // 2]

        def chunks() -> Iterator[bytes]:
            yield half
            fall_silent()
            yield data[size // 2 :]

        with (
            given_up_soon(),
            PeerClient(f"grpc+tls://127.0.0.1:{proxy.port}", credentials=OURS) as peer,
        ):
            peer.put(announce(data, name=shard(0)), chunks())
        assert cut_once.is_set()


def test_an_error_of_the_source_does_not_wait_for_a_silent_peer(server: PeerServer) -> None:
    with SilentWire(server.port) as proxy:

        def chunks() -> Iterator[bytes]:
            yield b"1"
            proxy.cut(there=True, back=True)
            raise InsufficientSpace("the source")

        endpoint, started_s = f"grpc+tls://127.0.0.1:{proxy.port}", time.monotonic()
        with (
            pytest.raises(InsufficientSpace),
            PeerClient(endpoint, credentials=OURS, gone_s=60.0) as peer,
        ):
            peer.put(announce(b"12"), chunks())
        assert time.monotonic() - started_s < SILENT_S + LATE_S


def test_a_peer_that_answers_no_more_after_it_has_stored_all_is_given_up(
    server: PeerServer, folder: Slow
) -> None:
    """The file is there all the same: the answer alone is lost."""
    data = os.urandom(3 * MIB)
    with SilentWire(server.port) as proxy:
        folder.before_answer = lambda: proxy.cut(back=True)
        with given_up_soon():
            send(f"grpc+tls://127.0.0.1:{proxy.port}", data)
    assert folder.path(shard(0)).read_bytes() == data


def test_a_frozen_process_is_given_up_and_found_again(tmp_path: Path) -> None:
    """Its kernel goes on taking bytes for it."""
    keys = [key.hex() for key in (KEYS.cert, KEYS.key, KEYS.secret)]
    command = [sys.executable, "-c", PEER, str(tmp_path), *keys]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            send(endpoint, os.urandom(MIB))
            process.send_signal(signal.SIGSTOP)
            with given_up_soon():
                send(endpoint, os.urandom(MIB))
            with PeerClient(endpoint, credentials=OURS) as peer:
                assert not peer.is_there(UID, within_s=0.5)
            process.send_signal(signal.SIGCONT)
            with PeerClient(endpoint, credentials=OURS) as peer:
                assert peer.is_there(UID, within_s=20.0)
            send(endpoint, b"and again")
        finally:
            process.kill()


@pytest.mark.slow  # 3 s
def test_what_was_given_up_takes_no_more_of_the_source(server: PeerServer) -> None:
    """Memory that is captured into again must not be read for a call that nobody waits for."""
    taken: list[int] = []
    with SilentWire(server.port) as proxy:

        def chunks() -> Iterator[bytes]:
            for number in range(64):
                taken.append(number)
                if number == 4:
                    proxy.cut(there=True)
                yield bytes(MIB)

        with (
            given_up_soon(),
            PeerClient(f"grpc+tls://127.0.0.1:{proxy.port}", credentials=OURS) as peer,
        ):
            peer.put(announce(bytes(64 * MIB)), chunks())
        seen = len(taken)
        assert seen < 64
        proxy.cut()
        time.sleep(2 * SILENT_S)
        assert len(taken) <= seen + 1


@pytest.mark.parametrize("where", [pytest.param("a chunk", marks=pytest.mark.slow), "the fsync"])
def test_a_slow_disk_is_not_silence(server: PeerServer, folder: Slow, where: str) -> None:
    if where == "a chunk":
        folder.before_chunk = lambda number: time.sleep(2 * SILENT_S * (number == 1))
    else:
        folder.before_answer = lambda: time.sleep(2 * SILENT_S)
    data = os.urandom(5 * MIB)
    send(server.endpoint, data)
    assert folder.path(shard(0)).read_bytes() == data


def test_a_pace_that_was_chosen_is_not_silence(server: PeerServer, folder: Slow) -> None:
    data = os.urandom(3 * MIB)
    send(server.endpoint, data, limiter=Limiter(MIB))
    assert folder.path(shard(0)).read_bytes() == data


def test_a_slow_source_is_not_silence(server: PeerServer, folder: Slow) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"1"
        time.sleep(1.5 * SILENT_S)
        yield b"2"

    with PeerClient(server.endpoint, credentials=OURS) as peer:
        peer.put(announce(b"12", name=shard(0)), chunks())
    assert folder.path(shard(0)).read_bytes() == b"12"


def test_a_slow_way_is_not_silence(server: PeerServer, folder: Slow) -> None:
    """A message takes most of the time in which a sign of life is waited for, and the next one as long."""
    data = os.urandom(6 * MIB)
    with SilentWire(server.port, bytes_per_s=4 * MIB) as proxy:
        send(f"grpc+tls://127.0.0.1:{proxy.port}", data)
    assert folder.path(shard(0)).read_bytes() == data


def test_a_peer_that_refuses_connections_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"grpc+tls://127.0.0.1:{unused.getsockname()[1]}"
        pauses: list[float] = []
        with pytest.raises(Unavailable) as caught:
            send_files(endpoint, OURS, [outgoing(0, b"1")], sleep=pauses.append)
    assert caught.value.fields["unreachable"] is True
    assert pauses, "an agent that starts again is back in seconds"


def test_a_peer_that_refuses_a_file_is_there(server: PeerServer, folder: Slow) -> None:
    def refuse(number: int) -> None:
        raise InsufficientSpace("full")

    folder.before_chunk = refuse
    with pytest.raises(Unavailable, match="full") as refused:
        send(server.endpoint, b"1")
    assert refused.value.fields["unreachable"] is False
    with PeerClient(server.endpoint, credentials=OURS) as peer:
        assert peer.is_there(UID, within_s=20.0)


def test_only_the_time_in_which_the_peer_is_waited_for_counts() -> None:
    now_s = 0.0
    signs = Pulse(clock=lambda: now_s)
    now_s = 9.0
    assert (signs.silent_s, signs.was_alive) == (0.0, False)
    signs.wait_for_peer()
    now_s = 12.0
    assert signs.silent_s == 3.0
    signs.beat()
    assert (signs.silent_s, signs.was_alive) == (0.0, True)
    now_s = 13.0
    signs.stop_waiting()
    signs.beat()
    now_s = 20.0
    assert signs.silent_s == 0.0, "a beat while the caller is busy starts nothing"


def test_calls_that_were_left_behind_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread stays when the peer never comes back."""
    monkeypatch.setattr(client_module, "CALL_BASE_S", 1.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        before = set(threading.enumerate())
        with given_up_soon():
            send(f"grpc+tls://127.0.0.1:{listener.getsockname()[1]}", b"1")
        deadline_s = time.monotonic() + 20
        while set(threading.enumerate()) - before:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
