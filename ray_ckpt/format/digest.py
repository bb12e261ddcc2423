"""The digest of the format: xxh3-128, as 32 hex digits. It detects damage, not attacks."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

import xxhash

from ray_ckpt.types import FileEntry

if TYPE_CHECKING:
    from typing_extensions import Buffer


def digest(data: Buffer) -> str:
    """Return the xxh3-128 of `data` as 32 hex digits; release the GIL for large buffers."""
    return str(xxhash.xxh3_128_hexdigest(data))


Digester = xxhash.xxh3_128
"""The digest of bytes that arrive in pieces: `update(data)`, then `hexdigest()`."""


def root_digest(files: Iterable[FileEntry]) -> str:
    """Return one digest over every (name, size, digest) of a checkpoint, in any order."""
    in_order = sorted(files, key=attrgetter("name"))
    return digest("".join([f"{file.name}\0{file.size_bytes}\0{file.digest}\n" for file in in_order]).encode())
