"""Notices of three clouds' metadata services, working and failing."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPMessage

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.errors import ConfigError
from ray_ckpt.preemption import cloud as cloud_module
from ray_ckpt.preemption.cloud import CloudNotices, _Aws, _Azure, _Gcp, _Service, _SilentError
from ray_ckpt.preemption.notice import Notice
from tests.servers.metadata_server import KINDS, CloudName, Fault, MetadataServer
from tests.support.examples import examples

CLOUDS: tuple[CloudName, ...] = ("aws", "gcp", "azure")
SLACK_S = 4.0  # the machine has other work
WELL_REQUEST_S = 10.0  # for the same reason
ILL_REQUEST_S = 0.25


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_module, "REQUEST_S", WELL_REQUEST_S)


@contextmanager
def playing(
    cloud: CloudName, *, requested: str | None = None
) -> Iterator[tuple[MetadataServer, CloudNotices]]:
    with MetadataServer(cloud) as server:
        yield server, CloudNotices(requested or cloud, server.url)


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
def test_the_ends_of_an_amazon_instance_have_their_deadlines(
    kind: str, in_s: float | None, deadline_in_s: float | None
) -> None:
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


def test_a_failed_interruption_of_amazon_is_no_notice() -> None:
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


@pytest.mark.parametrize(
    "machine_type", ["a2-highgpu-1g", "a3-megagpu-8g", "a4x-highgpu-4g", "g2-standard-4"]
)
def test_maintenance_of_a_google_machine_with_gpus_is_ignored_until_it_is_near(
    machine_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with playing("gcp") as (server, cloud_notices):
        server.machine_type = machine_type
        assert cloud_notices.poll() is None
        server.announce("terminate")
        assert cloud_notices.poll() is None
        seen_s = time.time()
        later_s = cloud_module.GCP_GPU_MAINTENANCE_S - cloud_module.PLANNED_S
        monkeypatch.setattr(time, "time", lambda: seen_s + later_s - SLACK_S)
        assert cloud_notices.poll() is None
        monkeypatch.setattr(time, "time", lambda: seen_s + later_s + 1.0)
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.deadline_s == pytest.approx(seen_s + 3600.0, abs=SLACK_S)
        server.announce("preempt")  # is sooner
        preempted = cloud_notices.poll()
        assert preempted is not None
        assert preempted.deadline_s == about(30.0)


def test_maintenance_that_google_has_announced_before_the_first_poll_counts_at_once() -> None:
    with playing("gcp") as (server, cloud_notices):
        server.machine_type = "a3-megagpu-8g"
        server.announce("terminate")
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.deadline_s == about(60.0)
        assert cloud_notices.poll() == notice


@pytest.mark.parametrize("machine_type", ["n1-standard-8", "c4a-standard-8", "n4a-highmem-4"])
def test_maintenance_of_a_google_machine_that_may_have_no_gpus_counts_at_once(machine_type: str) -> None:
    with playing("gcp") as (server, cloud_notices):
        server.machine_type = machine_type
        assert cloud_notices.poll() is None
        server.announce("terminate")
        notice = cloud_notices.poll()
        assert notice is not None
        assert notice.deadline_s == about(60.0)
        assert cloud_notices.poll() == notice


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
def test_auto_finds_the_cloud_and_polls_the_others_no_more(cloud: CloudName) -> None:
    with playing(cloud, requested="auto") as (server, cloud_notices):
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
    with playing("gcp", requested="auto") as (server, cloud_notices):
        server.fault = "error"
        assert cloud_notices.poll() is None
        server.fault = None
        cloud_notices.poll()
        assert cloud_notices.cloud == "gcp"


def test_off_sends_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_ill_service_announces_nothing_in_bounded_time_and_is_polled_again(
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


def test_a_silent_service_is_logged_once_and_its_answers_are_not_shown(
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
    """Answers each request with the given bytes."""

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


@examples(300)
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


def test_the_server_as_a_program_announces_at_the_given_time() -> None:
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
