"""Reading a stored fragment and its files against their digests, from the medium and not from the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from typing_extensions import Buffer

from ray_ckpt.errors import CorruptionError, NewerFormat
from ray_ckpt.format.manifest import decode_fragment
from ray_ckpt.format.names import fragment_file
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.storage.local.files import checked


def verify_fragment(path: Callable[[str], Path], node_index: int, num_nodes: int) -> tuple[str, ...]:
    """As `verify_stored`, of files on this node; `path` gives a file's place."""
    return verify_stored(lambda file: read_blocks_direct(path(file)), node_index, num_nodes)


def verify_stored(
    read: Callable[[str], Iterable[Buffer]], node_index: int, num_nodes: int
) -> tuple[str, ...]:
    """Names of files that are missing or differ from what the fragment says; `read` gives a file's bytes.

    If the fragment itself is bad, it is the only name: nothing can be said of the others. None if it is of a
    newer version, which is no damage. OSError if a file is there and cannot be read.
    """
    name = fragment_file(node_index, num_nodes)
    try:
        fragment = decode_fragment(b"".join(map(bytes, read(name))))
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
