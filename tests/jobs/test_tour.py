"""Each command on what the demo has just left: docs/tour.md still is what they print."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from docs import tour
from jobs.demo.local_cluster import LocalCluster
from tests.support.code_blocks import ROOT

LIKE = 0.8  # least share of equal words in a page's output; some, such as a checkpoint's level, are chance
RUN = str(tour.RUN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo has just left its result."""
    made, copy = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("tour").resolve()
    demo = subprocess.run(
        [sys.executable, "-m", "jobs.demo", "--out", str(made / "demo")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    shutil.copytree(made / "demo/storage", copy / tour.DEMO)
    return copy


def printed() -> dict[str, str]:
    """Return the output of each command on the page, by the command's line."""
    page = (ROOT / "docs/tour.md").read_text()
    found = re.findall(r"```bash\nray-ckpt ([^\n]*)\n```\n\n(?:```text\n(.*?)\n```)?", page, re.DOTALL)
    return dict(found)


def words(text: str) -> Counter[str]:
    """Return the words of a text without numbers and lines, which differ from run to run."""
    return Counter(re.findall(r"[A-Za-z_]{3,}", text))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_command_prints_on_the_demo_what_the_tour_shows(folder: Path) -> None:
    normalise, shown = tour.Normaliser(folder), printed()
    for stop in tour.stops():
        output = normalise(tour.run(stop.line, folder))
        expected, found = words(shown[stop.line]), words(output)
        common = sum((expected & found).values())
        assert common >= LIKE * max(expected.total(), found.total()), f"{stop.line}:\n{output}"
        if stop.picture:
            written = [folder / stop.picture, (folder / stop.picture).with_suffix(".html")]
            assert any(path.exists() and path.stat().st_size > 1000 for path in written), stop.picture


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_of_a_service_work_on_the_demo_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group has the run in this cluster: its log is all there is, and a pin is written to it.

    The newest step is 70, or 60 if the tour has gone back before.
    """
    with LocalCluster(tmp_path / "staging", ["node-a"]) as cluster:
        at = f"--address {cluster.address}"
        assert "up" in tour.run(f"up {at}", folder)
        status = json.loads(tour.run(f"status {RUN} {at} --json", folder))
        assert status["source"] == "log" and status["run_name"] == "gpt-with-failure"
        newest = {row["level"]: row["step"] for row in status["newest"]}
        assert newest["durable"] in (60, 70), status
        tour.run(f"pin {RUN} 60 --owner paper {at} --even-if-at-work", folder)
        assert "paper" in tour.run(f"show {RUN} 60", folder)
        assert "service" in tour.run(f"top --once {at}", folder).lower()
        tour.run(f"unpin {RUN} 60 --owner paper {at} --even-if-at-work", folder)
        assert "paper" not in tour.run(f"show {RUN} 60", folder)
        tour.run(f"down {at}", folder)
