"""The result of reading a checkpoint of another format, and the reading of its bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ray_ckpt.errors import ConfigError, CorruptionError
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.types import Slice

ReadSlice: TypeAlias = Callable[[], Iterator[memoryview]]
"""Function that yields the bytes of a slice in row-major order; each block is valid until the next one."""

MAX_CONFIG_BYTES = 64 << 10  # of a file that names a format: some fields

_STEP = re.compile(r"(\d+)(\.(pt|pth|ckpt|tar|bin|safetensors))*\Z")
_PARENT = re.compile(r"global_step_?(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A checkpoint of another format: the trees of its items with TensorRefs, and the slices of its tensors.

    `version` is that of the format, "" if it has none.
    """

    format: str
    source: Path
    version: str = ""
    items: dict[str, Any] = field(default_factory=dict)
    tensors: dict[Slice, ReadSlice] = field(default_factory=dict)

    @property
    def origin(self) -> Mapping[str, str]:
        """The entry `imported_from` of a state file."""
        return {"format": self.format, "version": self.version, "source": str(self.source)}


def step_of(source: Path) -> int:
    """Return the number at the end of the name of `source`, as in `checkpoint-3000` or `step_3000.pt`.

    The models of a training with several are in folders of one step, as in `global_step_3000/actor`.
    """
    found = _STEP.search(source.name) or _PARENT.fullmatch(source.parent.name)
    if found is None:
        raise ConfigError(f"{source.name} does not end in the number of a step.", hint="Give --step N.")
    return int(found[1])


def file_size(path: Path) -> int:
    """Return the size of a regular file; a link is followed. Raise ConfigError or CorruptionError."""
    if not path.exists():
        raise CorruptionError(f"{path} is missing.", hint="Copy the whole checkpoint.", file=str(path))
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file.")
    return path.stat().st_size


def read_range(path: Path, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a range of a file in blocks of some MB. Raise CorruptionError if the file is shorter."""
    try:
        yield from read_blocks_direct(path.resolve(), offset, nbytes)
    except EOFError as error:
        raise cut_short(path) from error


def read_bytes(path: Path, offset: int, nbytes: int) -> bytes:
    """Return a small range of a file. Raise CorruptionError if the file is shorter."""
    if not 0 <= offset <= file_size(path):  # a damaged header may have any number
        raise cut_short(path)
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(nbytes)
    if len(data) < nbytes:
        raise cut_short(path)
    return data


def cut_short(path: Path) -> CorruptionError:
    """Return the error for a file that ends before its content."""
    return CorruptionError(f"{path} is cut short.", hint="Copy the file again.", file=str(path))
