"""The server: a thread per connection, blocking sockets, loopback only.

All three APIs are on one port and see the same buckets: GCS's JSON API by its paths, GCS's XML API by bearer
tokens, S3 otherwise. `/__strict__/` is the admin interface, for tests in other processes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.servers.strict_store.api import Api
from tests.servers.strict_store.disk import Folder
from tests.servers.strict_store.exchange import Dropped, Exchange
from tests.servers.strict_store.faults import Down, Fault, Faults
from tests.servers.strict_store.gcs import Gcs
from tests.servers.strict_store.gcs_json import GcsJson
from tests.servers.strict_store.http1 import (
    BadBody,
    Connection,
    Disconnected,
    Head,
    Response,
    json_response,
    small_body,
)
from tests.servers.strict_store.objects import MIN_PART_BYTES, Objects
from tests.servers.strict_store.records import Conditions, StoredObject, StoreError, Upload
from tests.servers.strict_store.s3 import S3
from tests.servers.strict_store.signing import Credential
from tests.servers.strict_store.stats import Stats

MAX_CONNECTIONS = 512  # further ones wait to be accepted; a client of ours has some dozen
ADMIN = "/__strict__/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`port` 0: any free one. `directory`: where objects outlive the process; None: they are in memory.

    `conditions`: what a store that is not strict does with conditional writes. `min_part_bytes`: of all parts
    but the last. `buckets`: made at the start, unless they are there.
    """

    port: int = 0
    directory: Path | None = None
    access_key: str = "strict"
    secret_key: str = "strict-secret"
    token: str = "strict-token"
    conditions: Conditions = "enforced"
    min_part_bytes: int = MIN_PART_BYTES
    buckets: tuple[str, ...] = ()


class Clock:
    """The store's clock: this machine's, and an offset."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


class Server:
    """Listens once it is made; serves from `start` or `with` on, until `close`."""

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        self.clock = Clock()
        self.faults = Faults()
        self.stats = Stats()
        self.objects = Objects(
            conditions=settings.conditions,
            min_part_bytes=settings.min_part_bytes,
            now=self.clock,
            keeper=Folder(settings.directory) if settings.directory else None,
        )
        for bucket in set(settings.buckets).difference(self.objects.buckets()):
            self.objects.create_bucket(bucket)
        self._s3 = S3(self.objects, Credential(settings.access_key, settings.secret_key))
        self._gcs = Gcs(self.objects, settings.token)
        self._json = GcsJson(self.objects, settings.token)
        self._listener = socket.create_server(("127.0.0.1", settings.port), backlog=MAX_CONNECTIONS)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="strict-store", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._cut()

    def add_fault(self, fault: Fault, *, spared: Connection | None = None) -> int:
        """Add a fault; return its number for `faults.remove`. Down cuts all connections but `spared`."""
        number = self.faults.add(fault)
        if isinstance(fault.action, Down):
            self._cut(spared)
        return number

    def _cut(self, spared: Connection | None = None) -> None:
        with self._lock:
            connections = self._connections - {spared}
        for connection in connections:
            connection.cut()

    def _accept(self) -> None:
        while not self._closed:
            self._free.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._free.release()
                continue
            connection = Connection(sock, received=self.stats.received, sent=self.stats.sent)
            with self._lock:
                self._connections.add(connection)
            name = "strict-store-client"
            threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            with contextlib.suppress(Disconnected, Dropped, BadBody):
                while self._answer(connection):
                    pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            self._free.release()

    def _answer(self, connection: Connection) -> bool:
        """Answer one request; return whether another may follow."""
        head = connection.head()
        if head.path.startswith(ADMIN):
            body = small_body(head, connection)
            connection.send(
                *self._administer(head, body, connection).message(now_s=self.clock(), keep_alive=False)
            )
            return False
        return Exchange(head, self._api(head), connection, self.faults, self.stats).run(self.clock())

    def _api(self, head: Head) -> Api:
        if GcsJson.knows(head.path):
            return self._json
        return self._gcs if head.headers.get("authorization", "").startswith("Bearer ") else self._s3

    # -- the admin interface

    def _administer(self, head: Head, body: bytes, asking: Connection) -> Response:
        try:
            answer = self._admin(head, json.loads(body or b"{}"), asking)
        except (ValueError, TypeError, KeyError) as error:
            return json_response(400, {"error": repr(error)})
        except StoreError as error:
            return json_response(error.status, {"error": str(error)})
        return json_response(404, {"error": "not known"}) if answer is None else json_response(200, answer)

    def _admin(self, head: Head, values: Mapping[str, Any], asking: Connection) -> Mapping[str, Any] | None:
        match head.method, head.path.removeprefix(ADMIN):
            case "GET", "stats":
                return self.stats.to_json()
            case "GET", "faults":
                return self.faults.fired()
            case "POST", "faults":
                return {"number": self.add_fault(Fault.from_json(values), spared=asking)}
            case "DELETE", "faults":
                if "number" in head.query:
                    self.faults.remove(int(head.query["number"]))
                else:
                    self.faults.clear()
                return {}
            case "POST", "clock":
                self.clock.offset_s = float(values["offset_s"])
                return {}
            case "POST", "buckets":
                self.objects.create_bucket(str(values["name"]))
                return {}
            case "GET", "objects":
                return {
                    "objects": [_object_line(stored) for stored in self.objects.all(head.query["bucket"])]
                }
            case "GET", "uploads":
                return {
                    "uploads": [_upload_line(upload) for upload in self.objects.uploads(head.query["bucket"])]
                }
        return None


def _object_line(stored: StoredObject) -> Mapping[str, Any]:
    return {
        "key": stored.key,
        "size": stored.size,
        "etag": stored.etag,
        "generation": stored.generation,
        "modified_s": stored.modified_s,
        "headers": stored.headers,
    }


def _upload_line(upload: Upload) -> Mapping[str, Any]:
    return {
        "key": upload.key,
        "upload_id": upload.upload_id,
        "initiated_s": upload.initiated_s,
        "parts": len(upload.parts),
    }
