"""A run that begins with an import, of each format, is killed and resumes as any other, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ray_ckpt.catalog.catalog import Catalog
from tests.hostile.samples import SAMPLES, source_of
from tests.interop.imports import imported, restore
from tests.interop.resumed import MAKERS, RUN, objects_of, step

AT = 7  # the step of the import
KINDS = {
    "dcp": "small",
    "hf": "weights",
    "pt": "small",
    "verl": "small",
    "zero2": "net",
    "zero3": "net",
    "universal2": "net",
    "universal3": "net",
    "torch_dist": "megatron",
}
"""The model of `tests.interop.resumed` that the directory of a sample has trained."""
TIMEOUT_S = 200.0


def written(sample: str, folder: Path) -> Path:
    """Write the directory of `sample`; return what the import is called with."""
    if sample == "torch_dist":  # the sample for mutations has no whole model
        words = [sys.executable, "-m", "tests.interop.megatron", str(folder), "0", "1"]
        subprocess.run(words, check=True, timeout=TIMEOUT_S)
    else:
        folder.mkdir()
        SAMPLES[sample][1](folder)
    return source_of(sample, folder)


def run(storage: Path, kind: str, kill_at: int, out: Path) -> int:
    """Train to step AT + 4 in a process of its own; return its exit code."""
    words = [sys.executable, "-m", "tests.interop.resumed", storage, kind, AT + 4, kill_at, out]
    # Ray of the killed process takes seconds to end; the next one must not find it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    return subprocess.run([*map(str, words)], env=environment, timeout=TIMEOUT_S).returncode


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sample", KINDS)
def test_a_killed_training_resumes_bit_for_bit(sample: str, tmp_path: Path) -> None:
    kind, storage = KINDS[sample], tmp_path / "runs"
    source = written(sample, tmp_path / "source")
    imported(SAMPLES[sample][0], source, storage / RUN, "--step", AT)
    shutil.copytree(storage / RUN, tmp_path / "calm" / RUN)

    torch.set_num_threads(1)  # as the other processes have it; a sum depends on it
    model, optimizer, width = MAKERS[kind]()
    restore(tmp_path / "calm" / RUN, **objects_of(kind, model, optimizer))
    for number in range(AT + 1, AT + 5):
        step(model, optimizer, width, number)

    out = tmp_path / "out.pt"
    assert run(storage, kind, AT + 2, out) == -9
    assert run(storage, kind, 0, out) == 0
    found = torch.load(out, weights_only=True)
    assert found["first"] == AT + 2
    for name, tensor in model.state_dict().items():
        assert torch.equal(found["model"][name], tensor), name
    sessions = Catalog(storage / RUN).sessions
    assert [session.is_import for session in sessions] == [True, False, False]
