"""The exit code of the demo with S3 shows whether a run outlives its cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO_S = 400.0  # two minutes on a machine with nothing else to do


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(DEMO_S + 60)
def test_a_new_cluster_ends_on_the_bits_of_a_calm_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jobs.demo.s3", "--out", str(tmp_path / "demo"), "--server", "strict"],
        capture_output=True,
        text=True,
        timeout=DEMO_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restored from the storage path" in done.stdout
    assert "from its own disk" not in done.stdout
