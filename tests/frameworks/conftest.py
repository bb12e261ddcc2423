"""Collection of one framework's folder: the others need packages that this environment does not have."""

from __future__ import annotations

import os
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the folders of frameworks other than RAY_CKPT_FRAMEWORK, which `make test-frameworks` sets."""
    if collection_path.parent != Path(__file__).parent or not collection_path.is_dir():
        return None
    return collection_path.name != os.environ.get("RAY_CKPT_FRAMEWORK") or None
