"""Copies of a shard to and from another process's warm memory, beside a socket with the same encryption.

Each receiver is a separate process that keeps the received data in memory that was touched before; the
product also computes the digest there, compares it and answers. Large sizes reuse one window of memory, so
that they take more time but not more memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import socket
import ssl
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from jobs.bench.context import Context
from jobs.bench.row import Row, compared, gb_per_s
from ray_ckpt.format.digest import Digester
from ray_ckpt.storage.local.files import checked
from ray_ckpt.transport import wire
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import SERVER_NAME, ServiceKeys
from ray_ckpt.transport.sending import Outgoing, send_files
from ray_ckpt.transport.server import PeerServer

Bytes = npt.NDArray[np.uint8]
END_S = 10.0  # time in which a receiver can end by itself
WINDOW_BYTES = 256 << 20  # warm memory at each end: larger than any cache, quick to touch
BLOCK_BYTES = 8 << 20  # bytes of one call to a bare socket; larger calls are not faster
REACH = ">= 0.8"
SHARDS = 4  # shards of a node, which are copied together
RUN_UID = "0" * 32
DIRECTORY = f"{1:012d}-{1:016x}"


def rows(context: Context) -> Iterator[Row]:
    for tls, name in ((True, "TLS"), (False, "no encryption")):
        with SocketPeer(context.size_bytes, tls=tls) as bare, FlightPeer(context.size_bytes, tls=tls) as peer:
            for way, what, sample, reach in (
                ("put", "copy to a peer's warm memory, digest answered", peer.send_s, REACH),
                (f"put-{SHARDS}", f"the same, {SHARDS} shards at a time", peer.send_shards_s, ""),
                ("get", "copy from a peer's warm memory, digest checked", peer.read_s, ""),
            ):
                yield compared(
                    f"wire-{'tls' if tls else 'plain'}-{way}",
                    f"{what}, {name}",
                    "GB/s",
                    sample,
                    (f"bare socket, {name}", bare.send_s),
                    repeat=context.repeat,
                    reach=reach,
                    convert=partial(gb_per_s, size_bytes=context.size_bytes),
                )


def raw_socket(size_bytes: int, *, tls: bool) -> float:
    """Seconds of one transfer over a bare socket between two processes, warm memory to warm memory."""
    with SocketPeer(size_bytes, tls=tls) as peer:
        return peer.send_s()


class _Receiver(ABC):
    """A receiving process; `send_s()` sends everything once and returns the seconds."""

    _serve: Callable[..., None]

    def __init__(self, size_bytes: int, *, tls: bool) -> None:
        self.size_bytes = size_bytes
        self._keys = ServiceKeys.make(datetime.now(UTC), encrypt=tls)
        self._window = _window(size_bytes).data
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=type(self)._serve, args=(theirs, self._keys, size_bytes))
        self._process.start()
        theirs.close()
        self._answer: Any = ours.recv()
        self._pipe = ours

    @abstractmethod
    def send_s(self) -> float: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pipe.close()  # ends the process
        self._process.join(END_S)
        self._process.kill()


class SocketPeer(_Receiver):
    """A bare socket, optionally with TLS: TLS 1.3 and AES-256-GCM, as the transport's."""

    def __init__(self, size_bytes: int, *, tls: bool) -> None:
        super().__init__(size_bytes, tls=tls)
        self._socket = socket.create_connection(("127.0.0.1", self._answer))
        if tls:
            context = ssl.create_default_context(cadata=self._keys.cert.decode())
            self._socket = context.wrap_socket(self._socket, server_hostname=SERVER_NAME)
        self.send_s()  # TCP windows grow, and memory is touched

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        super().__exit__(*exc)

    def send_s(self) -> float:
        started_s = time.perf_counter()
        for block in _blocks(self._window, self.size_bytes):
            self._socket.sendall(block)
        assert self._socket.recv(1) == b"."
        return time.perf_counter() - started_s

    @staticmethod
    def _serve(pipe: Any, keys: ServiceKeys, size_bytes: int) -> None:
        window = _window(size_bytes).data
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname()[1])
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


class FlightPeer(_Receiver):
    """The transport between two agents."""

    def __init__(self, size_bytes: int, *, tls: bool) -> None:
        super().__init__(size_bytes, tls=tls)
        self._credentials = self._keys.credentials(RUN_UID)
        self._whole = [self._outgoing(0, 1)]
        self._shards = [self._outgoing(rank, SHARDS) for rank in range(SHARDS)]
        self._target = _window(size_bytes)
        for sample in (self.send_s, self.send_shards_s, self.read_s):
            sample()

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
        with PeerClient(self._answer, credentials=self._credentials) as peer:
            _keep(request, peer.read(request.name, [(0, request.size_bytes)]), self._target)
        return time.perf_counter() - started_s

    def _send_s(self, files: list[Outgoing]) -> float:
        started_s = time.perf_counter()
        send_files(self._answer, self._credentials, files, streams=len(files))
        return time.perf_counter() - started_s

    def _outgoing(self, rank: int, num_shards: int) -> Outgoing:
        size, state = self.size_bytes // num_shards, Digester()
        for block in _blocks(self._window, size):
            state.update(block)
        file = f"shard-{rank:05d}-of-{num_shards:05d}.safetensors"
        name = wire.FileName(run_uid=RUN_UID, directory=DIRECTORY, file=file)
        request = wire.PutRequest(name=name, size_bytes=size, digest=state.hexdigest())
        return Outgoing(request=request, chunks=partial(_blocks, self._window, size))

    @staticmethod
    def _serve(pipe: Any, keys: ServiceKeys, size_bytes: int) -> None:
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
    return np.resize(
        np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), min(size_bytes, WINDOW_BYTES)
    )


def _server_context(keys: ServiceKeys) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:  # the standard library accepts only files
        cert, key = Path(folder, "cert"), Path(folder, "key")
        cert.write_bytes(keys.cert)
        key.write_bytes(keys.key)
        context.load_cert_chain(cert, key)
    return context
