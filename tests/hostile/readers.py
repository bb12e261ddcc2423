"""Every reader of a run, called in a forked child: its answer, its seconds and its memory.

The parent imports everything and reads nothing, so a fork costs milliseconds and has no threads to lose.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch import nn

import ray_ckpt
from ray_ckpt.catalog.uri import CheckpointUri
from ray_ckpt.cli import main
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format import names
from ray_ckpt.train.pointers import open_checkpoint
from tests.support.sample_run import START_S

MAX_S = 20
NOW_S = START_S + 10**6  # of every clock that a reader looks at, so that equal runs give equal answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a reader. `code` is the exit code of a command, and of a `load` 0 or 1.

    `text` is all of its output, `problem` what no reader may do.
    """

    reader: str
    code: int
    out: str
    text: str
    problem: str
    seconds: float
    grown_bytes: int


def _load(run: Path) -> Any:
    return ray_ckpt.open(run).load()


def _load_tensor(run: Path) -> Any:
    return ray_ckpt.open(run).load("model.blocks.0.weight")


def _load_rank(run: Path) -> Any:
    return ray_ckpt.open(run).load(rank=1)


def _load_lazy(run: Path) -> Any:
    view = ray_ckpt.Catalog(run)[30]
    return {name: view[name].load() for name in view}


def _load_into(run: Path) -> Any:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(6, 8)])
    model.blocks[0].bias = nn.Parameter(torch.zeros(6))
    model.head = nn.Parameter(torch.zeros(4, 16, dtype=torch.bfloat16))
    model.unused = nn.Parameter(torch.zeros(0, 3))
    ray_ckpt.open(run).load(into={"model": model})
    return model.state_dict()


def _load_origin(run: Path) -> Any:
    return CheckpointUri.parse(f"{run}@30").open(None).load("model")


def _load_pointer(run: Path) -> Any:
    (pointer,) = run.glob("ray_ckpt_*/")
    return open_checkpoint(ray.train.Checkpoint(pointer)).load()


LOADS: dict[str, Callable[[Path], Any]] = {
    "load": _load,
    "load a tensor": _load_tensor,
    "load rank 1": _load_rank,
    "load lazily": _load_lazy,
    "load into": _load_into,
    "load an origin": _load_origin,
    "load a pointer": _load_pointer,
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "ls": ("ls", "RUN", "--all", "--json"),
    "ls --parquet": ("ls", "RUN", "--parquet", "OUT/tables", "--json"),
    "ls of runs": ("ls", "STORAGE", "--json"),
    "tree": ("tree", "RUN", "--json"),
    "show": ("show", "RUN", "30", "--slices", "--json"),
    "verify": ("verify", "RUN", "--all", "--json"),
    "verify a folder": ("verify", "FOLDER"),
    "verify --plan": ("verify", "RUN", "--all", "--plan", "--nodes", "--json"),
    "diff": ("diff", "RUN", "20", "30", "--json"),
    "export": ("export", "RUN", "OUT/export", "--json"),
    "export --to torch": ("export", "RUN", "OUT/export.pt", "--to", "torch", "--json"),
    "drill": ("drill", "RUN", "--remote-only", "--json"),
    "gc": ("gc", "RUN", "--dry-run", "--keep-last", "1", "--json"),
    "goodput": ("goodput", "RUN", "--json"),
    "report": ("report", "RUN", "--json"),
    "rollback": ("rollback", "RUN", "--before", "30", "--even-if-at-work"),
}
READERS = (*COMMANDS, *LOADS)


def answers_of(run: Path, readers: Sequence[str]) -> list[Answer]:
    """Return the answers of `readers`, each within MAX_S; a reader that takes longer is the last."""
    answers_file = run.parent / "answers"
    answers_file.unlink(missing_ok=True)
    wanted = list(readers)
    if (child := os.fork()) == 0:
        try:
            with answers_file.open("w") as file:
                for reader in wanted:
                    signal.alarm(MAX_S)
                    file.write(json.dumps(asdict(_answer(run, reader))) + "\n")
                    file.flush()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    answers = [Answer(**json.loads(line)) for line in answers_file.read_text().splitlines()]
    if len(answers) < len(wanted):
        ended = f"ended by {status}: {signal.strsignal(status & 127) if status & 127 else 'no answer'}"
        answers.append(
            Answer(reader=wanted[len(answers)], code=-1, out="", text="", problem=ended, seconds=MAX_S,
                   grown_bytes=0)
        )  # fmt: skip
        answers += answers_of(run, wanted[len(answers) :]) if len(answers) < len(wanted) else []
    return answers


def _answer(run: Path, reader: str) -> Answer:
    before, start_s = _reset_peak(), time.monotonic()
    code, problem, out, err = 0, "", io.StringIO(), io.StringIO()
    with _surroundings(out, err):
        try:
            if reader in LOADS:
                out.write(_digest(LOADS[reader](run)))
            else:
                main(_arguments(run, COMMANDS[reader]))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            code = 1
            err.write(f"{type(error).__name__}: {error}")
            if not isinstance(error, CheckpointError):
                problem = "".join(traceback.format_exception(error, limit=-6))
    if code not in (0, 1, 2):
        problem = f"exit code {code}"
    return Answer(
        reader=reader,
        code=code,
        out=out.getvalue(),
        text=out.getvalue() + err.getvalue(),
        problem=problem[-3000:],
        seconds=time.monotonic() - start_s,
        grown_bytes=_status_bytes("VmHWM") - before,
    )


@contextlib.contextmanager
def _surroundings(out: io.StringIO, err: io.StringIO) -> Iterator[None]:
    """Provide one clock, an empty stdin, and a copy of all output."""
    handler, log = logging.StreamHandler(err), logging.getLogger("ray_ckpt")
    log.handlers, log.propagate = [handler], False
    known, time.time = time.time, lambda: NOW_S
    stdin, sys.stdin = sys.stdin, io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        time.time, sys.stdin = known, stdin
        handler.flush()


def _arguments(run: Path, command: Sequence[str]) -> list[str]:
    out = run.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    folder = max((run / names.SERVICE_DIR / names.CHECKPOINTS_DIR).iterdir())
    places = {"RUN": run, "STORAGE": run.parent, "FOLDER": folder}
    return [str(places.get(part, part.replace("OUT", str(out)))) for part in command]


def _digest(value: Any) -> str:
    """Return a short text that differs for states that differ."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(repr((value.dtype, value.shape)).encode() + data).hexdigest()
    if isinstance(value, dict):
        return json.dumps({str(name): _digest(found) for name, found in value.items()}, sort_keys=True)
    return repr(value)


def _reset_peak() -> int:
    """Begin to measure anew; returns the memory that there is."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    """Return a value of this process by its name in `proc(5)`."""
    (line,) = [
        found for found in Path("/proc/self/status").read_text().splitlines() if found.startswith(field)
    ]
    return int(line.split()[1]) * 1024
