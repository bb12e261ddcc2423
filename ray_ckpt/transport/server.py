"""An agent's end of the transport: takes copies in, gives byte ranges out, nothing else.

A peer cannot list, delete or name anything but a file of a checkpoint of a run that is open here.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as flight
from typing_extensions import Buffer

from ray_ckpt.errors import CheckpointError
from ray_ckpt.transport import wire

TOKEN_HEADER = "authorization"


class PeerFiles(Protocol):
    """What the server serves. Called from several threads at a time."""

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> None:
        """Store a file durably; raises if size or digest differ or there is no space."""
        ...

    def read(self, name: wire.FileName, offset: int, nbytes: int | None) -> Iterator[bytes]:
        """The bytes of a file; FileNotFoundError if it is not here."""
        ...


class _RequireToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}"

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        given = next((v[0] for k, v in headers.items() if k.lower() == TOKEN_HEADER and v), "")
        if not hmac.compare_digest(given.encode(), self._expected.encode()):
            raise flight.FlightUnauthenticatedError("wrong or missing token")


class PeerServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves `files` on `host` at a free port until `shutdown()`."""

    def __init__(self, host: str, *, token: str, files: PeerFiles) -> None:
        super().__init__(f"grpc://{host}:0", middleware={"token": _RequireToken(token)})
        self._files = files
        self.endpoint = f"grpc://{host}:{self.port}"

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        try:
            request = wire.decode_put(descriptor.command)
            self._files.put(request, (b.data.column(0)[0].as_buffer() for b in reader))
        except (CheckpointError, OSError) as error:
            raise flight.FlightServerError(str(error)) from error

    def do_get(self, context: Any, ticket: Any) -> Any:
        try:
            request = wire.decode_get(ticket.ticket)
        except CheckpointError as error:
            raise flight.FlightServerError(str(error)) from error
        return flight.GeneratorStream(wire.CHUNK_SCHEMA, self._batches(request))

    def _batches(self, request: wire.GetRequest) -> Iterator[pa.RecordBatch]:
        ranges: Iterable[tuple[int, int | None]] = request.ranges or ((0, None),)
        try:
            for offset, nbytes in ranges:
                for chunk in wire.split(self._files.read(request.name, offset, nbytes)):
                    yield wire.batch(chunk)
        except (CheckpointError, OSError, EOFError) as error:
            raise flight.FlightServerError(str(error)) from error
