"""`ray-ckpt`: commands for the checkpoints of a run and for the service of a Ray cluster.

Commands that show a run work on any machine that reaches its storage path; they only read, through the
catalog. `rollback`, `import`, `pin` and `unpin` write to the run's log; pins are written by the service if it
has the run open. A `drill` in a cluster is recorded by the service. Commands that call the service run on a
node of its cluster and import Ray only then. Every command can print JSON.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

import ray_ckpt
from ray_ckpt.cli import (
    diff,
    doctor,
    drill,
    export,
    gc,
    goodput,
    imports,
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
from ray_ckpt.cli.options import EXIT_DAMAGED, EXIT_REFUSED, EXIT_USAGE, option
from ray_ckpt.cli.streams import end_when_unread
from ray_ckpt.errors import CheckpointError, CorruptionError, NewerFormat, RunInUse
from ray_ckpt.storage.checkpoint_files import UNREADABLE
from ray_ckpt.texts import printable

NAME = "ray-ckpt"

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Look at the checkpoints of a run, verify and compare them, keep them or go back to an older one; "
    "start, watch and stop the checkpoint service of a Ray cluster.",
    epilog="PATH is a folder or a URL: `/shared/runs/gpt`, `s3://bucket/runs/gpt`, `gs://bucket/runs/gpt`. "
    "Credentials come from the environment, a profile or a role. "
    "Commands of the service run on a node of its cluster; `status`, `pin` and `unpin` also without one. "
    "Exit codes: 0 fine; 1 damage found, a failed check, or a refusal as a run or the service is at work; "
    "2 wrong usage, nothing there, or another error; 130 after Ctrl-C; 141 if nobody reads the output.",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that `argv`, or else the command line, names, and exit.

    The exit code is 0; 1 for damage, a failed check or a refusal; 2 for wrong usage or another error, which
    the message explains; 130 after Ctrl-C; and 141, as after SIGPIPE, if the reader of stdout is gone.
    """
    end_when_unread()
    try:
        sys.exit(app(args=argv, prog_name=NAME, standalone_mode=False) or 0)
    except TyperException as error:
        _fail(_usage_text(error), EXIT_USAGE)
    except typer.Abort:  # a question was not answered
        _fail("The question was not answered.", EXIT_USAGE)
    except CheckpointError as error:
        is_damage = isinstance(error, CorruptionError) and not isinstance(error, NewerFormat)
        is_damage = is_damage and error.fields.get("where") != UNREADABLE
        code = EXIT_DAMAGED if is_damage else EXIT_REFUSED if isinstance(error, RunInUse) else EXIT_USAGE
        _fail(str(error), code)
    except OSError as error:
        _fail(_system_text(error), EXIT_USAGE)


def _fail(text: str, code: int) -> NoReturn:
    if text:
        print(f"{NAME}: {printable(text)}", file=sys.stderr)
    sys.exit(code)


def _usage_text(error: TyperException) -> str:
    """Return the problem with the command line; empty without arguments, as the help was printed then."""
    text, context = " ".join(error.format_message().split()), getattr(error, "ctx", None)
    if not (text and context):
        return text
    step = next((known for known in context.command.params if known.name == "step"), None)
    hint = ""
    if step is not None and text.startswith("No such option: --step"):
        hint = " The step is an argument: leave out --step."
    elif "--step" in getattr(step, "opts", ()) and (found := re.search(r"extra argument.*\((\d+)\)", text)):
        hint = f" Name the step with --step {found[1]}."
    return f"{text.removesuffix('.')}.{hint} See `{context.command_path} --help`."


def _system_text(error: OSError) -> str:
    """Return a text such as `/nope/out.png: No such file or directory`."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename2 or error.filename}: {error.strerror}"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ray-ckpt {ray_ckpt.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, option("--version", "Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


# commands by the panel of the help that lists them
_COMMANDS: Mapping[str, Sequence[Callable[..., None]]] = {
    "A run, on its storage path": (
        ls.ls,
        tree.tree,
        show.show,
        verify.verify,
        diff.diff,
        export.export,
        imports.import_,
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
        app.command(command.__name__.rstrip("_"), rich_help_panel=panel)(command)
