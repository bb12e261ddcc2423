"""The calling end of the transport."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
from typing_extensions import Buffer

from ray_ckpt.errors import FormatError, Unavailable
from ray_ckpt.transport import wire
from ray_ckpt.transport.server import TOKEN_HEADER

CALL_BASE_S = 30.0  # a live peer answers at once; this covers a busy one
SLOWEST_BYTES_PER_S = 10 << 20  # a slower peer is treated as gone


class PeerClient:
    """A connection to one agent. Every failure of the peer or the way to it is `Unavailable`."""

    def __init__(self, endpoint: str, *, token: str) -> None:
        self._endpoint = endpoint
        self._headers = [(TOKEN_HEADER.encode(), f"Bearer {token}".encode())]
        self._client = flight.connect(endpoint)

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> None:
        """Send a file; returns when the peer has it durably and has checked its digest."""
        descriptor = flight.FlightDescriptor.for_command(wire.encode_request(request))
        try:
            writer, _ = self._client.do_put(descriptor, wire.CHUNK_SCHEMA, self._options(request.size_bytes))
            with writer:
                for block in chunks:
                    for chunk in wire.split(iter([memoryview(block)])):  # type: ignore[list-item]
                        writer.write_batch(wire.batch(chunk))
                writer.done_writing()
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise self._unavailable(request.name, error) from error

    def read(self, name: wire.FileName, ranges: Sequence[tuple[int, int]]) -> Iterator[bytearray]:
        """The bytes of each range (offset, size), in order."""
        total = sum(size for _, size in ranges)
        try:
            reader = self._get(name, tuple(ranges), total)
            yield from wire.regroup(_chunks(reader), [size for _, size in ranges])
        except (flight.FlightError, pa.ArrowException, OSError, FormatError) as error:
            raise self._unavailable(name, error) from error

    def read_file(self, name: wire.FileName, *, max_bytes: int) -> bytes:
        """A whole small file; Unavailable if it is larger than `max_bytes`."""
        data = bytearray()
        try:
            for chunk in _chunks(self._get(name, (), max_bytes)):
                data += chunk
                if len(data) > max_bytes:
                    raise FormatError(f"{name.file} is larger than {max_bytes} bytes.")
        except (flight.FlightError, pa.ArrowException, OSError, FormatError) as error:
            raise self._unavailable(name, error) from error
        return bytes(data)

    def _get(self, name: wire.FileName, ranges: tuple[tuple[int, int], ...], size_bytes: int) -> Any:
        request = wire.encode_request(wire.GetRequest(name=name, ranges=ranges))
        return self._client.do_get(flight.Ticket(request), self._options(size_bytes))

    def _options(self, size_bytes: int) -> Any:
        timeout_s = CALL_BASE_S + size_bytes / SLOWEST_BYTES_PER_S
        return flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)

    def _unavailable(self, name: wire.FileName, error: Exception) -> Unavailable:
        reason = str(error).split(". gRPC client debug context", maxsplit=1)[0]
        return Unavailable(f"Peer {self._endpoint}, {name.directory}/{name.file}: {reason}.")


def _chunks(reader: Any) -> Iterator[memoryview]:
    for item in reader:
        yield memoryview(item.data.column(0)[0].as_buffer())
