"""Settings of a run of the bench: how many bytes, how often, and where on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One run of the bench.

    `size_bytes` is the state that a save or a restore moves, `repeat` the samples of a row, and `folder` lies
    on the disk to be measured. A `quick` run only shows that all rows work, with everything as small as
    possible. `server` is the server of the rows `remote`: one of `s3_server.KINDS`, which is started for
    them, or a storage path on S3; `peers` are the other libraries to measure. `num_nodes` are the nodes of
    the rows `ticket` and `fleet`.
    """

    size_bytes: int
    repeat: int
    folder: Path
    quick: bool = False
    server: str = "strict"
    peers: tuple[str, ...] = ()
    num_nodes: int | None = None

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """Make a folder in `folder` and remove it with its content at the end."""
        with TemporaryDirectory(prefix="ray_ckpt-bench-", dir=self.folder) as path:
            yield Path(path)
