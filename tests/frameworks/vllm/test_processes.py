"""Engines of vLLM in processes of their own, of a program that does not import ray_ckpt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ray_ckpt.vllm
from tests.frameworks.vllm.engines import from_checkpoint
from tests.frameworks.vllm.models import expected, qwen, saved

LIMIT_S = 500.0
pytestmark = pytest.mark.timeout(600)  # each of vLLM's processes imports torch and vLLM


def run(folder: str, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the program with an engine in other processes: the engine's core, and a worker for each rank."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.frameworks.vllm.generate", folder, json.dumps(options)],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_vllm_finds_the_loader_by_itself(tmp_path: Path) -> None:
    model = qwen(num_key_value_heads=2)
    uri = saved(tmp_path, model)
    folder = ray_ckpt.vllm.write_files(uri, tmp_path / "files")
    done = run(folder, {**from_checkpoint(uri), "tensor_parallel_size": 2})
    assert done.returncode == 0, done.stderr
    found = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("early", "tokens"))
    )
    assert found["early"] == "[]"
    assert json.loads(found["tokens"]) == expected(model)


def test_several_ranks_need_a_step(tmp_path: Path) -> None:
    uri = saved(tmp_path, qwen(num_key_value_heads=2))
    folder = ray_ckpt.vllm.write_files(uri, tmp_path / "files")
    done = run(folder, {**from_checkpoint(uri.removesuffix("@10")), "tensor_parallel_size": 2})
    assert done.returncode != 0
    assert "The ranks of vLLM would each choose the newest checkpoint" in done.stdout + done.stderr
