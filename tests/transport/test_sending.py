"""Several files to a peer at a time: paced, bounded, and again after an interruption."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from typing_extensions import Buffer

from ray_ckpt.errors import InsufficientSpace, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.transport import client as client_module
from ray_ckpt.transport import sending, wire
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import Credentials, ServiceKeys
from ray_ckpt.transport.sending import BURST_S, MAX_TRIES, RETRY_S, Limiter, Outgoing, send_files
from ray_ckpt.transport.server import PeerServer
from tests.transport.peers import KEYS, OTHER_UID, OURS, PLAIN_KEYS, UID, CutWire, Folder, announce, shard

MIB = 1 << 20
MOST_IN_PROCESSES_BYTES = 16 * MIB  # of one stream, in both processes


class Receiver(Folder):
    """Counts the files that arrive; refuses or delays those that a test chooses."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.root)
        self.fail: Callable[[wire.PutRequest], None] = lambda request: None
        self.at_work = 0
        self.most_at_work = 0
        self.tries: list[str] = []
        self._lock = threading.Lock()

    def wait_idle(self) -> None:
        """Wait until the receiver has cleaned up; a sender notices a broken connection earlier."""
        deadline_s = time.monotonic() + 20
        while self.at_work:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> str:
        with self._lock:
            self.tries.append(request.name.file)
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            self.fail(request)
            return super().put(request, chunks)
        finally:
            with self._lock:
                self.at_work -= 1


@pytest.fixture
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Receiver:
    return Receiver(Folder(tmp_path_factory.mktemp("peer")))


@pytest.fixture
def server(receiver: Receiver) -> Iterator[PeerServer]:
    opened = PeerServer("127.0.0.1", keys=KEYS, files=receiver)
    yield opened
    opened.shutdown()


def outgoing(rank: int, data: bytes) -> Outgoing:
    def chunks() -> Iterator[memoryview]:
        view = memoryview(data)
        return (view[start : start + MIB] for start in range(0, len(data), MIB))

    return Outgoing(request=announce(data, name=shard(rank)), chunks=chunks)


def files_of(*sizes: int) -> dict[int, bytes]:
    return {rank: os.urandom(size) for rank, size in enumerate(sizes)}


def test_files_go_over_several_streams_and_arrive_whole(server: PeerServer, receiver: Receiver) -> None:
    data = files_of(5 * MIB + 1, 0, 17, 9 * MIB, 3 * MIB, 4096)
    together = threading.Barrier(3)

    def meet(request: wire.PutRequest) -> None:
        if len(receiver.tries) <= 3:
            together.wait(10)  # which only three at a time get past

    receiver.fail = meet
    send_files(server.endpoint, OURS, [outgoing(rank, d) for rank, d in data.items()], streams=3)
    assert {rank: receiver.path(shard(rank)).read_bytes() for rank in data} == data
    assert receiver.most_at_work == 3
    assert shard(3).file in receiver.tries[:3]  # the largest goes first


def test_nothing_to_send(server: PeerServer) -> None:
    send_files(server.endpoint, OURS, [])


@pytest.mark.parametrize("keys", [KEYS, PLAIN_KEYS], ids=["tls", "plain"])
def test_an_interrupted_file_is_sent_again(
    receiver: Receiver, keys: ServiceKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENT_S", 60.0)  # busy machines starve threads
    server = PeerServer("127.0.0.1", keys=keys, files=receiver)
    data, pauses = os.urandom(8 * MIB), list[float]()
    started = 0
    file = outgoing(0, data)

    def chunks() -> Iterable[Buffer]:
        nonlocal started
        started += 1
        return file.chunks()

    with CutWire(server.port, cuts=[100, 3 * MIB, 8 * MIB]) as proxy:
        endpoint = f"{server.endpoint.rpartition(':')[0]}:{proxy.port}"
        credentials = keys.credentials(UID)
        send_files(endpoint, credentials, [replace(file, chunks=chunks)], sleep=pauses.append)
        assert proxy.num_connections == 4
    assert receiver.path(shard(0)).read_bytes() == data
    receiver.wait_idle()
    assert receiver.names(shard(0)) == [shard(0).file]  # nothing is left of the tries before
    assert len(pauses) == 3
    assert all(RETRY_S * 2**i <= pause <= RETRY_S * 2 ** (i + 1) for i, pause in enumerate(pauses))
    assert started >= 3  # one may fail before a byte is requested
    server.shutdown()


def test_a_peer_that_is_always_interrupted_is_given_up(server: PeerServer, receiver: Receiver) -> None:
    pauses: list[float] = []
    with CutWire(server.port, cuts=[MIB] * 100) as proxy, pytest.raises(Unavailable) as caught:
        send_files(
            f"grpc+tls://127.0.0.1:{proxy.port}", OURS, [outgoing(0, bytes(4 * MIB))], sleep=pauses.append
        )
    assert caught.value.fields["refused"] is False
    assert (proxy.num_connections, len(pauses)) == (MAX_TRIES, MAX_TRIES - 1)
    receiver.wait_idle()
    assert not receiver.names(shard(0))


def test_damage_on_the_way_is_repaired_by_another_try(server: PeerServer, receiver: Receiver) -> None:
    data = os.urandom(3 * MIB - 1) + b"!"
    good, tried = outgoing(0, data), list[int]()

    def chunks() -> Iterable[Buffer]:
        tried.append(len(tried))
        return good.chunks() if len(tried) == 3 else [data[:-1], b"?"]

    send_files(server.endpoint, OURS, [replace(good, chunks=chunks)], sleep=lambda _: None)
    assert receiver.path(shard(0)).read_bytes() == data
    assert len(tried) == 3


@pytest.mark.parametrize(
    ("error", "credentials", "message"),
    [
        (InsufficientSpace("there are 5 bytes free"), OURS, "there are 5 bytes free"),
        (Unavailable("the folder is being deleted here"), OURS, "being deleted"),
        (OSError(30, "Read-only file system"), OURS, "Read-only"),
        (None, KEYS.credentials(OTHER_UID), "token of another run"),
        (None, replace(OURS, token="x"), "wrong or missing token"),
    ],
)
def test_a_refusal_is_not_tried_again(
    server: PeerServer, receiver: Receiver, error: Exception | None, credentials: Credentials, message: str
) -> None:
    def fail(request: wire.PutRequest) -> None:
        if error is not None:
            raise error

    receiver.fail = fail
    pauses: list[float] = []
    with pytest.raises(Unavailable, match=message):
        send_files(server.endpoint, credentials, [outgoing(0, b"1")], sleep=pauses.append)
    assert not pauses
    assert len(receiver.tries) == (error is not None)


def test_a_frozen_peer_is_given_up_when_its_time_is_over(
    server: PeerServer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CALL_BASE_S", 0.3)
    is_over = threading.Event()

    def freeze(request: wire.PutRequest) -> None:
        is_over.wait(10)

    receiver.fail = freeze
    with pytest.raises(Unavailable, match="Deadline Exceeded"):
        send_files(server.endpoint, OURS, [outgoing(0, b"1")], sleep=lambda _: pytest.fail("tried again"))
    is_over.set()


def test_what_the_source_raises_comes_through_at_once(server: PeerServer, receiver: Receiver) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"1"
        raise Unavailable("the arena has been captured into again.")

    file = Outgoing(request=announce(b"12", name=shard(0)), chunks=chunks)
    with pytest.raises(Unavailable, match="captured into again"):
        send_files(server.endpoint, OURS, [file], sleep=lambda _: pytest.fail("tried again"))
    receiver.wait_idle()
    assert not receiver.names(shard(0))


def test_one_failure_stops_the_other_streams(server: PeerServer, receiver: Receiver) -> None:
    has_started = threading.Event()

    def endless() -> Iterator[bytes]:
        while True:
            has_started.set()
            yield bytes(1000)

    def fail(request: wire.PutRequest) -> None:
        if request.name == shard(1):
            assert has_started.wait(10)
            raise InsufficientSpace("full")

    receiver.fail = fail
    request = wire.PutRequest(name=shard(0), size_bytes=1 << 40, digest=digest(b""))
    with pytest.raises(Unavailable, match="full"):
        send_files(
            server.endpoint, OURS, [Outgoing(request=request, chunks=endless), outgoing(1, b"1")], streams=2
        )


def test_a_peer_that_restarts_meanwhile_gets_the_file(receiver: Receiver) -> None:
    first = PeerServer("127.0.0.1", keys=KEYS, files=receiver)
    port, servers = first.port, list[PeerServer]()
    first.shutdown()

    def restart(pause_s: float) -> None:
        if not servers:
            servers.append(PeerServer("127.0.0.1", keys=KEYS, files=receiver, ports=range(port, port + 1)))

    send_files(first.endpoint, OURS, [outgoing(0, b"late")], sleep=restart)
    assert receiver.path(shard(0)).read_bytes() == b"late"
    servers[0].shutdown()


class Clock:
    """Virtual seconds, for one thread."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def limiter(self, bytes_per_s: float) -> Limiter:
        return Limiter(bytes_per_s, clock=lambda: self.now_s, sleep=self.sleep)


@pytest.mark.parametrize("seed", range(5))
def test_no_span_of_time_lets_more_through_than_the_limit(seed: int) -> None:
    chance, clock, rate = Random(seed), Clock(), 1000.0
    limiter, sent = clock.limiter(rate), [(100.0, 0)]
    for _ in range(300):
        size = chance.randrange(1, 400)
        limiter.wait(size)
        sent.append((clock.now_s, size))
        clock.sleep(chance.choice([0, 0, 0, 0.05, 1.0]))
    for i in range(len(sent)):
        through = 0
        for at_s, size in sent[i:]:
            through += size
            assert (
                through <= rate * (at_s - sent[i][0] + BURST_S) + 400 + 1e-6
            )  # the last one may have just begun


def test_a_limit_is_used_to_the_full() -> None:
    clock = Clock()
    limiter = clock.limiter(1000.0)
    for _ in range(100):
        limiter.wait(100)
    assert clock.now_s == pytest.approx(110, abs=3 * BURST_S)  # the burst and the last one are not waited for


def test_an_idle_time_is_not_saved_up() -> None:
    clock = Clock()
    limiter = clock.limiter(1000.0)
    limiter.wait(1)
    clock.sleep(1e6)
    before_s = clock.now_s
    for _ in range(10):
        limiter.wait(1000)
    assert clock.now_s - before_s == pytest.approx(9, abs=2 * BURST_S)


def test_streams_share_a_limit() -> None:
    """Each stream gets the next span of time, and no two spans overlap."""
    spans: list[float] = []
    limiter = Limiter(1e6, clock=lambda: 0.0, sleep=spans.append)

    def wait_often() -> None:
        for _ in range(200):
            limiter.wait(1000)

    threads = [threading.Thread(target=wait_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = sorted(spans)
    assert len(starts) >= 1600 - BURST_S * 1e6 / 1000 - 1
    assert all(later - earlier == pytest.approx(1e-3) for earlier, later in pairwise(starts))


def test_no_limit_never_sleeps_and_no_rate_is_an_error() -> None:
    Limiter(None, sleep=lambda _: pytest.fail("slept")).wait(1 << 60)
    for rate in (0, -1):
        with pytest.raises(ValueError, match="must be above 0 bytes per second"):
            Limiter(rate)


def test_what_is_sent_goes_through_the_limiter(server: PeerServer, receiver: Receiver) -> None:
    clock = Clock()
    data = files_of(3 * MIB, 2 * MIB, MIB)
    limiter = clock.limiter(MIB)
    start_s = clock.now_s
    send_files(server.endpoint, OURS, [outgoing(r, d) for r, d in data.items()], streams=1, limiter=limiter)
    # The last chunk leaves when the others have paid.
    assert clock.now_s - start_s == pytest.approx(5, abs=2 * BURST_S)
    assert {rank: receiver.path(shard(rank)).read_bytes() for rank in data} == data


def test_a_slow_limit_is_no_reason_to_give_up(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out of a call grows with the time that its bytes may take."""
    requested: list[float] = []
    monkeypatch.setattr(client_module, "SLOWEST_BYTES_PER_S", 1e12)
    monkeypatch.setattr(sending, "SLOWEST_BYTES_PER_S", 1e12)
    monkeypatch.setattr(client_module, "CALL_BASE_S", 0.05)
    put = PeerClient.put

    def spy(self: PeerClient, *args: object, **kwargs: float) -> None:
        requested.append(kwargs["slowest_bytes_per_s"])
        put(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(PeerClient, "put", spy)
    send_files(server.endpoint, OURS, [outgoing(0, bytes(3 * MIB))], limiter=Limiter(10 * MIB))
    assert requested == [10 * MIB / sending.MAX_SHARING]


def most_on_its_way_bytes() -> int:
    """Return the bound of one stream; mostly 6 to 10 MiB are seen, and 33 MiB where the kernel grew a buffer.

    A socket's buffers grow up to the kernel's limits, which differ between machines.
    """
    limits = (Path(f"/proc/sys/net/ipv4/tcp_{name}").read_text().split()[2] for name in ("rmem", "wmem"))
    return MOST_IN_PROCESSES_BYTES + sum(map(int, limits))


@pytest.mark.parametrize("keys", [KEYS, PLAIN_KEYS], ids=["tls", "plain"])
def test_a_slow_receiver_holds_the_sender_back(receiver: Receiver, keys: ServiceKeys) -> None:
    """The bytes in flight, in both processes and the kernel, stay below a bound for any size of the file."""
    go_on, stuck = threading.Event(), threading.Event()

    class Slow(Folder):
        def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> str:
            for i, _ in enumerate(chunks):
                if i == 1:
                    stuck.set()
                    assert go_on.wait(20)
            return request.digest

    server = PeerServer("127.0.0.1", keys=keys, files=Slow(receiver.root))
    block, size, requested = bytes(MIB), 1024 * MIB, 0

    def chunks() -> Iterator[bytes]:
        nonlocal requested
        while requested < size:
            requested += MIB
            yield block

    request = wire.PutRequest(name=shard(0), size_bytes=size, digest="1" * 32)
    file = Outgoing(request=request, chunks=chunks)
    sender = threading.Thread(target=send_files, args=(server.endpoint, keys.credentials(UID), [file]))
    sender.start()
    assert stuck.wait(20)
    seen = -1
    while seen != requested:
        seen = requested
        threading.Event().wait(0.3)
    assert requested <= most_on_its_way_bytes()
    size = requested
    go_on.set()
    sender.join(20)
    assert not sender.is_alive()
    server.shutdown()
