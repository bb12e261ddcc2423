"""A file that somebody names for a result: nothing of his is replaced unasked, and nobody sees half of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import without_tilde


def output_file(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """`path` as the file to write: where a link leads, and below home for `~`.

    ConfigError if its folder is not there, if it is a folder, a device or a pipe, or if a file is there and
    not `force`.
    """
    given = without_tilde(path)
    file = given.resolve()
    if file.is_dir():
        raise ConfigError(f"{given} is a folder.", hint="Give the name of a file in it.", path=str(given))
    if file.exists() and not file.is_file():
        raise ConfigError(f"{given} is no file.", hint="Give the name of a file.", path=str(given))
    if file.exists() and not force:
        raise ConfigError(f"{given} is there already.", hint="Give --force to replace it.", path=str(given))
    if not file.parent.is_dir():
        folder = file.parent
        raise ConfigError(f"There is no folder {folder}.", hint="Make it first.", path=str(folder))
    return file


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A name beside `file` to write to; takes its place when the `with` ends without an error. OSError."""
    temporary = file.with_name(f".{token_hex(8)}.tmp")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
