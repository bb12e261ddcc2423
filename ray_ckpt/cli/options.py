"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from ray_ckpt.errors import ConfigError

EXIT_DAMAGED = 1
EXIT_USAGE = 2

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="The run: `<storage_path>/<run name>`.", show_default=False)
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="NAME=VALUE",
        help="How to open a URL, such as profile=training; no secrets. Repeatable.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def store_options(given: Iterable[str] | None) -> dict[str, str]:
    """`profile=training` as an option of the store."""
    if any("=" not in text for text in given or ()):  # it is not shown: it may be a secret
        raise ConfigError("A --storage-option has no value.", hint="Give NAME=VALUE.")
    return dict(text.partition("=")[::2] for text in given or ())
