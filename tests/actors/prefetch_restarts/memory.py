"""Find memory of the service that this process holds: descriptors, mappings, threads, temporary files."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

MEMORY = re.compile(r"memfd:(ray_ckpt-[a-z]+)")
THREADS = ("ray_ckpt-prefetch", "ray_ckpt-populate")  # others wait in the pools of an agent
TEMPORARY = ".tmp"
GONE_S = 2.0  # longest wait for threads that still refer to a mapping
POLL_S = 0.02


def descriptors() -> Counter[str]:
    """Count the open descriptors of memory by kind, such as `ray_ckpt-prefetch`."""
    return Counter(_open().values())


def open_numbers() -> set[int]:
    """Return the numbers of the open descriptors of memory."""
    return set(_open())


def _open() -> dict[int, str]:
    found: dict[int, str] = {}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if match := MEMORY.search(str(fd.readlink())):
                found[int(fd.name)] = match[1]
    return found


def mappings() -> Counter[str]:
    """Count the mappings of memory by kind."""
    return Counter(MEMORY.findall(Path("/proc/self/maps").read_text()))


async def mapped_for_long(kinds: Sequence[str], allowed: Counter[str]) -> dict[str, int]:
    """Return the mappings beyond those that are allowed, if they stay for GONE_S and through a collection."""
    deadline_s = time.monotonic() + GONE_S
    while True:
        beyond = mappings() - allowed
        found = {kind: beyond[kind] for kind in beyond if kind.startswith(tuple(kinds))}
        if not found or time.monotonic() > deadline_s:
            return found
        gc.collect()
        await asyncio.sleep(POLL_S)


def threads() -> list[str]:
    """Return the names of the service's threads that are alive."""
    return sorted(each.name for each in threading.enumerate() if each.name.startswith(THREADS))


def temporary_files(root: Path) -> list[str]:
    """Return the unfinished files below a folder."""
    return sorted(str(path) for path in root.rglob(f"{TEMPORARY}*"))
