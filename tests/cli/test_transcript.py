"""The exact output of each command for one small run: `tests/cli/transcripts/<command>.txt`.

Digits of sizes that include manifests are `#`, because versions of pyarrow write Parquet files of different
sizes; only digits of the sizes that the sample run really has are replaced. A change of a command's output
shows in a diff of these files. `UPDATE_TRANSCRIPTS=1` writes them anew; read what has changed before it is
committed.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import imports, main, output, rollback
from ray_ckpt.format import names, records
from ray_ckpt.texts import size_text
from tests.support.code_blocks import ON_A_CLUSTER, our_commands
from tests.support.sample_run import START_S, SampleRun, write_run

FOLDER = Path(__file__).parent / "transcripts"
UPDATE = "UPDATE_TRANSCRIPTS"
NOW_S = START_S + 3600.0
SHARED = "/shared"  # stands for the folder of a test
SHARD = "shard-00001-of-00002.safetensors"
DAMAGED_SLICE_BYTES = 96  # of the slice that `damage` changes

# `damage` changes a byte of step 50 before the next command, and `model` writes a model folder of another
# trainer; they are no commands of ours.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "ls": (
        "ls /shared/runs",
        "ls /shared/runs/gpt",
        "ls /shared/runs/gpt --all",
        "ls /shared/runs/gpt --json",
        "ls /shared/runs/gtp",
    ),
    "tree": ("tree /shared/runs/gpt", "tree /shared/runs/gpt --all"),
    "show": (
        "show /shared/runs/gpt 50",
        "show /shared/runs/gpt 40",
        "show /shared/runs/gpt 50 --slices",
        "show /shared/runs/gpt 45",
    ),
    "verify": (
        "verify /shared/runs/gpt",
        "verify /shared/runs/gpt --all --json",
        "verify /shared/runs/gpt --step 40",
        "damage",
        "verify /shared/runs/gpt --all",
    ),
    "diff": (
        "diff /shared/runs/gpt 30 50",
        "diff /shared/runs/gpt@30 /shared/runs/gpt@30",
        "diff /shared/runs/gpt 30 40",
        "damage",
        "diff /shared/runs/gpt 30 50 --only 'model.*'",
    ),
    "export": (
        "export /shared/runs/gpt /shared/out --item model",
        "export /shared/runs/gpt /shared/out --item model",
        "export /shared/runs/gpt /shared/gpt.pt --to torch --step 30 --json",
    ),
    "gc": (
        "gc /shared/runs/gpt --dry-run",
        "gc /shared/runs/gpt --dry-run --keep-last 1 --keep-every 30",
        "gc /shared/runs/gpt",
    ),
    "goodput": ("goodput /shared/runs/gpt", "goodput /shared/runs/gpt --plot /shared/goodput.png --json"),
    "rollback": (
        "rollback /shared/runs/gpt --before 50 --yes",
        "tree /shared/runs/gpt",
        "rollback /shared/runs/gpt --to 50 --yes",
        "rollback /shared/runs/gpt --before 10 --yes",
    ),
    "import": (
        "model",
        "import hf /shared/checkpoint-60 /shared/runs/gpt",
        "import hf /shared/checkpoint-60 /shared/runs/gpt --step 45",
        "tree /shared/runs/gpt",
        "import pt /shared/checkpoint-60/model.safetensors /shared/runs/new --step 60",
        "import hf /shared/runs /shared/runs/gpt",
    ),
    "report": (
        "report /shared/runs/gpt --html /shared/report.html",
        "report /shared/runs/gpt --html /shared/report.html",
        "report /shared/runs/gpt",
    ),
    "drill": (
        "drill /shared/runs/gpt --remote-only",
        "damage",
        "drill /shared/runs/gpt --remote-only",
        "drill /shared/runs/gpt",
    ),
    "doctor": ("doctor /shared/runs --size 0 --staging /shared/staging",),
}


def _names_of_checks(text: str) -> str:
    """Return doctor's table with the names of the checks only; the rest depends on the machine."""
    names = re.findall(r"^ (\S.*?) {2,}(?:ok|warn|fail) ", text, re.MULTILINE)
    return "\n".join(["checks:", *names]) + "\n"


def _without_speed(text: str) -> str:
    """Seconds and rates are chance, and so is the width of their columns."""
    text = re.sub(r" at [\d.]+ \w+/s", " at a rate", text)
    text = re.sub(r"(passed|failed) +\d+\.\d+ ", r"\1  N ", text)
    return re.sub(r"(?<=\S) {2,}", "  ", text)


def _sizes(run: SampleRun) -> Iterator[int]:
    """Yield the sizes of manifests, and the sums that contain them."""
    for checkpoint in run.checkpoints.values():
        size_bytes = checkpoint.size_bytes
        yield size_bytes
        yield size_bytes + len(checkpoint.files[names.CHECKPOINT_JSON])  # read by verify
        yield size_bytes - DAMAGED_SLICE_BYTES  # restored by drill
        yield from (size_bytes + other.size_bytes for other in run.checkpoints.values())  # freed by gc
        yield from (len(data) for name, data in checkpoint.files.items() if name.endswith(".parquet"))


def _without_manifests(text: str, run: SampleRun) -> str:
    """Replace the sizes and root digests that depend on the version of pyarrow."""
    for info in Catalog(run.folder).list(all=True):
        shown = f"<root digest of step {info.step} of session {info.id.session}>"
        text = re.sub(rf"\b{info.root_digest}\b", shown, text)
    for size in {shown for size_bytes in _sizes(run) for shown in (str(size_bytes), size_text(size_bytes))}:
        text = re.sub(rf"(?<![\w.]){re.escape(size)}\b", re.sub(r"\d", "#", size), text)
    return text


NORMALISE: Mapping[str, Callable[[str], str]] = {"doctor": _names_of_checks, "drill": _without_speed}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SampleRun]:
    """Two sessions, the second a branch from step 30; an hour later, in UTC, on no terminal."""
    for variable in ("COLUMNS", "FORCE_COLOR", "RAY_CKPT_STAGING"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for module in (imports, output, rollback):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW_S))
    found = write_run(
        tmp_path / "runs",
        durable=(10, 30, 50),
        resume_at=30,
        resumed_steps=(40, 50),
        lost=(20,),
        collected=(10,),
    )
    first = found.checkpoints[50].attempt.attempt
    found.log.append(records.Pin(attempt=first, owner="paper", expires_at_s=None))
    found.log.append(records.Epoch())
    found.log.append(
        records.Session(
            session=3,
            service="sample",
            after=2,
            resumed_from=first,
            world_size=2,
            num_nodes=2,
            retention="last=2",
        )
    )
    yield found
    monkeypatch.undo()
    time.tzset()


def _damage(run: SampleRun) -> None:
    path = run.directory(50) / SHARD
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)


def _write_model(folder: Path) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def transcript(name: str, run: SampleRun, folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yield each command with its output, errors last, and its exit code if that is not 0."""
    for line in COMMANDS[name]:
        if line == "damage":
            _damage(run)
            yield "# a byte of step 50 is changed\n"
            continue
        if line == "model":
            _write_model(folder / "checkpoint-60")
            continue
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line.replace(SHARED, str(folder))))
        printed = capsys.readouterr()
        text = (printed.out + printed.err).replace(str(folder), SHARED)
        text = re.sub(r"\d+ s ago, (?!2026-09)[\d-]+ [\d:]+Z", "0 s ago, now", text)  # what a rollback wrote
        text = _without_manifests(text, run)
        text = re.sub("─{4,}", "────", re.sub(r" +$", "", text, flags=re.MULTILINE))
        code = f"[exit code {ended.value.code}]\n" if ended.value.code else ""
        yield f"$ ray-ckpt {line}\n{NORMALISE.get(name, str)(text)}{code}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_it_printed(
    name: str, run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = "\n".join(transcript(name, run, tmp_path, capsys))
    file = FOLDER / f"{name}.txt"
    if os.environ.get(UPDATE):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text(), f"see the module's docstring: {UPDATE}=1"


def test_every_command_has_a_transcript_or_needs_a_cluster() -> None:
    assert our_commands().keys() <= COMMANDS.keys() | ON_A_CLUSTER.keys()
    assert not COMMANDS.keys() & ON_A_CLUSTER.keys()
    assert {path.stem for path in FOLDER.glob("*.txt")} == COMMANDS.keys()
