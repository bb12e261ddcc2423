"""The agent's end of the transport: a server that stores copies and serves sizes and byte ranges only.

The token of a peer gives access to the checkpoint files of one run; a peer can neither list nor delete files.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as flight
from typing_extensions import Buffer

from ray_ckpt.config import ADDRESS_ENV
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, FormatError, is_lost, text_of
from ray_ckpt.format.blocks import merge_ranges
from ray_ckpt.transport import wire
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.transport.pulse import Beats

_CALLER = "run"  # name of the middleware that has the run of a call


class PeerFiles(Protocol):
    """The files that the server serves. The methods are called from several threads at a time."""

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> str:
        """Store a file durably and return the digest of the stored bytes.

        Raise an error if the size or the digest differs, or if there is no space. A chunk stays valid as long
        as it is referenced. With `request.is_link` there are no chunks: link the file to the same one in
        another checkpoint, or return BYTES_WANTED if this node has none or cannot link it.
        """
        ...

    def read(self, name: wire.FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        """Yield the bytes of a file from `offset` on. Raise FileNotFoundError if the node does not have it.

        After an error with the field `refused=False` the peer may try again.
        A block may be overwritten as soon as the next block is requested, since the server has sent it then.
        """
        ...

    def size(self, name: wire.FileName) -> int | None:
        """Return the size of a file in bytes; None if the node does not have it."""
        ...


class PeerServer(flight.FlightServerBase):  # type: ignore[misc]
    """A server of `files` on `host`, at a free port or the first free one of `ports`, until `shutdown()`.

    `keys.encrypt` decides whether connections are encrypted. Raise ConfigError if `keys` is None, if no port
    is free, or if `host` is no address of this node.
    """

    def __init__(
        self, host: str, *, keys: ServiceKeys | None, files: PeerFiles, ports: range | None = None
    ) -> None:
        if keys is None:
            raise ConfigError(
                f"Peers are not served on {host} without keys: any client of the port could read the run.",
                hint="Make ServiceKeys once per service and pass them to every agent.",
            )
        wire.keep_freed_memory()
        self._files = files
        scheme = "grpc+tls" if keys.encrypt else "grpc"
        address = f"[{host}]" if ":" in host else host
        options = {
            "tls_certificates": [(keys.cert, keys.key)] if keys.encrypt else None,
            "middleware": {_CALLER: _RequireToken(keys)},
        }
        for port in _free_ports(host, ports):
            try:
                super().__init__(f"{scheme}://{address}:{port}", **options)
                break
            except pa.ArrowException as error:
                if not port:
                    raise ConfigError(
                        f"Peers cannot be served on {host}: {error}.",
                        hint=f"Set {ADDRESS_ENV} to an address of this node, or leave it out.",
                    ) from error
        self.endpoint = f"{scheme}://{address}:{self.port}"

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _errors_sent():
            request = wire.decode_put(descriptor.command)
            _check_run(context, request.name)
            with Beats(writer) as beats:
                answer = self._files.put(request, beats.watched(wire.chunks(reader)))
        writer.write(answer.encode())

    def do_get(self, context: Any, ticket: Any) -> Any:
        with _errors_sent():
            request = wire.decode_get(ticket.ticket)
            _check_run(context, request.name)
            if request.ranges and (size := self._files.size(request.name)) is not None:
                wire.check_ranges(request, size)
        return flight.GeneratorStream(wire.CHUNK_SCHEMA, self._batches(request))

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        with _errors_sent():
            request = wire.decode_get(descriptor.command)
            _check_run(context, request.name)
            size = self._files.size(request.name)
        total_bytes = wire.NOT_HERE if size is None else size
        return flight.FlightInfo(wire.CHUNK_SCHEMA, descriptor, [], -1, total_bytes)

    def _batches(self, request: wire.GetRequest) -> Iterator[pa.RecordBatch]:
        ranges: Iterable[tuple[int, int | None]] = ((0, None),)
        if request.ranges:
            ranges = merge_ranges(request.ranges)
        blocks = (block for at, size in ranges for block in self._files.read(request.name, at, size))
        with _errors_sent():
            for chunk in wire.gathered(blocks):
                yield wire.batch(chunk)


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]
    """The run of a call whose token is valid."""

    def __init__(self, run_uid: str) -> None:
        super().__init__()
        self.run_uid = run_uid


class _RequireToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Check of the token of each call, before the server reads anything else of the call."""

    def __init__(self, keys: ServiceKeys) -> None:
        super().__init__()
        self._keys = keys

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> _Caller:
        given = next((v[0] for k, v in headers.items() if k.lower() == wire.TOKEN_HEADER and v), "")
        run_uid = self._keys.run_of(str(given).removeprefix(wire.TOKEN_PREFIX))
        if run_uid is None:
            raise flight.FlightUnauthenticatedError("wrong or missing token")
        return _Caller(run_uid)


def _check_run(context: Any, name: wire.FileName) -> None:
    if context.get_middleware(_CALLER).run_uid != name.run_uid:
        raise flight.FlightUnauthenticatedError("a token of another run")


@contextlib.contextmanager
def _errors_sent() -> Iterator[None]:
    """Send an error in the block to the peer, with a mark; see `_mark`."""
    try:
        yield
    except (CheckpointError, OSError, EOFError) as error:
        raise flight.FlightServerError(text_of(error), extra_info=_mark(error)) from error


def _mark(error: Exception) -> bytes:
    """Return the mark of an error; b"" if a retry may help: `files` is busy (`refused=False`)."""
    if isinstance(error, CheckpointError) and "refused" in error.fields:
        return wire.REFUSED if error.fields["refused"] else b""
    if isinstance(error, CorruptionError) and not isinstance(error, FormatError):
        return wire.ALTERED
    return wire.LOST if is_lost(error) else wire.REFUSED


def _free_ports(host: str, ports: range | None) -> Iterator[int]:
    """Yield the ports that are free now, then raise ConfigError; without `ports`, yield 0, for any port.

    Another process may take a port before the server starts.
    """
    if not ports:
        yield 0
        return
    yield from (port for port in ports if _is_free(host, port))
    raise ConfigError(
        f"No free port of {ports.start} to {ports.stop - 1} on {host}.",
        hint="Configure a wider range of ports: each agent on a machine needs one.",
    )


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return True
    return False
