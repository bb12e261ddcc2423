"""Who tells that this machine or process is about to go: the cloud's metadata service, and SIGTERM.

What is told here is a `Notice`; what to save then is not decided here. Metadata services are asked over
plain HTTP on a link-local address. What they answer is data: it is bounded, matched against known words and
never quoted. Redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import Any, ClassVar, Protocol, cast
from urllib.parse import urlsplit

from ray_ckpt.errors import ConfigError

log = logging.getLogger("ray_ckpt")

METADATA_ENV = "RAY_CKPT_METADATA"  # auto (the default), aws, gcp, azure or off
METADATA_URL_ENV = "RAY_CKPT_METADATA_URL"  # in place of LINK_LOCAL, for a proxy of it and for tests
LINK_LOCAL = "http://169.254.169.254"  # the same for all three; Google's has a name besides

REQUEST_S = 1.0  # a whole request; the services answer from the host within milliseconds
MAX_BYTES = 64 << 10  # of an answer; what is asked for here has some hundred bytes
POLL_S = 5.0  # between looks for the cloud, and what Amazon recommends (see `_Aws`)
FAST_POLL_S = 1.0  # where there may be 30 s only
MAX_TRIES = 4  # looks for the cloud, over 15 s: a service on the host may start after this process
MAX_SILENT = 5  # polls without an answer in a row until that is said, once

AWS_TOKEN_TTL_S = 21_600  # the longest that Amazon gives
AWS_STALE_S = 300.0  # past its time, an interruption has failed: Amazon leaves its announcement there
GCP_PREEMPTED_S = 30.0
GCP_MAINTENANCE_S = 60.0
AZURE_PLANNED_S = 300.0  # before its time, a planned event counts; Azure may tell of it days ahead
AZURE_API = "2020-07-01"
_AZURE_NAME = re.compile(r"[\w.-]{1,80}", re.ASCII)  # 64 characters, and a number in a scale set

GRACE_S = 25.0  # Kubernetes kills 30 s after SIGTERM, unless the pod says otherwise
MAIN_THREAD_S = 1.0  # for the main thread to end the process; then it is ended from another one


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine or process will go, and who says so."""

    source: str
    """aws, gcp, azure or sigterm."""
    text: str
    """For people; words of this module only."""
    deadline_s: float | None
    """Unix seconds up to which it should stay; it may stay longer. None: not told, so at any moment."""


class CloudNotices:
    """What the metadata service of this machine's cloud announces.

    Use it in one thread, and in one process of a node: Azure takes 5 requests a second from a machine.
    """

    def __init__(self, cloud: str = "auto", base_url: str = LINK_LOCAL) -> None:
        """`cloud`: auto, aws, gcp, azure or off. ConfigError for anything else, and for a URL that is not
        plain http."""
        if cloud not in ("auto", "off", *_CLOUDS):
            raise ConfigError(
                f"{METADATA_ENV} is {cloud!r}.", hint=f"Set it to auto, {', '.join(_CLOUDS)} or off."
            )
        self._service = _Service(base_url)
        self._cloud: _Cloud | None = _CLOUDS[cloud](self._service) if cloud in _CLOUDS else None
        self._tries_left = MAX_TRIES if cloud == "auto" else 0
        self._num_silent = 0  # polls in a row
        self._has_said_silent = False
        self._standing: Notice | None = None

    @classmethod
    def from_environment(cls) -> CloudNotices:
        return cls(
            os.environ.get(METADATA_ENV) or "auto",
            os.environ.get(METADATA_URL_ENV) or LINK_LOCAL,
        )

    @property
    def cloud(self) -> str | None:
        """The one that is asked; None: not found yet, or none."""
        return self._cloud.name if self._cloud else None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to poll for: switched off, or this is no machine of a cloud."""
        return self._cloud is None and self._tries_left == 0

    @property
    def poll_s(self) -> float:
        """Seconds to leave between two polls; it changes when the cloud is found."""
        return self._cloud.poll_s if self._cloud else POLL_S

    def poll(self) -> Notice | None:
        """What is announced now: the same Notice for as long as it stands, None when it is taken back.

        It blocks for some milliseconds, and at worst for 10 requests of REQUEST_S each. It does not raise: an
        answer that is none changes nothing, and a service that gives none is logged once. The one thing
        without a limit of ours is the lookup of a host name in the base URL.
        """
        if self._cloud is None and self._tries_left > 0:
            self._find()
        if self._cloud is None:
            return None
        try:
            self._standing = self._cloud.look()
            self._num_silent = 0
        except _SilentError as error:
            self._num_silent += 1
            if self._num_silent == MAX_SILENT and not self._has_said_silent:
                self._has_said_silent = True
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
                cloud.greet()
                self._cloud = cloud
                self._tries_left = 0
                log.info("This is a machine of %s; its metadata service is asked for notices.", cloud.name)
                return
        if self._tries_left == 0:
            log.info("No metadata service of a cloud answers here; none is asked any more.")


class _SilentError(Exception):
    """The service did not answer as its documentation says. Its text quotes nothing from the answer."""


class _Cloud(Protocol):
    name: str
    poll_s: float

    def greet(self) -> None:
        """_SilentError if this is not a machine of this cloud."""

    def look(self) -> Notice | None: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def text(self) -> str:
        try:
            return self.body.decode("ascii").strip()
        except UnicodeDecodeError:
            raise _SilentError("an answer that is no text") from None

    def document(self) -> dict[str, Any]:
        """The JSON object that it is."""
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            raise _SilentError("an answer that is no JSON") from None
        if not isinstance(document, dict):
            raise _SilentError("an answer that is no JSON object")
        return document


class _TimedSocket(socket.socket):
    """Its reads all together end at `ends_s` of the monotonic clock.

    A timeout of a socket alone holds for each read anew: a byte at a time would keep a caller for hours.
    """

    ends_s: float

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self.settimeout(_left_s(self.ends_s))
        return super().recv_into(buffer, nbytes, flags)


class _Connection(http.client.HTTPConnection):
    """One request, all of it within REQUEST_S. http.client knows neither proxies nor redirects."""

    def connect(self) -> None:
        ends_s = time.monotonic() + REQUEST_S
        with socket.create_connection((self.host, self.port), timeout=REQUEST_S) as plain:
            timed = _TimedSocket(fileno=plain.detach())
        timed.ends_s = ends_s
        self.sock = timed
        timed.settimeout(_left_s(ends_s))


def _left_s(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class _Service:
    """Requests to one base URL."""

    def __init__(self, base_url: str) -> None:
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host, port, parts = None, 80, urlsplit("")
        if parts.scheme != "http" or not host or parts.username or parts.query or parts.fragment:
            raise ConfigError(  # what it is may hold a password
                f"{METADATA_URL_ENV} is no plain http URL.", hint=f"Set it to one such as {LINK_LOCAL}."
            )
        self._host, self._port, self._prefix = host, port, parts.path.rstrip("/")

    def get(self, path: str, headers: Mapping[str, str]) -> _Answer | None:
        """None for 404, that there is no such thing; _SilentError for all but 200."""
        answer = self.ask("GET", path, headers)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise _SilentError(f"status {answer.status}")
        return answer

    def ask(self, method: str, path: str, headers: Mapping[str, str]) -> _Answer:
        connection = _Connection(self._host, self._port)
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
    """EC2, by IMDSv2: a token first, then items, of which those that do not apply are 404.

    - spot/instance-action: {"action": "terminate", "time": "2017-09-18T08:22:00Z"}, two minutes ahead; a
      hibernation begins at once. Poll every 5 s. After an interruption that failed, the item stays, its time
      in the past (EC2 User Guide, "Spot Instance interruption notices").
    - autoscaling/target-lifecycle-state: where the Auto Scaling group is taking this instance (EC2 Auto
      Scaling User Guide, "Retrieve the target lifecycle state through instance metadata").
    - events/recommendations/rebalance: "at elevated risk of interruption" (EC2 User Guide, "EC2 instance
      rebalance recommendations"). That is no notice, only a line in the log: it may come hours before an
      interruption or without one, and training would save without a pause for as long. Where a group acts on
      it (Capacity Rebalancing), the lifecycle state tells.
    """

    name = "aws"
    poll_s = POLL_S
    _ITEMS = "/latest/meta-data/"
    _ACTIONS: ClassVar = {"terminate": "terminated", "stop": "stopped", "hibernate": "hibernated"}
    _LEAVING = ("Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated")

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._token: str | None = None
        self._has_said_rebalance = False

    def greet(self) -> None:
        self._token = self._new_token()

    def look(self) -> Notice | None:
        if answer := self._item("spot/instance-action"):
            notice = self._interruption(answer.document())
            if notice is not None:
                return notice
        state = self._item("autoscaling/target-lifecycle-state")
        if state is not None and state.text() in self._LEAVING:
            return Notice(self.name, "The Auto Scaling group takes this instance out of service.", None)
        if not self._has_said_rebalance and self._item("events/recommendations/rebalance") is not None:
            self._has_said_rebalance = True
            log.warning("Amazon says that this spot instance is at elevated risk of an interruption.")
        return None

    def _interruption(self, document: dict[str, Any]) -> Notice | None:
        action = self._ACTIONS.get(str(document.get("action")))
        if action is None:
            raise _SilentError("an interruption that is not known")
        time_s = _iso_time_s(document.get("time"))
        if time_s is not None and time_s < time.time() - AWS_STALE_S:
            return None
        deadline_s = None if action == "hibernated" else time_s
        return Notice(self.name, f"This spot instance will be {action}.", deadline_s)

    def _item(self, path: str) -> _Answer | None:
        if self._token is None:
            self._token = self._new_token()
        answer = self._service.ask("GET", self._ITEMS + path, self._headers(self._token))
        if answer.status == 401:  # the token has expired
            self._token = self._new_token()
            answer = self._service.ask("GET", self._ITEMS + path, self._headers(self._token))
        if answer.status not in (200, 404):
            raise _SilentError(f"status {answer.status}")
        return answer if answer.status == 200 else None

    def _headers(self, token: str) -> dict[str, str]:
        return {"X-aws-ec2-metadata-token": token}

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
        answer = self._service.ask("PUT", "/latest/api/token", headers)
        token = answer.text()
        if answer.status != 200 or not token.isprintable() or not 0 < len(token) <= 1024:
            raise _SilentError(f"no token, status {answer.status}")
        return token


class _Gcp:
    """Compute Engine: values under instance/, by and with the header Metadata-Flavor: Google.

    - preempted: TRUE; the machine is stopped 30 s later (Compute Engine, "Create and use Spot VMs").
    - maintenance-event: TERMINATE_ON_HOST_MAINTENANCE 60 s ahead, and an hour with GPUs ("Handle GPU host
      maintenance events"). Which of them, it does not say: 60 s from when it is first seen are sure.
      MIGRATE_ON_HOST_MAINTENANCE moves the machine and loses nothing. Only who has asked since the last event
      is warned ("Query metadata server for maintenance event notices").
    """

    name = "gcp"
    poll_s = FAST_POLL_S
    _HEADERS: ClassVar = {"Metadata-Flavor": "Google"}
    _ROOT = "/computeMetadata/v1/"

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._standing: Notice | None = None

    def greet(self) -> None:
        if self._get("") is None:
            raise _SilentError("status 404")

    def look(self) -> Notice | None:
        if self._value("preempted") == "TRUE":
            self._announce("This VM is preempted.", GCP_PREEMPTED_S)
        elif self._value("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            self._announce("This VM is stopped for maintenance of its host.", GCP_MAINTENANCE_S)
        else:
            self._standing = None
        return self._standing

    def _announce(self, text: str, stays_s: float) -> None:
        if self._standing is None or self._standing.text != text:
            self._standing = Notice(self.name, text, time.time() + stays_s)

    def _value(self, name: str) -> str | None:
        answer = self._get(f"instance/{name}")
        return answer.text() if answer else None

    def _get(self, path: str) -> _Answer | None:
        answer = self._service.get(self._ROOT + path, self._HEADERS)
        if answer is not None and answer.headers.get("Metadata-Flavor") != "Google":
            raise _SilentError("an answer that is not Google's")
        return answer


class _Azure:
    """Azure's Scheduled Events (Azure Virtual Machines, "Scheduled Events for Linux VMs").

    A document lists the events of all machines of a set; `Resources` names those that one is for. NotBefore
    is the earliest time (RFC 1123), and empty once it has begun. A Preempt comes 30 s ahead, Terminate 5 to
    15 minutes, Redeploy 10, Reboot 15, and for failing hardware days: then it counts from AZURE_PLANNED_S on.
    A Freeze loses nothing. The first request switches the service on; its answer may take two minutes, so the
    first polls may be silent. Poll every second. An event is listed until about 10 minutes after it began:
    one that had begun before the first look has brought this machine here, and is left out.
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
        self._left_out: frozenset[str] | None = None  # EventIds

    def greet(self) -> None:
        self._machine = self._own_name()

    def look(self) -> Notice | None:
        if self._machine is None:
            self._machine = self._own_name()
        events = [event for event in self._events() if self._machine in event.machines]
        if self._left_out is None:
            self._left_out = frozenset(event.id for event in events if event.has_begun)
        notices = [self._notice(event) for event in events if event.id not in self._left_out]
        standing = [notice for notice in notices if notice is not None]
        return min(standing, key=lambda notice: notice.deadline_s or 0.0, default=None)

    def _notice(self, event: _AzureEvent) -> Notice | None:
        begins_s = None if event.has_begun else _http_time_s(event.not_before)
        if begins_s is not None and begins_s > time.time() + AZURE_PLANNED_S:
            return None
        return Notice(self.name, self._LEAVING[event.kind], begins_s)

    def _events(self) -> list[_AzureEvent]:
        answer = self._service.get(f"/metadata/scheduledevents?api-version={AZURE_API}", self._HEADERS)
        if answer is None:
            raise _SilentError("status 404")
        listed = answer.document().get("Events")
        if not isinstance(listed, list):
            raise _SilentError("an answer without events")
        events = (_AzureEvent.parse(entry) for entry in listed)
        return [event for event in events if event is not None and event.kind in self._LEAVING]

    def _own_name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        answer = self._service.get(path, self._HEADERS)
        name = answer.text() if answer else ""
        if _AZURE_NAME.fullmatch(name) is None:  # it is kept, so a stray answer must not become it
            raise _SilentError("no name of this machine")
        return name.casefold()


@dataclass(frozen=True, slots=True)
class _AzureEvent:
    id: str
    kind: str
    machines: tuple[str, ...]
    has_begun: bool
    not_before: str

    @classmethod
    def parse(cls, entry: object) -> _AzureEvent | None:
        if not isinstance(entry, dict):
            return None
        id, kind, machines = (entry.get(key) for key in ("EventId", "EventType", "Resources"))
        if not (isinstance(id, str) and isinstance(kind, str) and isinstance(machines, list)):
            return None
        not_before = str(entry.get("NotBefore") or "")
        has_begun = entry.get("EventStatus") == "Started" or not not_before
        return cls(id, kind, tuple(str(name).casefold() for name in machines), has_begun, not_before)


_CLOUDS: dict[str, Callable[[_Service], _Cloud]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}


def _iso_time_s(value: object) -> float | None:
    """Unix seconds of an ISO 8601 time, in UTC if it does not say; None if it is none."""
    try:
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _http_time_s(value: str) -> float | None:
    """Unix seconds of an RFC 1123 time; None if it is none."""
    try:
        moment = email.utils.parsedate_to_datetime(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers

# What the watching thread reads, beside the numbers of signals, which Python itself writes.
_HANDLED = b"\x00"
_RELEASED = b"\xff"
_ENDED = b"\xfe"


class TermSignal:
    """Holds back the end of this process by SIGTERM, once, so that it can be used for a last save.

    On SIGTERM `on_notice` is called, in a thread of its own. After `grace_s`, at `release`, at a second
    SIGTERM or at `uninstall`, whatever comes first, the signal goes where it would have gone before: to the
    handler of then (Ray's workers: SystemExit), to the default action, or nowhere where it was ignored. After
    that this object is spent, and SIGTERM is as it was before `install`.

    Python runs handlers in the main thread, between two bytecodes. `time.sleep`, `Thread.join` and locks let
    them run; C code that does not return does not. The notice does not depend on that: the signal's number
    comes through the process's wakeup descriptor (`signal.set_wakeup_fd`), unless something else has it, such
    as `loop.add_signal_handler` of an asyncio loop in the main thread; then the notice waits for the handler.
    The handler of before does depend on it, as it always has. The default action comes from another thread,
    MAIN_THREAD_S late and as status 143, if the main thread does not. While C code keeps Python's lock,
    nothing here runs.

    In a Ray worker the main thread waits for tasks in C++ and runs the methods of actors that are not async.
    `install` from such a method; in a training loop with a thread of its own it does nothing.

    Processes forked from this one have SIGTERM as before `install`.
    """

    @classmethod
    def install(cls, on_notice: Callable[[Notice], None], *, grace_s: float = GRACE_S) -> TermSignal | None:
        """None, and a line in the log, where it cannot be done: in another than the main thread, over a
        handler that Python does not know, or beside another TermSignal."""
        if not (0 <= grace_s < math.inf):
            raise ConfigError(f"grace_s is {grace_s!r}.", hint="Set it to a number of seconds, 0 or more.")
        if threading.current_thread() is not threading.main_thread():
            log.info("SIGTERM is not watched: only a process's main thread can set that up.")
            return None
        if _installed is not None and _installed._is_off:
            _installed._restore()
        if _installed is not None or signal.getsignal(signal.SIGTERM) is None:
            log.info("SIGTERM is not watched: it is already, or by code that is not Python's.")
            return None
        return cls(on_notice, grace_s)

    def __init__(self, on_notice: Callable[[Notice], None], grace_s: float) -> None:
        global _installed
        self._on_notice = on_notice
        self._grace_s = grace_s
        self._is_off = False  # then the handler passes on
        self._num_handled = 0  # signals, as the handler saw them: two that come together are one
        self._num_woken = 0  # signals, as Python wrote them, where the wakeup descriptor is ours
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._previous = cast(_Handler, signal.signal(signal.SIGTERM, self._handle))
        _replace_wakeup_fd(-1, self._outbox.fileno())
        _installed = self
        threading.Thread(target=self._watch, name="ray-ckpt-sigterm", daemon=True).start()

    def release(self) -> None:
        """Training has what it wants: do not hold the signal any longer. Nothing before one has come."""
        self._write(_RELEASED)

    def uninstall(self) -> None:
        """SIGTERM as before `install`; one that is held goes on at once. From another thread than the main
        one the handler stays in place and only passes on."""
        self._is_off = True
        self._write(_ENDED)
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_off:
            self._write(_HANDLED)  # no lock: the main thread may hold any
            return
        self._restore()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _write(self, byte: bytes) -> None:
        with contextlib.suppress(OSError):  # full, or closed: the thread has been told enough
            self._outbox.send(byte)

    def _watch(self) -> None:
        with self._inbox:
            if self._wait(num_signals=1, ends_s=None):
                now_s = time.monotonic()
                text = f"This process got SIGTERM; it is held for {self._grace_s:g} s."
                notice = Notice("sigterm", text, time.time() + self._grace_s)
                threading.Thread(
                    target=self._tell, args=(notice,), name="ray-ckpt-notice", daemon=True
                ).start()
                self._wait(num_signals=2, ends_s=now_s + self._grace_s)
                self._pass_on()
            self._inbox.settimeout(None)
            while self._inbox.recv(64):  # Python complains of each signal that nobody takes from it
                pass

    def _wait(self, *, num_signals: int, ends_s: float | None) -> bool:
        """Whether there have been so many signals; False at the time, or if told to wait no longer."""
        while max(self._num_handled, self._num_woken) < num_signals:
            try:
                self._inbox.settimeout(None if ends_s is None else _left_s(ends_s))
                byte = self._inbox.recv(1)
            except TimeoutError:
                return False
            if byte == _HANDLED:
                self._num_handled += 1
            elif byte == bytes([signal.SIGTERM]):
                self._num_woken += 1
            elif byte in (_ENDED, b"") or (byte == _RELEASED and num_signals > 1):
                return False
        return True

    def _tell(self, notice: Notice) -> None:
        try:
            self._on_notice(notice)
        except Exception:
            log.exception("A notice could not be passed on: %s", notice.text)

    def _pass_on(self) -> None:
        """Let the main thread do what it would have done at the signal."""
        if self._num_handled == 0 and signal.getsignal(signal.SIGTERM) != self._handle:
            return  # it went to a handler of others that did not call ours
        self._is_off = True
        os.kill(os.getpid(), signal.SIGTERM)
        if self._previous == signal.SIG_DFL:
            time.sleep(MAIN_THREAD_S)
            os._exit(128 + signal.SIGTERM)

    def _restore(self) -> None:
        """In the main thread."""
        global _installed
        self._is_off = True
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        if _installed is self:
            _replace_wakeup_fd(self._outbox.fileno(), -1)
            _installed = None
        self._outbox.close()


_installed: TermSignal | None = None


def _replace_wakeup_fd(old: int, new: int) -> None:
    """Set the wakeup descriptor to `new` if it is `old`, and leave it alone otherwise."""
    found = signal.set_wakeup_fd(new, warn_on_full_buffer=False)
    if found != old:
        with contextlib.suppress(ValueError, OSError):  # it has been closed
            signal.set_wakeup_fd(found)


def _forget_in_child() -> None:
    """A forked process shares the descriptors: its SIGTERM would look like one of ours."""
    if _installed is not None:
        _installed._restore()


os.register_at_fork(after_in_child=_forget_in_child)
