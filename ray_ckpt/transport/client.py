"""The calling end of the transport."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
from typing_extensions import Buffer

from ray_ckpt.errors import FormatError, Unavailable
from ray_ckpt.transport import wire
from ray_ckpt.transport.credentials import SERVER_NAME, Credentials

CALL_BASE_S = 30.0  # a live peer answers at once; this covers a busy one
SLOWEST_BYTES_PER_S = 10 << 20  # a slower peer is treated as gone
SILENT_S = 30.0  # bytes that a peer's kernel has not taken for so long: its node is gone
PING_S = 600.0  # idle connections are pinged this often; servers refuse more than one ping in 5 minutes

_FINAL = (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError, flight.FlightTimedOutError)
_FAILURES = (flight.FlightError, pa.ArrowException, OSError, FormatError)


class PeerClient:
    """A connection of its own to one agent. Every failure of the peer or the way to it is `Unavailable`.

    Its `fields["refused"]` is true if another try cannot go better: the peer has said no, or a frozen one has
    used up the time that its slowest acceptable pace would take. `fields["answered"]` is true if the peer
    itself has told what is wrong, so that it may well have other files.
    """

    def __init__(self, endpoint: str, *, credentials: Credentials) -> None:
        wire.keep_freed_memory()
        self._endpoint = endpoint
        self._headers = [(wire.TOKEN_HEADER.encode(), f"{wire.TOKEN_PREFIX}{credentials.token}".encode())]
        if credentials.encrypt != endpoint.startswith("grpc+tls://"):
            raise Unavailable(f"Peer {endpoint} does not encrypt as its service does.", refused=True)
        tls: dict[str, Any] = {}
        if credentials.encrypt:
            tls = {"tls_root_certs": credentials.root_cert, "override_hostname": SERVER_NAME}
        self._client = flight.connect(endpoint, generic_options=list(_CHANNEL), **tls)

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def put(
        self,
        request: wire.PutRequest,
        chunks: Iterable[Buffer],
        *,
        slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S,
    ) -> None:
        """Send a file; returns when the peer has it durably and has answered with the same digest.

        A chunk may change once the next is asked for. What `chunks` raises comes through as it is.
        At less than `slowest_bytes_per_s` on average it is given up; who is slow on purpose says so.
        """
        descriptor = flight.FlightDescriptor.for_command(wire.encode_request(request))
        options = self._options(request.size_bytes, slowest_bytes_per_s)
        with self._naming(request.name):
            writer, answers = self._client.do_put(descriptor, wire.CHUNK_SCHEMA, options)
        try:
            for chunk in wire.split(chunks):
                with self._naming(request.name):
                    writer.write_batch(wire.batch(chunk))
        except BaseException:
            with contextlib.suppress(*_FAILURES):
                writer.close()  # the peer finds that bytes are missing and keeps nothing
            raise
        with self._naming(request.name):
            writer.done_writing()
            answer = answers.read()
            writer.close()
        stored = "" if answer is None else answer.to_pybytes().decode(errors="replace")
        if stored != request.digest:
            raise self._unavailable(request.name, FormatError(f"it has stored other bytes (digest {stored})"))

    def read(
        self,
        name: wire.FileName,
        ranges: Sequence[tuple[int, int]],
        *,
        slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S,
    ) -> Iterator[memoryview]:
        """The bytes of all ranges (offset, size) in order, in blocks as they arrive, none copied.

        A block keeps its bytes as long as it is held. Bounds of blocks say nothing about bounds of ranges.
        It is given up as a `put` is.
        """
        left = sum(size for _, size in ranges)
        if not left:
            return
        with self._naming(name):
            reader = self._get(name, wire.merged(ranges), self._options(left, slowest_bytes_per_s))
            try:
                for chunk in wire.chunks(reader):
                    left -= chunk.nbytes
                    if left < 0:
                        raise FormatError(f"{-left} bytes too many")
                    yield chunk
            finally:
                reader.cancel()  # of one that nobody reads to its end
            if left:
                raise FormatError(f"{left} bytes are missing")

    def read_file(self, name: wire.FileName, *, max_bytes: int) -> bytes:
        """A whole small file; Unavailable if it is larger than `max_bytes`."""
        data = bytearray()
        with self._naming(name):
            for chunk in wire.chunks(self._get(name, (), self._options(max_bytes))):
                data += chunk
                if len(data) > max_bytes:
                    raise FormatError(f"{name.file} is larger than {max_bytes} bytes")
        return bytes(data)

    def size(self, name: wire.FileName) -> int | None:
        """How many bytes the peer has of a file; None if it has no such file."""
        request = wire.encode_request(wire.GetRequest(name=name, ranges=()))
        descriptor = flight.FlightDescriptor.for_command(request)
        with self._naming(name):
            found = self._client.get_flight_info(descriptor, self._options(0))
        size = int(found.total_bytes)
        return None if size < 0 else size

    def _get(self, name: wire.FileName, ranges: tuple[tuple[int, int], ...], options: Any) -> Any:
        request = wire.encode_request(wire.GetRequest(name=name, ranges=ranges))
        return self._client.do_get(flight.Ticket(request), options)

    def _options(self, size_bytes: int, slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S) -> Any:
        timeout_s = CALL_BASE_S + size_bytes / slowest_bytes_per_s
        return flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)

    @contextlib.contextmanager
    def _naming(self, name: wire.FileName) -> Iterator[None]:
        """Whatever fails at the peer is Unavailable."""
        try:
            yield
        except _FAILURES as error:
            raise self._unavailable(name, error) from error

    def _unavailable(self, name: wire.FileName, error: Exception) -> Unavailable:
        reason = (
            str(error).split(". gRPC client debug context", maxsplit=1)[0].split(". Detail: ", maxsplit=1)[0]
        )
        is_refused = isinstance(error, _FINAL) or getattr(error, "extra_info", b"") == wire.REFUSED
        return Unavailable(
            f"Peer {self._endpoint}, {name.directory}/{name.file}: {reason.rstrip('.')}.",
            refused=is_refused,
            answered=isinstance(error, flight.FlightServerError),
        )


_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),  # else all clients of an endpoint share one connection
    ("grpc.keepalive_time_ms", int(PING_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(SILENT_S * 1000)),  # TCP_USER_TIMEOUT as well
)
