"""A zip archive of torch.save, in a file or in a part of a file, whose tensors are described, not loaded.

`data.pkl` has the values; each storage is a record of raw bytes. See torch.serialization. Files of before
torch 1.6 are no archives and are refused.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import unpack
from typing import Any

from typing_extensions import Buffer

from ray_ckpt.errors import ConfigError, CorruptionError
from ray_ckpt.interop.importers.source import cut_short, file_size, read_bytes, read_range
from ray_ckpt.interop.importers.unpickler import damaged, unpickle

MAX_DATA_BYTES = 64 << 20  # of `data.pkl`, all values but tensors
MAX_LIST_BYTES = 16 << 20  # of the list of records: 200,000 of some 70 bytes
LOCAL_HEADER_BYTES = 30  # before the name and the extra field of a record


class _Window(io.RawIOBase):
    """A part of a file, as a file; it reads at most MAX_LIST_BYTES at once."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._offset, self._length, self._at = offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a negative position")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view[:count])
        self._at += count
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(0, self._length - self._at)
        wanted = rest if size is None or size < 0 else min(size, rest)
        if wanted > MAX_LIST_BYTES:
            raise zipfile.BadZipFile("its list of records is too long")
        return super().read(wanted) or b""

    def close(self) -> None:
        self._file.close()
        super().close()


class TorchArchive:
    """The records of an archive at `offset` of a file. `form` chooses the names that its pickle may have."""

    def __init__(self, path: Path, *, form: str, offset: int = 0, length: int | None = None) -> None:
        """Read the list of records.

        Raise ConfigError for a file in the old format of torch.save or with compressed records,
        CorruptionError if the archive is damaged.
        """
        self.path = path
        self._form = form
        self.offset = offset
        self._length = file_size(path) - offset if length is None else length
        self._checked_keys: set[str] = set()
        self._check_kind()
        self._records = self._list()
        self._root = next((name[:-8] for name in self._records if name.endswith("data.pkl")), "")
        if f"{self._root}data.pkl" not in self._records:
            raise damaged(str(path), "the archive has no data.pkl")
        self._check_byteorder()

    def value(self) -> Any:
        """Return the saved value, with Foreign objects; see `unpickle`."""
        return unpickle(self._small("data.pkl", MAX_DATA_BYTES), form=self._form, where=str(self.path))

    def storage(self, key: str) -> int:
        """Return the size of a storage in bytes. Raise CorruptionError if it is not in the file."""
        return self._place(f"data/{key}")[1]

    def read(self, key: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield bytes of a storage from `start` on, in blocks of some MB, each valid until the next one.

        Raise CorruptionError if the storage differs from its checksum. If a part is wanted, the whole
        storage is read first, once.
        """
        if (start, nbytes) == (0, self.storage(key)):
            yield from self._checked(key)
            return
        self.check(key)
        yield from read_range(self.path, self._place(f"data/{key}")[0] + start, nbytes)

    def check(self, key: str) -> None:
        """Raise CorruptionError if a storage differs from its checksum. Files may be without checksums."""
        if key not in self._checked_keys and self._crc(f"data/{key}"):
            for _ in self._checked(key):
                pass
        self._checked_keys.add(key)

    def _checked(self, key: str) -> Iterator[memoryview]:
        at, nbytes = self._place(f"data/{key}")
        found = 0
        for block in read_range(self.path, at, nbytes):
            found = zlib.crc32(block, found)
            yield block
        self._compare(f"data/{key}", found)

    def _crc(self, name: str) -> int:
        """Return the checksum of a record; 0 without one, see torch.serialization.set_crc32_options."""
        return self._records[f"{self._root}{name}"].CRC

    def _compare(self, name: str, found: int) -> None:
        if self._crc(name) not in (0, found):
            raise damaged(str(self.path), f"{name} differs from its checksum")

    def _check_kind(self) -> None:
        if self._length < 4:
            raise cut_short(self.path)
        if read_bytes(self.path, self.offset, 2) != b"PK":
            raise ConfigError(
                f"{self.path} is no archive of torch.save, or one of before torch 1.6.",
                hint="Load it with torch.load and save it again with torch.save.",
                file=str(self.path),
            )

    def _list(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with _Window(self.path, self.offset, self._length) as window, zipfile.ZipFile(window) as archive:
                found = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise damaged(str(self.path), error) from error
        if any(info.compress_type != zipfile.ZIP_STORED for info in found.values()):
            raise ConfigError(
                f"{self.path} is a compressed archive, which torch.save does not write.",
                hint="Load it with torch.load and save it again with torch.save.",
            )
        return found

    def _check_byteorder(self) -> None:
        name = "byteorder"
        order = self._small(name, 16) if f"{self._root}{name}" in self._records else b"little"
        if order != b"little":
            raise ConfigError(
                f"{self.path} has its numbers in the byte order {order!r}.",
                hint="Load and save it again on a machine of little-endian order.",
            )

    def _small(self, name: str, max_bytes: int) -> bytes:
        offset, nbytes = self._place(name)
        if nbytes > max_bytes:
            raise ConfigError(
                f"{name} of {self.path} has {nbytes} bytes; at most {max_bytes} are read.",
                hint="Keep large arrays as tensors.",
            )
        data = read_bytes(self.path, offset, nbytes)
        self._compare(name, zlib.crc32(data))
        return data

    def _place(self, name: str) -> tuple[int, int]:
        """Return the position in the file of the bytes of a record, and their number."""
        info = self._records.get(f"{self._root}{name}")
        if info is None:
            raise damaged(str(self.path), f"the archive has no record {name}")
        at = self.offset + info.header_offset
        header = read_bytes(self.path, at, LOCAL_HEADER_BYTES)
        at += LOCAL_HEADER_BYTES + sum(unpack("<HH", header[-4:]))
        if header[:4] != b"PK\x03\x04" or at + info.file_size > self.offset + self._length:
            raise CorruptionError(
                f"{self.path} is damaged: {name} is not in the file.",
                hint="Copy the file again.",
                file=str(self.path),
            )
        return at, info.file_size
