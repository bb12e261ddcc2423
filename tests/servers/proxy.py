"""A TCP proxy on loopback that turns one bit of what clients send."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16


class FlippingProxy:
    """Passes everything on; see `proxy`."""

    def __init__(self, target: str) -> None:
        url = urlsplit(target)
        self._target = (url.hostname or "", url.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._flip_at: int | None = None
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def flip_next(self, at: int) -> None:
        """Turn a bit of byte `at` of the next connection's upstream that gets as far from now on; once."""
        with self._lock:
            self._flip_at = at

    def has_flipped(self) -> bool:
        with self._lock:
            return self._flip_at is None

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for connection in self._open:
                connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {client, server}
                for pump in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=pump, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_upstream: bool) -> None:
        buffer, passed = bytearray(CHUNK_BYTES), 0
        with contextlib.suppress(OSError):
            while nbytes := source.recv_into(buffer):
                if is_upstream:
                    self._flip(buffer, passed, nbytes)
                    passed += nbytes
                target.sendall(memoryview(buffer)[:nbytes])
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _flip(self, buffer: bytearray, passed: int, nbytes: int) -> None:
        with self._lock:
            if self._flip_at is not None and passed <= self._flip_at < passed + nbytes:
                buffer[self._flip_at - passed] ^= 1
                self._flip_at = None


@contextlib.contextmanager
def proxy(target: str) -> Iterator[FlippingProxy]:
    """Start a proxy before the server at a URL. Its `endpoint` stands in for the server's."""
    running = FlippingProxy(target)
    try:
        yield running
    finally:
        running.close()
