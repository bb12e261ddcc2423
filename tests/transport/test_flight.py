"""Files between two agents by Arrow Flight, on the loopback: all of it, or an error and nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import Buffer

from ray_ckpt.errors import FormatError, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.storage.files import checked, make_dirs, read_blocks, write_file
from ray_ckpt.transport import client as client_module
from ray_ckpt.transport import wire
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.server import PeerServer

UID = "0123456789abcdef" * 2
DIRECTORY = "000000000010-0123456789abcdef"
SHARD = "shard-00000-of-00001.safetensors"
NAME = wire.FileName(run_uid=UID, directory=DIRECTORY, file=SHARD)
TOKEN = "secret-token"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Folder:
    """Files as an agent serves them, without the agent."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: wire.FileName) -> Path:
        return self.root / name.run_uid / name.directory / name.file

    def put(self, request: wire.PutRequest, chunks: Iterable[Buffer]) -> None:
        path = self.path(request.name)
        make_dirs(path.parent)
        write_file(
            path, checked(chunks, size_bytes=request.size_bytes, digest=request.digest, what=path.name)
        )

    def read(self, name: wire.FileName, offset: int, nbytes: int | None) -> Iterator[bytes]:
        return read_blocks(self.path(name), offset, nbytes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("peer"))


@pytest.fixture(scope="module")
def server(folder: Folder) -> Iterator[PeerServer]:
    opened = PeerServer("127.0.0.1", token=TOKEN, files=folder)
    yield opened
    opened.shutdown()


@pytest.fixture
def peer(server: PeerServer) -> Iterator[PeerClient]:
    with PeerClient(server.endpoint, token=TOKEN) as opened:
        yield opened


def announce(data: bytes, **changes: Any) -> wire.PutRequest:
    return wire.PutRequest(**{"name": NAME, "size_bytes": len(data), "digest": digest(data), **changes})


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
    assert names_in(folder.path(NAME).parent) == [SHARD]


def test_ranges_come_in_the_order_asked_for(peer: PeerClient) -> None:
    data = os.urandom(10 << 20)
    peer.put(announce(data), [data])
    ranges = [(5, 3), (0, 0), (9 << 20, 1 << 20), (0, 5 << 20), (7, 0), (4, 1), (10 << 20, 0)]
    assert [bytes(piece) for piece in peer.read(NAME, ranges)] == [data[a : a + n] for a, n in ranges]
    assert list(peer.read(NAME, [])) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3000)), max_size=8))
def test_any_ranges(server: PeerServer, folder: Folder, ranges: list[tuple[int, int]]) -> None:
    data = bytes(i % 251 for i in range(8000))
    make_dirs(folder.path(NAME).parent)
    folder.path(NAME).write_bytes(data)
    with PeerClient(server.endpoint, token=TOKEN) as peer:
        assert [bytes(piece) for piece in peer.read(NAME, ranges)] == [data[a : a + n] for a, n in ranges]


def test_a_range_beyond_the_end_is_unavailable(peer: PeerClient) -> None:
    peer.put(announce(b"123"), [b"123"])
    with pytest.raises(Unavailable, match="ends at byte 3"):
        list(peer.read(NAME, [(2, 5)]))


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
    with pytest.raises(Unavailable, match=r"other bytes|impossible"):
        peer.put(announce(b"1234", name=name, **changes), [b"12", b"34"])
    parent = folder.path(name).parent
    assert not parent.exists() or not names_in(parent)


def test_a_source_that_ends_early_leaves_nothing(peer: PeerClient, folder: Folder) -> None:
    name = wire.FileName(run_uid=UID, directory="000000000012-0123456789abcdef", file=SHARD)

    def source() -> Iterator[bytes]:
        yield b"12"
        raise EOFError("the disk has lost the rest")

    with pytest.raises((EOFError, Unavailable)):
        peer.put(announce(b"1234", name=name), source())
    peer.put(announce(b"1"), [b"1"])  # the connection still serves
    parent = folder.path(name).parent
    assert not parent.exists() or not names_in(parent)


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN.upper()])
def test_a_wrong_token_gets_nothing(server: PeerServer, folder: Folder, token: str) -> None:
    make_dirs(folder.path(NAME).parent)
    folder.path(NAME).write_bytes(b"private")
    with PeerClient(server.endpoint, token=token) as stranger:
        with pytest.raises(Unavailable) as caught:
            stranger.read_file(NAME, max_bytes=100)
        assert TOKEN not in str(caught.value)
        with pytest.raises(Unavailable):
            stranger.put(announce(b"mine"), [b"mine"])
    assert folder.path(NAME).read_bytes() == b"private"


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
    import json

    fields = json.loads(good)
    fields["name"] = {"run_uid": uid, "directory": directory, "file": file}
    with pytest.raises(FormatError):
        wire.decode_get(json.dumps(fields).encode())
    with pytest.raises(FormatError):
        wire.decode_put(json.dumps({**fields, "size_bytes": 1, "digest": ""}).encode())


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
    ],
)
def test_requests_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        wire.decode_get(data)
    with pytest.raises(FormatError):
        wire.decode_put(data)


def test_impossible_ranges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_RANGES", 2)
    for ranges in (((-1, 1),), ((0, -1),), ((0, 1),) * 3):
        with pytest.raises(FormatError, match="impossible ranges"):
            wire.decode_get(wire.encode_request(wire.GetRequest(name=NAME, ranges=ranges)))


def test_requests_round_trip() -> None:
    get = wire.GetRequest(name=NAME, ranges=((0, 5), (7, 0)))
    assert wire.decode_get(wire.encode_request(get)) == get
    assert wire.decode_put(wire.encode_request(announce(b"1"))) == announce(b"1")


def test_a_peer_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CALL_BASE_S", 2.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"grpc://127.0.0.1:{free.getsockname()[1]}"
    with PeerClient(endpoint, token=TOKEN) as gone, pytest.raises(Unavailable, match="shard-00000"):
        gone.read_file(NAME, max_bytes=10)


def test_a_peer_that_goes_away_is_unavailable(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CALL_BASE_S", 2.0)
    dying = PeerServer("127.0.0.1", token=TOKEN, files=folder)
    with PeerClient(dying.endpoint, token=TOKEN) as peer:
        peer.put(announce(b"1"), [b"1"])
        dying.shutdown()
        with pytest.raises(Unavailable):
            peer.put(announce(b"1"), [b"1"])
        with pytest.raises(Unavailable):
            list(peer.read(NAME, [(0, 1)]))


def test_regroup_notices_missing_bytes() -> None:
    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        yield memoryview(b"de")

    assert [bytes(p) for p in wire.regroup(chunks(), [1, 0, 3, 1])] == [b"a", b"", b"bcd", b"e"]
    with pytest.raises(FormatError, match="sent 1 of 2"):
        list(wire.regroup(chunks(), [4, 2]))
