"""`ray-ckpt`: look at the checkpoints of a run, verify them, see what retention would do, and go back to an
older one, on any machine that reaches the storage path.

Needs no cluster. Reads only, through the catalog, but for `rollback`, which writes two records to the log.
Everything is there as JSON too, for scripts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import ray_ckpt
from ray_ckpt.cli import diff, doctor, export, gc, goodput, ls, rollback, show, tree, verify
from ray_ckpt.cli.options import EXIT_USAGE
from ray_ckpt.cli.output import plain
from ray_ckpt.errors import CheckpointError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Look at the checkpoints of a run, verify them, see what retention would do, and go back to an "
    "older one. Needs no cluster.",
    epilog="PATH is a folder or a URL: `/shared/runs/gpt`, `s3://bucket/runs/gpt`, `gs://bucket/runs/gpt`. "
    "Credentials come from the environment, a profile or a role. "
    "Exit codes: 0 fine, 1 damage found or a failed check, 2 wrong usage or nothing there to read.",
)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Exits with 0, 1 (damage) or 2 (usage, or an error that its message explains)."""
    try:
        app(args=argv)
    except (CheckpointError, OSError) as error:
        print(f"ray-ckpt: {plain(str(error))}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ray-ckpt {ray_ckpt.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (
    ls.ls,
    tree.tree,
    show.show,
    verify.verify,
    diff.diff,
    export.export,
    doctor.doctor,
    gc.gc,
    goodput.goodput,
    rollback.rollback,
):
    app.command()(command)
