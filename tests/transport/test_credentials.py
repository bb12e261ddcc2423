"""Access needs a token of the run over the service's own TLS."""

from __future__ import annotations

import contextlib
import pickle
import random
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from cryptography import x509

from ray_ckpt.config import ADDRESS_ENV
from ray_ckpt.errors import ConfigError, FormatError, Unavailable
from ray_ckpt.storage.local.files import make_dirs
from ray_ckpt.transport import server as server_module
from ray_ckpt.transport import wire
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import SERVER_NAME, Credentials, ServiceKeys
from ray_ckpt.transport.server import PeerServer
from tests.transport.peers import KEYS, NAME, OTHER_UID, OURS, PLAIN_KEYS, UID, Folder, announce

OTHER_KEYS = ServiceKeys.make(datetime.now(UTC))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = Folder(tmp_path_factory.mktemp("peer"))
    make_dirs(folder.path(NAME).parent)
    folder.path(NAME).write_bytes(b"private")
    return folder


@pytest.fixture(scope="module")
def server(folder: Folder) -> Iterator[PeerServer]:
    opened = PeerServer("127.0.0.1", keys=KEYS, files=folder)
    yield opened
    opened.shutdown()


def refused(endpoint: str, credentials: Credentials) -> str:
    """Try everything as a stranger; the errors."""
    texts = []
    with PeerClient(endpoint, credentials=credentials) as stranger:
        for attempt in (
            lambda: stranger.read_file(NAME, max_bytes=100),
            lambda: list(stranger.read(NAME, [(0, 1)])),
            lambda: stranger.size(NAME),
            lambda: stranger.put(announce(b"mine"), [b"mine"]),
        ):
            with pytest.raises(Unavailable) as caught:
                attempt()
            texts.append(str(caught.value))
    return " ".join(texts)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "wrong",
        UID,
        f"{UID}.",
        OURS.token + "x",
        OURS.token[:-1],
        OURS.token.upper(),
        OTHER_KEYS.credentials(UID).token,
        f"{OTHER_UID}.{OURS.token.partition('.')[2]}",
        f"~{OURS.token}",
    ],
    ids=[
        "none",
        "word",
        "uid",
        "uid and dot",
        "longer",
        "shorter",
        "upper",
        "other keys",
        "other uid",
        "mark",
    ],
)
def test_a_wrong_token_gets_nothing(
    server: PeerServer, folder: Folder, token: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = refused(server.endpoint, replace(OURS, token=token))
    assert text.count("wrong or missing token") == 4
    assert OURS.token not in text
    assert folder.path(NAME).read_bytes() == b"private"
    captured = capfd.readouterr()
    assert not captured.err + captured.out


def test_a_token_is_good_for_one_run(server: PeerServer, folder: Folder) -> None:
    text = refused(server.endpoint, KEYS.credentials(OTHER_UID))
    assert text.count("a token of another run") == 4
    assert folder.path(NAME).read_bytes() == b"private"
    theirs = replace_run(NAME, OTHER_UID)
    with PeerClient(server.endpoint, credentials=KEYS.credentials(OTHER_UID)) as peer:
        peer.put(announce(b"theirs", name=theirs), [b"theirs"])
        assert peer.read_file(theirs, max_bytes=10) == b"theirs"


def replace_run(name: wire.FileName, run_uid: str) -> wire.FileName:
    return wire.FileName(run_uid=run_uid, directory=name.directory, file=name.file)


def test_without_a_token_no_call_is_answered(server: PeerServer) -> None:
    client = flight.connect(server.endpoint, tls_root_certs=KEYS.cert, override_hostname=SERVER_NAME)
    descriptor = flight.FlightDescriptor.for_command(b"x")
    with client:
        for call in (
            lambda: list(client.list_flights()),
            lambda: list(client.list_actions()),
            lambda: list(client.do_action(flight.Action("x", b""))),
            lambda: client.get_flight_info(descriptor),
            lambda: client.do_get(flight.Ticket(b"")).read_all(),
        ):
            with pytest.raises(flight.FlightUnauthenticatedError):
                call()


def test_with_a_token_other_calls_are_not_served(server: PeerServer) -> None:
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {OURS.token}".encode())])
    client = flight.connect(server.endpoint, tls_root_certs=KEYS.cert, override_hostname=SERVER_NAME)
    with client, pytest.raises((NotImplementedError, pa.ArrowNotImplementedError)):
        list(client.list_flights(options=options))


def test_another_root_certificate_trusts_nobody_here(server: PeerServer) -> None:
    refused(server.endpoint, replace(OURS, root_cert=OTHER_KEYS.cert))


def test_a_token_never_leaves_unencrypted_where_it_should_be_encrypted(server: PeerServer) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    with pytest.raises(Unavailable, match="does not encrypt"):
        PeerClient(f"grpc://127.0.0.1:{listener.getsockname()[1]}", credentials=OURS)
    with pytest.raises(TimeoutError):
        listener.accept()
    listener.close()


def test_a_plain_client_gets_nothing_from_an_encrypted_port(server: PeerServer) -> None:
    plain = server.endpoint.replace("grpc+tls", "grpc")
    refused(plain, PLAIN_KEYS.credentials(UID))


def test_the_port_uses_tls_with_the_certificate_of_the_service(server: PeerServer) -> None:
    context = ssl.create_default_context(cadata=KEYS.cert.decode())
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", server.port)) as bare,
        context.wrap_socket(bare, server_hostname=SERVER_NAME) as wrapped,
    ):
        cipher = wrapped.cipher()
        assert cipher is not None
        assert cipher[1] in ("TLSv1.2", "TLSv1.3")
    with (
        socket.create_connection(("127.0.0.1", server.port)) as bare,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        context.wrap_socket(bare, server_hostname="127.0.0.1")  # a name that it does not have


def test_a_certificate_lasts_longer_than_a_service() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    made = x509.load_pem_x509_certificate(ServiceKeys.make(now).cert)
    assert made.not_valid_before_utc < now - timedelta(hours=12)
    assert made.not_valid_after_utc > now + timedelta(days=3649)


def test_no_secret_in_a_repr_and_all_of_it_in_a_pickle() -> None:
    secrets = (KEYS.secret.hex(), repr(KEYS.secret)[2:-1], OURS.token, OURS.token[33:], "PRIVATE KEY")
    for holder in (KEYS, OURS, PeerClient("grpc+tls://127.0.0.1:1", credentials=OURS)):
        text = f"{holder!r} {holder} {[holder]}"
        assert not [secret for secret in secrets if secret in text]
    assert pickle.loads(pickle.dumps(KEYS)) == KEYS
    assert pickle.loads(pickle.dumps(OURS)) == OURS
    assert re.fullmatch(r"[0-9a-f]{32}\.[0-9a-f]{64}", OURS.token)


def test_no_two_services_share_a_key() -> None:
    assert KEYS.secret != OTHER_KEYS.secret
    assert KEYS.key != OTHER_KEYS.key
    assert KEYS.credentials(UID) != KEYS.credentials(OTHER_UID)
    assert KEYS.credentials(UID) == KEYS.credentials(UID)
    with pytest.raises(FormatError):
        KEYS.credentials("../x")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "127.0.0.1"])
def test_nothing_is_served_without_keys(folder: Folder, host: str) -> None:
    with pytest.raises(ConfigError, match="could read the run") as caught:
        PeerServer(host, keys=None, files=folder)
    assert "ServiceKeys" in caught.value.hint


def _three_ports_with_the_first_one_taken() -> tuple[socket.socket, range]:
    """Below the ports that systems hand out themselves (32768 on Linux, 49152 elsewhere), so that no
    connection of another test takes one of them in the meantime."""
    for first in random.sample(range(20_000, 30_000, 3), k=100):
        with contextlib.ExitStack() as others, contextlib.suppress(OSError):
            for port in (first + 1, first + 2):
                others.enter_context(socket.create_server(("127.0.0.1", port)))
            return socket.create_server(("127.0.0.1", first)), range(first, first + 3)
    raise AssertionError("No three free ports in a row among 100 that were tried.")


def test_ports_of_a_range_are_taken_in_turn(folder: Folder) -> None:
    taken, ports = _three_ports_with_the_first_one_taken()
    first = ports.start
    servers: list[PeerServer] = []
    try:
        while len(servers) < 2:
            servers.append(PeerServer("127.0.0.1", keys=KEYS, files=folder, ports=ports))
        assert {server.port for server in servers} == {first + 1, first + 2}
        with pytest.raises(ConfigError, match=f"No free port of {first} to {first + 2}") as caught:
            PeerServer("127.0.0.1", keys=KEYS, files=folder, ports=ports)
        assert caught.value.hint
    finally:
        taken.close()
        for server in servers:
            server.shutdown()


def test_a_port_that_another_process_takes_at_that_moment_is_passed_over(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents of a machine may start together, and look for a free port at the same time."""
    taken, ports = _three_ports_with_the_first_one_taken()
    monkeypatch.setattr(server_module, "_is_free", lambda host, port: True)
    with taken:
        server = PeerServer("127.0.0.1", keys=KEYS, files=folder, ports=ports)
        assert server.port == ports.start + 1 and server.endpoint.endswith(f":{server.port}")
        with PeerClient(server.endpoint, credentials=OURS) as peer:
            assert peer.size(NAME) == len(b"private")
        server.shutdown()
        with pytest.raises(ConfigError, match=f"No free port of {ports.start} to {ports.start}"):
            PeerServer("127.0.0.1", keys=KEYS, files=folder, ports=ports[:1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a b"])
def test_an_address_that_is_not_of_this_node_is_named(folder: Folder, host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(host)) as caught:
        PeerServer(host, keys=KEYS, files=folder)
    assert ADDRESS_ENV in caught.value.hint


def test_a_server_listens_on_its_own_address_only(server: PeerServer) -> None:
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.port), timeout=1)
