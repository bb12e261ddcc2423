"""The remote tier: the folder of a run on the storage path, with its log and its durable checkpoints.

<storage_path>/<run>/ray_ckpt/log/...            the commit log
<storage_path>/<run>/ray_ckpt/checkpoints/...    drained checkpoints, one folder each, and folders of some
                                                 items of a checkpoint

A shard may be stored compressed, as NAME.zst (`format/zstd.py`). Callers use the names, sizes and digests
that the files had before compression.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import Buffer

from ray_ckpt.errors import CorruptionError, FormatError, StorageNotShared, StoragePathError
from ray_ckpt.format import names, zstd
from ray_ckpt.location import BUCKETS, Location, resolve_options, storage_options
from ray_ckpt.storage.local.direct import read_written
from ray_ckpt.storage.local.files import checked, is_temporary
from ray_ckpt.storage.log_store import (
    PROBE_PREFIX,
    LogStore,
    ObjectLogStore,
    PosixLogStore,
    SmallObjects,
    Unsupported,
    not_writable,
    probe,
    probe_store,
)
from ray_ckpt.storage.remote.file_store import Blocks, FileStore, PosixFiles, StoredFile, Upload, read_whole
from ray_ckpt.types import FileEntry

log = logging.getLogger("ray_ckpt")

CLOCK_FILE = "clock.probe"  # written to read the store's time
PROBE_FILE = "shared.probe"  # in the folder of the log: the coordinator's nonce, which each node must read
MAX_PROBE_BYTES = 1 << 10  # size of a probe file; real ones have a few hundred bytes
MAX_OPEN = 16  # tiers that a process keeps open: one for each run of a service or of a notebook
MAX_READERS = 256  # readers of compressed files, kept for later reads
MAX_READER_FRAMES = 4 << 20  # frames of all kept readers: 16 TiB of raw files, or 32 MiB of tables


class RateLimiter(Protocol):
    """A limit on the bytes per second; `wait` sleeps until `nbytes` may be sent."""

    def wait(self, nbytes: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The result of reading the seek table of a compressed file: a reader or an error.

    The result is valid as long as the stored file has this size and time. A damaged table is therefore read
    only once, not for each slice; the table is read again after the file was stored again.
    """

    size_bytes: int
    modified_s: float
    found: zstd.SeekableReader | FormatError

    @property
    def num_frames(self) -> int:
        return self.found.num_frames if isinstance(self.found, zstd.SeekableReader) else 0

    def reader(self) -> zstd.SeekableReader:
        if isinstance(self.found, FormatError):
            raise self.found.with_traceback(None)
        return self.found


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRef:
    """A reference, without secrets, with which any process can open the remote tier of a run."""

    storage_path: str
    run_name: str
    options: tuple[tuple[str, str], ...] = ()

    def open(self) -> RemoteTier:
        """Return the tier that this process keeps open for the reference, with its connections."""
        return _open(self)


@functools.lru_cache(maxsize=MAX_OPEN)
def _open(ref: RemoteRef) -> RemoteTier:
    base = Location.parse(ref.storage_path)
    root = base / names.check_run_name(ref.run_name) / names.SERVICE_DIR
    return RemoteTier(root, dict(ref.options))


def open_store(location: Location, options: Mapping[str, str] | None) -> tuple[FileStore, LogStore]:
    """Return the files below `location`, and the folder `log` in it as a log store; send no request."""
    options = storage_options(location, options)
    if location.is_posix:
        return PosixFiles(location.folder), PosixLogStore(location.folder / names.LOG_DIR)

    bulk, small = open_objects(location, options)
    return bulk, ObjectLogStore(small, names.LOG_DIR)


def open_objects(location: Location, options: Mapping[str, str]) -> tuple[FileStore, SmallObjects]:
    """Open a URL, by scheme and backend; return the client for shards and the one for the log."""
    from ray_ckpt.storage.remote.object_store import Bucket, BucketFiles, BucketObjects

    options = resolve_options(options)
    if location.scheme in BUCKETS and options.get("backend") == "fsspec":
        from ray_ckpt.storage.remote.fsspec_buckets import open_buckets

        return open_buckets(location, options)
    if location.scheme == "s3":
        from ray_ckpt.storage.remote.s3 import S3Bucket

        bucket: Bucket = S3Bucket(location, options)
    elif location.scheme == "gs":
        from ray_ckpt.storage.remote.gcs import GcsBucket

        bucket = GcsBucket(location, options)
    else:
        from ray_ckpt.storage.remote.fsspec_store import FsspecStore

        other = FsspecStore.open(location, options)
        return other, other
    return BucketFiles(bucket), BucketObjects(bucket)


class RemoteTier:
    """One run's folder, `<storage_path>/<run>/ray_ckpt`. Every call may be repeated; names are checked (P9).

    The first call opens the store, and raises ConfigError if the store cannot be opened.
    """

    def __init__(self, root: Location, options: Mapping[str, str] | None = None) -> None:
        self.root = root
        self._options = options
        self._lock = threading.Lock()
        self._opened: tuple[FileStore, LogStore] | None = None
        self._tables: dict[str, _Table] = {}
        self._copies = True  # False once the store has turned out to copy no files
        self._suffix = ""  # of the checkpoint folders that the methods with `directory` use

    def of_items(self, items: str) -> RemoteTier:
        """Return the same tier, where the folder of a checkpoint is that of these items alone; "": of all."""
        if (suffix := names.items_suffix(items)) == self._suffix:
            return self
        other = copy.copy(self)
        other._tables, other._suffix = {}, suffix
        return other

    def folder_of(self, directory: str) -> str:
        """Return the folder of a checkpoint, relative to the folder of the run. Raise FormatError."""
        return f"{names.CHECKPOINTS_DIR}/{names.check_directory(directory)}{self._suffix}"

    def _name(self, directory: str, file: str) -> str:
        return f"{self.folder_of(directory)}/{names.check_file(file)}"

    @property
    def where(self) -> str:
        """The path or URL of the folder."""
        return str(self.root)

    @property
    def log(self) -> LogStore:
        return self._open()[1]

    @property
    def files(self) -> FileStore:
        return self._open()[0]

    def _open(self) -> tuple[FileStore, LogStore]:
        with self._lock:
            if self._opened is None:
                self._opened = open_store(self.root, self._options)
            return self._opened

    # -- checks of the storage path ----------------------------------------------------------------------

    def missing(self) -> str:
        """Return a message that names the missing folder and the remedy if the run's folder is gone.

        Return an empty string if record 0 exists, intact or damaged, or if the store does not answer.
        """
        try:
            if self.log.read(names.record_file(0)) is not None:
                return ""
        except (OSError, FormatError):
            return ""
        gone = self.where
        if self.root.is_posix:
            log = self.root.folder / names.LOG_DIR
            gone = next((str(path) for path in (*reversed(log.parents), log) if not path.is_dir()), str(log))
        return (
            f"{gone} is not there any more, or is empty: no checkpoint can be recorded. Restore it (mount it "
            "again, rename it back), and waiting saves will be recorded. If it was deleted, its checkpoints "
            "are lost: end training and give the run another name."
        )

    def probe_log(self) -> None:
        """Check that records can be committed, even with concurrent writers. Raise StoragePathError."""
        if self.root.is_posix:
            probe(self.root.folder / names.LOG_DIR)
        else:
            probe_store(self.log, where=self.where)

    def leave_nonce(self, nonce: str) -> None:
        """Write `nonce` to a file; a node that reads the same nonce uses this folder.

        Raise StoragePathError.
        """
        try:
            self.files.put(PROBE_FILE, [nonce.encode()], max_bytes=MAX_PROBE_BYTES)
        except OSError as error:
            raise not_writable(self.where, error) from error

    def check_shared(self, nonce: str, *, node: str) -> None:
        """Check on a node that it can read the coordinator's nonce and write to the folder.

        Raise StorageNotShared or StoragePathError if it cannot.
        """
        try:
            seen = read_whole(self.files, PROBE_FILE, max_bytes=MAX_PROBE_BYTES).decode(errors="replace")
        except (OSError, EOFError) as error:
            seen = str(error)
        if seen != nonce:
            raise StorageNotShared(
                f"Node {node[:12]} does not see the storage path {self.where} as the coordinator does.",
                hint="Use a storage_path that every node reaches (an object store, NFS, Lustre, ...); "
                "a local disk works for one node only.",
                node=node,
                path=self.where,
            )
        name = f"{PROBE_PREFIX}{node[:32]}"  # not in a folder: a delete removes an empty folder
        try:
            self.files.put(name, [b"1"], max_bytes=1)
            self.files.delete([name])
        except OSError as error:
            raise StoragePathError(
                f"Node {node[:12]} cannot write to the storage path {self.where}: {error}.",
                hint="Give the user that runs Ray write access to it on every node.",
                node=node,
                path=self.where,
            ) from error

    def is_there(self) -> bool:
        """Return whether the file that the coordinator wrote when it opened the run exists. Raise OSError."""
        return self.files.size(PROBE_FILE) is not None

    # -- files of checkpoints ----------------------------------------------------------------------------

    def put(self, directory: str, file: str, data: bytes) -> None:
        """Store a small file. Raise OSError."""
        self.files.put(self._name(directory, file), [data], max_bytes=len(data))

    def put_blocks(
        self, directory: str, file: str, blocks: Iterable[Buffer], max_bytes: int, *, pace: RateLimiter
    ) -> int:
        """Store a file of at most `max_bytes`; return its size. Raise OSError, and what `blocks` raise."""
        return self.files.put(self._name(directory, file), _paced(blocks, pace), max_bytes=max_bytes)

    def put_file(
        self,
        directory: str,
        file: FileEntry,
        path: Path,
        *,
        pace: RateLimiter | None = None,
        level: int | None = None,
    ) -> int:
        """Store a file from this node's disk and return the stored size in bytes.

        The file is read once and hashed. If the size or digest differs from `file`, or the disk has lost some
        of its bytes, the source is damaged: the file is not published, and CorruptionError is raised. With
        `level`, a shard is compressed with zstd if a sample compresses well enough. If the shard is already
        stored in the other form (compressed or raw), that form stays until `settle`. Raise OSError if the
        store or the disk fails.
        """
        _check_size(file, path)
        name, max_bytes = self._name(directory, file.name), file.size_bytes
        blocks: Iterable[Buffer] = checked(
            read_written(path), size_bytes=file.size_bytes, digest=file.digest, what=file.name
        )
        if level is not None and names.is_shard_name(file.name) and _pays(path, file.size_bytes, level):
            name, blocks = name + zstd.SUFFIX, zstd.encode(blocks, level)
            max_bytes = zstd.max_encoded_bytes(file.size_bytes)
        try:
            return self.files.put(name, _paced(blocks, pace), max_bytes=max_bytes)
        finally:
            self._forget(self._name(directory, file.name))

    def share(
        self,
        source: str,
        directory: str,
        file: FileEntry,
        *,
        path: Path | None = None,
        level: int | None = None,
    ) -> int | None:
        """Copy a shard within the store from the checkpoint `source`, which has the same shard.

        Return the stored size in bytes, or None if that is not possible, or if the shard of `source` is cut
        short or has a damaged seek table; the caller then uploads the shard. With `path`, the shard on this
        node's disk, it is copied only if it is stored in the form (compressed or raw) that `put_file` would
        give it.
        """
        origin, name = self._name(source, file.name), self._name(directory, file.name)
        try:
            for suffix in ("", zstd.SUFFIX) if self._copies else ():
                size = self.files.size(origin + suffix)
                if size is None or (path and not _keeps(suffix, path, file.size_bytes, level)):
                    continue
                if self._saved_size(origin + suffix, size) == file.size_bytes:
                    return self.files.copy(origin + suffix, name + suffix)
        except Unsupported as error:
            self._copies = False
            log.info("unchanged shards are uploaded again: %s", error)
        except (OSError, EOFError, FormatError) as error:
            log.info("%s is uploaded, not copied from %s: %s", name, source, error)
        finally:
            self._forget(name)
        return None

    def read(self, directory: str, file: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        """Yield the saved bytes of the ascending ranges (offset, nbytes), one after the other.

        Raise the errors of `FileStore.read`, and CorruptionError if a compressed frame is damaged.
        """
        name, store, has_begun = self._name(directory, file), self.files, False
        self._forget_repaired(name)
        if name not in self._tables:
            try:
                with contextlib.closing(store.read(name, ranges)) as blocks:
                    for block in blocks:
                        has_begun = True
                        yield block
                return
            except FileNotFoundError:  # after the first block, the other form would begin anew
                if has_begun or not names.is_shard_name(file):
                    raise
        try:
            yield from self._reader(name).read(ranges)
        except (OSError, EOFError, CorruptionError):
            self._forget_changed(name)  # the file may have been stored again meanwhile, in another form
            raise

    def size(self, directory: str, file: str) -> int | None:
        """Return the saved size of a file in bytes, None if it does not exist."""
        name = self._name(directory, file)
        self._forget_repaired(name)
        size = None if name in self._tables else self.files.size(name)
        if size is not None or not names.is_shard_name(file):
            return size
        try:
            return self._reader(name).raw_size
        except FileNotFoundError:
            return None

    def saved_size(self, listed: StoredFile) -> int:
        """Return the saved size in bytes of a file of a listing; a compressed file costs one small read.

        Raise FormatError, OSError or EOFError.
        """
        return self._saved_size(listed.name, listed.size_bytes)

    def _saved_size(self, stored: str, size_bytes: int) -> int:
        if not stored.endswith(zstd.SUFFIX):
            return size_bytes
        read = functools.partial(self.files.read, stored)
        try:
            return zstd.SeekableReader(read, size_bytes).raw_size
        except FormatError as error:
            raise error.at(f"{self.where}/{stored}") from None

    def blocks(self, directory: str, file: str) -> Blocks:
        """Yield all saved bytes of a file. Raise FileNotFoundError, OSError or EOFError."""
        size = self.size(directory, file)
        if size is None:
            raise FileNotFoundError(f"{self.where}: {directory}/{file} does not exist")
        yield from self.read(directory, file, [(0, size)])

    def read_whole(self, directory: str, file: str, *, max_bytes: int) -> bytes:
        """Read a small file. Raise FileNotFoundError, OSError or EOFError."""
        return read_whole(self.files, self._name(directory, file), max_bytes=max_bytes)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._tables.pop(name, None)

    def _forget_repaired(self, name: str) -> None:
        """Remove the cached error of a damaged seek table if the file has been stored again since."""
        with self._lock:
            table = self._tables.get(name)
        if table is not None and isinstance(table.found, FormatError):
            self._forget_changed(name)

    def _forget_changed(self, name: str) -> None:
        """Remove the cached seek table of a file that has changed since the table was read."""
        with self._lock:
            table = self._tables.get(name)
        stored = name + zstd.SUFFIX
        try:
            same = table is not None and (table.size_bytes, table.modified_s) == self._stamp(stored)
            same = same and self.files.size(name) is None
        except OSError:
            same = False
        if not same:
            self._forget(name)

    def _stamp(self, stored: str) -> tuple[int, float]:
        """Return the size and the modification time of a stored file. Raise FileNotFoundError or OSError."""
        size = self.files.size(stored)
        if size is None:
            raise FileNotFoundError(f"{self.where}/{stored} does not exist")
        return size, self.files.modified_s(stored)

    def _reader(self, name: str) -> zstd.SeekableReader:
        """Return a reader of the compressed form of a file. Raise FileNotFoundError or FormatError."""
        with self._lock:
            if (table := self._tables.get(name)) is not None:
                return table.reader()
        stored = name + zstd.SUFFIX
        size, modified_s = self._stamp(stored)
        found: zstd.SeekableReader | FormatError
        try:
            found = zstd.SeekableReader(functools.partial(self.files.read, stored), size)
        except FormatError as error:
            found = error.at(f"{self.where}/{stored}")
        table = _Table(size_bytes=size, modified_s=modified_s, found=found)
        with self._lock:
            num_frames = sum(each.num_frames for each in self._tables.values()) + table.num_frames
            if len(self._tables) >= MAX_READERS or num_frames > MAX_READER_FRAMES:
                self._tables.clear()
            return self._tables.setdefault(name, table).reader()

    # -- folders of checkpoints --------------------------------------------------------------------------

    def files_of(self, directory: str) -> dict[str, StoredFile]:
        """Return the stored files of a checkpoint by the names before compression. Raise OSError."""
        return self._forms(directory)[0]

    def settle(self, directory: str) -> dict[str, StoredFile]:
        """Delete the older form of each shard that is stored in two forms; return the result of `files_of`.

        The older form may be damaged, and the newer form stored to replace it. Call this method only
        when no file of the checkpoint is being stored. Raise OSError.
        """
        newest, older = self._forms(directory)
        self.files.delete([stored.name for stored in older])
        for stored in older:
            self._forget(stored.name.removesuffix(zstd.SUFFIX))
        return newest

    def _forms(self, directory: str) -> tuple[dict[str, StoredFile], list[StoredFile]]:
        """Return the stored files by the names before compression, and the older form of shards with two."""
        folder = self.folder_of(directory)
        newest: dict[str, StoredFile] = {}
        older: list[StoredFile] = []
        for stored in self.files.list(folder):
            if is_stored_name(stored.name):
                other = newest.get(_saved_name(stored.name))
                pair = sorted((s for s in (other, stored) if s is not None), key=lambda s: s.modified_s)
                newest[_saved_name(stored.name)] = pair[-1]
                older += pair[:-1]
        return newest, older

    def delete(self, directory: str) -> None:
        """Delete the files of one checkpoint, if there are any: data, then manifests. Raise OSError.

        Folders of some of its items are deleted before.
        """
        there = self.files.children(names.CHECKPOINTS_DIR).folders
        whole = self.folder_of(directory)
        for folder in (*(f for f in there if f != whole and _whole_folder(f) == directory), whole):
            self._delete_folder(folder)
            with contextlib.suppress(OSError):  # some stores do not list uploads; the next sweep aborts them
                for upload in self._uploads_in(folder):
                    self.files.abort(upload)

    def _delete_folder(self, folder: str) -> None:
        ours = {stored.name for stored in self.files.list(folder) if is_stored_name(stored.name)}
        ours.add(f"{folder}/{names.CHECKPOINT_JSON}")  # even if absent: deletes an empty folder
        manifests = {name for name in ours if not names.is_data_name(_saved_name(name))}
        # Data first, so that the manifest of a partly deleted checkpoint still identifies it.
        self.files.delete(sorted(ours - manifests))
        self.files.delete(sorted(manifests))

    def directories(self) -> dict[str, float]:
        """Return the checkpoint folders, each with the Unix time of the newest file in it. Raise OSError.

        Files of some items of a checkpoint count as those of its folder.
        """
        newest: dict[str, float] = {}
        for stored in self.files.list(names.CHECKPOINTS_DIR):
            directory = _whole_folder(stored.name.rpartition("/")[0])
            if directory is not None and is_stored_name(stored.name):
                newest[directory] = max(stored.modified_s, newest.get(directory, 0.0))
        return newest

    def now_s(self) -> float:
        """Return the Unix time of the store's clock, which dates stored files. Raise OSError."""
        self.files.put(CLOCK_FILE, [b"1"], max_bytes=1)
        return self.files.modified_s(CLOCK_FILE)

    def uploads(self, directory: str | None = None) -> Iterator[Upload]:
        """Return the unfinished uploads of a checkpoint's files, or of all checkpoints. Raise OSError."""
        return self._uploads_in(names.CHECKPOINTS_DIR if directory is None else self.folder_of(directory))

    def _uploads_in(self, folder: str) -> Iterator[Upload]:
        for upload in self.files.uploads(folder):
            parent, _, file = upload.name.rpartition("/")
            is_ours = _whole_folder(parent) is not None and is_temporary(file)
            if is_ours or is_stored_name(upload.name):
                yield upload

    def abort(self, directory: str, file: str, upload_id: str) -> None:
        """Abort an unfinished upload that `uploads` returned. Raise OSError."""
        if names.whole_directory(directory) is None:
            names.check_directory(directory)  # raises
        name = f"{names.CHECKPOINTS_DIR}/{directory}/{file}"
        if "/" not in file and (is_stored_name(name) or is_temporary(file)):
            self.files.abort(Upload(name=name, id=upload_id, started_s=0.0))


def is_stored_name(name: str) -> bool:
    """Return whether `name`, relative to a run's folder, is a checkpoint's file, compressed or not."""
    folder, _, file = name.rpartition("/")
    if _whole_folder(folder) is None:
        return False
    return names.is_file_name(file) or names.is_shard_name(file.removesuffix(zstd.SUFFIX))


def _whole_folder(folder: str) -> str | None:
    """Return the name of the checkpoint of which `folder` has all or some items; None for other folders."""
    parent, _, name = folder.rpartition("/")
    return names.whole_directory(name) if parent == names.CHECKPOINTS_DIR else None


def _saved_name(stored: str) -> str:
    """Return the name that the stored file had before compression."""
    return stored.rpartition("/")[2].removesuffix(zstd.SUFFIX)


def _paced(blocks: Iterable[Buffer], pace: RateLimiter | None) -> Iterator[Buffer]:
    for block in blocks:
        if pace is not None:
            pace.wait(memoryview(block).nbytes)
        yield block


def _check_size(file: FileEntry, path: Path) -> None:
    """Raise CorruptionError if the file on this node's disk is missing or has another size."""
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        raise CorruptionError(f"{file.name} is missing on this node.", file=file.name) from None
    if size_bytes != file.size_bytes:
        raise CorruptionError(
            f"{file.name} has {size_bytes} bytes here, not {file.size_bytes}.", file=file.name
        )


def _keeps(suffix: str, path: Path, size_bytes: int, level: int | None) -> bool:
    """Return whether a stored shard keeps its form; one that is compressed does with any level."""
    if level is None:
        return not suffix
    return bool(suffix) or not _pays(path, size_bytes, level)


def _pays(path: Path, size_bytes: int, level: int) -> bool:
    sample = (
        bytes(block)
        for offset, nbytes in zstd.sample_ranges(size_bytes)
        for block in read_written(path, offset, nbytes)
    )
    return zstd.pays(zstd.estimate(sample, level))
