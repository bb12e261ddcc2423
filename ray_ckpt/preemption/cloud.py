"""Notices of preemptions from the metadata services of Amazon, Google and Azure.

This module only reports a `Notice`; other modules decide what to save. Metadata services are queried over
plain HTTP on a link-local address. Answers are untrusted: their size is bounded, and they are compared with
known values and never quoted. Redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from ray_ckpt.errors import ConfigError
from ray_ckpt.preemption.notice import Notice, left_s

log = logging.getLogger("ray_ckpt")

METADATA_ENV = "RAY_CKPT_METADATA"  # auto (the default), aws, gcp, azure or off
METADATA_URL_ENV = "RAY_CKPT_METADATA_URL"  # replaces LINK_LOCAL, for a proxy of the service and for tests
LINK_LOCAL = "http://169.254.169.254"  # the address of all three services; Google's service also has a name

REQUEST_S = 1.0  # limit of a whole request; the services run on the host and answer within milliseconds
MAX_BYTES = 64 << 10  # of an answer; a valid answer has some hundred bytes
POLL_S = 5.0  # between attempts to find the cloud; also Amazon's recommendation (see `_Aws`)
FAST_POLL_S = 1.0  # for clouds where a machine may end 30 s after the notice
MAX_TRIES = 4  # attempts to find the cloud, over 15 s: a service on the host may start after this process
MAX_SILENT = 5  # consecutive polls without an answer before a warning, which is logged once

AWS_TOKEN_TTL_S = 21_600  # the longest lifetime that Amazon allows
AWS_STALE_S = 300.0  # after the announced time; then the interruption has failed, but Amazon keeps the item
GCP_PREEMPTED_S = 30.0  # from Google's notice of a preemption to the end of the machine
GCP_MAINTENANCE_S = 60.0  # from Google's notice of maintenance to the stop of the machine
GCP_GPU_MAINTENANCE_S = 3600.0  # the same for a machine with GPUs
PLANNED_S = 300.0  # a planned event is ignored until then: Azure may list it days ahead, Google an hour
AZURE_API = "2020-07-01"
_GCP_GPU_TYPE = re.compile(r"/machineTypes/[ag]\d", re.ASCII)  # A2, A3, A4, A4X, G2, G4: all have GPUs
_AZURE_NAME = re.compile(r"[\w.-]{1,80}", re.ASCII)  # 64 characters, plus a number in a scale set


class CloudNotices:
    """Polls the metadata service of this machine's cloud.

    Use this class in one thread of one process per node: Azure accepts 5 requests a second per machine.
    """

    def __init__(self, cloud: str = "auto", base_url: str = LINK_LOCAL) -> None:
        """Take `cloud` from auto, aws, gcp, azure and off.

        Raises ConfigError for any other value, and for a URL that is not plain http.
        """
        if cloud not in ("auto", "off", *_CLOUDS):
            raise ConfigError(
                f"{METADATA_ENV} is {cloud!r}.", hint=f"Set it to auto, {', '.join(_CLOUDS)} or off."
            )
        self._service = _Service(base_url)
        self._cloud: _Cloud | None = _CLOUDS[cloud](self._service) if cloud in _CLOUDS else None
        self._tries_left = MAX_TRIES if cloud == "auto" else 0
        self._num_silent = 0  # consecutive polls without an answer
        self._has_warned = False
        self._standing: Notice | None = None

    @classmethod
    def from_environment(cls) -> CloudNotices:
        return cls(
            os.environ.get(METADATA_ENV) or "auto",
            os.environ.get(METADATA_URL_ENV) or LINK_LOCAL,
        )

    @property
    def cloud(self) -> str | None:
        """Name of the polled cloud; None if no cloud is found yet, or this machine is in no known cloud."""
        return self._cloud.name if self._cloud else None

    @property
    def is_over(self) -> bool:
        """True if polling is pointless: it is switched off, or this machine is in no known cloud."""
        return self._cloud is None and self._tries_left == 0

    @property
    def poll_s(self) -> float:
        """Seconds between two polls; the value changes when the cloud is found."""
        return self._cloud.poll_s if self._cloud else POLL_S

    def poll(self) -> Notice | None:
        """Return the current notice, an equal one while the notice is valid; None if it is withdrawn.

        Blocks for some milliseconds, and at most for 10 requests of REQUEST_S each; only the lookup of a host
        name in the base URL has no time limit. Does not raise: an invalid answer changes nothing, and a
        service without valid answers is logged once.
        """
        if self._cloud is None and self._tries_left > 0:
            self._find()
        if self._cloud is None:
            return None
        try:
            self._standing = self._cloud.notice()
            self._num_silent = 0
        except _SilentError as error:
            self._num_silent += 1
            if self._num_silent == MAX_SILENT and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "The metadata service of %s does not answer as it should (%s): no notice of a preemption "
                    "comes from it. In a container on Amazon it needs a hop limit of 2. %s=off ends this.",
                    self._cloud.name,
                    error,
                    METADATA_ENV,
                )
        return self._standing

    def _find(self) -> None:
        self._tries_left -= 1
        for kind in _CLOUDS.values():
            cloud = kind(self._service)
            with contextlib.suppress(_SilentError):
                cloud.check()
                self._cloud = cloud
                self._tries_left = 0
                log.info("This is a machine of %s; its metadata service is polled for notices.", cloud.name)
                return
        if self._tries_left == 0:
            log.info("No metadata service of a cloud answers here; none is polled from now on.")


class _SilentError(Exception):
    """The answer of the service is missing or invalid. The error text quotes nothing from the answer."""


class _Cloud(Protocol):
    name: str
    poll_s: float

    def check(self) -> None:
        """Raise _SilentError if this is not a machine of this cloud."""

    def notice(self) -> Notice | None: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def text(self) -> str:
        try:
            return self.body.decode("ascii").strip()
        except UnicodeDecodeError:
            raise _SilentError("an answer that is not text") from None

    def document(self) -> dict[str, Any]:
        """Parse the body as a JSON object."""
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            raise _SilentError("an answer that is not JSON") from None
        if not isinstance(document, dict):
            raise _SilentError("an answer that is not a JSON object")
        return document


class _TimedSocket(socket.socket):
    """A socket with a deadline, `ends_s` of the monotonic clock, for all reads together.

    The timeout of a plain socket restarts with each read, so a slow sender could block a caller for hours.
    """

    ends_s: float

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self.settimeout(left_s(self.ends_s))
        return super().recv_into(buffer, nbytes, flags)


class _TimedConnection(http.client.HTTPConnection):
    """One request that takes at most REQUEST_S. http.client uses no proxies and follows no redirects."""

    def connect(self) -> None:
        ends_s = time.monotonic() + REQUEST_S
        with socket.create_connection((self.host, self.port), timeout=REQUEST_S) as plain:
            timed = _TimedSocket(fileno=plain.detach())
        timed.ends_s = ends_s
        self.sock = timed
        timed.settimeout(left_s(ends_s))


class _Service:
    """Sends requests to one base URL."""

    def __init__(self, base_url: str) -> None:
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host, port, parts = None, 80, urlsplit("")
        if parts.scheme != "http" or not host or parts.username or parts.query or parts.fragment:
            raise ConfigError(  # the URL is not quoted, because a URL may hold a password
                f"{METADATA_URL_ENV} is not a plain http URL.", hint=f"Set it to one such as {LINK_LOCAL}."
            )
        self._host, self._port, self._prefix = host, port, parts.path.rstrip("/")

    def get(self, path: str, headers: Mapping[str, str]) -> _Answer | None:
        """Return the answer, or None for status 404. Raise _SilentError for any other status but 200."""
        answer = self.request("GET", path, headers)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise _SilentError(f"status {answer.status}")
        return answer

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> _Answer:
        connection = _TimedConnection(self._host, self._port)
        try:
            connection.request(method, self._prefix + path, headers=dict(headers))
            response = connection.getresponse()
            body = response.read(MAX_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _SilentError(type(error).__name__) from None
        finally:
            connection.close()
        if len(body) > MAX_BYTES:
            raise _SilentError(f"an answer of more than {MAX_BYTES} bytes")
        return _Answer(response.status, response.headers, body)


class _Aws:
    """EC2, by IMDSv2: first request a token, then items. An item that does not apply has status 404.

    - spot/instance-action: {"action": "terminate", "time": "2017-09-18T08:22:00Z"}, two minutes ahead; a
      hibernation begins at once. Poll every 5 s. After a failed interruption the item remains, with a time in
      the past (EC2 User Guide, "Spot Instance interruption notices").
    - autoscaling/target-lifecycle-state: the state that the Auto Scaling group moves this instance to (EC2
      Auto Scaling User Guide, "Retrieve the target lifecycle state through instance metadata").
    - events/recommendations/rebalance: "at elevated risk of interruption" (EC2 User Guide, "EC2 instance
      rebalance recommendations"). The recommendation is only logged, without a notice: it may come hours
      before an interruption or without an interruption, and training would save continuously during this
      time. A group that follows the recommendation (Capacity Rebalancing) changes the lifecycle state.
    """

    name = "aws"
    poll_s = POLL_S
    _ITEMS = "/latest/meta-data/"
    _ACTIONS: ClassVar = {"terminate": "terminated", "stop": "stopped", "hibernate": "hibernated"}
    _LEAVING = ("Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated")

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._token: str | None = None
        self._has_logged_rebalance = False

    def check(self) -> None:
        self._token = self._new_token()

    def notice(self) -> Notice | None:
        if answer := self._item("spot/instance-action"):
            notice = self._interruption(answer.document())
            if notice is not None:
                return notice
        state = self._item("autoscaling/target-lifecycle-state")
        if state is not None and state.text() in self._LEAVING:
            return Notice(self.name, "The Auto Scaling group takes this instance out of service.", None)
        if not self._has_logged_rebalance and self._item("events/recommendations/rebalance") is not None:
            self._has_logged_rebalance = True
            log.warning("Amazon reports that this spot instance is at elevated risk of an interruption.")
        return None

    def _interruption(self, document: dict[str, Any]) -> Notice | None:
        action = self._ACTIONS.get(str(document.get("action")))
        if action is None:
            raise _SilentError("an unknown kind of interruption")
        time_s = _time_s(document.get("time"), datetime.fromisoformat)
        if time_s is not None and time_s < time.time() - AWS_STALE_S:
            return None
        deadline_s = None if action == "hibernated" else time_s
        return Notice(self.name, f"This spot instance will be {action}.", deadline_s)

    def _item(self, path: str) -> _Answer | None:
        if self._token is None:
            self._token = self._new_token()
        answer = self._service.request("GET", self._ITEMS + path, self._headers(self._token))
        if answer.status == 401:  # the token has expired
            self._token = self._new_token()
            answer = self._service.request("GET", self._ITEMS + path, self._headers(self._token))
        if answer.status not in (200, 404):
            raise _SilentError(f"status {answer.status}")
        return answer if answer.status == 200 else None

    def _headers(self, token: str) -> dict[str, str]:
        return {"X-aws-ec2-metadata-token": token}

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
        answer = self._service.request("PUT", "/latest/api/token", headers)
        token = answer.text()
        if answer.status != 200 or not token.isprintable() or not 0 < len(token) <= 1024:
            raise _SilentError(f"no token, status {answer.status}")
        return token


class _Gcp:
    """Compute Engine: values under instance/; requests and answers have the header Metadata-Flavor: Google.

    - preempted: TRUE; the machine is stopped 30 s later (Compute Engine, "Create and use Spot VMs").
    - maintenance-event: TERMINATE_ON_HOST_MAINTENANCE 60 s ahead, or an hour with GPUs ("Handle GPU host
      maintenance events"). The time counts from the first poll with this value. It is an hour if
      machine-type is of a series that always has GPUs and an earlier poll had another value; then the event
      is ignored until PLANNED_S before the stop. No item shows the GPUs of an N1 machine.
      MIGRATE_ON_HOST_MAINTENANCE moves the machine without loss. Only clients that have sent a query since
      the last event get the value ("Query metadata server for maintenance event notices").
    """

    name = "gcp"
    poll_s = FAST_POLL_S
    _HEADERS: ClassVar = {"Metadata-Flavor": "Google"}
    _ROOT = "/computeMetadata/v1/"

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._standing: Notice | None = None
        self._was_polled = False  # a value at the first poll may be older

    def check(self) -> None:
        if self._get("") is None:
            raise _SilentError("status 404")

    def notice(self) -> Notice | None:
        if self._value("preempted") == "TRUE":
            self._announce("This VM is preempted.", GCP_PREEMPTED_S)
        elif self._value("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            is_hour = self._was_polled and self._standing is None and self._has_gpus()
            stays_s = GCP_GPU_MAINTENANCE_S if is_hour else GCP_MAINTENANCE_S
            self._announce("This VM is stopped for maintenance of its host.", stays_s)
        else:
            self._standing = None
        self._was_polled = True
        standing = self._standing
        is_planned = standing is not None and (standing.deadline_s or 0.0) > time.time() + PLANNED_S
        return None if is_planned else standing

    def _announce(self, text: str, stays_s: float) -> None:
        if self._standing is None or self._standing.text != text:
            self._standing = Notice(self.name, text, time.time() + stays_s)

    def _has_gpus(self) -> bool:
        return _GCP_GPU_TYPE.search(self._value("machine-type") or "") is not None

    def _value(self, name: str) -> str | None:
        answer = self._get(f"instance/{name}")
        return answer.text() if answer else None

    def _get(self, path: str) -> _Answer | None:
        answer = self._service.get(self._ROOT + path, self._HEADERS)
        if answer is not None and answer.headers.get("Metadata-Flavor") != "Google":
            raise _SilentError("an answer that is not from Google")
        return answer


class _Azure:
    """Azure's Scheduled Events (Azure Virtual Machines, "Scheduled Events for Linux VMs").

    A document lists the events of all machines of a set; `Resources` names the machines of an event.
    NotBefore is the earliest time (RFC 1123), and empty once the event has begun. A Preempt is listed 30 s
    ahead, a Terminate 5 to 15 minutes, a Redeploy 10 minutes, a Reboot 15 minutes. Events for failing
    hardware are listed days ahead; such an event is ignored until PLANNED_S before NotBefore. A Freeze
    loses nothing. The first request switches the service on; the answer to it may take two minutes, so the
    first polls may get no answer. Poll every second. An event is listed until about 10 minutes after its
    start: an event that had started before the first poll caused the start of this machine, and is left out.
    """

    name = "azure"
    poll_s = FAST_POLL_S
    _HEADERS: ClassVar = {"Metadata": "true"}
    _LEAVING: ClassVar = {
        "Preempt": "This spot VM is evicted.",
        "Terminate": "This VM is deleted.",
        "Reboot": "This VM is restarted.",
        "Redeploy": "This VM is moved to another host, without its memory and local disks.",
    }

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._machine: str | None = None
        self._left_out: frozenset[str] | None = None  # EventIds that had begun at the first poll

    def check(self) -> None:
        self._machine = self._own_name()

    def notice(self) -> Notice | None:
        if self._machine is None:
            self._machine = self._own_name()
        events = self._events(self._machine)
        if self._left_out is None:
            self._left_out = frozenset(event["EventId"] for event in events if self._has_begun(event))
        notices = [self._notice(event) for event in events if event["EventId"] not in self._left_out]
        standing = [notice for notice in notices if notice is not None]
        return min(standing, key=lambda notice: notice.deadline_s or 0.0, default=None)

    def _has_begun(self, event: Mapping[str, Any]) -> bool:
        return event.get("EventStatus") == "Started" or not event.get("NotBefore")

    def _notice(self, event: Mapping[str, Any]) -> Notice | None:
        begins_s = None
        if not self._has_begun(event):
            begins_s = _time_s(event["NotBefore"], email.utils.parsedate_to_datetime)
        if begins_s is not None and begins_s > time.time() + PLANNED_S:
            return None
        return Notice(self.name, self._LEAVING[event["EventType"]], begins_s)

    def _events(self, machine: str) -> list[dict[str, Any]]:
        """Return the valid events that end this machine."""
        answer = self._service.get(f"/metadata/scheduledevents?api-version={AZURE_API}", self._HEADERS)
        if answer is None:
            raise _SilentError("status 404")
        listed = answer.document().get("Events")
        if not isinstance(listed, list):
            raise _SilentError("an answer without events")
        return [
            event
            for event in listed
            if isinstance(event, dict)
            and isinstance(event.get("EventId"), str)
            and str(event.get("EventType")) in self._LEAVING
            and isinstance(event.get("Resources"), list)
            and machine in (str(name).casefold() for name in event["Resources"])
        ]

    def _own_name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        answer = self._service.get(path, self._HEADERS)
        name = answer.text() if answer else ""
        if _AZURE_NAME.fullmatch(name) is None:  # the name is stored, so an invalid answer must not set it
            raise _SilentError("no name of this machine")
        return name.casefold()


_CLOUDS: dict[str, Callable[[_Service], _Cloud]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}


def _time_s(value: object, parse: Callable[[str], datetime]) -> float | None:
    """Return Unix seconds of a time, in UTC if the time has no zone; None if it is invalid."""
    try:
        moment = parse(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
