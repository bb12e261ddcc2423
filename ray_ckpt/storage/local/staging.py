"""One node's local tier: <staging>/<run uid>/<checkpoint directory>/<files>, owned by one agent at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from ray_ckpt.config import STAGING_ENV
from ray_ckpt.core.ownership import RunMark
from ray_ckpt.errors import CorruptionError, FormatError, StagingError
from ray_ckpt.format import jsontext, names
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import MAX_FRAGMENT_BYTES, decode_columns
from ray_ckpt.format.parity import ParityHeader, decode_header, header_bytes
from ray_ckpt.format.shard import ALIGNMENT_BYTES
from ray_ckpt.storage.local import files
from ray_ckpt.storage.local.direct import Written, write_direct
from ray_ckpt.types import FileEntry, FragmentMetadata

MARK_FILE = "run.json"  # <staging>/<run uid>/run.json: the names of the run and its highest known epoch
DISK_FILE = "disk"  # <staging>/disk: the name of this staging folder
BALLAST_FILE = "ballast"  # <staging>/ballast: deleted for a mark that finds the disk full
BALLAST_BYTES = 1 << 16  # one block of the largest size that file systems have; a run folder and a mark fit
MAX_MARK_BYTES = 1 << 16  # size of a mark file; real ones have a few hundred bytes
_MARK_FIELDS = frozenset(("run_uid", "run_name", "storage_path", "epoch"))
_DISK_NAME = re.compile(r"[0-9a-f]{32}\Z")
QUARANTINE_DIR = "quarantine"
MAX_QUARANTINED = 4  # newest checkpoints of a run whose damaged files are kept for inspection
MAX_KNOWN = 1024  # fragments of all runs of a node; the metadata of 8 ranks takes about 6 KB
FULL = (errno.ENOSPC, errno.EDQUOT)  # not broken: another file may fit after a deletion
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # descriptors or memory are short for now
LOCK_WAIT_S = 20.0  # a killed agent loses the lock within seconds, a live agent keeps it


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A fragment that is complete on this node: its manifest file and every file that it lists exist."""

    fragment: FragmentMetadata
    entry: FileEntry


class KnownFragments:
    """The metadata of fragments by the digest of their bytes, so that the rows of each are checked once.

    Bytes with the digest of checked bytes need no further check: all of a fragment is under its digest, while
    its seal covers the metadata only. Several threads may use an object.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, FragmentMetadata] = OrderedDict()
        self._lock = threading.Lock()

    def decode(self, data: bytes) -> tuple[FragmentMetadata, str]:
        """Return the metadata and the digest of a fragment. FormatError for any violation of the format."""
        found = digest(data)
        with self._lock:
            known = self._known.get(found)
        if known is None:
            known, _ = decode_columns(data)
        self.add(found, known)
        return known, found

    def add(self, fragment_digest: str, metadata: FragmentMetadata) -> None:
        """Note a checked fragment, in place of the one that was not needed for the longest time."""
        with self._lock:
            self._known[fragment_digest] = metadata
            self._known.move_to_end(fragment_digest)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)


class Staging:
    """The staging folder of a disk, with an exclusive lock until `close`."""

    def __init__(self, root: Path, known: KnownFragments | None = None) -> None:
        self.root = root
        self._known = known or KnownFragments()
        self._publishing = threading.Lock()  # held while a file is visible but not durable yet
        try:
            files.make_dirs(root)
            self._check_owner()
            self._lock = self._take_lock()
            try:
                self._clean_up()
                self.disk = self._name_disk()
                self._write_ballast()
            except OSError:
                self._lock.close()
                raise
        except OSError as error:
            raise StagingError(
                f"The staging folder {root} cannot be used: {error}.",
                hint=f"Make it writable for the user that runs Ray, or set staging= or {STAGING_ENV}.",
                path=str(root),
            ) from error

    def close(self) -> None:
        self._lock.close()

    # -- files ---------------------------------------------------------------------------------------

    def path(self, run_uid: str, directory: str, file: str) -> Path:
        return self.folder(run_uid, directory) / names.check_file(file)

    def folder(self, run_uid: str, directory: str) -> Path:
        return self.root / names.check_run_uid(run_uid) / names.check_directory(directory)

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
        """Write one file of a checkpoint durably; see `write_direct`.

        Raise CorruptionError, and keep no file, if the digest of the bytes is not `expect`.
        """
        path = self.path(run_uid, directory, file)
        with self._publishing:
            files.make_dirs(path.parent)
            was_there = path.exists()
        temporary, written = write_direct(path.parent, chunks, size_bytes=size_bytes, spans=spans)
        if expect not in (None, written.digest):
            temporary.unlink()
            raise CorruptionError(f"{file} arrived with other bytes than announced.", what=file)
        with self._publishing, _nothing_new_on_error(path, was_there):
            files.publish(temporary, path)
        return written

    def link(self, run_uid: str, source: str, directory: str, file: str) -> None:
        """Give a file of the checkpoint `source` a second name in another checkpoint, durably.

        Raise OSError if the file is gone, or if the file system makes no links or no more of them.
        """
        origin, path = self.path(run_uid, source, file), self.path(run_uid, directory, file)
        with self._publishing:
            files.make_dirs(path.parent)
            with _nothing_new_on_error(path, path.exists()):
                files.link(origin, path)

    def delete(self, run_uid: str, directory: str) -> None:
        """Delete the files of one checkpoint durably, if there are any; data before manifests."""
        folder = self.folder(run_uid, directory)
        delete_checkpoint_dir(folder)
        with contextlib.suppress(FileNotFoundError):
            files.fsync_dir(folder.parent)
        with contextlib.suppress(OSError):  # the delete is done
            if not (self.root / BALLAST_FILE).exists():
                self._write_ballast()

    def quarantine(self, run_uid: str, directory: str, file: str) -> None:
        """Move a damaged file out of the checkpoint, which is no holding then; keep a few such files."""
        pen = self.root / names.check_run_uid(run_uid) / QUARANTINE_DIR
        target = pen / names.check_directory(directory)
        files.make_dirs(target)
        source = self.path(run_uid, directory, file)
        with contextlib.suppress(FileNotFoundError):
            source.rename(target / file)
            files.fsync_dir(source.parent)
        for old in _oldest_first(pen)[:-MAX_QUARANTINED]:
            delete_checkpoint_dir(old)

    def forget(self, run_uid: str, kept: Collection[str]) -> None:
        """Delete a run except the folders `kept`; if none stays, delete the mark and the run's folder too."""
        run = self.root / names.check_run_uid(run_uid)
        for directory in self.directories(run_uid):
            if directory not in kept:
                delete_checkpoint_dir(run / directory)
        if not run.is_dir():
            return
        pen = run / QUARANTINE_DIR
        for old in pen.iterdir() if pen.is_dir() else ():
            delete_checkpoint_dir(old)
        left = [path for path in run.iterdir() if path not in (pen, run / MARK_FILE)]
        if not left:  # without a checkpoint the mark is useless
            (run / MARK_FILE).unlink(missing_ok=True)
            for folder in (pen, run):
                with contextlib.suppress(OSError):  # the folder may contain files of other programs
                    folder.rmdir()
        files.fsync_dir(self.root)

    # -- marks ---------------------------------------------------------------------------------------

    def write_mark(self, run_uid: str, *, run_name: str, storage_path: str, epoch: int) -> None:
        """Store the names of the run and its highest epoch durably.

        On a full disk the ballast makes room: without the epoch, no delete of its coordinator is carried out.
        """
        path = self.root / names.check_run_uid(run_uid) / MARK_FILE
        document = {"run_uid": run_uid, "run_name": run_name, "storage_path": storage_path, "epoch": epoch}
        data = jsontext.dumps_sealed(document, what="The run's mark", max_bytes=MAX_MARK_BYTES)
        try:
            self._write_mark(path, data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            (self.root / BALLAST_FILE).unlink(missing_ok=True)  # another run may have used it a moment ago
            files.fsync_dir(self.root)  # some file systems free the blocks with their journal only
            self._write_mark(path, data)

    def _write_mark(self, path: Path, data: bytes) -> None:
        with self._publishing:
            files.make_dirs(path.parent)
        files.write_file(path, [data])

    def marks(self, run_name: str, storage_path: str) -> tuple[RunMark, ...]:
        """Return the marks of all runs with this name and storage path; normally there is one."""
        found = []
        for path in sorted(self.root.glob(f"*/{MARK_FILE}")):
            mark = _read_mark(path)
            if mark is not None and (mark["run_name"], mark["storage_path"]) == (run_name, storage_path):
                found.append(RunMark(run_uid=path.parent.name, epoch=int(mark["epoch"])))
        return tuple(found)

    def epoch(self, run_uid: str) -> int:
        """Return the highest epoch whose coordinator has contacted this node for the run, or 0."""
        mark = _read_mark(self.root / names.check_run_uid(run_uid) / MARK_FILE)
        return int(mark["epoch"]) if mark is not None else 0

    # -- what is here --------------------------------------------------------------------------------

    def holdings(
        self,
        run_uid: str,
        find: Callable[[str, str, str], Path] | None = None,
        *,
        directory: str | None = None,
    ) -> Iterator[Holding]:
        """Yield each durable fragment of the run whose listed files exist with the listed sizes.

        With `directory` only fragments of that checkpoint. If files may be on other disks, `find` returns the
        path for (run uid, directory, file).
        """
        folders = self._folders(run_uid) if directory is None else [self.folder(run_uid, directory)]
        for folder in folders:
            with self._publishing:
                manifests = sorted(folder.glob("manifest-*.parquet"))
            for path in manifests:
                if holding := _holding(path, run_uid, find or self.path, self._known):
                    yield holding

    def parities(
        self,
        run_uid: str,
        find: Callable[[str, str, str], Path] | None = None,
        *,
        directory: str | None = None,
    ) -> Iterator[ParityHeader]:
        """Yield the header of each parity file of the run, or of one checkpoint, that has its full size.

        So has the one of its still shards, for which `find` is as in `holdings`.
        """
        folders = self._folders(run_uid) if directory is None else [self.folder(run_uid, directory)]
        for folder in folders:
            with self._publishing:
                paths = sorted(folder.glob(f"{names.PARITY_PREFIX}*.bin"))
            for path in paths:
                header = None if names.is_still_name(path.name) else _parity(path, find or self.path)
                if header is not None and header.attempt.run_uid == run_uid:
                    yield header

    def directories(self, run_uid: str) -> tuple[str, ...]:
        """Return the run's checkpoint folders, complete or not."""
        return tuple(folder.name for folder in self._folders(run_uid))

    def _folders(self, run_uid: str) -> list[Path]:
        run = self.root / names.check_run_uid(run_uid)
        with contextlib.suppress(FileNotFoundError):
            return sorted(p for p in run.iterdir() if names.is_directory_name(p.name) and p.is_dir())
        return []

    def _name_disk(self) -> str:
        """Return the name of the folder, written once, by which its disk is recognized on another node."""
        path = self.root / DISK_FILE
        with contextlib.suppress(FileNotFoundError, EOFError):
            if _DISK_NAME.match(name := files.read_small(path, MAX_MARK_BYTES).decode(errors="replace")):
                return name
        name = uuid.uuid4().hex  # a disk with a damaged name counts as new
        files.write_file(path, [name.encode()])
        return name

    def _write_ballast(self) -> None:
        """Write the ballast, of bytes that no file system can compress; at the start, this tests the disk.

        Raise OSError, unless the disk is full: its files are read, and deletes make room.
        """
        try:
            files.write_file(self.root / BALLAST_FILE, [os.urandom(BALLAST_BYTES)])
        except OSError as error:
            if error.errno not in FULL:
                raise

    def _clean_up(self) -> None:
        """Take over from the previous agent, which may have been killed at any moment.

        Delete its unfinished files, and make its visible files durable.
        """
        runs = [self.root / uid for uid in self._runs()]
        for folder in (self.root, *runs, *(folder for run in runs for folder in self._folders(run.name))):
            for path in folder.glob(files.TEMPORARIES):
                path.unlink()
            files.fsync_dir(folder)
        with contextlib.suppress(PermissionError):  # another user created the root
            files.fsync_dir(self.root.parent)

    def _runs(self) -> Iterator[str]:
        for path in self.root.iterdir():
            with contextlib.suppress(FormatError):
                if path.is_dir():
                    yield names.check_run_uid(path.name)

    # -- ownership -----------------------------------------------------------------------------------

    def _check_owner(self) -> None:
        found = self.root.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise StagingError(
                f"The staging folder {self.root} is a link, or others own it or can write to it.",
                hint="Use a folder of your own with mode 0700.",
                path=str(self.root),
            )

    def _take_lock(self) -> _Lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return _Lock(self.root / "agent.lock")
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StagingError(
                        f"Another agent owns the staging folder {self.root}.",
                        hint="Give each node its own folder: put {node_id} into staging=, "
                        f"or set {STAGING_ENV} differently on each node.",
                        path=str(self.root),
                    ) from None
                time.sleep(0.2)


class _Lock:
    """An exclusive flock, which the kernel frees when the process ends for any reason."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, files.FILE_MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def _nothing_new_on_error(path: Path, was_there: bool) -> Iterator[None]:
    """Delete the file that a block has made before it fails, since a file that is seen counts as durable."""
    try:
        yield
    except OSError:
        if not was_there:
            with contextlib.suppress(OSError):
                path.unlink()
        raise


def _read_mark(path: Path) -> dict[str, Any] | None:
    try:
        data = files.read_small(path, MAX_MARK_BYTES)
        mark = jsontext.loads_if_sealed(
            data, what="The run's mark", max_bytes=MAX_MARK_BYTES, known=_MARK_FIELDS
        )
        jsontext.integer(mark.get("epoch"), "epoch")
        names.check_run_uid(path.parent.name)
    except (OSError, EOFError, FormatError) as error:
        _check_shortage(error)
        return None
    return mark if mark.keys() >= _MARK_FIELDS else None


def _holding(
    path: Path, run_uid: str, find: Callable[[str, str, str], Path], known: KnownFragments
) -> Holding | None:
    try:
        data = files.read_small(path, MAX_FRAGMENT_BYTES)
        fragment, found_digest = known.decode(data)
    except (OSError, EOFError, FormatError) as error:
        _check_shortage(error)
        return None
    if fragment.attempt.run_uid != run_uid or fragment.attempt.directory != path.parent.name:
        return None
    for file in fragment.files:
        try:
            found = find(run_uid, path.parent.name, file.name).lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_size != file.size_bytes:
                return None
        except (OSError, FormatError) as error:
            _check_shortage(error)
            return None
    return Holding(
        fragment=fragment, entry=FileEntry(name=path.name, size_bytes=len(data), digest=found_digest)
    )


def _oldest_first(folder: Path) -> list[Path]:
    """Return what is in a folder, without what another thread deletes at the same time."""
    times: dict[Path, float] = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime
    return sorted(times, key=times.__getitem__)


def _parity(path: Path, find: Callable[[str, str, str], Path]) -> ParityHeader | None:
    try:
        with os.fdopen(files.open_file(path), "rb") as file:
            size = header_bytes(file.read(ALIGNMENT_BYTES))
            file.seek(0)
            header = decode_header(file.read(size))
        attempt = header.attempt
        if header.name != path.name or attempt.directory != path.parent.name:
            return None
        for layer in header.layers:
            name = layer.parity_file(header.position)
            at = find(attempt.run_uid, attempt.directory, name) if layer.number else path
            if at.stat().st_size != header.size_bytes(layer):
                return None
        return header
    except (OSError, FormatError) as error:
        _check_shortage(error)
        return None


def _check_shortage(error: Exception) -> None:
    """Raise `error` if it says nothing of the file that could not be read."""
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        raise error


def delete_checkpoint_dir(folder: Path) -> None:
    """Delete a checkpoint's files, data before manifests, and its folder if no other file is in it."""
    if not folder.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):  # another thread deletes it too
        entries = [p for p in folder.iterdir() if names.is_file_name(p.name) or files.is_temporary(p.name)]
        for path in sorted(
            entries, key=lambda p: (p.name.startswith("manifest"), p.name == names.CHECKPOINT_JSON)
        ):
            path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
