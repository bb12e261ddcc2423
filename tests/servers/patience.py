"""Clients that give up soon, so that a test of a failing store takes no minutes."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import gcsfs.retry
import pytest
import s3fs

from ray_ckpt.storage.remote import gcs, object_store, s3

TRIES = 4  # of a request by a client library, with milliseconds between them
REQUEST_S = 1  # for a request: a hanging one costs as much


def lose_patience(monkeypatch: pytest.MonkeyPatch, *, tries: int = TRIES) -> None:
    """Shorten the time-outs of stores that are opened from now on, by either backend."""

    async def wait(seconds: float) -> None:
        await asyncio.sleep(0.002)

    def retry_config(retry_s: int) -> dict[str, Any]:
        first, most = timedelta(milliseconds=2), timedelta(milliseconds=20)
        backoff = {"init_backoff": first, "max_backoff": most, "base": 2}
        return {"max_retries": tries - 1, "retry_timeout": timedelta(seconds=retry_s), "backoff": backoff}

    for module in (s3, gcs):
        monkeypatch.setattr(module, "retry_config", retry_config)
    for name in ("PUT_S", "GET_S", "STALL_S", "LOG_REQUEST_S"):
        monkeypatch.setattr(object_store, name, REQUEST_S)
    monkeypatch.setattr(gcs, "REQUEST_S", REQUEST_S)
    monkeypatch.setattr(gcs, "MAX_TRIES", tries)
    monkeypatch.setattr(gcs, "BACKOFF_S", 0.002)
    monkeypatch.setattr(s3, "RETRIES", {"max_attempts": min(tries, 2)})
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", tries)
    monkeypatch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(sleep=wait))  # it tries six times, always
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
