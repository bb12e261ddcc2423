"""Arguments and exit codes that several commands share."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any

import typer

from ray_ckpt.errors import ConfigError

EXIT_DAMAGED = 1
EXIT_REFUSED = 1  # a run or the service may be at work
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT  # as typer exits after Ctrl-C
EXIT_UNREAD = 128 + signal.SIGPIPE  # as a shell reports a command that this signal ended


def argument(metavar: str, help: str) -> Any:
    """Declare an argument of a command."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(name: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    """Declare an option of a command whose default the help does not show."""
    return typer.Option(name, help=help, metavar=metavar, show_default=False, **more)


PathArgument = Annotated[str, argument("PATH", "The run: `<storage_path>/<run name>`.")]
StorageOption = Annotated[
    list[str] | None,
    option(
        "--storage-option",
        "How to open a URL, such as profile=training; no secrets. Repeatable.",
        "NAME=VALUE",
    ),
]
JsonOption = Annotated[bool, option("--json", "Print JSON instead of tables.")]
YesOption = Annotated[bool, option("--yes", "Skip the question.")]

RunArgument = Annotated[
    str | None,
    argument("[PATH|RUN]", "A run, by its path or by its name in the service."),
]
AddressOption = Annotated[
    str | None,
    option("--address", "The Ray cluster; else RAY_ADDRESS, or the one of this machine.", "HOST:PORT"),
]

MIN_RATE_BYTES_PER_S = 10**6  # at lower rates, requests for long ranges would time out

_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?:([KMGT])(I)?)?B?", re.IGNORECASE | re.ASCII)
_PREFIXES = ("", "K", "M", "G", "T")
_PER_SECOND = re.compile(r"\s*(?:/\s*(?:s|sec)|ps)$", re.IGNORECASE)
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds(text: str) -> float:
    """Parse `7d` or `90 min` into seconds. Raise ConfigError unless it is a time above zero."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|h|d|w)", text.strip())
    span_s = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if span_s <= 0:
        raise ConfigError(f"{text!r} is not a duration.", hint="Give one such as 7d, 12h, 30min or 90s.")
    return span_s


def size(text: str, *, option: str) -> int:
    """Parse `5GB` into bytes. Raise ConfigError, which names the option, unless it is a size above zero."""
    if not (size_bytes := _bytes(text)):
        raise ConfigError(f"{option} is {text!r}.", hint="Give a size such as 5GB.", option=option)
    return size_bytes


def rate(text: str | None, *, option: str = "--max-rate") -> int | None:
    """Parse `200MB/s` into bytes per second; None for `0` or no text: there is no limit.

    Raise ConfigError, which names the option, unless it is a rate of at least MIN_RATE_BYTES_PER_S.
    """
    bytes_per_s = _bytes(_PER_SECOND.sub("", (text or "0").strip()))
    if bytes_per_s is None or 0 < bytes_per_s < MIN_RATE_BYTES_PER_S:
        raise ConfigError(
            f"{option} is {text!r}.",
            hint="Give one such as 200MB/s, 1.5GB/s or 1GiB/s, of 1MB/s or more; 0: no limit.",
            option=option,
        )
    return bytes_per_s or None


def _bytes(text: str) -> int | None:
    if (found := _SIZE.fullmatch(text.strip())) is None:
        return None
    number, prefix, is_binary = found.groups(default="")
    return int(Decimal(number) * (1024 if is_binary else 1000) ** _PREFIXES.index(prefix.upper()))


def store_options(given: Iterable[str] | None) -> dict[str, str]:
    """Parse texts such as `profile=training` into options of the store."""
    if any("=" not in text for text in given or ()):  # the text may be a secret, so the error omits it
        raise ConfigError("A --storage-option has no value.", hint="Give NAME=VALUE.")
    return dict(text.partition("=")[::2] for text in given or ())
