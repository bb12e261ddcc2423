"""Find memory of the service that this process holds: descriptors, mappings, threads, temporary files."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

MEMORY = re.compile(r"memfd:(ray_ckpt-[a-z]+)")
THREADS = ("ray_ckpt-prefetch", "ray_ckpt-populate")  # others wait in the pools of an agent
TEMPORARY = ".tmp"


def descriptors() -> Counter[str]:
    """Count the open descriptors of memory by kind, such as `ray_ckpt-prefetch`."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if match := MEMORY.search(str(fd.readlink())):
                found[match[1]] += 1
    return found


def mappings() -> Counter[str]:
    """Count the mappings of memory by kind."""
    return Counter(MEMORY.findall(Path("/proc/self/maps").read_text()))


def collected_mappings(kinds: Iterable[str], before: Counter[str]) -> Counter[str]:
    """Return the mappings beyond `before`; collect garbage only if there are some."""
    kinds = tuple(kinds)
    for _ in range(2):
        left = mappings() - before
        found = Counter({kind: left[kind] for kind in left if kind.startswith(kinds)})
        if not found:
            break
        gc.collect()
    return found


def threads() -> list[str]:
    """Return the names of the service's threads that are alive."""
    return sorted(each.name for each in threading.enumerate() if each.name.startswith(THREADS))


def temporary_files(root: Path) -> list[str]:
    """Return the unfinished files below a folder."""
    return sorted(str(path) for path in root.rglob(f"{TEMPORARY}*"))
