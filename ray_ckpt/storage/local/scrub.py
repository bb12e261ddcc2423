"""Verification of a fragment and the files that it lists, read from the medium, not from the page cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from typing_extensions import Buffer

from ray_ckpt.errors import CorruptionError, NewerFormat
from ray_ckpt.format.manifest import MAX_FRAGMENT_BYTES, decode_columns
from ray_ckpt.format.names import fragment_file
from ray_ckpt.storage.local.direct import read_written
from ray_ckpt.storage.local.files import checked


def verify_fragment(path: Callable[[str], Path], node_index: int, num_nodes: int) -> tuple[str, ...]:
    """Call `verify_stored` for files on this node; `path` returns the path of a file.

    A file of which the medium has lost bytes is damaged.
    """
    return verify_stored(lambda file: read_written(path(file)), node_index, num_nodes)


def verify_stored(
    read: Callable[[str], Iterable[Buffer]], node_index: int, num_nodes: int
) -> tuple[str, ...]:
    """Return the names of files that are missing or differ from the fragment; `read` yields a file's bytes.

    If the fragment itself is damaged, return only its name, because the others cannot be checked. A fragment
    of a newer version is not damaged: return no names. Raise OSError if a file exists but cannot be read.
    """
    name = fragment_file(node_index, num_nodes)
    try:
        fragment, _ = decode_columns(_first_bytes(read(name)))
    except NewerFormat:
        return ()
    except (FileNotFoundError, CorruptionError):
        return (name,)
    damaged = []
    for file in fragment.files:
        try:
            whole = checked(read(file.name), size_bytes=file.size_bytes, digest=file.digest, what=file.name)
            for _ in whole:
                pass
        except (FileNotFoundError, CorruptionError):
            damaged.append(file.name)
    return tuple(damaged)


def _first_bytes(blocks: Iterable[Buffer]) -> bytes:
    """Return the bytes of a file; of one that is too large for a fragment, enough to be refused as such."""
    data = bytearray()
    for block in blocks:
        data += block
        if len(data) > MAX_FRAGMENT_BYTES:
            break
    return bytes(data)
