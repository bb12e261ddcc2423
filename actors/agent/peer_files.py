"""Serve files of this node to peers, and store the copies that peers send."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from typing_extensions import Buffer

from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.actors.agent.still_files import is_intact, same_here
from ray_ckpt.errors import Unavailable
from ray_ckpt.format.digest import FRAGMENT_PREFIX
from ray_ckpt.format.names import attempt_of
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.storage.local.files import size_of
from ray_ckpt.transport.wire import BYTES_WANTED, FileName, PutRequest
from ray_ckpt.types import FileEntry

MAX_SERVED = 16  # concurrent reads by peers, each with blocks of read-ahead
SERVE_WAIT_S = 20.0  # longest wait for another read to end; then the peer, whose call may still last, retries


class PeerFiles:
    """Files of the runs that are open on this node. Methods run in the server's threads."""

    def __init__(self, runs: dict[str, NodeRun]) -> None:
        self._runs = runs
        self._readers = threading.BoundedSemaphore(MAX_SERVED)

    def _run(self, name: FileName) -> NodeRun:
        if name.run_uid not in self._runs:
            raise Unavailable(f"run {name.run_uid} is not open here")
        return self._runs[name.run_uid]

    def put(self, request: PutRequest, chunks: Iterable[Buffer]) -> str:
        name, run = request.name, self._run(request.name)
        self._check_wanted(run, name)
        if request.is_link:
            entry = FileEntry(name=name.file, size_bytes=request.size_bytes, digest=request.digest)
            same = same_here(run, name.directory, entry)
            if request.is_repair:
                same = (other for other in same if is_intact(run, other, entry))
            if not run.staging.link(name.run_uid, same, name.directory, name.file):
                return BYTES_WANTED
        else:
            run.check_space(request.size_bytes, what=f"A copy of {name.file}")
            run.staging.put(
                name.run_uid,
                name.directory,
                name.file,
                chunks,
                size_bytes=request.size_bytes,
                expect=request.digest,
            )
        run.reach_epoch(request.epoch)
        try:
            self._check_wanted(run, name)
        except Unavailable:  # the delete may have listed the folder before the file was there
            run.staging.delete(name.run_uid, name.directory)
            raise
        if name.file.startswith(FRAGMENT_PREFIX):
            self._check_complete(run, name)
        return request.digest

    def _check_wanted(self, run: NodeRun, name: FileName) -> None:
        """Raise Unavailable if the folder is being deleted.

        Called before and after a write, so that no deleted copy counts. After the second call, no order of
        an epoch below the sender's deletes the copy.
        """
        if run.machine.is_deleted(attempt_of(name.directory)):
            raise Unavailable(f"{name.directory} is being deleted here")

    def _check_complete(self, run: NodeRun, name: FileName) -> None:
        """Raise Unavailable if a file that a fragment lists is not here.

        A scrub may have taken away a file that was linked here, before there was a fragment that listed it.
        """
        held = run.staging.holdings(name.run_uid, directory=name.directory)
        if not any(each.entry.name == name.file for each in held):
            raise Unavailable(f"{name.directory} is not complete here: a file that {name.file} lists is gone")

    def read(self, name: FileName, offset: int, nbytes: int | None) -> Iterator[memoryview]:
        path = self._run(name).staging.path(name.run_uid, name.directory, name.file)
        if not self._readers.acquire(timeout=SERVE_WAIT_S):
            raise Unavailable(f"{MAX_SERVED} others read here; try again", refused=False)
        try:
            yield from read_blocks_direct(path, offset, nbytes)
        finally:
            self._readers.release()

    def size(self, name: FileName) -> int | None:
        path = self._run(name).staging.path(name.run_uid, name.directory, name.file)
        try:
            return size_of(path)
        except FileNotFoundError:
            return None
