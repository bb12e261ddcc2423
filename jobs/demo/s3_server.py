"""An S3 server on this machine, in a separate process, for the demo and the bench. Not for data.

`strict` is the store of `ray_ckpt.testing`, which is always available; `ministack` is a server of another
project and must be installed by `make .venv-servers/.ready`. Both keep objects in memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import botocore.session

from tests.servers import programs
from tests.servers.strict_store import StrictStore

TOOLS = programs.HOME / "bin"
KINDS = ("strict", "ministack")
REGION = "us-east-1"
ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": programs.ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": programs.SECRET_KEY,
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

    The user's own keys are not used. Raise RuntimeError if the server is not installed or does not start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, ENVIRONMENT))
        for name in OTHERS:
            os.environ.pop(name, None)
        if kind == "strict":
            endpoint = stack.enter_context(StrictStore.process(buckets=(bucket,))).endpoint
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray_ckpt-s3-"))
            endpoint = stack.enter_context(programs.ministack(Path(folder)))
            client = botocore.session.Session().create_client("s3", endpoint_url=endpoint)
            with contextlib.closing(client):
                client.create_bucket(Bucket=bucket)
        yield S3Server(kind=kind, endpoint=endpoint, bucket=bucket)
