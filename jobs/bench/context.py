"""Settings of a run of the bench: how many bytes, how often, and where on the disk."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

QUICK_BYTES = 64 << 20  # state in a quick run, which must end within a minute on two cores
QUICK_REPEAT = 2  # samples per row in a quick run; a median of two still shows their spread
UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One run of the bench.

    `size_bytes` is the state that a save or a restore moves, `repeat` the samples of a row, and `folder` lies
    on the disk to be measured. A `quick` run only shows that all rows work, with everything as small as
    possible. `server` is the server of the rows `remote`: one of `s3_server.KINDS`, which is started for
    them, or a storage path on S3.
    """

    size_bytes: int
    repeat: int
    folder: Path
    quick: bool = False
    server: str = "strict"

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """Make a folder in `folder` and remove it with its content at the end."""
        path = Path(tempfile.mkdtemp(prefix="ray_ckpt-bench-", dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path)


def parse_size(text: str) -> int:
    """Parse "2GiB", "500 MB" or "4096" into bytes. Raise ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    if match is None or (size := int(float(match[1]) * UNITS[match[2]])) < 1:
        raise ValueError(f"{text!r} is no size; write 2GiB, 512MiB or a number of bytes")
    return size


def format_size(size_bytes: int) -> str:
    """Return the size in its largest binary unit: "2 GiB", "1.5 MiB"."""
    for name in ("GiB", "MiB", "KiB"):
        if size_bytes >= UNITS[name.upper()]:
            return f"{size_bytes / UNITS[name.upper()]:.3g} {name}"
    return f"{size_bytes} B"
