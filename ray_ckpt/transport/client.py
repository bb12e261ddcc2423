"""The calling end of the transport."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
from typing_extensions import Buffer

from ray_ckpt.errors import FormatError, Unavailable
from ray_ckpt.format.blocks import merge_ranges
from ray_ckpt.format.names import fragment_file
from ray_ckpt.transport import wire
from ray_ckpt.transport.credentials import SERVER_NAME, Credentials
from ray_ckpt.transport.pulse import BEAT, SILENT_S, Pulse

CALL_BASE_S = 30.0  # time for each call besides the transfer: a busy peer may answer late
SLOWEST_BYTES_PER_S = 10 << 20  # a slower peer is treated as gone
GONE_S = 30.0  # a node is gone if the kernel there acknowledges no bytes for this time
LOOK_S = 0.05  # shortest time between two checks for a silent peer
PING_S = 600.0  # time between pings of an idle connection; servers refuse more than one in 5 minutes

_FINAL = (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError, flight.FlightTimedOutError)
NO_DIRECTORY = "000000000000-0000000000000000"  # of no checkpoint: `is_there` accepts any answer
_UNREACHED = (flight.FlightUnavailableError, flight.FlightTimedOutError)
_FAILURES = (flight.FlightError, pa.ArrowException, OSError, FormatError)


class PeerClient:
    """A connection to one agent. Every failure of the peer or of the network is raised as `Unavailable`.

    `fields["refused"]` of the error is true if a retry cannot succeed: the peer refused the call, or the call
    took longer than the slowest acceptable rate allows. `fields["answered"]` is true if the peer itself
    reported the error: the peer is alive and may have other files. `fields["unreachable"]` is true if the
    peer gave no sign of life at all, or none for SILENT_S; `fields["lost"]` if the peer does not have the
    file, or not all of it; `fields["altered"]` if bytes did not have their digest.
    """

    def __init__(self, endpoint: str, *, credentials: Credentials, gone_s: float = GONE_S) -> None:
        wire.keep_freed_memory()
        self._endpoint = endpoint
        self._headers = [(wire.TOKEN_HEADER.encode(), f"{wire.TOKEN_PREFIX}{credentials.token}".encode())]
        if credentials.encrypt != endpoint.startswith("grpc+tls://"):
            raise Unavailable(f"Peer {endpoint} does not encrypt as its service does.", refused=True)
        tls: dict[str, Any] = {}
        if credentials.encrypt:
            tls = {"tls_root_certs": credentials.root_cert, "override_hostname": SERVER_NAME}
        self._client = flight.connect(endpoint, generic_options=_channel(gone_s), **tls)

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
        """Send a file; return when the peer has stored it durably and answered with the same digest.

        The caller may overwrite a chunk as soon as the next chunk is requested. Exceptions from `chunks`
        propagate. The call fails if it is slower than `slowest_bytes_per_s` on average, or if the peer gives
        no sign of life for SILENT_S. A caller with a rate limit passes a lower `slowest_bytes_per_s`.

        A Flight call cannot be cancelled, and a wait for the call cannot have a timeout. Therefore each call
        runs in a separate thread, which is abandoned if the peer falls silent. An abandoned thread takes no
        further chunk, and ends when the kernel closes the connection or when the deadline of the call passes.
        """
        stored = self._put(request, chunks, slowest_bytes_per_s)
        if stored != request.digest:
            wrong = FormatError(f"it stored other bytes (digest {stored})")
            raise self._unavailable(request.name, wrong)

    def link(self, request: wire.PutRequest) -> bool:
        """Have the peer link a file to the same one in another checkpoint; False if it needs bytes."""
        return self._put(request, (), SLOWEST_BYTES_PER_S) == request.digest

    def _put(self, request: wire.PutRequest, chunks: Iterable[Buffer], slowest_bytes_per_s: float) -> str:
        """Send a request and chunks; return the peer's answer."""
        call = _Put(self._client, request, chunks, self._options(request.size_bytes, slowest_bytes_per_s))
        call.start()
        while not call.ended.wait(max(SILENT_S - call.pulse.silent_s, LOOK_S)):
            if call.pulse.silent_s >= SILENT_S:
                call.is_abandoned = True
                if call.source_error is not None:
                    raise call.source_error
                silent = flight.FlightTimedOutError(f"it gave no sign of life for {SILENT_S:.0f} s")
                raise self._unavailable(request.name, silent, unreachable=True)
        if call.source_error is not None:
            raise call.source_error
        if call.failure is not None:
            was_alive = call.pulse.was_alive
            raise self._unavailable(request.name, call.failure, was_alive=was_alive) from call.failure
        return call.stored

    def read(
        self,
        name: wire.FileName,
        ranges: Sequence[tuple[int, int]],
        *,
        slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S,
    ) -> Iterator[memoryview]:
        """Yield the bytes of all ranges (offset, size) in order, in blocks as they arrive, without a copy.

        A block stays valid as long as it is referenced. Blocks do not end where ranges end. The call fails
        if it is slower than `slowest_bytes_per_s` on average.
        """
        left = sum(size for _, size in ranges)
        if not left:
            return
        with self._naming(name):
            reader = self._get(name, merge_ranges(ranges), self._options(left, slowest_bytes_per_s))
            try:
                for chunk in wire.chunks(reader):
                    left -= chunk.nbytes
                    if left < 0:
                        raise FormatError(f"{-left} bytes too many")
                    yield chunk
            finally:
                reader.cancel()  # the caller may stop before the end
            if left:
                raise FormatError(f"{left} bytes are missing")

    def read_file(self, name: wire.FileName, *, max_bytes: int) -> bytes:
        """Return a whole small file. Raise Unavailable if it is larger than `max_bytes`."""
        data = bytearray()
        with self._naming(name):
            for chunk in wire.chunks(self._get(name, (), self._options(max_bytes))):
                data += chunk
                if len(data) > max_bytes:
                    raise FormatError(f"{name.file} is larger than {max_bytes} bytes")
        return bytes(data)

    def is_there(self, run_uid: str, *, within_s: float) -> bool:
        """Return whether the peer answers; an error also counts as an answer."""
        name = wire.FileName(run_uid=run_uid, directory=NO_DIRECTORY, file=fragment_file(0, 1))
        request = wire.encode_request(wire.GetRequest(name=name, ranges=()))
        options = flight.FlightCallOptions(timeout=within_s, headers=self._headers)
        try:
            self._client.get_flight_info(flight.FlightDescriptor.for_command(request), options)
        except _UNREACHED:
            return False
        except _FAILURES:
            return True
        return True

    def size(self, name: wire.FileName) -> int | None:
        """Return the size of a file in bytes; None if the peer has no such file."""
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
        """Convert each failure in the block to Unavailable with the name of the file."""
        try:
            yield
        except _FAILURES as error:
            raise self._unavailable(name, error) from error

    def _unavailable(
        self, name: wire.FileName, error: Exception, *, was_alive: bool = True, unreachable: bool = False
    ) -> Unavailable:
        reason = (
            str(error).split(". gRPC client debug context", maxsplit=1)[0].split(". Detail: ", maxsplit=1)[0]
        )
        mark = getattr(error, "extra_info", b"")
        return Unavailable(
            f"Peer {self._endpoint}, {name.directory}/{name.file}: {reason.rstrip('.')}.",
            refused=isinstance(error, _FINAL) or mark in (wire.REFUSED, wire.LOST),
            lost=mark == wire.LOST,
            altered=mark == wire.ALTERED,
            answered=isinstance(error, flight.FlightServerError),
            unreachable=unreachable or (not was_alive and isinstance(error, _UNREACHED)),
        )


class _Abandoned(Exception):
    """The source failed, or the caller abandoned the call."""


class _Put(threading.Thread):
    """The thread of one `put`. `ended` is set when the call is over, whether it succeeded or failed."""

    def __init__(self, client: Any, request: wire.PutRequest, chunks: Iterable[Buffer], options: Any) -> None:
        super().__init__(name="ray_ckpt-put", daemon=True)  # an abandoned call must not delay the exit
        self._client = client
        self._request = request
        self._chunks = chunks
        self._options = options
        self.pulse = Pulse()
        self.ended = threading.Event()
        self.is_abandoned = False  # the caller no longer waits
        self.stored = ""  # digest in the peer's answer
        self.failure: Exception | None = None  # failure of the peer or of the network
        self.source_error: BaseException | None = None  # exception from `chunks`

    def run(self) -> None:
        try:
            self._call()
        except _Abandoned:
            pass
        except _FAILURES as error:
            self.failure = error
        finally:
            self._chunks = ()  # frees the memory of the source
            self.ended.set()

    def _call(self) -> None:
        descriptor = flight.FlightDescriptor.for_command(wire.encode_request(self._request))
        self.pulse.wait_for_peer()
        writer, answers = self._client.do_put(descriptor, wire.CHUNK_SCHEMA, self._options)
        self.pulse.beat()  # the connection is open
        listener = threading.Thread(target=self._listen, args=(answers,), name="ray_ckpt-put", daemon=True)
        listener.start()
        try:
            self._send(writer)
        except BaseException:  # the peer detects missing bytes and deletes the file
            if self.source_error is not None:
                self.pulse.wait_for_peer()
            else:
                self.pulse.stop_waiting()  # report this failure, not the silence that follows
            for end in (writer.done_writing, listener.join, writer.close):
                with contextlib.suppress(*_FAILURES):
                    end()
            raise
        self.pulse.wait_for_peer()
        writer.done_writing()
        listener.join()  # before `close`, which would wait for the pending read
        writer.close()

    def _send(self, writer: Any) -> None:
        for chunk in self._source_chunks():
            self.pulse.wait_for_peer()
            writer.write_batch(wire.batch(chunk))
            self.pulse.stop_waiting()

    def _source_chunks(self) -> Iterator[memoryview]:
        """Yield the chunks of the source until the call is abandoned."""
        self.pulse.stop_waiting()
        chunks = wire.split(self._chunks)
        while True:
            try:
                chunk = next(chunks, None)
            except BaseException as error:
                self.source_error = error
                raise _Abandoned from error
            if self.is_abandoned:
                raise _Abandoned
            if chunk is None:
                return
            yield chunk

    def _listen(self, answers: Any) -> None:
        """Read beats until the answer arrives; a failure is raised later, when the writer is closed."""
        with contextlib.suppress(*_FAILURES):
            while (answer := answers.read()) is not None:
                self.pulse.beat()
                if (message := answer.to_pybytes()) != BEAT:
                    self.stored = message.decode(errors="replace")
                    return


def _channel(gone_s: float) -> list[tuple[str, int]]:
    return [
        ("grpc.use_local_subchannel_pool", 1),  # otherwise all clients of an endpoint share one connection
        ("grpc.keepalive_time_ms", int(PING_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(gone_s * 1000)),  # gRPC also sets TCP_USER_TIMEOUT to this
    ]
