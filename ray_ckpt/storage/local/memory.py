"""Memory that is available to this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_FILES = "memory.max", "memory.current"  # of a cgroup: limit and usage
_FILES_OF_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"


def available_memory_bytes() -> int:
    """Return the memory that this process may still allocate, on the machine and in its cgroups.

    Page cache that the kernel can reclaim counts as free.
    """
    with open("/proc/meminfo") as file:  # noqa: PTH123
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    for folder, is_v2 in cgroups("memory"):
        limit_file, usage_file = _FILES if is_v2 else _FILES_OF_V1
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())
            used = int((folder / usage_file).read_text()) - _reclaimable_bytes(folder)
            free = min(free, limit - used)
    return max(free, 0)


def cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the process's cgroup and of its parents; True for those of version 2."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":  # version 2
                yield from ((folder, True) for folder in _upwards(root, path))
            elif controller in controllers.split(","):
                yield from ((folder, False) for folder in _upwards(root / controller, path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a cgroup and of its parents; in a container some of these may not exist."""
    folder = root / path.strip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _reclaimable_bytes(folder: Path) -> int:
    fields = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
