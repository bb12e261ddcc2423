"""Shared parts of the transport's tests: files as an agent serves them, keys, and a wire that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from ray_ckpt.format.digest import digest
from ray_ckpt.storage.local.files import checked, make_dirs, write_file
from ray_ckpt.transport import wire
from ray_ckpt.transport.credentials import ServiceKeys

UID = "0123456789abcdef" * 2
OTHER_UID = "f" * 32
DIRECTORY = "000000000010-0123456789abcdef"
SHARD = "shard-00000-of-00001.safetensors"
NAME = wire.FileName(run_uid=UID, directory=DIRECTORY, file=SHARD)
KEYS = ServiceKeys.make(datetime.now(UTC))
PLAIN_KEYS = ServiceKeys(cert=KEYS.cert, key=KEYS.key, secret=KEYS.secret, encrypt=False)
OURS = KEYS.credentials(UID)


def shard(rank: int) -> wire.FileName:
    return wire.FileName(run_uid=UID, directory=DIRECTORY, file=f"shard-{rank:05d}-of-00100.safetensors")


def announce(data: Buffer, **changes: Any) -> wire.PutRequest:
    size = memoryview(data).nbytes
    return wire.PutRequest(**{"name": NAME, "size_bytes": size, "digest": digest(data), **changes})


class Folder:
    """Files as an agent serves them, without the agent."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: wire.FileName) -> Path:
        return self.root / name.run_uid / name.directory / name.file

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> str:
        path = self.path(request.name)
        make_dirs(path.parent)
        write_file(
            path, checked(chunks, size_bytes=request.size_bytes, digest=request.digest, what=path.name)
        )
        return request.digest

    def read(self, name: wire.FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        with self.path(name).open("rb") as file:
            file.seek(offset)
            yield file.read(-1 if nbytes is None else nbytes)

    def size(self, name: wire.FileName) -> int | None:
        path = self.path(name)
        return path.stat().st_size if path.exists() else None

    def names(self, name: wire.FileName = NAME) -> list[str]:
        """Return the names of the files beside a file, temporary ones included."""
        parent = self.path(name).parent
        return sorted(path.name for path in parent.iterdir()) if parent.exists() else []


class CutWire:
    """Passes connections on to a port of this machine, and resets the first ones after some bytes."""

    def __init__(self, port: int, *, cuts: Iterable[int] = ()) -> None:
        self._port = port
        self._cuts = list(cuts)  # bytes towards the port until each of the first connections is reset
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> CutWire:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                left = self._cuts.pop(0) if self._cuts else None
                self.num_connections += 1
                threading.Thread(target=_pass, args=(near, far, left), daemon=True).start()
                threading.Thread(target=_pass, args=(far, near, None), daemon=True).start()


class SilentWire:
    """Passes connections on to a port of this machine, and may stop doing so in a direction.

    The connections stay open, as when packets are lost on their way.
    """

    def __init__(self, port: int, *, bytes_per_s: float | None = None) -> None:
        self._port = port
        self._pause_s = (1 << 16) / bytes_per_s if bytes_per_s else 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = {"there": threading.Event(), "back": threading.Event()}
        self.cut()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> SilentWire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cut()
        self._listener.close()

    def cut(self, *, there: bool = False, back: bool = False) -> None:
        """Cut directions: from now on bytes pass in the others only."""
        for direction, is_cut in (("there", there), ("back", back)):
            if is_cut:
                self._open[direction].clear()
            else:
                self._open[direction].set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for source, sink, direction in ((near, far, "there"), (far, near, "back")):
                    threading.Thread(target=self._pass, args=(source, sink, direction), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._open[direction].wait()
                sink.sendall(data)
                time.sleep(self._pause_s if direction == "there" else 0.0)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _pass(source: socket.socket, sink: socket.socket, left: int | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if left is not None and (left := left - len(data)) <= 0:
                break
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
