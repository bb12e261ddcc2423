"""The metadata service of a cloud's machine, on loopback, which announces the given events.

    python -m tests.servers.metadata_server --cloud gcp --port 0 --after 10

It answers the requests of `ray_ckpt.preemption.cloud` to Amazon, Google or Azure, with their headers, tokens
and status codes, and refuses the rest. RAY_CKPT_METADATA_URL leads a process to it.
"""

from __future__ import annotations

import argparse
import email.utils
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Literal, Self
from urllib.parse import parse_qs, urlsplit

CloudName = Literal["aws", "gcp", "azure"]
Fault = Literal["hang", "drip", "huge", "garbage", "redirect", "error", "drop"]
KINDS: Mapping[CloudName, tuple[str, ...]] = {  # what each can announce, the usual one first
    "aws": ("terminate", "stop", "hibernate", "scale-in", "rebalance"),
    "gcp": ("preempt", "terminate", "migrate"),
    "azure": ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"),
}
NOTICE_S: Mapping[CloudName, float] = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
MAX_TOKEN_TTL_S = 21_600
DRIP_S = 0.2  # between two bytes
HANG_S = 20.0  # no client of ours waits for so long
HUGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """`at_s`: Unix seconds; None: at once."""

    kind: str
    at_s: float | None
    machine: str


class MetadataServer:
    """Listens on 127.0.0.1 once it is made; answers from `start` or `with` on, until `close`."""

    def __init__(self, cloud: CloudName, *, port: int = 0, machine: str = "vm-1") -> None:
        self.cloud = cloud
        self.machine = machine
        self.machine_type = "n1-standard-8"
        """Of Google's machine."""
        self.fault: Fault | None = None
        """Goes for all requests while it is set."""
        self.num_requests = 0
        self.foreign_url = ""
        """Where `redirect` leads."""
        self._lock = threading.Lock()
        self._events: tuple[Event, ...] = ()
        self._incarnation = 1
        self._tokens: dict[str, float] = {}  # -> when it ends, monotonic
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def announce(self, kind: str, in_s: float | None = None, *, machine: str | None = None) -> None:
        """Announce one of KINDS; on Azure, for another `machine` of the set.

        `in_s`: seconds from now; None: at once, which on Azure is an event that has begun. Google announces
        no time.
        """
        if kind not in KINDS[self.cloud]:
            raise ValueError(f"{self.cloud} does not announce {kind!r}, but {', '.join(KINDS[self.cloud])}.")
        at_s = None if in_s is None else time.time() + in_s
        with self._lock:
            self._events = (*self._events, Event(kind, at_s, machine or self.machine))
            self._incarnation += 1

    def withdraw(self) -> None:
        """Take everything back."""
        with self._lock:
            self._events = ()
            self._incarnation += 1

    def expire_tokens(self) -> None:
        with self._lock:
            self._tokens.clear()

    def reply(self, method: str, target: str, headers: Message) -> Reply:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        with self._lock:
            self.num_requests += 1
            answer: dict[CloudName, Callable[..., Reply]] = {
                "aws": self._aws,
                "gcp": self._gcp,
                "azure": self._azure,
            }
            return answer[self.cloud](method, parts.path, query, headers)

    def _find(self, *kinds: str) -> Event | None:
        return next((event for event in self._events if event.kind in kinds), None)

    # Amazon: EC2 User Guide, "Use the Instance Metadata Service to access instance metadata": 400 for a bad
    # request, 401 without a valid token, 403 if switched off or for a forwarded request for a token.
    def _aws(self, method: str, path: str, query: Mapping[str, str], headers: Message) -> Reply:
        if path == "/latest/api/token":
            return self._aws_token(method, headers)
        if method != "GET":
            return Reply(405)
        if self._tokens.get(headers.get("X-aws-ec2-metadata-token", ""), 0.0) <= time.monotonic():
            return Reply(401)
        item = path.removeprefix("/latest/meta-data/")
        if item == "spot/instance-action" and (event := self._find("terminate", "stop", "hibernate")):
            return Reply(200, json.dumps({"action": event.kind, "time": _iso(event.at_s)}))
        if item == "events/recommendations/rebalance" and (event := self._find("rebalance")):
            return Reply(200, json.dumps({"noticeTime": _iso(event.at_s)}))
        if item == "autoscaling/target-lifecycle-state":
            return Reply(200, "Terminated" if self._find("scale-in") else "InService")
        return Reply(404)

    def _aws_token(self, method: str, headers: Message) -> Reply:
        if method != "PUT":
            return Reply(405)
        if "X-Forwarded-For" in headers:
            return Reply(403)
        ttl = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if not ttl.isdecimal() or not 0 < int(ttl) <= MAX_TOKEN_TTL_S:
            return Reply(400)
        token = secrets.token_urlsafe(40) + "=="
        self._tokens[token] = time.monotonic() + int(ttl)
        return Reply(200, token, {"X-aws-ec2-metadata-token-ttl-seconds": ttl})

    # Google: Compute Engine, "View and query VM metadata": requests need the header, answers have it, and
    # forwarded requests are refused.
    def _gcp(self, method: str, path: str, query: Mapping[str, str], headers: Message) -> Reply:
        mark = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        if headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in headers:
            return Reply(403, "", mark)
        if method != "GET":
            return Reply(405, "", mark)
        if query:  # waiting for a change, and listings, are not played
            return Reply(400, "", mark)
        values = {
            "/computeMetadata/v1/": "instance/\nproject/\n",
            "/computeMetadata/v1/instance/name": self.machine,
            "/computeMetadata/v1/instance/machine-type": f"projects/1/machineTypes/{self.machine_type}",
            "/computeMetadata/v1/instance/preempted": "TRUE" if self._find("preempt") else "FALSE",
            "/computeMetadata/v1/instance/maintenance-event": self._gcp_maintenance(),
        }
        return Reply(200, values[path], mark) if path in values else Reply(404, "", mark)

    def _gcp_maintenance(self) -> str:
        event = self._find("terminate", "migrate")
        return f"{event.kind.upper()}_ON_HOST_MAINTENANCE" if event else "NONE"

    # Azure: "Azure Instance Metadata Service" and "Scheduled Events for Linux VMs": 400 without the header or
    # with an unknown version.
    def _azure(self, method: str, path: str, query: Mapping[str, str], headers: Message) -> Reply:
        if headers.get("Metadata", "").lower() != "true" or "X-Forwarded-For" in headers:
            return Reply(400, '{"error": "Bad request. Required metadata header not specified"}')
        if method != "GET":
            return Reply(405)
        version = query.get("api-version")
        if path == "/metadata/scheduledevents":
            if version != "2020-07-01":
                return Reply(400, '{"error": "Bad request. api-version is invalid or was not specified"}')
            entries = [self._azure_entry(number, event) for number, event in enumerate(self._events)]
            return Reply(200, json.dumps({"DocumentIncarnation": self._incarnation, "Events": entries}))
        if path == "/metadata/instance/compute/name":
            if version != "2021-02-01" or query.get("format") != "text":
                return Reply(400, '{"error": "Bad request. api-version or format"}')
            return Reply(200, self.machine)
        return Reply(404)

    def _azure_entry(self, number: int, event: Event) -> dict[str, Any]:
        return {
            "EventId": f"602d9444-d2cd-49c7-8624-{number:012x}",
            "EventType": event.kind,
            "ResourceType": "VirtualMachine",
            "Resources": [event.machine],
            "EventStatus": "Started" if event.at_s is None else "Scheduled",
            "NotBefore": "" if event.at_s is None else email.utils.formatdate(event.at_s, usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        class Handler(_Handler):
            metadata = self

        return Handler


class _Handler(BaseHTTPRequestHandler):
    metadata: ClassVar[MetadataServer]
    protocol_version = "HTTP/1.1"
    timeout = HANG_S

    def do_GET(self) -> None:
        metadata = self.metadata
        reply = metadata.reply(self.command, self.path, self.headers)
        match metadata.fault:
            case None:
                pass
            case "hang":
                metadata._closing.wait(HANG_S)
                self.close_connection = True
                return
            case "drop":
                self.close_connection = True
                return
            case "drip":
                self._drip()
                return
            case "huge":
                reply = Reply(200, "x" * HUGE_BYTES, reply.headers)
            case "garbage":
                reply = Reply(200, '[{"action"', reply.headers)
            case "redirect":
                reply = Reply(302, "", {**reply.headers, "Location": metadata.foreign_url + self.path})
            case "error":
                reply = Reply(500, "", reply.headers)
        self._send(reply)

    do_PUT = do_GET
    do_POST = do_GET

    def _send(self, reply: Reply) -> None:
        body = reply.body.encode()
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the client has seen enough
            self.close_connection = True

    def _drip(self) -> None:
        """Send a header without end, a byte at a time."""
        self.close_connection = True
        ends_s = time.monotonic() + HANG_S
        try:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while time.monotonic() < ends_s and not self.metadata._closing.wait(DRIP_S):
                self.wfile.write(b"x")
        except OSError:
            pass

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _iso(at_s: float | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.servers.metadata_server", description=__doc__)
    parser.add_argument("--cloud", choices=tuple(KINDS), required=True)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--after", type=float, metavar="S", help="announce after so many seconds; else never")
    parser.add_argument("--kind", help="what to announce; default: the cloud's spot preemption")
    parser.add_argument(
        "--notice", type=float, metavar="S", help="seconds that it leaves; default: the cloud's"
    )
    arguments = parser.parse_args()
    cloud: CloudName = arguments.cloud
    kind = arguments.kind or KINDS[cloud][0]
    if kind not in KINDS[cloud]:
        parser.error(f"--kind for {cloud}: {', '.join(KINDS[cloud])}")
    with MetadataServer(cloud, port=arguments.port) as server:
        print(f"RAY_CKPT_METADATA={cloud} RAY_CKPT_METADATA_URL={server.url}", flush=True)
        if arguments.after is not None:
            time.sleep(arguments.after)
            server.announce(kind, NOTICE_S[cloud] if arguments.notice is None else arguments.notice)
            print(f"announced: {kind}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
