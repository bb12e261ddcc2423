"""An S3 server on this machine, in a separate process, for the demo and the bench. Not for data.

`strict` is the store of `ray_ckpt.testing`, which is always available; `ministack` is a server of another
project and must be installed by `make .venv-servers/.ready`. Both keep objects in memory.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import botocore.session

from tests.servers.strict_store import StrictStore

TOOLS = Path(__file__).resolve().parents[2] / ".venv-servers" / "bin"
KINDS = ("strict", "ministack")
REGION = "us-east-1"
START_S = 60.0  # time limit until the server answers; ministack takes about 2 s
POLL_S = 0.1
ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "strict",
    "AWS_SECRET_ACCESS_KEY": "strict-secret",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_REGION": REGION,
    "AWS_CONFIG_FILE": os.devnull,  # the user's own accounts are not used
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}
OTHERS = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")  # would win


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A running server with an existing bucket. Clients of the server need `ENVIRONMENT`."""

    kind: str
    endpoint: str
    bucket: str

    def url(self, prefix: str) -> str:
        """Return a storage path in the form that pyarrow, and therefore Ray Train, accepts."""
        host = self.endpoint.removeprefix("http://")
        return f"s3://{self.bucket}/{prefix}?endpoint_override={host}&region={REGION}&scheme=http"


def tool(name: str) -> str | None:
    """Return the path of a program in the servers' environment or on this machine."""
    return shutil.which(name, path=os.pathsep.join([str(TOOLS), os.environ.get("PATH", os.defpath)]))


@contextmanager
def running(kind: str, bucket: str) -> Iterator[S3Server]:
    """Start a server of one of KINDS with an empty bucket, and put its keys into this process's environment.

    Raise FileNotFoundError if the server is not installed, OSError if the server does not start.
    """
    with credentials(), _started(kind, bucket) as endpoint:
        yield S3Server(kind=kind, endpoint=endpoint, bucket=bucket)


@contextmanager
def credentials() -> Iterator[None]:
    """Set the environment to the keys of these servers, without the user's own."""
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, *OTHERS)}
    for name in OTHERS:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _started(kind: str, bucket: str) -> Iterator[str]:
    """Start the server and yield its endpoint."""
    if kind == "strict":
        with StrictStore.process(buckets=(bucket,)) as store:
            yield store.endpoint
        return
    program = tool("ministack")
    if program is None:
        raise FileNotFoundError("ministack is not installed; `make .venv-servers/.ready` does it")
    port = _free_port()
    own = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    with subprocess.Popen(
        [program], env={**os.environ, **own}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _wait(process, port)
            endpoint = f"http://127.0.0.1:{port}"
            _make_bucket(endpoint, bucket)
            yield endpoint
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/")
            connection.getresponse()
            return
        time.sleep(POLL_S)
    raise OSError("ministack does not answer")


def _make_bucket(endpoint: str, bucket: str) -> None:
    client = botocore.session.Session().create_client("s3", endpoint_url=endpoint)
    with contextlib.closing(client):
        client.create_bucket(Bucket=bucket)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
