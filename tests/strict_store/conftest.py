"""One store in its own process for all tests here; each test has a bucket of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import botocore.session
import pytest
from botocore.config import Config

from tests.servers.strict_store import StrictStore

_numbers = itertools.count()
_SESSION = botocore.session.Session()  # reads descriptions of all services once


@pytest.fixture(scope="session")
def running() -> Iterator[StrictStore]:
    with StrictStore.process() as store:
        yield store


@pytest.fixture
def store(running: StrictStore) -> Iterator[StrictStore]:
    yield running
    running.clear_faults()
    running.set_clock_offset(0)


@pytest.fixture
def bucket(store: StrictStore) -> str:
    name = f"bucket-{next(_numbers)}"
    store.make_bucket(name)
    return name


def s3_client(endpoint: str, *, attempts: int = 1, secret: str = "strict-secret", **options: Any) -> Any:
    """botocore's, which repeats nothing."""
    return _SESSION.create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=options.pop("access_key", "strict"),
        aws_secret_access_key=secret,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": attempts, "mode": "standard"},
            **{"read_timeout": 10, **options},
        ),
    )


@pytest.fixture(scope="session")
def s3(running: StrictStore) -> Iterator[Any]:
    client = s3_client(running.endpoint)
    yield client
    client.close()
