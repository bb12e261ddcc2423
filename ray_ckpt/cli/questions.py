"""Confirmation prompts of commands."""

from __future__ import annotations

import sys

import typer

from ray_ckpt.cli.options import EXIT_INTERRUPTED
from ray_ckpt.errors import ConfigError


def is_anybody_there() -> bool:
    """Return whether stdin is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirm(question: str) -> None:
    """Ask `question`; raise ConfigError unless the answer is yes, and exit with 130 after Ctrl-C."""
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort as error:
        typer.echo(err=True)  # ends the line of the question
        if isinstance(error.__context__, KeyboardInterrupt):
            raise typer.Exit(EXIT_INTERRUPTED) from error
        is_sure = False
    if not is_sure:
        raise ConfigError("Nothing was changed.", hint="Answer y, or give --yes.")
