from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: real disks take too long over thousands of fsyncs."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="crash-", dir=memory if os.access(memory, os.W_OK) else None)
    yield Path(folder)
    shutil.rmtree(folder)
