"""`ray-ckpt`: the checkpoints of a run, on any machine that reaches its storage path, and the service of a
Ray cluster, on any node of that.

What looks at a run needs no cluster and only reads, through the catalog. `rollback`, `pin` and `unpin` write
to its log; pins through the service if that has the run. What asks the service loads Ray when it runs, not
before. Everything is there as JSON too, for scripts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

import ray_ckpt
from ray_ckpt.cli import (
    diff,
    doctor,
    drill,
    export,
    gc,
    goodput,
    ls,
    pin,
    report,
    rollback,
    service,
    show,
    status,
    top,
    tree,
    verify,
)
from ray_ckpt.cli.options import EXIT_USAGE
from ray_ckpt.cli.output import plain
from ray_ckpt.errors import CheckpointError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Look at the checkpoints of a run, verify and compare them, keep them or go back to an older one; "
    "start, watch and stop the checkpoint service of a Ray cluster.",
    epilog="PATH is a folder or a URL: `/shared/runs/gpt`, `s3://bucket/runs/gpt`, `gs://bucket/runs/gpt`. "
    "Credentials come from the environment, a profile or a role. "
    "Commands of the service run on a node of its cluster; `status`, `pin` and `unpin` also without one. "
    "Exit codes: 0 fine, 1 damage found, a failed check or a refusal, 2 wrong usage or nothing there.",
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


# By the panel of the help that they stand in.
_COMMANDS: Mapping[str, Sequence[Callable[..., None]]] = {
    "A run, on its storage path": (
        ls.ls,
        tree.tree,
        show.show,
        verify.verify,
        diff.diff,
        export.export,
        drill.drill,
        gc.gc,
        goodput.goodput,
        report.report,
        rollback.rollback,
    ),
    "The service of a Ray cluster": (
        service.up,
        status.status,
        top.top,
        pin.pin,
        pin.unpin,
        service.down,
    ),
    "A machine": (doctor.doctor,),
}

for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
