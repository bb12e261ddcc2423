"""Output files named by a user: no file is replaced without --force, and no incomplete file is visible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import without_tilde


def output_file(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Return the file to write for `path`, with links and `~` resolved.

    Raise ConfigError if its folder does not exist, if it is a folder, a device, a pipe or a link to itself,
    or if the file exists and `force` is false.
    """
    given = without_tilde(path)
    try:
        file = given.resolve()
    except RuntimeError:  # Python before 3.13, for a link to itself
        file = given
    if file.is_symlink():
        raise ConfigError(f"{given} is a link to itself.", hint="Give another name.", path=str(given))
    if file.is_dir():
        raise ConfigError(f"{given} is a folder.", hint="Give the name of a file in it.", path=str(given))
    if file.exists() and not file.is_file():
        raise ConfigError(f"{given} is not a file.", hint="Give the name of a file.", path=str(given))
    if file.exists() and not force:
        raise ConfigError(f"{given} is there already.", hint="Give --force to replace it.", path=str(given))
    if not file.parent.is_dir():
        folder = file.parent
        raise ConfigError(f"There is no folder {folder}.", hint="Create it first.", path=str(folder))
    return file


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Provide a temporary file that replaces `file` if the `with` block ends without an error."""
    temporary = file.with_name(f".{token_hex(8)}.tmp")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
