"""The files of one checkpoint in any store, with names and bytes as before compression."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

from ray_ckpt.errors import CorruptionError, FormatError, StoragePathError
from ray_ckpt.format import names, zstd
from ray_ckpt.location import Location, StoragePath, locate
from ray_ckpt.storage.local.files import NotRegular
from ray_ckpt.storage.remote.file_store import Blocks, FileStore, StoredFile, UnlistableKey, children_of
from ray_ckpt.storage.remote.tier import RemoteTier, open_store

UNREADABLE = "unreadable"  # field `where` of an error about a file whose bytes are unknown
PERHAPS_DELETED = "Run `ray-ckpt verify`; if it was deleted since the log was read, read the log again."


def where_of(error: OSError | EOFError) -> str:
    """Return the field `where` of a file that was listed and could not be read."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    return "size" if isinstance(error, EOFError) else UNREADABLE


@contextmanager
def readable(location: Location) -> Iterator[None]:
    """Convert errors of a store in the block to a StoragePathError with a hint."""
    try:
        yield
    except OSError as error:
        hint = "Check bucket, endpoint and credentials; they come from the environment, a profile or a role."
        if location.is_posix:
            hint = "Checkpoints are private to the user that trained; read them as that user."
        if isinstance(error, FileNotFoundError):
            hint = PERHAPS_DELETED
        if isinstance(error, UnlistableKey):
            hint = "Delete that object, which another program made, or set the storage option backend=fsspec."
        if isinstance(error, NotRegular):
            hint = "Restore that file from a backup."
        where = "" if str(location) in str(error) else f" {location}"
        message = f"The storage path{where} cannot be read: {error}."
        raise StoragePathError(message, hint=hint, path=str(location)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A saved file: the uncompressed size, and a function that reads ascending ranges (offset, nbytes)."""

    size_bytes: int
    read: Callable[[Sequence[tuple[int, int]]], Blocks]


class SavedFiles(ABC):
    """Files of one checkpoint in one location, with names and bytes as before compression."""

    @property
    @abstractmethod
    def folder_name(self) -> str:
        """The name of the checkpoint's folder."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The sorted names of the files that the location lists. Raises OSError."""

    @abstractmethod
    def place(self, name: str) -> str:
        """Return the path or URL of a file for messages."""

    @abstractmethod
    def open(self, name: str) -> CheckpointFile | None:
        """Open a file; return None if it does not exist.

        Raise OSError, or FormatError if the file is compressed and its seek table is damaged.
        """

    def read_whole(self, name: str, max_bytes: int) -> bytes:
        """Read a small file. Raise CorruptionError if it is missing, too large or unreadable."""
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
            if isinstance(error, PermissionError):
                hint = "Checkpoints are private to the user that trained; read them as that user, or with "
                hint += "credentials for the bucket."
            raise CorruptionError(
                f"{self.place(name)} cannot be read: {error}.", hint=hint, file=name, where=where_of(error)
            ) from error


class CheckpointFiles(SavedFiles):
    """Files of one checkpoint in a folder of a store.

    A shard may be compressed, as NAME.zst. The folder is listed once, at the first access; see `forget`.
    """

    def __init__(self, location: Location, store: FileStore, folder: str = "") -> None:
        """Take the files in `folder` of `store`, which is the same folder as `location`."""
        self.location = location
        self._store = store
        self._folder = folder
        self._tables: dict[StoredFile, CheckpointFile | FormatError] = {}  # of compressed files

    @property
    def folder_name(self) -> str:
        return self.location.name

    def place(self, name: str) -> str:
        return str(self.location / name)

    @cached_property
    def _stored(self) -> Mapping[str, StoredFile]:
        """The stored files by the name in the folder. Raises OSError."""
        store, folder = self._store, self._folder
        found = (children_of(store, folder) if folder else store.children()).files
        return {stored.name.rpartition("/")[2]: stored for stored in found}

    def forget(self) -> None:
        """List the folder again at the next access, because a file may have been repaired by then.

        The seek table of a file that has the same size and time is not read again.
        """
        self.__dict__.pop("_stored", None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({_saved_name(name) for name in self._stored}))

    @property
    def size_bytes(self) -> int:
        """The size in bytes of all stored files of the checkpoint. Raises OSError."""
        found = self._stored.items()
        return sum(stored.size_bytes for name, stored in found if names.is_file_name(_saved_name(name)))

    def open(self, name: str) -> CheckpointFile | None:
        path = f"{self._folder}/{name}" if self._folder else name
        there = self._stored
        if (stored := there.get(name)) is not None:
            return CheckpointFile(size_bytes=stored.size_bytes, read=partial(self._store.read, path))
        if not names.is_shard_name(name) or (stored := there.get(name + zstd.SUFFIX)) is None:
            return None
        if stored not in self._tables:
            self._tables[stored] = self._read_table(path + zstd.SUFFIX, stored.size_bytes)
        file = self._tables[stored]
        if isinstance(file, FormatError):
            raise file.with_traceback(None)
        return file

    def _read_table(self, stored: str, size: int) -> CheckpointFile | FormatError:
        try:
            reader = zstd.SeekableReader(partial(self._store.read, stored), size)
        except FormatError as error:
            return error.at(self.place(stored.rpartition("/")[2]))
        return CheckpointFile(size_bytes=reader.raw_size, read=reader.read)


def files_at(path: StoragePath, storage_options: Mapping[str, str] | None = None) -> CheckpointFiles:
    """Return the files of the checkpoint whose directory is at `path`. Raise ConfigError."""
    location = locate(path)
    return CheckpointFiles(location, open_store(location, storage_options)[0])


def files_on(tier: RemoteTier, directory: str) -> CheckpointFiles:
    """Return the files of a checkpoint, or of some of its items, on a run's storage path; send no request."""
    folder = tier.folder_of(directory)
    return CheckpointFiles(tier.root / folder, tier.files, folder)


def _saved_name(stored: str) -> str:
    """Return the name that the stored file had before compression."""
    plain = stored.removesuffix(zstd.SUFFIX)
    return plain if names.is_shard_name(plain) else stored
