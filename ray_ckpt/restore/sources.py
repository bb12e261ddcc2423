"""Sources of a file's bytes: a disk, the storage path, memory of another process, a peer."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ray_ckpt.errors import ConfigError, Unavailable
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.storage.local.pages import is_write_sealed, map_shared
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.transport.client import SLOWEST_BYTES_PER_S, PeerClient
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.wire import FileName

REMOTE_TRIES = 2  # a connection may break within a response; the store's client repeats single requests
PEER_TRIES = 2  # a connection may break once; after that this restore no longer uses the peer
BUSY_TRIES = 5  # of reading from a busy peer that serves nothing; it lets each wait for 20 s
MAX_IDLE = 64  # open connections that no thread uses; a restore may read from thousands of peers

Blocks: TypeAlias = Generator[memoryview, None, None]


class ByteSource(ABC):
    """A source of one file's bytes, shared by the threads that read it."""

    tries = 1
    is_verified = False  # the bytes were compared with their digests, and nobody can change them since
    left_out: tuple[str, ...] = ()  # nodes whose files a computed file does without

    def open(self) -> None:  # noqa: B027
        """Prepare a read; OSError, EOFError or Unavailable if the read cannot succeed."""

    def check(self) -> None:  # noqa: B027
        """Check after a read; Unavailable if the bytes may have changed meanwhile."""

    @abstractmethod
    def read(self, ranges: Sequence[tuple[int, int]]) -> Blocks:
        """Return the bytes of the ranges (offset, size), one after the other, in blocks of any size."""

    def give_up(self) -> None:  # noqa: B027
        """Note that the last try has failed."""


class Disk(ByteSource):
    """A file on a disk of this node."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, ranges: Sequence[tuple[int, int]]) -> Blocks:
        for offset, size in ranges:
            yield from read_blocks_direct(self._path, offset, size)


class Remote(ByteSource):
    """A file on the storage path, which may be stored compressed."""

    tries = REMOTE_TRIES

    def __init__(self, tier: RemoteTier, directory: str, file: str) -> None:
        self._tier = tier
        self._directory = directory
        self._file = file

    def open(self) -> None:
        try:
            _ = self._tier.files
        except ConfigError as error:  # such as missing credentials: another source may work
            raise Unavailable(str(error), refused=True) from None

    def read(self, ranges: Sequence[tuple[int, int]]) -> Blocks:
        yield from self._tier.read(self._directory, self._file, ranges)


class Mapped(ByteSource):
    """Memory of another process: an arena, or the agent's buffer of shared rows.

    Each extent is mapped separately, so that all threads fill and release page tables at once: with small
    pages this takes nearly as long as the copy. The views must not outlive the file's bytes: an arena keeps
    its size, and is freed when the last process has unmapped it. With `is_verified` the agent has compared
    all bytes with their digests; that counts only if the kernel lets no process write to the memory.
    """

    def __init__(self, path: str, *, base: int, seal: bytes, is_verified: bool = False) -> None:
        self._path = path
        self._base = base
        self._seal = seal
        self.is_verified = is_verified
        self._lock = threading.Lock()
        self._fd: int | None = None

    def open(self) -> None:
        self.check()

    def check(self) -> None:
        if os.pread(self._file(), len(self._seal), 0) != self._seal:
            raise Unavailable("the arena holds a newer capture.", lost=True)

    def read(self, ranges: Sequence[tuple[int, int]]) -> Blocks:
        fd = self._file()
        (first, _), (last, last_bytes) = ranges[0], ranges[-1]
        start = self._base + first
        end = min(self._base + last + last_bytes, os.fstat(fd).st_size)
        memory = map_shared(fd, start, end) if end > start else memoryview(b"")
        for offset, size in ranges:
            at = offset - first
            yield memory[at : at + size]
            if at + size > memory.nbytes:
                raise EOFError(f"it ends at byte {end - self._base}")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _file(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                self.is_verified = self.is_verified and is_write_sealed(self._fd)
            return self._fd


class Peer(ByteSource):
    """A file on another node."""

    tries = PEER_TRIES

    def __init__(self, peers: Peers, endpoint: str, name: FileName) -> None:
        self._peers = peers
        self._endpoint = endpoint
        self._name = name

    def open(self) -> None:
        if self._endpoint in self._peers.gone:
            raise Unavailable(f"{self._endpoint} did not answer.", refused=True)

    def read(self, ranges: Sequence[tuple[int, int]]) -> Blocks:
        with self._peers.acquire(self._endpoint) as peer:
            slowest = self._peers.slowest_bytes_per_s
            yield from peer.read(self._name, ranges, slowest_bytes_per_s=slowest)

    def give_up(self) -> None:
        self._peers.gone.add(self._endpoint)


class Peers:
    """Pool of connections to peers; a thread has a connection to itself while it reads."""

    def __init__(
        self,
        credentials: Credentials | None,
        slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S,
        gone: set[str] | None = None,
    ) -> None:
        self._credentials = credentials
        self.slowest_bytes_per_s = slowest_bytes_per_s  # lowest rate of a response
        self._lock = threading.Lock()
        self._idle: dict[str, list[PeerClient]] = {}
        self.gone = gone if gone is not None else set()  # endpoints that this restore no longer uses

    @contextlib.contextmanager
    def acquire(self, endpoint: str) -> Iterator[PeerClient]:
        """Lend a connection to `endpoint`; Unavailable for "", a node whose address is not known here."""
        if not endpoint:
            raise Unavailable("The address of the node is not known here.", refused=True, answered=True)
        if self._credentials is None:
            raise Unavailable("There are no credentials for peers.", refused=True)
        with self._lock:
            idle = self._idle.get(endpoint)
            peer = idle.pop() if idle else None
        peer = peer or PeerClient(endpoint, credentials=self._credentials)
        try:
            yield peer
        except BaseException:
            peer.__exit__()  # a failed connection may be in any state
            raise
        with self._lock:
            is_kept = sum(map(len, self._idle.values())) < MAX_IDLE
            if is_kept:
                self._idle.setdefault(endpoint, []).append(peer)
        if not is_kept:
            peer.__exit__()

    def read_small(self, endpoint: str, name: FileName, *, max_bytes: int) -> bytes:
        """Return a whole small file. Raise Unavailable, also for a peer that has not answered before."""
        for tries_left in reversed(range(PEER_TRIES)):
            if endpoint in self.gone:
                break
            try:
                with self.acquire(endpoint) as peer:
                    return peer.read_file(name, max_bytes=max_bytes)
            except Unavailable as error:
                is_refused = bool(error.fields.get("refused"))
                if not error.fields.get("answered") and (is_refused or not tries_left):
                    self.gone.add(endpoint)
                if is_refused or not tries_left:
                    raise
        raise Unavailable(f"{endpoint} did not answer.", refused=True)

    def close(self) -> None:
        while self._idle:
            for peer in self._idle.popitem()[1]:
                peer.__exit__()
