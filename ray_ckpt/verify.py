"""Reading every byte of a checkpoint against its digests, wherever it lies.

Never raises for damage: whatever is wrong becomes a `Damage` that names file and place. What a newer version
wrote is no damage: it is a NewerFormat, as nothing can be said of it. Works on a directory
that was copied elsewhere, with the log's root digest or without.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import TypeAlias, TypeVar

from ray_ckpt.errors import CorruptionError, FormatError, NewerFormat, StoragePathError
from ray_ckpt.format import names, zstd
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.format.digest import root_digest as digest_of_files
from ray_ckpt.format.manifest import (
    MAX_DESCRIPTION_BYTES,
    MAX_FRAGMENT_BYTES,
    CheckpointDescription,
    check_coverage,
    decode_checkpoint,
    decode_fragment,
)
from ray_ckpt.location import Location, without_tilde
from ray_ckpt.storage.file_store import Blocks, FileStore
from ray_ckpt.storage.files import NotRegular
from ray_ckpt.storage.remote import open_store
from ray_ckpt.types import FileEntry, Fragment, ManifestRow

MAX_MISSING = 1000  # fragments that are named; one that is there may say that it is of a million
FILES_AT_A_TIME = 4  # read by a thread each, with 72 MiB on their way at most: answers come late

StoragePath: TypeAlias = str | os.PathLike[str] | Location
"""A folder of this machine, absolute or not, or the URL of a place in a store."""

PERHAPS_DELETED = "If it has been deleted since the log was read, read the log again."

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes read since the last call; from several threads, one at a time."""

T = TypeVar("T")
R = TypeVar("R")


def locate(path: StoragePath) -> Location:
    """The place that a person means by `path`: a relative one counts from the working directory."""
    if isinstance(path, Location):
        return path
    text = os.fspath(path)
    return Location.parse(text if "://" in text else without_tilde(text).absolute())


@contextmanager
def readable(location: Location) -> Iterator[None]:
    """What a store refuses or fails to do as a StoragePathError with a hint."""
    try:
        yield
    except OSError as error:
        hint = "Check bucket, endpoint and credentials; they come from the environment, a profile or a role."
        if location.is_posix:
            hint = "Checkpoints are private to the user that trained; read them as that user."
        if isinstance(error, FileNotFoundError):
            hint = PERHAPS_DELETED
        if isinstance(error, NotRegular):
            hint = "Bring that file back from a backup."
        where = "" if str(location) in str(error) else f" {location}"
        message = f"The storage path{where} cannot be read: {error}."
        raise StoragePathError(message, hint=hint, path=str(location)) from error


def is_fragment(name: str) -> bool:
    return name.startswith("manifest-")


# The files of a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A file as it was saved: its size, and how to read ranges (offset, nbytes) of it that rise."""

    size_bytes: int
    read: Callable[[Sequence[tuple[int, int]]], Blocks]


class SavedFiles(ABC):
    """Files of one checkpoint at one place, by the names and with the bytes that were saved."""

    @property
    @abstractmethod
    def folder_name(self) -> str:
        """Of the folder that they are in."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What there is, as far as the place tells. Sorted. OSError."""

    @abstractmethod
    def place(self, name: str) -> str:
        """Of a file, for people."""

    @abstractmethod
    def open(self, name: str) -> CheckpointFile | None:
        """None if it is not there. OSError; FormatError if it is compressed and its table is damaged."""

    def read_whole(self, name: str, max_bytes: int) -> bytes:
        """A small file; CorruptionError if it is not there, is too large or cannot be read."""
        try:
            file = self.open(name)
            if file is None:
                raise CorruptionError(
                    f"{self.place(name)} is missing.",
                    hint=PERHAPS_DELETED,
                    file=name,
                    where="missing",
                )
            if file.size_bytes > max_bytes:
                raise CorruptionError(
                    f"{self.place(name)} has {file.size_bytes} bytes; the format allows {max_bytes}.",
                    file=name,
                    where="size",
                )
            return b"".join(map(bytes, file.read([(0, file.size_bytes)])))
        except (OSError, EOFError) as error:
            hint = PERHAPS_DELETED if isinstance(error, FileNotFoundError) else ""
            raise CorruptionError(
                f"{self.place(name)} cannot be read: {error}.", hint=hint, file=name, where="unreadable"
            ) from error


class CheckpointFiles(SavedFiles):
    """The files of one checkpoint in a folder of a store.

    A shard may lie there compressed, as NAME.zst. They are listed once, when they are first asked for.
    """

    def __init__(self, location: Location, store: FileStore, folder: str = "") -> None:
        """`folder` of `store` is the same place as `location`."""
        self.location = location
        self._store = store
        self._folder = folder
        self._tables: dict[str, CheckpointFile | FormatError] = {}  # of compressed files that were opened

    @property
    def folder_name(self) -> str:
        return self.location.name

    def place(self, name: str) -> str:
        return str(self.location / name)

    @cached_property
    def _stored_bytes(self) -> Mapping[str, int]:
        """Size of each file that is stored, by its name in the folder. OSError."""
        found = self._store.children(self._folder).files
        return {stored.name.rpartition("/")[2]: stored.size_bytes for stored in found}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({_saved_name(name) for name in self._stored_bytes}))

    @property
    def size_bytes(self) -> int:
        """That the checkpoint's files take there. OSError."""
        sizes = self._stored_bytes.items()
        return sum(size for name, size in sizes if names.is_file_name(_saved_name(name)))

    def open(self, name: str) -> CheckpointFile | None:
        path = f"{self._folder}/{name}" if self._folder else name
        if (size := self._stored_bytes.get(name)) is not None:
            return CheckpointFile(size_bytes=size, read=partial(self._store.read, path))
        if not names.is_shard_name(name) or (size := self._stored_bytes.get(name + zstd.SUFFIX)) is None:
            return None
        if name not in self._tables:
            self._tables[name] = self._read_table(path + zstd.SUFFIX, size)
        file = self._tables[name]
        if isinstance(file, FormatError):
            raise file.with_traceback(None)
        return file

    def _read_table(self, stored: str, size: int) -> CheckpointFile | FormatError:
        try:
            reader = zstd.SeekableReader(partial(self._store.read, stored), size)
        except FormatError as error:
            where = self.place(stored.rpartition("/")[2])
            return type(error)(f"{where}: {error.message}", hint=error.hint, **error.fields)
        return CheckpointFile(size_bytes=reader.raw_size, read=reader.read)


def files_at(path: StoragePath, storage_options: Mapping[str, str] | None = None) -> CheckpointFiles:
    """The checkpoint whose directory is at `path`. ConfigError if that cannot be opened."""
    location = locate(path)
    return CheckpointFiles(location, open_store(location, storage_options)[0])


def _saved_name(stored: str) -> str:
    """The file that a stored one holds."""
    plain = stored.removesuffix(zstd.SUFFIX)
    return plain if names.is_shard_name(plain) else stored


# Verifying


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing wrong with a checkpoint's files.

    `where` is the label of the damaged byte range, such as `model.blocks.0.weight[0:64, 0:128]`, `header` or
    `state`; or what is wrong with the whole file: `missing`, `size`, `digest`, `content`, `unreadable`,
    `unlisted`, `attempt`, `files`, `ranks`, `coverage`, `root digest`.
    """

    file: str
    where: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a pass over a checkpoint's files found. Sizes are saved bytes that were read."""

    where: str
    num_files: int
    num_slices: int
    size_bytes: int
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damages


def check_group(
    description: CheckpointDescription | None, fragments: Mapping[str, Fragment]
) -> Iterator[Damage]:
    """That the fragments belong together, and if all are there, that they have all ranks."""
    if not fragments:
        return
    first = description or next(iter(fragments.values()))
    for name, f in fragments.items():
        same = (f.attempt, f.world_size, f.num_nodes) == (
            first.attempt,
            first.world_size,
            first.num_nodes,
        )
        if not same or name != names.fragment_file(f.node_index, f.num_nodes):
            yield Damage(file=name, where="attempt", detail="It belongs to another checkpoint or node.")
    if len(fragments) != first.num_nodes:
        return
    ranks = sorted(rank for f in fragments.values() for rank in f.ranks)
    if ranks != list(range(first.world_size)):
        detail = f"They have {len(ranks)} ranks of {first.world_size}."
        yield Damage(file=ALL_FRAGMENTS, where="ranks", detail=detail)


def verify_directory(
    path: StoragePath,
    storage_options: Mapping[str, str] | None = None,
    *,
    root_digest: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """`verify_files` of a checkpoint's directory, or of a copy of it under any name. ConfigError if there can
    be no such place, or no credentials for it.
    """
    return verify_files(files_at(path, storage_options), root_digest=root_digest, progress=progress)


def verify_files(
    files: CheckpointFiles, *, root_digest: str | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte of a checkpoint and report all that differs from its digests.

    Never raises for damage; NewerFormat for a manifest of a newer version. A few files are read at a time, in
    blocks; only the manifest is held whole. `root_digest` is the one in the log; without it the files are
    checked against themselves, which a copy elsewhere allows. If `checkpoint.json` is damaged, the fragments
    that can be read say what should be there.
    """
    check = Verification(files, progress or (lambda nbytes: None))
    description = check.read_description()
    fragments = check.read_fragments(description)
    check.refuse_newer()
    check.damages += check_group(description, fragments)
    check.check_coverage(fragments)
    check.read_files(description, fragments)
    check.check_root(description, root_digest)
    if description is not None or fragments:
        check.check_unlisted()
    return VerifyReport(
        where=str(files.location),
        num_files=len(check.found),
        num_slices=check.num_slices,
        size_bytes=check.size_bytes,
        damages=tuple(check.damages),
    )


@dataclass(slots=True)
class Checked:
    """What one thread of a `Verification` has found of one file."""

    name: str
    found: FileEntry | None = None  # as it is; None if it cannot be read
    fragment: Fragment | None = None
    num_rows: int = 0  # that are there entirely, damaged or not
    num_slices: int = 0  # of them
    damages: list[Damage] = field(default_factory=list)
    newer: NewerFormat | None = None

    def report(self, where: str, detail: str) -> None:
        self.damages.append(Damage(file=self.name, where=where, detail=detail))

    def compare(self, entry: FileEntry) -> bool:
        """Whether the file is what `entry` says; else what differs is reported."""
        assert self.found is not None
        if self.found.size_bytes != entry.size_bytes:
            self.report("size", f"{self.found.size_bytes} bytes, not {entry.size_bytes}.")
        elif self.found.digest != entry.digest:
            self.report("digest", f"Its bytes differ from their digest {entry.digest}.")
        return self.found == entry


class Verification:
    """One pass over the files at a place. `found` has each that was read as it is, `expected` all names."""

    def __init__(self, files: SavedFiles, progress: Progress) -> None:
        self.damages: list[Damage] = []
        self.newer: NewerFormat | None = None  # the first file of a newer version; it is a damage, too
        self.found: dict[str, FileEntry] = {}
        self.expected: set[str] = set()
        self.num_slices = 0
        self.size_bytes = 0
        self._files = files
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def report(self, file: str, where: str, detail: str) -> None:
        self.damages.append(Damage(file=file, where=where, detail=detail))

    def refuse_newer(self) -> None:
        """Raise NewerFormat if a file that was read is of a newer version."""
        if self.newer is not None:
            raise self.newer

    def read_description(self) -> CheckpointDescription | None:
        checked = Checked(names.CHECKPOINT_JSON)
        description = self._check_description(checked)
        self._take(checked)
        return description

    def read_fragments(self, description: CheckpointDescription | None) -> dict[str, Fragment]:
        """The fragments that are intact, by file name."""
        if description is not None:
            return self.read_named([(f.name, f) for f in description.files if is_fragment(f.name)])
        there = [name for name in self._names_there() if is_fragment(name)]
        read = self.read_named([(name, None) for name in there])
        num_nodes = next((f.num_nodes for f in read.values()), 0)
        expected = (names.fragment_file(i, num_nodes) for i in range(num_nodes))
        missing = islice((name for name in expected if name not in read), MAX_MISSING)
        return read | self.read_named([(name, None) for name in missing if name not in there])

    def read_named(self, wanted: Sequence[tuple[str, FileEntry | None]]) -> dict[str, Fragment]:
        """Those of these fragments that are intact and, where that is known, what they should be."""
        read: dict[str, Fragment] = {}
        for checked in self._each(self._check_fragment, wanted):
            self._take(checked)
            if checked.fragment is not None:
                read[checked.name] = checked.fragment
        return read

    def check_coverage(self, fragments: Mapping[str, Fragment]) -> None:
        """If all fragments are there, that they describe whole tensors."""
        if not fragments or len(fragments) != next(iter(fragments.values())).num_nodes:
            return
        try:
            check_coverage(row for f in fragments.values() for row in f.rows)
        except FormatError as error:
            self.report(ALL_FRAGMENTS, "coverage", str(error))

    def read_files(
        self, description: CheckpointDescription | None, fragments: Mapping[str, Fragment]
    ) -> None:
        """Shards and state files, against their rows where a fragment has them, else against their digest."""
        listed = {f.name: f for f in description.files if not is_fragment(f.name)} if description else {}
        rows: dict[str, list[ManifestRow]] = {}
        for name, fragment in fragments.items():
            for entry in fragment.files:
                if entry.name in rows or (description and listed.get(entry.name) != entry):
                    self.report(name, "files", f"It lists {entry.name} otherwise than the others do.")
                listed.setdefault(entry.name, entry)
                rows.setdefault(entry.name, [])
            for row in fragment.rows:
                rows[row.file].append(row)
        all_there = description is not None and len(fragments) == description.num_nodes
        wanted = [
            (entry, sorted(rows.get(name, ()), key=lambda row: row.byte_offset))
            for name, entry in sorted(listed.items())
        ]
        for checked in self._each(self._check_data, wanted):
            if all_there and checked.name not in rows:
                self.report(checked.name, "files", "No fragment lists it.")
            self._take(checked)

    def check_root(self, description: CheckpointDescription | None, expected: str | None) -> None:
        """That these are the files that the log committed; said only if no other damage shows it."""
        files = [f for f in self.found.values() if f.name != names.CHECKPOINT_JSON]
        if description is not None:
            actual = description.root_digest
        elif all(damage.file == names.CHECKPOINT_JSON for damage in self.damages):
            actual = digest_of_files(files)
        else:
            return
        if expected is not None and actual != expected:
            self.report(names.CHECKPOINT_JSON, "root digest", f"It is {actual}; the log has {expected}.")

    def check_unlisted(self) -> None:
        """Files that a stock reader of safetensors would take for part of the checkpoint."""
        for name in self._names_there():
            if name not in self.expected and (names.is_file_name(name) or name.endswith(".safetensors")):
                self.report(name, "unlisted", "It is not part of this checkpoint.")

    # -- threads -----------------------------------------------------------------------------------------

    def _each(self, check: Callable[[T], R], things: Sequence[T]) -> list[R]:
        """`check` of each, a few at a time; in order."""
        pool = ThreadPoolExecutor(FILES_AT_A_TIME, thread_name_prefix="ray_ckpt-verify")
        try:
            return list(pool.map(check, things))
        except BaseException:  # somebody has had enough, and files are long
            self._stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _take(self, checked: Checked) -> None:
        self.expected.add(checked.name)
        self.damages += checked.damages
        self.newer = self.newer or checked.newer
        self.num_slices += checked.num_slices
        if checked.found is not None:
            self.found[checked.name] = checked.found

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.size_bytes += nbytes
            self._progress(nbytes)

    # -- files; those below run in several threads -------------------------------------------------------

    def _names_there(self) -> Sequence[str]:
        try:
            return self._files.names
        except OSError:
            return ()

    def _check_description(self, checked: Checked) -> CheckpointDescription | None:
        if (data := self._read_small(checked, MAX_DESCRIPTION_BYTES)) is None:
            return None
        try:
            description = decode_checkpoint(data)
        except FormatError as error:
            self._refused(checked, error)
            return None
        name = self._files.folder_name
        if names.is_directory_name(name) and name != description.attempt.directory:
            checked.report("attempt", f"It describes {description.attempt.directory}, not this one.")
        return description

    def _check_fragment(self, wanted: tuple[str, FileEntry | None]) -> Checked:
        name, entry = wanted
        checked = Checked(name)
        data = self._read_small(checked, MAX_FRAGMENT_BYTES)
        if data is not None and (entry is None or checked.compare(entry)):
            try:
                checked.fragment = decode_fragment(data)
            except FormatError as error:
                self._refused(checked, error)
        return checked

    def _refused(self, checked: Checked, error: FormatError) -> None:
        checked.report("content", str(error))
        if isinstance(error, NewerFormat):
            checked.newer = error.at(self._files.place(checked.name))

    def _read_small(self, checked: Checked, max_bytes: int) -> bytes | None:
        try:
            data = self._files.read_whole(checked.name, max_bytes)
        except CorruptionError as error:
            checked.report(error.fields["where"], str(error))
            return None
        self._count(len(data))
        checked.found = FileEntry(name=checked.name, size_bytes=len(data), digest=digest(data))
        return data

    def _check_data(self, wanted: tuple[FileEntry, Sequence[ManifestRow]]) -> Checked:
        entry, rows = wanted
        checked, whole = Checked(entry.name), Digester()
        try:
            file = self._files.open(entry.name)
            if file is None:
                checked.report("missing", f"Its {entry.size_bytes} bytes are not there.")
                return checked
            with closing(file.read([(0, min(file.size_bytes, entry.size_bytes))])) as blocks:
                self._check_rows(checked, self._counted(blocks, whole), rows)
        except (OSError, EOFError) as error:
            checked.report("unreadable", str(error))
            return checked
        except CorruptionError as error:  # of a compressed file
            checked.report("content", f"{error}{_cut_off(rows, checked.num_rows)}")
            return checked
        checked.found = FileEntry(name=entry.name, size_bytes=file.size_bytes, digest=whole.hexdigest())
        if file.size_bytes != entry.size_bytes:
            cut = _cut_off(rows, checked.num_rows)
            checked.report("size", f"{file.size_bytes} bytes, not {entry.size_bytes}.{cut}")
        elif not checked.damages:
            checked.compare(entry)
        return checked

    def _check_rows(
        self, checked: Checked, blocks: Iterator[memoryview], rows: Sequence[ManifestRow]
    ) -> None:
        """Read all of `blocks`, count the rows that are there entirely, and report each damaged one."""
        for row, found in zip(rows, _row_digests(blocks, rows), strict=False):
            checked.num_rows += 1
            checked.num_slices += row.slice is not None
            if found != row.digest:
                span = f"bytes {row.byte_offset} to {row.byte_offset + row.nbytes}"
                checked.report(row.label, f"The {span} differ from their digest {row.digest}.")
        for _ in blocks:  # what no row describes still counts for the digest of the file
            pass

    def _counted(self, blocks: Iterable[memoryview], whole: Digester) -> Iterator[memoryview]:
        for block in blocks:
            whole.update(block)
            self._count(block.nbytes)
            yield block
            if self._stopped.is_set():
                return


ALL_FRAGMENTS = "manifest-*.parquet"


def _cut_off(rows: Sequence[ManifestRow], num_rows: int) -> str:
    """What cannot be read if only the first rows can."""
    return f" {rows[num_rows].label} and what follows are cut off." if num_rows < len(rows) else ""


def _row_digests(blocks: Iterator[memoryview], rows: Iterable[ManifestRow]) -> Iterator[str]:
    """The digest of the bytes of each of `rows`, which follow one another; ends early where the bytes do."""
    rest = memoryview(b"")
    for row in rows:
        state, left = Digester(), row.nbytes
        while left:
            if not rest and not (rest := next(blocks, memoryview(b""))):
                return
            piece, rest = rest[:left], rest[left:]
            state.update(piece)
            left -= piece.nbytes
        yield state.hexdigest()
