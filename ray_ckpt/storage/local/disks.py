"""A node's local tier on one or several disks, with a Staging folder on each.

A checkpoint's files are distributed over the disks. A fragment may be on another disk than the files that the
fragment lists, so each disk is checked to find a file. A broken disk gets no new files, but the files on it
are still read. The name of the first disk is the name of the storage. With one disk, all calls go to that
disk's Staging.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from typing_extensions import Buffer

from ray_ckpt.core.ownership import RunMark
from ray_ckpt.errors import LOST_BYTES, InsufficientSpace, StagingError
from ray_ckpt.format.parity import ParityHeader
from ray_ckpt.storage.local import files
from ray_ckpt.storage.local.direct import Written
from ray_ckpt.storage.local.staging import FULL, Holding, KnownFragments, Staging

log = logging.getLogger("ray_ckpt.disks")

Result = TypeVar("Result")

BROKEN = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN)  # no new files until a restart
# Of file systems that make no hard links at all, or none between folders
LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)


class Disks:
    """The staging folders of a node, each with an exclusive lock until `close`.

    If the disk of a folder is broken and another disk works, the folder is left out and an error is logged.
    Any other StagingError is raised: a folder that another agent owns is a mistake in the options.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.known = KnownFragments()
        self._stages: list[Staging] = []
        self._out: set[Path] = set()  # roots that get no new files
        self._linkless: set[Path] = set()  # roots on file systems without hard links
        self._bad: set[tuple[int, int, int]] = set()  # damaged files that could not be moved: see `_identity`
        self._pending: dict[Path, int] = dict.fromkeys(roots, 0)  # bytes that are being written to each root
        self._lock = threading.Lock()  # for `_out` and `_pending`
        self.no_links = threading.Lock()  # held while a file is taken away from all that share it
        broken: StagingError | None = None
        try:
            for root in self._pending:
                try:
                    self._stages.append(Staging(root, self.known))
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
        """The name of the node's storage; the name stays the same when the node gets a new id."""
        return self._stages[0].disk

    # -- space ---------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return the sum of the free bytes of all file systems that get new files."""
        return sum(self._call_each(self._file_systems(), lambda stage: files.free_bytes(stage.root)))

    def total_bytes(self) -> int:
        """Return the total size in bytes of all file systems that get new files."""
        return sum(self._call_each(self._file_systems(), lambda stage: files.total_bytes(stage.root)))

    def check_space(
        self, needed_bytes: int, *, reserve_bytes: int, what: str, is_one_file: bool = True
    ) -> None:
        """Raise InsufficientSpace unless `needed_bytes` fit and `reserve_bytes` stay free on each disk.

        A single file must fit on one disk; several files must fit on all disks together.
        """
        free = dict(
            self._call_each(self._file_systems(), lambda stage: (stage.root, files.free_bytes(stage.root)))
        )
        rooms = [max(0, left - reserve_bytes) for left in free.values()]
        room = max(rooms) if is_one_file else sum(rooms)
        if room < needed_bytes:
            there = ", ".join(f"{root}, which has {left:,} free" for root, left in free.items())
            one_of = "" if len(free) == 1 else "one of " if is_one_file else "all of "
            raise InsufficientSpace(
                f"{what} needs {needed_bytes:,} bytes in {one_of}{there}; "
                f"each disk keeps {reserve_bytes:,} in reserve.",
                hint="Free space there, point staging= to a larger disk, or lower replicas or reserve_bytes.",
                path=there,
                needed_bytes=needed_bytes,
                free_bytes=sum(free.values()),
            )

    # -- files ---------------------------------------------------------------------------------------

    def path(self, run_uid: str, directory: str, file: str) -> Path:
        """Return the path of the file; if no disk has the file, a path on one of the disks."""
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
        """Write one file of a checkpoint durably, to the disk that has the file or has most free space.

        If the disk fails and `chunks` can be read again (a sequence), the next disk is tried. An iterator
        is already partly consumed, so the OSError is raised, and the next `put` uses another disk.
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

    def link(self, run_uid: str, sources: Iterable[str], directory: str, file: str) -> bool:
        """Link a file of one of the checkpoints `sources` into another one, on the disk that has the file.

        The next source is tried if the file of the one before is gone, or is on a disk without hard links.
        Return False if no source can be linked; the caller then writes the file.
        """
        for source in sources:
            stage = self._stage_of(run_uid, source, file)
            if stage.root in self._out or stage.root in self._linkless:
                continue
            try:
                with self.no_links:
                    stage.link(run_uid, source, directory, file)
                return True
            except OSError as error:
                if error.errno in LINKLESS:
                    self._linkless.add(stage.root)
                    log.warning("the disk of %s makes no hard links: %s", stage.root, error)
                    continue
                log.info("%s of %s is not linked: %s", file, source, error)
                if error.errno != errno.ENOENT:
                    return False
        return False

    def delete(self, run_uid: str, directory: str) -> None:
        """Delete the files of one checkpoint durably, if there are any; on each disk data before manifests.

        The first disk, which has the fragments, is last. If a disk fails, process the others, then raise
        OSError, unless the disk is broken and another one works: the files of a disk that comes back are
        orphans, which the next inventory lists.
        """
        self._call_all(lambda stage: stage.delete(run_uid, directory))

    def sharers(self, run_uid: str, directory: str, file: str) -> tuple[str, ...]:
        """Return the other checkpoints in which the file is the same one on the disk, by a hard link."""
        stage = self._stage_of(run_uid, directory, file)
        try:
            found = stage.path(run_uid, directory, file).lstat()
        except FileNotFoundError:
            return ()
        others = (name for name in stage.directories(run_uid) if name != directory and found.st_nlink > 1)
        return tuple(name for name in others if _is_file(stage.path(run_uid, name, file), found))

    def quarantine(self, run_uid: str, directory: str, file: str) -> None:
        """Move a damaged file out of its checkpoint, which is then no longer a holding.

        Nor is it one if the file cannot be moved, as on a full or read-only disk, until the file is written
        anew or the agent is started again. If the disk fails altogether, the file may be intact, and counts.
        """
        stage = self._stage_of(run_uid, directory, file)
        try:
            stage.quarantine(run_uid, directory, file)
        except OSError as error:
            if error.errno not in LOST_BYTES:
                with contextlib.suppress(OSError):
                    self._bad.add(_identity(stage.path(run_uid, directory, file)))
            raise

    def forget(self, run_uid: str, kept: Collection[str]) -> None:
        """Delete a run except the folders `kept`. A disk that fails is treated as by `delete`."""
        self._call_all(lambda stage: stage.forget(run_uid, kept))

    # -- marks ---------------------------------------------------------------------------------------

    def write_mark(self, run_uid: str, *, run_name: str, storage_path: str, epoch: int) -> None:
        """Store the names of the run and its highest epoch durably on every disk that gets new files.

        A disk that fails is skipped. Raise OSError if all fail.
        """
        self._call_each(
            self._working(),
            lambda stage: stage.write_mark(
                run_uid, run_name=run_name, storage_path=storage_path, epoch=epoch
            ),
        )

    def marks(self, run_name: str, storage_path: str) -> tuple[RunMark, ...]:
        """Return the marks of all runs with this name and storage path; normally there is one."""
        found: dict[str, int] = {}
        on_each = self._call_each(self._stages, lambda stage: stage.marks(run_name, storage_path))
        for mark in chain.from_iterable(on_each):
            found[mark.run_uid] = max(mark.epoch, found.get(mark.run_uid, 0))
        return tuple(RunMark(run_uid=uid, epoch=epoch) for uid, epoch in sorted(found.items()))

    def epoch(self, run_uid: str) -> int:
        """Return the highest epoch whose coordinator has contacted this node for the run, or 0."""
        return max(stage.epoch(run_uid) for stage in self._stages)

    # -- what is here --------------------------------------------------------------------------------

    def holdings(self, run_uid: str, *, directory: str | None = None) -> Iterator[Holding]:
        """Yield the run's fragments whose listed files are all on the disks. See `Staging.holdings`.

        Those with a file that is known to be damaged are left out.
        """
        for holding in self._holdings(run_uid, directory):
            fragment = holding.fragment
            if not self._is_bad(run_uid, fragment.attempt.directory, (file.name for file in fragment.files)):
                yield holding

    def _holdings(self, run_uid: str, directory: str | None) -> Iterator[Holding]:
        if len(self._stages) == 1:
            yield from self._stages[0].holdings(run_uid, directory=directory)
            return
        seen = set()
        on_each = self._call_each(
            self._stages, lambda stage: tuple(stage.holdings(run_uid, self.path, directory=directory))
        )
        for on_disk in on_each:
            for holding in on_disk:
                key = (holding.fragment.attempt, holding.entry.name)
                if key not in seen:
                    seen.add(key)
                    yield holding

    def parities(self, run_uid: str, *, directory: str | None = None) -> tuple[ParityHeader, ...]:
        """Return the headers of the run's parity files that are not damaged. See `Staging.parities`."""
        found = self._call_each(
            self._stages, lambda stage: tuple(stage.parities(run_uid, self.path, directory=directory))
        )
        headers = dict.fromkeys(header for on_disk in found for header in on_disk)
        return tuple(
            header
            for header in headers
            if not self._is_bad(
                run_uid,
                header.attempt.directory,
                (layer.parity_file(header.position) for layer in header.layers),
            )
        )

    def _is_bad(self, run_uid: str, directory: str, listed: Iterable[str]) -> bool:
        """Return True if a file of a checkpoint is one that `quarantine` could not move."""
        for file in listed if self._bad else ():
            with contextlib.suppress(OSError):
                if _identity(self.path(run_uid, directory, file)) in self._bad:
                    return True
        return False

    def directories(self, run_uid: str) -> tuple[str, ...]:
        """Return the run's checkpoint folders, complete or not."""
        found = self._call_each(self._stages, lambda stage: stage.directories(run_uid))
        return tuple(sorted(set().union(*found)))

    # -- which disk ----------------------------------------------------------------------------------

    def _working(self) -> list[Staging]:
        """Return the disks that get new files, or all disks if every one is broken."""
        return [stage for stage in self._stages if stage.root not in self._out] or self._stages[:]

    def _stage_of(self, run_uid: str, directory: str, file: str) -> Staging:
        """Return the disk that has the file, or any disk if none has the file; prefer disks that work."""
        stages = sorted(self._stages, key=lambda stage: stage.root in self._out)
        return next((stage for stage in stages if self._has(stage, run_uid, directory, file)), stages[0])

    def _places(self, run_uid: str, directory: str, file: str) -> list[Staging]:
        """Return the disks for a file, best first: disks that have the file, then by free space.

        A fragment goes to the first disk that works.
        """
        working = self._working()
        if file.startswith("manifest-"):
            return working
        there = [stage for stage in working if self._has(stage, run_uid, directory, file)]
        return sorted(self._working(), key=lambda stage: (stage not in there, -self._room(stage)))

    def _has(self, stage: Staging, run_uid: str, directory: str, file: str) -> bool:
        """Return whether the disk has the file; False if the disk is broken and another one works."""
        try:
            return stage.path(run_uid, directory, file).exists()
        except OSError as error:
            if not self._may_pass_over(stage, error):
                raise
            return False

    def _room(self, stage: Staging) -> int:
        with contextlib.suppress(OSError):
            return files.free_bytes(stage.root) - self._pending[stage.root]
        return 0

    def _file_systems(self) -> list[Staging]:
        """Return one working disk for each file system."""
        found = self._call_each(self._working(), lambda stage: (stage.root.stat().st_dev, stage))
        return list(dict(found).values())

    @contextlib.contextmanager
    def _writing(self, stage: Staging, size_bytes: int) -> Iterator[None]:
        """Count `size_bytes` as used during the block, so that concurrent files go to different disks."""
        with self._lock:
            self._pending[stage.root] += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self._pending[stage.root] -= size_bytes

    # -- failures ------------------------------------------------------------------------------------

    def _may_pass_over(self, stage: Staging, error: OSError) -> bool:
        """Exclude the disk if it is broken, log what is new, and return True if another disk can be tried."""
        if len(self._stages) == 1 or error.errno not in (*FULL, *BROKEN):
            return False
        if error.errno in FULL:
            log.warning("the disk of %s is passed over: %s", stage.root, error)
        elif stage.root not in self._out:
            with self._lock:
                self._out.add(stage.root)
            log.error("the disk of %s takes no new files any more: %s", stage.root, error)
        return True

    def _call_all(self, call: Callable[[Staging], None]) -> None:
        """Call `call` with each disk, the first disk last. Raise an OSError when all were called.

        A broken disk is passed over if another one works: it would fail in each try until a restart.
        """
        failures: list[OSError] = []
        passed: list[OSError] = []
        for stage in reversed(self._stages):
            try:
                call(stage)
            except OSError as error:
                is_broken = error.errno in BROKEN and self._may_pass_over(stage, error)
                (passed if is_broken else failures).append(error)
        if failures or len(passed) == len(self._stages):
            raise (*failures, *passed)[0]

    def _call_each(self, stages: Iterable[Staging], call: Callable[[Staging], Result]) -> list[Result]:
        """Return the results of the disks on which `call` succeeds. Raise OSError if it fails on all."""
        results: list[Result] = []
        failure: OSError | None = None
        for stage in stages:
            try:
                results.append(call(stage))
            except OSError as error:
                if not self._may_pass_over(stage, error):
                    raise
                failure = error
        if failure is not None and not results:
            raise failure
        return results


def _is_file(path: Path, known: os.stat_result) -> bool:
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        return (found.st_dev, found.st_ino) == (known.st_dev, known.st_ino)
    return False


def _identity(path: Path) -> tuple[int, int, int]:
    """Return the device, inode and time of a file; all of its links have the same, a new file has others."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_mtime_ns
