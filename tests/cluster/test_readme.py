"""README's two scripts, run as a reader runs them: copied out of it, killed, run again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.config import STAGING_ENV
from ray_ckpt.errors import CheckpointError
from ray_ckpt.preemption.cloud import METADATA_ENV
from tests.support.code_blocks import ROOT, find

pytestmark = pytest.mark.cluster

SCRIPT = find("README.md", "ray_ckpt.connect(")
OUTPUT = find("README.md", "$ python train_mlp.py")
WITH_RAY_TRAIN = find("README.md", "CheckpointCallback(")
STORAGE = "/tmp/runs"
FIRST_SAVE_S = 60.0
MAX_LINES = 40


def programs() -> tuple[Sequence[str], Sequence[str]]:
    """Return the README's output lines of the killed run and of the next run."""
    killed, resumed = OUTPUT.text.split("$ python train_mlp.py\n")[1:]
    assert killed.endswith("\nKilled\n")
    return killed.splitlines()[:-1], resumed.splitlines()


def masked(lines: Sequence[str]) -> list[str]:
    """Lines without their losses, which processors may round differently."""
    return [re.sub(r"loss \d\.\d{6}$", "loss", line) for line in lines]


def step_of(line: str) -> int:
    return int(re.findall(r"^step (\d+):", line)[0])


@pytest.fixture
def here(no_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(STAGING_ENV, str(tmp_path / "staging"))
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes a token there
    monkeypatch.setenv(METADATA_ENV, "off")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = {process.pid for process in psutil.process_iter()}
    yield tmp_path
    for process in psutil.process_iter():
        if process.pid not in before and str(tmp_path) in _environment(process).get(STAGING_ENV, ""):
            process.kill()


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    file = folder / "train_mlp.py"
    file.write_text(code.replace(STORAGE, str(folder / "runs")))
    with (folder / "errors").open("a") as errors:
        return subprocess.Popen(
            [sys.executable, file],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ,
        )


def saved_step(folder: Path) -> int:
    try:
        view = Catalog(folder / "runs/mlp").newest()
    except CheckpointError:  # not there yet
        return 0
    return 0 if view is None else view.info.step


def uninterrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the output of the script without saves and without a kill."""

    class Checkpointer:
        def __init__(self, **items: Any) -> None:
            self.step, self.close = (lambda *_: None), (lambda: None)

        def resume_step(self) -> int:
            return 0

        def steps(self, total: int) -> Iterator[int]:
            return iter(range(1, total + 1))

    fake = SimpleNamespace(Checkpointer=Checkpointer, connect=lambda **_: None)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "ray_ckpt", fake)
        patched.setattr(time, "sleep", lambda _: None)
        exec(compile(SCRIPT.text, "README.md", "exec"), {})
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow  # 50 s on two clusters of its own; `make demo` kills and resumes as well
def test_the_script_is_killed_and_goes_on_with_the_losses_of_a_run_that_was_not(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(SCRIPT.text.splitlines()) <= MAX_LINES
    shown_killed, shown_resumed = programs()
    last = step_of(shown_killed[-1])
    assert shown_resumed[0] == f"continues after step {last}"

    began = time.monotonic()
    first = start(SCRIPT.text.replace("time.sleep(0.01)", "time.sleep(0.002)"), here)  # 4 s less
    assert first.stdout is not None
    printed = []
    for line in first.stdout:
        printed.append(line.rstrip("\n"))
        if len(printed) == 2:
            assert time.monotonic() - began < FIRST_SAVE_S
        if line.startswith(f"step {last}:"):
            break
    while saved_step(here) < last:
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    printed += first.stdout.read().splitlines()
    first.wait()
    assert masked(printed[: len(shown_killed)]) == masked(shown_killed)

    saved = saved_step(here)
    second = start(SCRIPT.text.replace("time.sleep(0.01)", "time.sleep(0)"), here)  # 6 s less
    resumed = second.communicate()[0].splitlines()
    assert second.returncode == 0, (here / "errors").read_text()
    assert resumed[0] == f"continues after step {saved}"
    assert saved >= last  # a slow machine may complete the next save before the process is killed
    assert masked(resumed[1:]) == masked([line for line in shown_resumed[1:] if step_of(line) > saved])
    losses = {step_of(line): line for line in [*printed[1:], *resumed[1:]]}
    assert [*losses.values()] == uninterrupted(monkeypatch, capsys)[1:]


@pytest.mark.slow  # 30 s; tests/cluster/test_train.py has quick trainings with Ray Train
def test_the_script_for_ray_train_trains_to_its_end(here: Path) -> None:
    code = WITH_RAY_TRAIN.text.replace("total=1000", "total=200")
    program = start(code, here)
    program.communicate()
    assert program.returncode == 0, (here / "errors").read_text()[-2000:]
    newest = Catalog(here / "runs/linear").newest()
    assert newest is not None and newest.info.step == 200 and newest.verify() == ()
