"""Trainings of DeepSpeed on several processes, and its own tools, for the tests of this folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 400.0  # the first import of DeepSpeed compiles for 90 s of one core
TRAIN = "tests.frameworks.deepspeed_files.train"


def environment(**more: object) -> dict[str, str]:
    """Return the environment of a process with DeepSpeed on CPUs; the compiler finds ninja on its PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    fixed = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": path,
        "TORCH_EXTENSIONS_DIR": f"{sys.prefix}/torch_extensions",  # else environments build over each other
    }
    return {**os.environ, **fixed, **{name: str(value) for name, value in more.items()}}


def train(folder: Path, world_size: int, *words: object) -> list[dict[str, Any]]:
    """Train on `world_size` processes and save to `folder`; return each rank's losses and counters."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", TRAIN, str(folder), *map(str, words)],
            env=environment(
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE=world_size,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(text[-3000:] for text in texts)
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(world_size)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(*words: object) -> str:
    """Run a Python module or script in a process with DeepSpeed; return its output."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert not ended.returncode, ended.stderr[-3000:]
    return ended.stdout


def to_universal(tag: Path, out: Path) -> Path:
    """Convert the folder of a tag to a Universal Checkpoint with DeepSpeed's own tool."""
    workers = ("--num_extract_workers", 1, "--num_merge_workers", 1)
    module = "deepspeed.checkpoint.ds_to_universal"
    run("-m", module, "--input_folder", tag, "--output_folder", out, *workers)
    return out
