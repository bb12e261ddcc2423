"""A run that begins with an import of DeepSpeed's files is killed, and resumes as any other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ray_ckpt.catalog.catalog import Catalog
from tests.frameworks.deepspeed_files.ranks import TIMEOUT_S, environment
from tests.frameworks.deepspeed_files.resumed import step
from tests.frameworks.deepspeed_files.saved import STEPS, Saved
from tests.frameworks.deepspeed_files.train import groups_of, make_model
from tests.interop.imports import restore

pytestmark = pytest.mark.timeout(1200)  # the first training compiles for 90 s of one core

SCRIPT = "tests.frameworks.deepspeed_files.resumed"


def run_on(storage: Path, total: int, kill_at: int, out: Path) -> int:
    """Train in a process of its own; return its exit code."""
    words = [sys.executable, "-m", SCRIPT, str(storage), str(total), str(kill_at), str(out)]
    alone = environment(RAY_ADDRESS="local")  # Ray of a killed process takes seconds to end
    return subprocess.run(words, env=alone, timeout=TIMEOUT_S).returncode


@pytest.mark.parametrize("saved", [3], indirect=True)
def test_a_killed_training_resumes_bit_for_bit(saved: Saved, tmp_path: Path) -> None:
    storage, out = tmp_path / "runs", tmp_path / "out.pt"
    storage.mkdir()
    shutil.copytree(saved.runs / "deepspeed", storage / "deepspeed")
    assert run_on(storage, STEPS + 4, STEPS + 2, out) == -9
    assert run_on(storage, STEPS + 4, 0, out) == 0
    found = torch.load(out, weights_only=True)
    assert found["first"] == STEPS + 2
    model = make_model(8)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
    torch.set_num_threads(1)
    restore(saved.runs / "deepspeed", model=model, optimizer=optimizer)
    for number in range(STEPS + 1, STEPS + 5):
        step(model, optimizer, number)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found["model"][name], tensor), name
    sessions = Catalog(storage / "deepspeed").sessions
    assert [session.is_import for session in sessions] == [True, False, False]
