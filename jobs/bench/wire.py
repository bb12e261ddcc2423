"""Copies of a shard to and from another process's warm memory, beside a socket with the same encryption.

Each receiver is a separate process that keeps the received data in memory that was touched before; the
product also computes the digest there, compares it and answers. Large sizes reuse one window of memory, so
that they take more time but not more memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import numpy as np
from typing_extensions import Buffer

from jobs.bench.context import Context
from jobs.bench.limits import Bytes, fill
from jobs.bench.row import Row, Sampler, measure
from ray_ckpt.format.digest import Digester
from ray_ckpt.storage.local.files import checked
from ray_ckpt.transport import wire
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import SERVER_NAME, ServiceKeys
from ray_ckpt.transport.sending import Outgoing, send_files
from ray_ckpt.transport.server import PeerServer

END_S = 10.0  # time in which a receiver can end by itself
WINDOW_BYTES = 256 << 20  # warm memory at each end: larger than any cache, quick to touch
BLOCK_BYTES = 8 << 20  # bytes of one call to a bare socket; larger calls are not faster
SHARDS = 4  # shards of a node, which are copied together
RUN_UID = "0" * 32
DIRECTORY = f"{1:012d}-{1:016x}"
Serve: TypeAlias = Callable[[Connection, ServiceKeys, int], None]


def rows(context: Context) -> Iterator[Row]:
    size = context.size_bytes
    for tls, name in ((True, "TLS"), (False, "no encryption")):
        keys = ServiceKeys.make(datetime.now(UTC), encrypt=tls)
        with bare_socket(keys, size) as send_s, _receiver(_serve_flight, keys, size) as endpoint:
            peer = FlightPeer(endpoint, keys, size)
            for way, what, sample, reach in (
                ("put", "copy to a peer's warm memory, digest answered", peer.send_s, ">= 0.8"),
                (f"put-{SHARDS}", f"the same, {SHARDS} shards at a time", peer.send_shards_s, ""),
                ("get", "copy from a peer's warm memory, digest checked", peer.read_s, ""),
            ):
                sample()  # memory is touched
                yield measure(
                    f"wire-{'tls' if tls else 'plain'}-{way}",
                    f"{what}, {name}",
                    "GB/s",
                    sample,
                    beside=(f"bare socket, {name}", send_s),
                    repeat=context.repeat,
                    reach=reach,
                    size_bytes=size,
                )


@contextmanager
def _receiver(serve: Serve, keys: ServiceKeys, size_bytes: int) -> Iterator[str]:
    """Run `serve` in another process, which ends with this context; yield the address that it sends."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, keys, size_bytes))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()  # ends the process
        process.join(END_S)
        process.kill()


@contextmanager
def bare_socket(keys: ServiceKeys, size_bytes: int) -> Iterator[Sampler]:
    """Yield a sampler that sends everything; with encryption TLS 1.3 and AES-256-GCM, as the transport's."""
    window = _window(size_bytes).data
    with _receiver(_serve_socket, keys, size_bytes) as port:
        connection = socket.create_connection(("127.0.0.1", int(port)))
        if keys.encrypt:
            context = ssl.create_default_context(cadata=keys.cert.decode())
            connection = context.wrap_socket(connection, server_hostname=SERVER_NAME)

        def send_s() -> float:
            started_s = time.perf_counter()
            for block in _blocks(window, size_bytes):
                connection.sendall(block)
            assert connection.recv(1) == b"."
            return time.perf_counter() - started_s

        with connection:
            send_s()  # TCP windows grow, and memory is touched
            yield send_s


def _serve_socket(pipe: Connection, keys: ServiceKeys, size_bytes: int) -> None:
    window = _window(size_bytes).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(str(listener.getsockname()[1]))
        connection = listener.accept()[0]
    if keys.encrypt:
        connection = _server_context(keys).wrap_socket(connection, server_side=True)
    with connection:
        while True:
            left, at = size_bytes, 0
            while left:
                taken = connection.recv_into(window[at : at + min(left, BLOCK_BYTES)])
                if not taken:
                    return
                left, at = left - taken, (at + taken) % window.nbytes
            connection.sendall(b".")


class FlightPeer:
    """The transport between two agents; each method moves everything once and returns the seconds."""

    def __init__(self, endpoint: str, keys: ServiceKeys, size_bytes: int) -> None:
        self._endpoint, self._credentials = endpoint, keys.credentials(RUN_UID)
        self._window = _window(size_bytes).data
        self._whole = [self._outgoing(0, 1, size_bytes)]
        self._shards = [self._outgoing(rank, SHARDS, size_bytes // SHARDS) for rank in range(SHARDS)]
        self._target = _window(size_bytes)

    def send_s(self) -> float:
        """Send one file over one stream."""
        return self._send_s(self._whole)

    def send_shards_s(self) -> float:
        """Send the same bytes as several files, each over a stream of its own."""
        return self._send_s(self._shards)

    def read_s(self) -> float:
        """Read the bytes back over one stream."""
        started_s = time.perf_counter()
        request = self._whole[0].request
        with PeerClient(self._endpoint, credentials=self._credentials) as peer:
            _keep(request, peer.read(request.name, [(0, request.size_bytes)]), self._target)
        return time.perf_counter() - started_s

    def _send_s(self, files: list[Outgoing]) -> float:
        started_s = time.perf_counter()
        send_files(self._endpoint, self._credentials, files, streams=len(files))
        return time.perf_counter() - started_s

    def _outgoing(self, rank: int, num_shards: int, size_bytes: int) -> Outgoing:
        state = Digester()
        for block in _blocks(self._window, size_bytes):
            state.update(block)
        file = f"shard-{rank:05d}-of-{num_shards:05d}.safetensors"
        name = wire.FileName(run_uid=RUN_UID, directory=DIRECTORY, file=file)
        request = wire.PutRequest(name=name, size_bytes=size_bytes, digest=state.hexdigest())
        return Outgoing(request=request, chunks=partial(_blocks, self._window, size_bytes))


def _serve_flight(pipe: Connection, keys: ServiceKeys, size_bytes: int) -> None:
    server = PeerServer("127.0.0.1", keys=keys, files=_WarmMemory(size_bytes))
    pipe.send(server.endpoint)
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.shutdown()


class _WarmMemory:
    """A store that keeps received data in one window for all streams, and sends noise from the window."""

    def __init__(self, size_bytes: int) -> None:
        self._window = _window(size_bytes)

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> str:
        _keep(request, chunks, self._window)
        return request.digest

    def read(self, name: wire.FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        return _blocks(self._window.data, nbytes or 0)

    def size(self, name: wire.FileName) -> int | None:
        return None


def _keep(request: wire.PutRequest, chunks: Iterable[Buffer], window: Bytes) -> None:
    """Check the digest of the received chunks and copy them to the window cyclically."""
    at = 0
    for chunk in checked(chunks, size_bytes=request.size_bytes, digest=request.digest, what="the shard"):
        data = np.frombuffer(memoryview(chunk), np.uint8)
        at = at if at + data.size <= window.size else 0
        np.copyto(window[at : at + data.size], data)
        at += data.size


def _blocks(window: memoryview, size_bytes: int) -> Iterator[memoryview]:
    """Yield `size_bytes` bytes of the window, cyclically."""
    starts = cycle(range(0, window.nbytes, BLOCK_BYTES))
    while size_bytes:
        block = window[(start := next(starts)) : start + min(size_bytes, BLOCK_BYTES)]
        size_bytes -= block.nbytes
        yield block


def _window(size_bytes: int) -> Bytes:
    """Return warm memory of at most WINDOW_BYTES, filled with noise."""
    window = np.empty(min(size_bytes, WINDOW_BYTES), np.uint8)
    fill(window.data)
    return window


def _server_context(keys: ServiceKeys) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:  # the standard library accepts only files
        cert, key = Path(folder, "cert"), Path(folder, "key")
        cert.write_bytes(keys.cert)
        key.write_bytes(keys.key)
        context.load_cert_chain(cert, key)
    return context
