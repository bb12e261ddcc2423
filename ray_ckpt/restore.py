"""Reading a checkpoint's bytes from the cheapest intact source, each checked against its digest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ray_ckpt.errors import Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.storage.files import read_range
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import (
    ARENA_PAGE_BYTES,
    AttemptId,
    CheckpointInfo,
    Fragment,
    ManifestRow,
    RestoredPart,
    Tier,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One place that holds a file: a path on this node or the storage path, or a peer's endpoint."""

    tier: Tier
    where: str  # for people: a node id or a path
    path: str = ""
    endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTicket:
    """What a rank needs to restore: the checkpoint, its manifest, and each file's sources, best first."""

    session: int
    epoch: int  # of the coordinator that opened the session
    checkpoint: CheckpointInfo | None
    fragments: tuple[Fragment, ...] = ()
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    damage: tuple[str, ...] = ()  # why the manifest itself cannot be had; then there is nothing to read


class SourceReader:
    """Reads rows of a checkpoint's files; remembers what came from where and what no source could give."""

    def __init__(self, attempt: AttemptId, sources: Mapping[str, Sequence[Source]], *, token: str) -> None:
        self._attempt = attempt
        self._sources = sources
        self._token = token
        self.parts: list[RestoredPart] = []
        self.damage: list[str] = []
        self.rejected: list[str] = []

    def read(
        self, rows: Iterable[ManifestRow], take: Callable[[ManifestRow, bytearray | bytes], None]
    ) -> None:
        """Give the verified bytes of each row to `take`. Rows without an intact source go to `damage`."""
        files: dict[str, list[ManifestRow]] = {}
        for row in rows:
            files.setdefault(row.file, []).append(row)
        for file, wanted in sorted(files.items()):
            left = sorted(wanted, key=lambda r: r.byte_offset)
            for source in self._sources.get(file, ()):
                if not left:
                    break
                left = self._read_from(source, file, left, take)
            self.damage += [f"{file}: {row.label}" for row in left]

    def _read_from(
        self,
        source: Source,
        file: str,
        rows: list[ManifestRow],
        take: Callable[[ManifestRow, bytearray | bytes], None],
    ) -> list[ManifestRow]:
        """Rows that this source could not give intact."""
        start_s = time.monotonic()
        bad, size = [], 0
        pending = list(rows)
        try:
            for data in self._bytes(source, file, [(r.byte_offset, r.nbytes) for r in rows]):
                row = pending.pop(0)
                if digest(data) != row.digest:
                    bad.append(row)
                    self.rejected.append(f"{file}: {row.label} on {source.tier} {source.where}: wrong digest")
                    continue
                take(row, data)
                size += row.nbytes
        except (OSError, EOFError, Unavailable) as error:
            self.rejected.append(f"{file} on {source.tier} {source.where}: {error}")
        if size:
            seconds = time.monotonic() - start_s
            self.parts.append(
                RestoredPart(
                    file=file, tier=source.tier, where=source.where, size_bytes=size, seconds=seconds
                )
            )
        return bad + pending

    def _bytes(self, source: Source, file: str, ranges: list[tuple[int, int]]) -> Iterator[bytearray | bytes]:
        if source.tier == "peer":
            name = FileName(run_uid=self._attempt.run_uid, directory=self._attempt.directory, file=file)
            with PeerClient(source.endpoint, token=self._token) as peer:
                yield from peer.read(name, ranges)
            return
        base = 0
        if source.tier == "memory":
            base = ARENA_PAGE_BYTES
            sealed = read_range(Path(source.path), 0, 16)
            if sealed != self._attempt.attempt.encode():
                raise Unavailable("the arena has been captured into again.")
        for offset, nbytes in ranges:
            yield read_range(Path(source.path), base + offset, nbytes)
