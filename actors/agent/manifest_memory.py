"""The manifest of a restore in memory: fragments, stored once on a node, which all ranks of the node map.

The memory is a memfd, or a file in /dev/shm for ranks that may not open the agent's files, like an arena
(`arena`). It is freed when no rank maps it and the agent has closed it or has died. It cannot shrink or
change while ranks read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import pyarrow as pa

from ray_ckpt.actors.agent.shared_memory import named_file
from ray_ckpt.errors import InsufficientSpace
from ray_ckpt.format.shard import ALIGNMENT_BYTES
from ray_ckpt.restore.manifest import MappedFragment, MappedManifest
from ray_ckpt.storage.local.memory import available_memory_bytes

MEMORY_SHARE = 0.5  # limit, as a share of free memory: the ranks' models need the rest


class ManifestMemory:
    """Fragments, one after the other. Call `add` from one thread at a time."""

    def __init__(self, *, named: bool = False) -> None:
        self._limit_bytes = int(MEMORY_SHARE * available_memory_bytes())
        self._name: str | None = None
        if named:
            self._fd, self._name = named_file(0, os.sysconf("SC_PAGESIZE"))
        else:
            self._fd = os.memfd_create("ray_ckpt-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._path = self._name or f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            self._sink = pa.OSFile(f"/proc/self/fd/{self._fd}", mode="wb")
        except OSError:
            self._drop()
            raise
        self._parts: list[MappedFragment] = []

    @property
    def size_bytes(self) -> int:
        return sum(self._parts[-1].file) if self._parts else 0

    def add(self, places: pa.Table, file: bytes) -> None:
        """Append a fragment: columns of its rows, and its file. InsufficientSpace if memory is too small."""
        start = self.size_bytes + -self.size_bytes % ALIGNMENT_BYTES
        try:
            self._sink.write(bytes(start - self.size_bytes))
            with pa.ipc.new_stream(self._sink, places.schema) as writer:
                writer.write_table(places)
            middle = self._sink.tell()
            self._sink.write(file)
            end = self._sink.tell()
        except OSError as error:  # /dev/shm is full
            raise InsufficientSpace(f"The manifest does not fit in {self._path}: {error}.") from error
        if end > self._limit_bytes:
            raise InsufficientSpace(
                f"The manifest takes more than {self._limit_bytes:,} bytes, half of the free memory.",
                hint="Restore on nodes with more free memory.",
                needed_bytes=end,
                free_bytes=self._limit_bytes,
            )
        self._parts.append(MappedFragment(places=(start, middle - start), file=(middle, end - middle)))

    def seal(self) -> MappedManifest:
        """Return the manifest for a ticket; nothing can be added any more."""
        self._sink.close()
        if self._name is None:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        return MappedManifest(path=self._path, parts=tuple(self._parts))

    def close(self) -> None:
        """Free the memory, once the ranks that map it have unmapped it. A second call does nothing."""
        if self._fd < 0:
            return
        self._sink.close()
        self._drop()

    def _drop(self) -> None:
        if self._name is not None:
            with contextlib.suppress(FileNotFoundError):
                Path(self._name).unlink()
        os.close(self._fd)
        self._fd = -1
