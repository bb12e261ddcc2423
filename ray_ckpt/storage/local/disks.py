"""A node's local tier on one or several disks: a Staging folder on each, used as one.

A checkpoint's files are spread over the disks, a fragment may lie on another disk than the files that it
lists, and a file is found by looking. A disk that fails a write takes no new files any more; what it holds
is still read. The name of the storage is that of the first disk. With one disk this is that disk's Staging.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from typing_extensions import Buffer

from ray_ckpt.core.ownership import RunMark
from ray_ckpt.errors import InsufficientSpace, StagingError
from ray_ckpt.storage.local import files
from ray_ckpt.storage.local.direct import Written
from ray_ckpt.storage.local.staging import Holding, Staging

log = logging.getLogger("ray_ckpt.disks")

Answer = TypeVar("Answer")

FULL = (errno.ENOSPC, errno.EDQUOT)  # another file may fit again after something was deleted
BROKEN = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN)  # no new files until a restart


class Disks:
    """The staging folders of a node. Holds an exclusive lock on each until closed.

    A folder of several that cannot be used because its disk is broken is left out, loudly, as long as one
    works. Any other StagingError is raised: a folder that somebody else has is a mistake in the options.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._stages: list[Staging] = []
        self._out: set[Path] = set()  # roots that take no new files
        self._pending: dict[Path, int] = dict.fromkeys(roots, 0)  # bytes that are being written to each
        self._lock = threading.Lock()  # of the two above
        broken: StagingError | None = None
        try:
            for root in self._pending:
                try:
                    self._stages.append(Staging(root))
                except StagingError as error:
                    if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in BROKEN):
                        raise
                    log.error("the staging folder %s is left out: %s", root, error)
                    broken = error
            if broken is not None and not self._stages:
                raise broken
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for stage in self._stages:
            stage.close()

    @property
    def roots(self) -> tuple[Path, ...]:
        return tuple(stage.root for stage in self._stages)

    @property
    def disk(self) -> str:
        """The name of the node's storage, which nodes come and go with."""
        return self._stages[0].disk

    # -- space ---------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Bytes that may still be written, over all file systems that take new files."""
        return sum(files.free_bytes(stage.root) for stage in self._file_systems())

    def total_bytes(self) -> int:
        """The size of the same file systems."""
        return sum(files.total_bytes(stage.root) for stage in self._file_systems())

    def check_space(
        self, needed_bytes: int, *, reserve_bytes: int, what: str, is_one_file: bool = True
    ) -> None:
        """InsufficientSpace unless `needed_bytes` fit and `reserve_bytes` stay free on each disk.

        What is one file must fit on one disk, anything else on all of them together.
        """
        if len(self._stages) == 1:
            self._stages[0].check_space(needed_bytes, reserve_bytes=reserve_bytes, what=what)
            return
        free = {stage.root: files.free_bytes(stage.root) for stage in self._file_systems()}
        rooms = [max(0, left - reserve_bytes) for left in free.values()]
        room = max(rooms) if is_one_file else sum(rooms)
        if room < needed_bytes:
            there = ", ".join(f"{root} ({left:,} free)" for root, left in free.items())
            raise InsufficientSpace(
                f"{what} needs {needed_bytes:,} bytes {'on one' if is_one_file else 'over all'} of {there}; "
                f"each keeps {reserve_bytes:,} in reserve.",
                hint="Free space there, point staging= to larger disks, or lower replicas or reserve_bytes.",
                path=there,
                needed_bytes=needed_bytes,
                free_bytes=sum(free.values()),
            )

    # -- files ---------------------------------------------------------------------------------------

    def path(self, run_uid: str, directory: str, file: str) -> Path:
        """Where the file is; if it is nowhere, a path where it is not."""
        return self._stage_of(run_uid, directory, file).path(run_uid, directory, file)

    def put(
        self,
        run_uid: str,
        directory: str,
        file: str,
        chunks: Iterable[Buffer],
        *,
        size_bytes: int | None = None,
        spans: Sequence[tuple[int, int]] = (),
        expect: str | None = None,
    ) -> Written:
        """Write one file of a checkpoint durably: where it is already, or where most room is.

        A disk that fails is passed over if `chunks` can be read again (a sequence); of an iterator, some is
        gone, so its OSError is raised, and the next `put` goes elsewhere.
        """
        is_repeatable = iter(chunks) is not chunks
        stages = self._places(run_uid, directory, file)
        while True:
            stage = stages.pop(0)
            try:
                with self._writing(stage, size_bytes or 0):
                    return stage.put(
                        run_uid, directory, file, chunks, size_bytes=size_bytes, spans=spans, expect=expect
                    )
            except OSError as error:
                if not self._may_pass_over(stage, error) or not stages or not is_repeatable:
                    raise

    def delete(self, run_uid: str, directory: str) -> None:
        """Delete one checkpoint's files durably, on each disk data before manifests. Absent is fine.

        The first disk, where fragments go, is last. OSError if a disk failed, after the others are done.
        """
        failure: OSError | None = None
        for stage in reversed(self._stages):
            try:
                stage.delete(run_uid, directory)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def quarantine(self, run_uid: str, directory: str, file: str) -> None:
        """Move a bad file out of its checkpoint, which is no holding any more."""
        self._stage_of(run_uid, directory, file).quarantine(run_uid, directory, file)

    def forget(self, run_uid: str, kept: Collection[str]) -> None:
        """Delete what is here of a run but its folders `kept`. OSError if a disk failed, after the others."""
        failure: OSError | None = None
        for stage in reversed(self._stages):
            try:
                stage.forget(run_uid, kept)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    # -- marks ---------------------------------------------------------------------------------------

    def write_mark(self, run_uid: str, *, run_name: str, storage_path: str, epoch: int) -> None:
        """Remember durably, on every disk that takes new files, whose files these are and the highest epoch.

        A disk that fails is passed over; OSError if all do.
        """
        self._ask_each(
            self._working(),
            lambda stage: stage.write_mark(
                run_uid, run_name=run_name, storage_path=storage_path, epoch=epoch
            ),
        )

    def marks(self, run_name: str, storage_path: str) -> tuple[RunMark, ...]:
        """What the disks remember of runs of this name and storage path; normally one."""
        found: dict[str, int] = {}
        for stage in self._stages:
            for mark in stage.marks(run_name, storage_path):
                found[mark.run_uid] = max(mark.epoch, found.get(mark.run_uid, 0))
        return tuple(RunMark(run_uid=uid, epoch=epoch) for uid, epoch in sorted(found.items()))

    def epoch(self, run_uid: str) -> int:
        """The highest epoch that has spoken to this node about the run; 0 if none has."""
        return max(stage.epoch(run_uid) for stage in self._stages)

    # -- what is here --------------------------------------------------------------------------------

    def holdings(self, run_uid: str) -> Iterator[Holding]:
        """Every fragment of the run that is complete here, wherever its files lie. See `Staging.holdings`."""
        if len(self._stages) == 1:
            yield from self._stages[0].holdings(run_uid)
            return
        seen = set()
        for held in self._ask_each(self._stages, lambda stage: tuple(stage.holdings(run_uid, self.path))):
            for holding in held:
                key = (holding.fragment.attempt, holding.entry.name)
                if key not in seen:
                    seen.add(key)
                    yield holding

    def directories(self, run_uid: str) -> tuple[str, ...]:
        """Every checkpoint folder of the run, complete or not."""
        found = self._ask_each(self._stages, lambda stage: stage.directories(run_uid))
        return tuple(sorted(set().union(*found)))

    # -- which disk ----------------------------------------------------------------------------------

    def _working(self) -> list[Staging]:
        """The disks that take new files; all, if none does."""
        return [stage for stage in self._stages if stage.root not in self._out] or self._stages[:]

    def _stage_of(self, run_uid: str, directory: str, file: str) -> Staging:
        """The disk that has the file, or any. What a failed disk has is taken last."""
        if len(self._stages) == 1:
            return self._stages[0]
        stages = sorted(self._stages, key=lambda stage: stage.root in self._out)
        return next((stage for stage in stages if stage.path(run_uid, directory, file).exists()), stages[0])

    def _places(self, run_uid: str, directory: str, file: str) -> list[Staging]:
        """Where a file may be written, best first: over the one that is there, or where most room is.

        Fragments go to the first disk that works.
        """
        if len(self._stages) == 1:
            return self._stages[:]
        working = self._working()
        if file.startswith("manifest-"):
            return working
        there = [stage for stage in working if stage.path(run_uid, directory, file).exists()]
        return sorted(working, key=lambda stage: (stage not in there, -self._room(stage)))

    def _room(self, stage: Staging) -> int:
        with contextlib.suppress(OSError):
            return files.free_bytes(stage.root) - self._pending[stage.root]
        return 0

    def _file_systems(self) -> list[Staging]:
        """One of the working disks for each file system that they are on."""
        return list({stage.root.stat().st_dev: stage for stage in self._working()}.values())

    @contextlib.contextmanager
    def _writing(self, stage: Staging, size_bytes: int) -> Iterator[None]:
        """Files that are written at the same time go to different disks."""
        with self._lock:
            self._pending[stage.root] += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self._pending[stage.root] -= size_bytes

    # -- failures ------------------------------------------------------------------------------------

    def _may_pass_over(self, stage: Staging, error: OSError) -> bool:
        """Whether another disk may do what this one could not; it is said, and remembered if it is broken."""
        if len(self._stages) == 1 or error.errno not in (*FULL, *BROKEN):
            return False
        if error.errno in BROKEN and stage.root not in self._out:
            with self._lock:
                self._out.add(stage.root)
            log.error("the disk of %s takes no new files any more: %s", stage.root, error)
        else:
            log.warning("the disk of %s is passed over: %s", stage.root, error)
        return True

    def _ask_each(self, stages: Iterable[Staging], ask: Callable[[Staging], Answer]) -> list[Answer]:
        """The answers of the disks that work; OSError if none does."""
        answers: list[Answer] = []
        failure: OSError | None = None
        for stage in stages:
            try:
                answers.append(ask(stage))
            except OSError as error:
                if not self._may_pass_over(stage, error):
                    raise
                failure = error
        if failure is not None and not answers:
            raise failure
        return answers
