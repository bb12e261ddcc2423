"""Preemption notices: three clouds' metadata services, well and ill, and SIGTERM in real processes."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPMessage

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.errors import ConfigError
from ray_ckpt.preemption import cloud as cloud_module
from ray_ckpt.preemption.cloud import CloudNotices, _Aws, _Azure, _Gcp, _Service, _SilentError
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.preemption.sigterm import TermSignal
from tests.servers.metadata_server import KINDS, CloudName, Fault, MetadataServer

CLOUDS: tuple[CloudName, ...] = ("aws", "gcp", "azure")
SLACK_S = 4.0  # the machine has other work
WELL_REQUEST_S = 10.0  # for the same reason
ILL_REQUEST_S = 0.5


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_module, "REQUEST_S", WELL_REQUEST_S)


@contextmanager
def playing(cloud: CloudName, *, asked: str | None = None) -> Iterator[tuple[MetadataServer, CloudNotices]]:
    with MetadataServer(cloud) as server:
        yield server, CloudNotices(asked or cloud, server.url)


def about(seconds: float) -> object:
    return pytest.approx(time.time() + seconds, abs=SLACK_S)


# --- each cloud ---


@pytest.mark.parametrize("cloud", CLOUDS)
def test_nothing_is_announced_until_something_is_and_when_it_is_taken_back(cloud: CloudName) -> None:
    with playing(cloud) as (server, cloud_notices):
        assert cloud_notices.poll() is None
        server.announce(KINDS[cloud][0], 100.0)
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.source == cloud
        assert notice.deadline_s == about(30.0 if cloud == "gcp" else 100.0)
        time.sleep(0.01)
        assert cloud_notices.poll() == notice  # also where the deadline is counted from when it was seen
        server.withdraw()
        assert cloud_notices.poll() is None


@pytest.mark.parametrize(
    ("kind", "in_s", "deadline_in_s"),
    [
        ("terminate", 120.0, 120.0),
        ("stop", 120.0, 120.0),
        ("hibernate", 120.0, None),
        ("scale-in", None, None),
    ],
)
def test_what_ends_an_instance_of_amazon(kind: str, in_s: float | None, deadline_in_s: float | None) -> None:
    with playing("aws") as (server, cloud_notices):
        server.announce(kind, in_s)
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.deadline_s == (None if deadline_in_s is None else about(deadline_in_s))


def test_a_rebalance_recommendation_is_a_line_in_the_log_and_no_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with playing("aws") as (server, cloud_notices):
        server.announce("rebalance")
        with caplog.at_level(logging.WARNING, "ray_ckpt"):
            assert cloud_notices.poll() is None
            assert cloud_notices.poll() is None
        assert [record.message for record in caplog.records] == [
            "Amazon reports that this spot instance is at elevated risk of an interruption."
        ]
        server.announce("terminate", 120.0)
        assert cloud_notices.poll() is not None


def test_an_interruption_of_amazon_that_has_failed_is_none() -> None:
    with playing("aws") as (server, cloud_notices):
        server.announce("terminate", -cloud_module.AWS_STALE_S - 60)
        assert cloud_notices.poll() is None
        server.withdraw()
        server.announce("terminate", -10.0)  # late, and still to come
        assert cloud_notices.poll() is not None


def test_a_token_of_amazon_is_kept_and_renewed_when_it_has_expired() -> None:
    with playing("aws") as (server, cloud_notices):
        cloud_notices.poll()
        before = server.num_requests
        cloud_notices.poll()
        assert server.num_requests == before + 3  # the items, no token
        server.expire_tokens()
        server.announce("terminate", 120.0)
        assert cloud_notices.poll() is not None


def test_maintenance_of_googles_hosts_counts_if_the_machine_is_stopped_and_not_if_it_is_moved() -> None:
    with playing("gcp") as (server, cloud_notices):
        server.announce("migrate")
        assert cloud_notices.poll() is None
        server.withdraw()
        server.announce("terminate")
        maintenance = cloud_notices.poll()
        assert maintenance is not None
        assert maintenance.deadline_s == about(60.0)
        server.announce("preempt")  # is sooner
        preempted = cloud_notices.poll()
        assert preempted is not None
        assert preempted.deadline_s == about(30.0)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_an_event_of_azure_has_its_time_and_none_once_it_has_begun(kind: str) -> None:
    with playing("azure") as (server, cloud_notices):
        assert cloud_notices.poll() is None
        server.announce(kind, 90.0)
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.deadline_s == about(90.0)
        server.withdraw()
        server.announce(kind, None)
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.deadline_s is None


def test_events_of_azure_for_other_machines_and_those_that_lose_nothing_are_none() -> None:
    with playing("azure") as (server, cloud_notices):
        server.announce("Preempt", 30.0, machine="vm-2")
        server.announce("Freeze", 30.0)
        assert cloud_notices.poll() is None
        server.announce("Preempt", 40.0, machine="VM-1")  # names of Azure's have no case
        assert cloud_notices.poll() is not None


def test_of_several_events_of_azure_the_soonest_counts_and_one_of_next_week_not_yet() -> None:
    with playing("azure") as (server, cloud_notices):
        server.announce("Redeploy", 7 * 24 * 3600.0)
        assert cloud_notices.poll() is None
        server.announce("Terminate", 250.0)
        server.announce("Preempt", 30.0)
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.text == "This spot VM is evicted."


def test_an_event_of_azure_that_had_begun_before_the_first_look_is_over() -> None:
    with playing("azure") as (server, cloud_notices):
        server.announce("Reboot", None)  # after the restart it is still listed
        assert cloud_notices.poll() is None
        server.announce("Preempt", 30.0)
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.deadline_s == about(30.0)


# --- finding the cloud ---


@pytest.mark.parametrize("cloud", CLOUDS)
def test_auto_finds_the_cloud_and_asks_the_others_no_more(cloud: CloudName) -> None:
    with playing(cloud, asked="auto") as (server, cloud_notices):
        assert (cloud_notices.cloud, cloud_notices.poll_s) == (None, cloud_module.POLL_S)
        server.announce(KINDS[cloud][0], 100.0)
        assert cloud_notices.poll() is not None
        assert (cloud_notices.cloud, cloud_notices.is_over) == (cloud, False)
        assert cloud_notices.poll_s == (5.0 if cloud == "aws" else 1.0)
        before = server.num_requests
        cloud_notices.poll()
        assert server.num_requests - before <= 3


def test_auto_gives_up_for_good_where_no_cloud_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    cloud_notices = CloudNotices("auto", url)  # refuses connections
    for _ in range(cloud_module.MAX_TRIES):
        assert not cloud_notices.is_over
        assert cloud_notices.poll() is None
    assert cloud_notices.is_over
    with MetadataServer("gcp", port=int(url.rsplit(":", 1)[1])) as server:
        assert cloud_notices.poll() is None
        assert server.num_requests == 0


def test_auto_waits_for_a_service_that_is_late() -> None:
    with playing("gcp", asked="auto") as (server, cloud_notices):
        server.fault = "error"
        assert cloud_notices.poll() is None
        server.fault = None
        cloud_notices.poll()
        assert cloud_notices.cloud == "gcp"


def test_off_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with MetadataServer("aws") as server:
        monkeypatch.setenv("RAY_CKPT_METADATA", "off")
        monkeypatch.setenv("RAY_CKPT_METADATA_URL", server.url)
        cloud_notices = CloudNotices.from_environment()
        assert cloud_notices.is_over
        assert cloud_notices.poll() is None
        assert server.num_requests == 0


def test_the_environment_chooses_cloud_and_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with MetadataServer("azure") as server:
        monkeypatch.setenv("RAY_CKPT_METADATA", "azure")
        monkeypatch.setenv("RAY_CKPT_METADATA_URL", server.url + "/")
        cloud_notices = CloudNotices.from_environment()
        assert cloud_notices.cloud == "azure"
        server.announce("Preempt", 30.0)
        assert cloud_notices.poll() is not None
    for name in ("RAY_CKPT_METADATA", "RAY_CKPT_METADATA_URL"):
        monkeypatch.setenv(name, "")  # as if it were not set
    assert CloudNotices.from_environment().cloud is None


@pytest.mark.parametrize(
    "url",
    [
        "https://x",
        "ftp://x",
        "x",
        "",
        "http://",
        "http://u:hunter2@x",
        "http://x?y",
        "http://x:z",
        "http://[",
    ],
)
def test_a_base_url_that_is_not_plain_http_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError, match="RAY_CKPT_METADATA_URL") as caught:
        CloudNotices("aws", url)
    assert "hunter2" not in str(caught.value)


def test_an_unknown_cloud_is_refused() -> None:
    with pytest.raises(ConfigError, match="Set it to auto, aws, gcp, azure or off"):
        CloudNotices("oracle")


# --- services that are ill ---


@pytest.mark.parametrize("fault", ["hang", "drip", "huge", "garbage", "redirect", "error", "drop"])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_an_ill_service_announces_nothing_in_bounded_time_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, cloud: CloudName, fault: Fault
) -> None:
    with playing(cloud) as (server, cloud_notices), MetadataServer(cloud) as foreign:
        server.foreign_url = foreign.url
        for ill_from_the_start in (True, False):
            server.fault = fault
            monkeypatch.setattr(cloud_module, "REQUEST_S", ILL_REQUEST_S)
            began_s = time.monotonic()
            assert cloud_notices.poll() is None
            assert time.monotonic() - began_s < ILL_REQUEST_S + SLACK_S
            server.fault = None
            monkeypatch.setattr(cloud_module, "REQUEST_S", WELL_REQUEST_S)
            if ill_from_the_start:
                assert cloud_notices.poll() is None
        assert foreign.num_requests == 0
        server.announce(KINDS[cloud][0], 100.0)
        assert cloud_notices.poll() is not None


@pytest.mark.parametrize("cloud", CLOUDS)
def test_what_is_announced_stands_while_the_service_is_ill(cloud: CloudName) -> None:
    with playing(cloud) as (server, cloud_notices):
        server.announce(KINDS[cloud][0], 100.0)
        notice = cloud_notices.poll()
        server.fault = "error"
        assert notice is not None
        assert cloud_notices.poll() == notice


def test_a_service_that_stays_silent_is_said_once_and_its_answers_are_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with playing("azure") as (server, cloud_notices), caplog.at_level(logging.INFO, "ray_ckpt"):
        server.fault = "garbage"
        for _ in range(3 * cloud_module.MAX_SILENT):
            cloud_notices.poll()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "azure" in caplog.text
    assert "action" not in caplog.text


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with playing("gcp") as (server, cloud_notices):
        server.announce("preempt")
        assert cloud_notices.poll() is not None


def test_of_a_huge_answer_no_more_is_read_than_the_limit() -> None:
    with MetadataServer("azure") as server:
        server.fault = "huge"
        with pytest.raises(_SilentError, match="more than 65536 bytes"):
            _Service(server.url).request("GET", "/", {})


def test_an_answer_by_google_needs_its_mark() -> None:
    with MetadataServer("aws") as server:
        server.fault = "garbage"  # 200 for all paths, and no mark
        with pytest.raises(_SilentError, match="not from Google"):
            _Gcp(_Service(server.url)).check()


class Scripted(_Service):
    """Answers with given bytes, whatever is asked."""

    def __init__(self, body: bytes) -> None:
        super().__init__("http://127.0.0.1:1")
        self._body = body

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> cloud_module._Answer:
        marks = HTTPMessage()
        marks["Metadata-Flavor"] = "Google"
        is_name = path.startswith("/metadata/instance") or method == "PUT"
        return cloud_module._Answer(200, marks, b"vm-1" if is_name else self._body)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("vm-1"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["action", "time", "Events", "EventId", "EventType", "Resources", "NotBefore", "EventStatus"]
            ),
            inner
            | st.sampled_from(["terminate", "Preempt", "Started", "9999-12-31T23:59:59Z", "0001-01-01"]),
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64) | values.map(lambda value: json.dumps(value).encode()))
def test_no_answer_makes_a_look_fail_otherwise_than_by_silence(body: bytes) -> None:
    for kind in (_Aws, _Gcp, _Azure):
        try:
            notice = kind(Scripted(body)).notice()
        except _SilentError:
            continue
        assert notice is None or isinstance(notice, Notice)


def test_an_answer_that_is_nested_without_end_is_silence() -> None:
    with pytest.raises(_SilentError):
        _Aws(Scripted(b"[" * 60_000)).notice()


# --- the server that plays them ---


def status(method: str, url: str, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return int(requests.request(method, url, headers=named, timeout=5).status_code)


def test_the_played_amazon_wants_a_token_and_a_lifetime_for_it() -> None:
    with MetadataServer("aws") as server:
        token_url = f"{server.url}/latest/api/token"
        item_url = f"{server.url}/latest/meta-data/spot/instance-action"
        assert status("GET", item_url) == 401
        assert status("GET", item_url, X_aws_ec2_metadata_token="guessed") == 401
        assert status("PUT", token_url) == 400
        assert status("PUT", token_url, X_aws_ec2_metadata_token_ttl_seconds="21601") == 400
        ttl = {"X_aws_ec2_metadata_token_ttl_seconds": "1"}
        assert status("PUT", token_url, X_Forwarded_For="10.0.0.1", **ttl) == 403
        answer = requests.put(token_url, headers={"X-aws-ec2-metadata-token-ttl-seconds": "1"}, timeout=5)
        assert answer.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "1"
        assert status("GET", item_url, X_aws_ec2_metadata_token=answer.text) == 404
        time.sleep(1.0)
        assert status("GET", item_url, X_aws_ec2_metadata_token=answer.text) == 401


def test_the_played_google_wants_its_mark_and_gives_it() -> None:
    with MetadataServer("gcp") as server:
        url = f"{server.url}/computeMetadata/v1/instance/preempted"
        assert status("GET", url) == 403
        assert status("GET", url, Metadata_Flavor="Google", X_Forwarded_For="10.0.0.1") == 403
        answer = requests.get(url, headers={"Metadata-Flavor": "Google"}, timeout=5)
        assert (answer.text, answer.headers["Metadata-Flavor"]) == ("FALSE", "Google")
        assert status("PUT", f"{server.url}/latest/api/token", Metadata_Flavor="Google") == 405


def test_the_played_azure_wants_its_header_and_a_version_and_counts_its_documents() -> None:
    with MetadataServer("azure") as server:
        url = f"{server.url}/metadata/scheduledevents"
        version = "?api-version=2020-07-01"
        assert status("GET", url + version) == 400
        assert status("GET", url, Metadata="true") == 400
        assert status("GET", url + "?api-version=latest", Metadata="true") == 400

        def incarnation() -> int:
            document = requests.get(url + version, headers={"Metadata": "true"}, timeout=5).json()
            return int(document["DocumentIncarnation"])

        before = incarnation()
        assert incarnation() == before
        server.announce("Preempt", 30.0)
        assert incarnation() == before + 1


def test_the_server_refuses_to_announce_what_its_cloud_does_not() -> None:
    with MetadataServer("gcp") as server, pytest.raises(ValueError, match="preempt, terminate, migrate"):
        server.announce("Preempt")


def test_the_server_as_a_program_announces_when_it_is_told_to() -> None:
    command = [sys.executable, "-m", "tests.servers.metadata_server", "--cloud", "gcp", "--after", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            settings_of = dict(word.split("=", 1) for word in process.stdout.readline().split())
            cloud_notices = CloudNotices(
                settings_of["RAY_CKPT_METADATA"], settings_of["RAY_CKPT_METADATA_URL"]
            )
            assert process.stdout.readline() == "announced: preempt\n"
            assert cloud_notices.poll() is not None
        finally:
            process.kill()


# --- SIGTERM, each in a process of its own ---

BEGIN = """
import atexit, hashlib, os, signal, sys, threading, time
from ray_ckpt.preemption.sigterm import TermSignal

def say(text):
    os.write(1, text.encode() + bytes([10]))  # print writes the end of a line by itself

def on_notice(notice):
    assert threading.current_thread() is not threading.main_thread()
    say("notice")

def before(number, frame):
    assert threading.current_thread() is threading.main_thread()
    say("before")
    sys.exit(7)

def nothing_is_left():
    assert signal.set_wakeup_fd(-1) == -1
    for thread in threading.enumerate():
        if thread.name == "ray-ckpt-sigterm":
            thread.join(10)
            assert not thread.is_alive()
"""


class Program:
    """A Python program that says "ready"; what it says after that, and how it ends."""

    def __init__(self, text: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + textwrap.dedent(text)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # nothing is complained of either
            text=True,
        )
        self.expect("ready")

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def expect(self, line: str) -> None:
        assert self.line() == line

    def terminate(self) -> float:
        began_s = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        return began_s

    def write_nothing_and_wait(self, timeout_s: float = 20.0) -> int:
        rest, _ = self._process.communicate(timeout=timeout_s)
        assert rest == ""
        return self._process.returncode

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[[str], Program]]:
    programs: list[Program] = []

    def run(text: str) -> Program:
        program = Program.__new__(Program)
        programs.append(program)
        program.__init__(text)  # type: ignore[misc]
        return program

    yield run
    for program in programs:
        program.close()


Start = Callable[[str], Program]

MAIN_THREADS = {  # what the main thread of a training process may be doing
    "sleeps": "time.sleep(60)",
    "joins a thread": "worker = threading.Thread(target=time.sleep, args=(60,), daemon=True)\n"
    "worker.start()\n"
    "worker.join()",
    "waits for a lock": "threading.Event().wait()",
    "computes": "while True: sum(range(1000))",
    "runs an event loop": "import asyncio\nasyncio.run(asyncio.sleep(60))",
    "runs an event loop with signals of its own": "import asyncio\n"
    "async def wait():\n"
    "    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)\n"
    "    await asyncio.sleep(60)\n"
    "asyncio.run(wait())",
}


@pytest.mark.parametrize("main_thread", MAIN_THREADS.values(), ids=MAIN_THREADS.keys())
def test_sigterm_is_told_and_after_the_grace_it_ends_the_process(start: Start, main_thread: str) -> None:
    program = start("TermSignal.install(on_notice, grace_s=0.5)\nsay('ready')\n" + main_thread)
    began_s = program.terminate()
    program.expect("notice")
    assert program.write_nothing_and_wait() == -signal.SIGTERM
    assert time.monotonic() - began_s >= 0.5


def test_the_handler_of_before_is_called_after_the_grace_in_the_main_thread(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        atexit.register(nothing_is_left)
        TermSignal.install(on_notice, grace_s=0.5)
        say("ready")
        time.sleep(60)
        """
    )
    began_s = program.terminate()
    program.expect("notice")
    program.expect("before")
    assert time.monotonic() - began_s >= 0.5
    assert program.write_nothing_and_wait() == 7


def test_the_notice_has_the_time_that_the_process_is_held(start: Start) -> None:
    program = start(
        """
        def show(notice):
            say(f"{notice.source} {notice.deadline_s}")
        TermSignal.install(show, grace_s=60)
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    source, deadline_s = program.line().split()
    assert source == "sigterm"
    assert float(deadline_s) == about(60.0)


def test_release_ends_the_grace_early(start: Start) -> None:
    program = start(
        """
        def save(notice):
            on_notice(notice)
            term.release()
        signal.signal(signal.SIGTERM, before)
        term = TermSignal.install(save, grace_s=60)
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.expect("before")
    assert program.write_nothing_and_wait() == 7


def test_release_before_a_signal_is_nothing(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=60).release()
        time.sleep(0.1)
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    time.sleep(0.3)
    assert program.is_alive


@pytest.mark.parametrize("callback", ["on_notice", "lambda notice: (on_notice(notice), time.sleep(60))"])
def test_a_second_sigterm_ends_the_grace_even_if_the_callback_hangs(start: Start, callback: str) -> None:
    program = start(f"TermSignal.install({callback}, grace_s=60)\nsay('ready')\ntime.sleep(60)")
    program.terminate()
    program.expect("notice")
    program.terminate()
    assert program.write_nothing_and_wait() == -signal.SIGTERM


@pytest.mark.slow
def test_a_callback_that_fails_is_said_and_costs_nothing(start: Start) -> None:
    program = start("TermSignal.install(lambda notice: 1 / 0, grace_s=0.5)\nsay('ready')\ntime.sleep(60)")
    program.terminate()
    program.expect("A notice could not be passed on: This process got SIGTERM; it is held for 0.5 s.")
    while (line := program.line()) != "ZeroDivisionError: division by zero":
        assert line
    assert program.write_nothing_and_wait() == -signal.SIGTERM


def test_where_sigterm_was_ignored_it_is_told_and_ignored_again(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        TermSignal.install(on_notice, grace_s=0.1)
        say("ready")
        while signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            time.sleep(0.01)
        nothing_is_left()
        say("ignored again")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.expect("ignored again")
    program.terminate()
    time.sleep(0.3)
    assert program.is_alive


# C code that neither returns at a signal nor keeps Python's lock.
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)"


@pytest.mark.slow
def test_the_notice_does_not_wait_for_a_main_thread_in_c_code_nor_does_the_end(start: Start) -> None:
    program = start(f"TermSignal.install(on_notice, grace_s=0.3)\nsay('ready')\n{IN_C}")
    began_s = program.terminate()
    program.expect("notice")
    assert time.monotonic() - began_s < SLACK_S
    assert program.write_nothing_and_wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_the_handler_of_before_waits_for_the_main_thread_in_c_code(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        TermSignal.install(on_notice, grace_s=0.1)
        data = b"x"
        began_s = time.process_time()
        hashlib.pbkdf2_hmac("sha256", data, data, 100_000)
        rounds = int(100_000 * 1.5 / (time.process_time() - began_s))  # 1.5 s
        say("ready")
        hashlib.pbkdf2_hmac("sha256", data, data, rounds)
        say("returned")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    first = program.line()
    assert first in ("before", "returned")  # after the C code
    if first == "returned":
        program.expect("before")
    assert program.write_nothing_and_wait() == 7


def test_uninstall_restores_all_and_a_new_install_works(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        for _ in range(50):
            TermSignal.install(on_notice, grace_s=60).uninstall()
        assert signal.getsignal(signal.SIGTERM) is before
        time.sleep(0.1)
        nothing_is_left()
        assert len(os.listdir("/proc/self/fd")) < 20
        TermSignal.install(on_notice, grace_s=0.1)
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.expect("before")
    assert program.write_nothing_and_wait() == 7


def test_after_uninstall_from_another_thread_sigterm_is_as_before(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        for _ in range(50):
            term = TermSignal.install(on_notice, grace_s=60)
            thread = threading.Thread(target=term.uninstall)
            thread.start()
            thread.join()
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)  # is still written to the descriptor, and taken
        assert len(os.listdir("/proc/self/fd")) < 20
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("before")
    assert program.write_nothing_and_wait() == 7


@pytest.mark.slow
def test_uninstall_hands_on_a_signal_that_is_held(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGTERM, before)
        told = threading.Event()
        term = TermSignal.install(lambda notice: (on_notice(notice), told.set()), grace_s=60)
        say("ready")
        told.wait()
        term.uninstall()
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.expect("before")
    assert program.write_nothing_and_wait() == 7


def test_a_handler_that_was_installed_on_top_and_calls_ours_works(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=0.2)
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: (say("top"), ours(number, frame)))
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    assert {program.line(), program.line()} == {"top", "notice"}
    program.expect("top")
    assert program.write_nothing_and_wait() == -signal.SIGTERM


@pytest.mark.slow
def test_a_handler_that_took_our_place_is_left_alone(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=0.1)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    time.sleep(1.5)
    assert program.is_alive


def test_a_wakeup_descriptor_of_others_stays_theirs_and_the_handler_tells(start: Start) -> None:
    program = start(
        """
        import socket
        theirs, other = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        TermSignal.install(on_notice, grace_s=60).uninstall()
        TermSignal.install(on_notice, grace_s=60)
        found = signal.set_wakeup_fd(theirs.fileno())
        assert found == theirs.fileno(), found
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    program.terminate()
    assert program.write_nothing_and_wait() == -signal.SIGTERM


def test_other_signals_are_not_taken_for_it(start: Start) -> None:
    program = start(
        """
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        TermSignal.install(on_notice, grace_s=60)
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    time.sleep(0.2)
    assert program.is_alive


def test_a_forked_process_ends_at_once_and_its_parent_takes_no_notice(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=60)
        child = os.fork()
        if child == 0:
            time.sleep(60)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        time.sleep(0.2)
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")


def test_only_one_is_installed(start: Start) -> None:
    program = start(
        """
        TermSignal.install(on_notice, grace_s=0.1)
        assert TermSignal.install(on_notice, grace_s=60) is None
        say("ready")
        time.sleep(60)
        """
    )
    program.terminate()
    program.expect("notice")
    assert program.write_nothing_and_wait() == -signal.SIGTERM


def test_outside_the_main_thread_it_is_not_installed_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found: list[object] = []
    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level(logging.INFO, "ray_ckpt"):
        thread = threading.Thread(target=lambda: found.append(TermSignal.install(lambda notice: None)))
        thread.start()
        thread.join()
    assert found == [None]
    assert "main thread" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("grace_s", [-1.0, float("inf"), float("nan")])
def test_a_grace_that_is_no_time_is_refused(grace_s: float) -> None:
    with pytest.raises(ConfigError, match="grace_s"):
        TermSignal.install(lambda notice: None, grace_s=grace_s)
