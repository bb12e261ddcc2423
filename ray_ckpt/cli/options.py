"""Arguments that several commands take."""

from __future__ import annotations

import re
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


AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster; else RAY_ADDRESS, or the one of this machine.",
        show_default=False,
    ),
]

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds(text: str) -> float:
    """`7d` or `90 min` in seconds; ConfigError if it is no time, or none at all."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|h|d|w)", text.strip())
    span_s = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if span_s <= 0:
        raise ConfigError(f"{text!r} is no length of time.", hint="Give one such as 7d, 12h, 30min or 90s.")
    return span_s


def store_options(given: Iterable[str] | None) -> dict[str, str]:
    """`profile=training` as an option of the store."""
    if any("=" not in text for text in given or ()):  # it is not shown: it may be a secret
        raise ConfigError("A --storage-option has no value.", hint="Give NAME=VALUE.")
    return dict(text.partition("=")[::2] for text in given or ())
