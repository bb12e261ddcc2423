"""The wait for an asynchronous save of Megatron-core, without Megatron-core."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.interop.megatron import pending


def test_the_lock_ends_with_the_save_even_if_its_file_was_cleaned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[Callable[[], None]] = []

    class Thread:
        def __init__(self, *, target: Any, args: Any, **options: Any) -> None:
            threads.append(lambda: target(*args))

        def start(self) -> None:
            pass

    monkeypatch.setattr(pending, "Thread", Thread)
    found = pending.Pending(lambda: None)
    Path(found.path).unlink()  # as a cleaner of /tmp does
    threads[0]()
    found.result()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(found._file)
