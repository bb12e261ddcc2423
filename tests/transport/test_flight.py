"""Files between two agents by Arrow Flight, on the loopback: all of it, or an error and nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from ray_ckpt.errors import FormatError, InsufficientSpace, Unavailable
from ray_ckpt.format.blocks import merge_ranges
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.storage.local.files import make_dirs
from ray_ckpt.transport import client as client_module
from ray_ckpt.transport import wire
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import SERVER_NAME
from ray_ckpt.transport.server import PeerServer
from tests.support.examples import examples
from tests.transport.peers import (
    DIRECTORY,
    KEYS,
    NAME,
    OURS,
    PLAIN_KEYS,
    SHARD,
    UID,
    Folder,
    announce,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("peer"))


@pytest.fixture(scope="module")
def server(folder: Folder) -> Iterator[PeerServer]:
    opened = PeerServer("127.0.0.1", keys=KEYS, files=folder)
    yield opened
    opened.shutdown()


@pytest.fixture
def peer(server: PeerServer) -> Iterator[PeerClient]:
    with PeerClient(server.endpoint, credentials=OURS) as opened:
        yield opened


@pytest.mark.parametrize("size", [0, 1, 4096, (4 << 20) + 3, 9 << 20])
def test_a_file_goes_over_and_comes_back(peer: PeerClient, folder: Folder, size: int) -> None:
    data = os.urandom(size)
    view = memoryview(data)
    peer.put(announce(data), (view[i : i + (8 << 20)] for i in range(0, size, 8 << 20)))
    assert folder.path(NAME).read_bytes() == data
    assert peer.read_file(NAME, max_bytes=size) == data
    assert b"".join(peer.read(NAME, [(0, size)])) == data


def test_a_put_can_be_repeated(peer: PeerClient, folder: Folder) -> None:
    for _ in range(2):
        peer.put(announce(b"same"), [b"sa", b"", b"me"])
    assert folder.path(NAME).read_bytes() == b"same"
    assert folder.names() == [SHARD]


def test_ranges_come_in_the_requested_order(peer: PeerClient) -> None:
    data = os.urandom(10 << 20)
    peer.put(announce(data), [data])
    ranges = [(5, 3), (0, 0), (9 << 20, 1 << 20), (0, 5 << 20), (7, 0), (4, 1), (10 << 20, 0)]
    assert b"".join(peer.read(NAME, ranges)) == b"".join(data[a : a + n] for a, n in ranges)
    assert list(peer.read(NAME, [])) == []
    assert list(peer.read(NAME, [(3, 0)])) == []


@examples(40)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3000)), max_size=8))
def test_any_ranges(server: PeerServer, folder: Folder, ranges: list[tuple[int, int]]) -> None:
    data = bytes(i % 251 for i in range(8 * 3000))  # no fewer than the ranges together
    make_dirs(folder.path(NAME).parent)
    folder.path(NAME).write_bytes(data)
    with PeerClient(server.endpoint, credentials=OURS) as peer:
        assert b"".join(peer.read(NAME, ranges)) == b"".join(data[a : a + n] for a, n in ranges)


def test_a_range_beyond_the_end_is_unavailable(peer: PeerClient) -> None:
    peer.put(announce(b"123"), [b"123"])
    with pytest.raises(Unavailable, match="ends at byte 3"):
        list(peer.read(NAME, [(2, 5)]))


def test_a_size_is_sent_without_a_byte_of_the_file(peer: PeerClient) -> None:
    peer.put(announce(b"123"), [b"123"])
    assert peer.size(NAME) == 3
    other = wire.FileName(run_uid=UID, directory=DIRECTORY, file="state-00007-of-00009.json")
    assert peer.size(other) is None


class Failing(Folder):
    """Files of a node that fails with `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self, name: wire.FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        raise self._error
        yield b""

    def size(self, name: wire.FileName) -> int | None:
        return None


@pytest.mark.parametrize(
    ("error", "text", "is_refused"),
    [
        (TimeoutError(), f"{SHARD}: no answer in time.", True),
        (OSError(5, "Input/output error"), "Input/output error.", True),
        (Unavailable("others read here", refused=False), "others read here.", False),
    ],
)
def test_the_error_of_a_peer_has_a_text_and_is_refused_unless_the_peer_is_busy(
    error: Exception, text: str, is_refused: bool
) -> None:
    server = PeerServer("127.0.0.1", keys=KEYS, files=Failing(error))
    try:
        with PeerClient(server.endpoint, credentials=OURS) as peer, pytest.raises(Unavailable) as caught:
            peer.read_file(NAME, max_bytes=10)
        assert caught.value.message.endswith(text)
        assert caught.value.fields["refused"] == is_refused and caught.value.fields["answered"]
    finally:
        server.shutdown()


def test_a_small_file_that_is_not_small_is_refused(peer: PeerClient) -> None:
    peer.put(announce(b"123"), [b"123"])
    with pytest.raises(Unavailable, match="larger than 2 bytes"):
        peer.read_file(NAME, max_bytes=2)


def test_a_file_that_is_not_there_is_unavailable(peer: PeerClient) -> None:
    other = wire.FileName(run_uid=UID, directory=DIRECTORY, file="state-00007-of-00009.json")
    with pytest.raises(Unavailable, match="state-00007"):
        peer.read_file(other, max_bytes=10)
    with pytest.raises(Unavailable):
        list(peer.read(other, [(0, 1)]))


@pytest.mark.parametrize(
    "changes", [{"digest": digest(b"other")}, {"size_bytes": 3}, {"size_bytes": 5}, {"size_bytes": -1}]
)
def test_other_bytes_than_announced_leave_nothing(
    peer: PeerClient, folder: Folder, changes: dict[str, Any]
) -> None:
    name = wire.FileName(run_uid=UID, directory="000000000011-0123456789abcdef", file=SHARD)
    with pytest.raises(Unavailable, match=r"other bytes|whole number"):
        peer.put(announce(b"1234", name=name, **changes), [b"12", b"34"])
    assert not folder.names(name)


def test_a_source_that_ends_early_leaves_nothing(peer: PeerClient, folder: Folder) -> None:
    name = wire.FileName(run_uid=UID, directory="000000000012-0123456789abcdef", file=SHARD)

    def source() -> Iterator[bytes]:
        yield b"12"
        raise EOFError("the disk has lost the rest")

    with pytest.raises(EOFError, match="the disk has lost the rest"):
        peer.put(announce(b"1234", name=name), source())
    peer.put(announce(b"1"), [b"1"])  # the connection still serves
    deadline_s = time.monotonic() + 20
    while folder.names(name):  # the receiver notices the end after the sender
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("uid", "directory", "file"),
    [
        ("../../etc", DIRECTORY, SHARD),
        (UID, "..", SHARD),
        (UID, f"{DIRECTORY}/..", SHARD),
        (UID, DIRECTORY, "../../x"),
        (UID, DIRECTORY, "/etc/passwd"),
        (UID, DIRECTORY, f"{SHARD}\x00"),
        ("", "", ""),
    ],
)
def test_names_that_leave_the_folder_are_refused_on_both_ends(uid: str, directory: str, file: str) -> None:
    with pytest.raises(FormatError):
        wire.FileName(run_uid=uid, directory=directory, file=file)
    good = wire.encode_request(wire.GetRequest(name=NAME, ranges=()))
    fields = json.loads(good)
    fields["name"] = {"run_uid": uid, "directory": directory, "file": file}
    with pytest.raises(FormatError):
        wire.decode_get(json.dumps(fields).encode())
    with pytest.raises(FormatError):
        wire.decode_put(json.dumps({**fields, "size_bytes": 1, "digest": ""}).encode())


def _request(*, ranges: str, size_bytes: str, digest: str = '""') -> bytes:
    """Return a get and put request of these fields, good or not."""
    name = json.dumps({"run_uid": UID, "directory": DIRECTORY, "file": SHARD})
    return f'{{"name": {name}, "ranges": {ranges}, "size_bytes": {size_bytes}, "digest": {digest}}}'.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"name": {}, "ranges": []}',
        b'{"name": 1, "ranges": 2}',
        b'{"name": {"run_uid": 1, "directory": 2, "file": 3}, "ranges": [], "size_bytes": 1, "digest": ""}',
        b"[" * 100_000,
        _request(ranges="[[1e400, 1]]", size_bytes="1e400"),
        _request(ranges=f"[[{2**70}, 1]]", size_bytes=str(2**70)),
        _request(ranges=f"[[{'9' * 5000}, 1]]", size_bytes="9" * 5000),
        _request(ranges="[[NaN, 1]]", size_bytes="NaN"),
        _request(ranges="[[0.0, 1]]", size_bytes="true"),
        _request(ranges="[[0, 1, 2]]", size_bytes='"1"'),
        _request(ranges="[[-1, 1]]", size_bytes="-1"),
        _request(ranges="[[0, -1]]", size_bytes="null"),
        _request(ranges=f"[{', '.join(['[0, 1]'] * 1_000_000)}]", size_bytes="[]"),
        _request(ranges='["01"]', size_bytes="1", digest='"no digest"'),
    ],
    ids=lambda data: data[:20].decode(errors="replace"),
)
def test_requests_that_are_none_are_refused(data: bytes, server: PeerServer) -> None:
    """Also by a real server, which goes on to serve."""
    with pytest.raises(FormatError):
        wire.decode_get(data)
    with pytest.raises(FormatError):
        wire.decode_put(data)
    with flight.connect(server.endpoint, **_TLS) as client:
        descriptor = flight.FlightDescriptor.for_command(data)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: client.do_get(flight.Ticket(data), _CALL).read_all(),
            lambda: client.get_flight_info(descriptor, _CALL),
            lambda: client.do_put(descriptor, wire.CHUNK_SCHEMA, _CALL)[1].read(),
        )
        for call in calls:
            with pytest.raises(flight.FlightServerError) as raised:
                call()
            assert raised.value.extra_info == wire.LOST  # goes with errors of ours alone


_TLS = {"tls_root_certs": OURS.root_cert, "override_hostname": SERVER_NAME}
_CALL = flight.FlightCallOptions(
    timeout=30, headers=[(wire.TOKEN_HEADER.encode(), f"{wire.TOKEN_PREFIX}{OURS.token}".encode())]
)


def test_a_request_for_more_bytes_than_the_file_has_is_refused(peer: PeerClient) -> None:
    data = os.urandom(3000)
    peer.put(announce(data), [data])
    for ranges in ([(0, 3000)] * 2, [(0, 1), (5, 2999)], [(2**63 - 1, 1)], [(0, 2999), (0, 1), (0, 1)]):
        with pytest.raises(Unavailable, match="ends at byte 3000") as raised:
            list(peer.read(NAME, ranges))
        assert raised.value.fields["refused"]
    with pytest.raises(Unavailable, match="at most 10000 are served"):
        list(peer.read(NAME, [(at % 2, 1) for at in range(0, 20_002, 2)]))


def test_requests_round_trip() -> None:
    get = wire.GetRequest(name=NAME, ranges=((0, 5), (7, 0)))
    assert wire.decode_get(wire.encode_request(get)) == get
    assert wire.decode_put(wire.encode_request(announce(b"1"))) == announce(b"1")


def test_a_peer_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CALL_BASE_S", 2.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"grpc+tls://127.0.0.1:{free.getsockname()[1]}"
    with PeerClient(endpoint, credentials=OURS) as gone, pytest.raises(Unavailable, match="shard-00000"):
        gone.read_file(NAME, max_bytes=10)


def test_a_peer_that_goes_away_is_unavailable(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CALL_BASE_S", 2.0)
    dying = PeerServer("127.0.0.1", keys=KEYS, files=folder)
    with PeerClient(dying.endpoint, credentials=OURS) as peer:
        peer.put(announce(b"1"), [b"1"])
        dying.shutdown()
        with pytest.raises(Unavailable):
            peer.put(announce(b"1"), [b"1"])
        with pytest.raises(Unavailable):
            list(peer.read(NAME, [(0, 1)]))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=12))
def test_merged_ranges_are_the_same_bytes(ranges: list[tuple[int, int]]) -> None:
    found = merge_ranges(ranges)
    assert [b for a, n in found for b in range(a, a + n)] == [b for a, n in ranges for b in range(a, a + n)]
    assert all(sum(one) != two[0] and two[1] for one, two in itertools.pairwise(found))


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 20), st.integers(1, 20))
def test_blocks_are_gathered_into_few_chunks(sizes: list[int], small: int, chunk: int) -> None:
    blocks = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SMALL_BYTES", small)
        patch.setattr(wire, "CHUNK_BYTES", chunk)
        found = list(wire.gathered(blocks))
    assert b"".join(found) == b"".join(blocks)
    assert all(0 < view.nbytes <= chunk for view in found)
    assert all(a.nbytes + b.nbytes > min(small, chunk) - 1 for a, b in itertools.pairwise(found))


def test_many_small_ranges_are_few_messages(peer: PeerClient) -> None:
    data = os.urandom(4 << 20)
    peer.put(announce(data), [data])
    ranges = [(at, 1000) for at in range(0, len(data) - 4096, 4096)]
    blocks = list(peer.read(NAME, ranges))
    assert b"".join(blocks) == b"".join(data[at : at + size] for at, size in ranges)
    assert len(blocks) == 1


def test_an_unencrypted_service_works_as_well(folder: Folder) -> None:
    plain = PeerServer("127.0.0.1", keys=PLAIN_KEYS, files=folder)
    with PeerClient(plain.endpoint, credentials=PLAIN_KEYS.credentials(UID)) as peer:
        peer.put(announce(b"in the clear"), [b"in the clear"])
        assert b"".join(peer.read(NAME, [(3, 3)])) == b"the"
    plain.shutdown()


def test_a_node_that_falls_silent_is_noticed_by_the_kernel(folder: Folder) -> None:
    """No call hangs until its deadline: bytes that nobody acknowledges end the connection."""
    here = "127.0.0.2"  # where no other test has connections
    server = PeerServer(here, keys=KEYS, files=folder)
    limits = set()
    with PeerClient(server.endpoint, credentials=OURS) as peer:
        peer.put(announce(b"1"), [b"1"])
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as one:
                if one.family != socket.AF_UNIX and one.getpeername()[0].endswith(here):
                    limits.add(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    server.shutdown()
    assert limits == {int(client_module.GONE_S * 1000)}


class Answers(Folder):
    """A receiver with a given answer, whose blocks change as soon as they may."""

    answer: str | Exception = ""
    num_blocks = 40

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        for _ in chunks:
            pass
        return self.answer

    def read(self, name: wire.FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        block = bytearray(nbytes or 0)
        for i in range(self.num_blocks):
            block[:] = bytes([i]) * len(block)
            yield block
            block[:] = bytes([255]) * len(block)


@pytest.fixture
def strange(folder: Folder) -> Iterator[tuple[Answers, PeerClient]]:
    files = Answers(folder.root)
    opened = PeerServer("127.0.0.1", keys=KEYS, files=files)
    with PeerClient(opened.endpoint, credentials=OURS) as peer:
        yield files, peer
    opened.shutdown()


@pytest.mark.parametrize("answer", ["", digest(b"other")])
def test_a_receiver_that_has_other_bytes_is_not_believed(
    strange: tuple[Answers, PeerClient], answer: str
) -> None:
    files, peer = strange
    files.answer = answer
    with pytest.raises(Unavailable, match="stored other bytes") as caught:
        peer.put(announce(b"1234"), [b"1234"])
    assert caught.value.fields["refused"] is False


@pytest.mark.parametrize("size", [1, 40 << 20])
def test_a_full_receiver_refuses_at_once(strange: tuple[Answers, PeerClient], size: int) -> None:
    files, peer = strange
    files.answer = InsufficientSpace("there are 5 bytes free.")
    taken = 0

    def chunks() -> Iterator[bytes]:
        nonlocal taken
        for start in range(0, size, 1 << 20):
            taken = start
            yield bytes(1 << 20)

    with pytest.raises(Unavailable, match=r"there are 5 bytes free\.$") as caught:
        peer.put(announce(b"", size_bytes=size), chunks())
    assert caught.value.fields["refused"] is True
    assert taken < 40 << 20


@pytest.mark.parametrize("size", [1, 1000, 70_000, 1 << 20, wire.CHUNK_BYTES])
def test_a_served_block_may_change_once_the_next_is_requested(
    strange: tuple[Answers, PeerClient], size: int
) -> None:
    files, peer = strange
    make_dirs(files.path(NAME).parent)
    files.path(NAME).write_bytes(bytes(size))
    request = wire.encode_request(wire.GetRequest(name=NAME, ranges=((0, size),)))
    stream = peer._client.do_get(flight.Ticket(request), flight.FlightCallOptions(headers=peer._headers))
    seen = np.frombuffer(b"".join(wire.chunks(stream)), np.uint8).reshape(files.num_blocks, size)
    assert (seen == np.arange(files.num_blocks)[:, None]).all()


def test_a_sent_chunk_may_change_once_the_next_is_requested(peer: PeerClient, folder: Folder) -> None:
    block, state = bytearray(1 << 20), Digester()

    def fill(value: int) -> bytearray:
        block[:] = bytes([value]) * len(block)
        return block

    for i in range(40):
        state.update(fill(i))
    request = announce(b"", size_bytes=40 << 20, digest=state.hexdigest())
    peer.put(request, (fill(i) for i in range(40)))
    assert digest(folder.path(NAME).read_bytes()) == request.digest


def test_a_taken_chunk_keeps_its_bytes(peer: PeerClient) -> None:
    data = os.urandom(9 << 20)
    peer.put(announce(data), [data])
    assert b"".join(list(peer.read(NAME, [(0, len(data))]))) == data


def test_a_stream_that_nobody_reads_to_its_end_is_given_up(peer: PeerClient) -> None:
    data = bytes(24 << 20)
    peer.put(announce(data), [data])
    for _ in peer.read(NAME, [(0, len(data))]):
        break
    assert peer.read_file(NAME, max_bytes=len(data)) == data


@pytest.mark.parametrize(
    "arrays",
    [
        [pa.array([b"one", b"two"], pa.large_binary())],
        [pa.array([], pa.large_binary())],
        [pa.array([None], pa.large_binary())],
    ],
)
def test_a_stream_of_something_else_is_refused(arrays: list[Any]) -> None:
    batch = pa.RecordBatch.from_arrays(arrays, schema=wire.CHUNK_SCHEMA)
    with pytest.raises(FormatError, match="not a chunk"):
        list(wire.chunks([Sent(None)]))
    with pytest.raises(FormatError, match="not a chunk"):
        list(wire.chunks([Sent(batch)]))


def test_a_stream_without_columns_is_refused() -> None:
    batch = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
    with pytest.raises(FormatError, match="not a chunk"):
        list(wire.chunks([Sent(batch)]))


def test_a_chunk_with_bounds_outside_of_its_bytes_is_refused() -> None:
    bounds = np.array([0, 5], np.int64)
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(bounds), pa.py_buffer(b"short")])
    sent = Sent(pa.RecordBatch.from_arrays([column], schema=wire.CHUNK_SCHEMA))
    assert [bytes(chunk) for chunk in wire.chunks([sent])] == [b"short"]
    for first, last in ((0, 1 << 40), (-5, 5), (5, 0)):
        bounds[:] = (first, last)
        with pytest.raises(FormatError, match="not a chunk"):
            list(wire.chunks([sent]))


class Sent:
    """An item of a stream."""

    def __init__(self, data: Any) -> None:
        self.data = data
