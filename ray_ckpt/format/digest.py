"""The digest of the format: xxh3-128, as 32 hex digits. It detects damage, not attacks."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, get_args

import xxhash

from ray_ckpt.types import FileEntry, RootOf

if TYPE_CHECKING:
    from typing_extensions import Buffer

FRAGMENT_PREFIX = "manifest-"  # begins the names of fragments


def digest(data: Buffer) -> str:
    """Return the xxh3-128 of `data` as 32 hex digits; release the GIL for large buffers."""
    return str(xxhash.xxh3_128_hexdigest(data))


Digester = xxhash.xxh3_128
"""The digest of bytes that arrive in pieces: `update(data)`, then `hexdigest()`."""


def root_files(files: Iterable[FileEntry], of: RootOf) -> list[FileEntry]:
    """Return those of a checkpoint's files that its root digest covers, in the order of their names."""
    covered = files if of == "files" else (file for file in files if file.name.startswith(FRAGMENT_PREFIX))
    return sorted(covered, key=attrgetter("name"))


def root_digests(files: Iterable[FileEntry]) -> tuple[str, ...]:
    """Return the root digests of all files of a checkpoint, first that of its fragments."""
    files = tuple(files)
    return tuple(root_digest(files, of) for of in get_args(RootOf))


def root_digest(files: Iterable[FileEntry], of: RootOf = "fragments") -> str:
    """Return one digest over every (name, size, digest) of the `root_files` of a checkpoint."""
    lines = [f"{file.name}\0{file.size_bytes}\0{file.digest}\n" for file in root_files(files, of)]
    return digest("".join(lines).encode())
