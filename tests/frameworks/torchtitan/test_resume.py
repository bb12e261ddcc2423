"""torchtitan's Trainer on several ranks with FSDP2: killed, resumed, and on other numbers of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil
import pytest
import torch

from jobs.demo.free_ports import free_port
from tests.frameworks.torchtitan.setups import Setup, make_assets

ROOT = Path(__file__).parents[3]
FLAG = ["--checkpoint.enable", "--override.imports", "ray_ckpt.torchtitan.manager"]
RANKS, AT, TOTAL = 2, 4, 8
WAIT_S, PORTS = 600.0, 3
pytestmark = pytest.mark.timeout(1_800)  # each rank imports torch and torchtitan


def run(setup: Setup, world_size: int) -> tuple[list[int], str]:
    """Run a group as torchrun would; return the exit codes of its ranks and what they printed."""
    for _ in range(PORTS):
        codes, text = start(setup, world_size)
        if "EADDRINUSE" not in text:  # between the choice of a port and its use, another process may take it
            break
    return codes, text


def start(setup: Setup, world_size: int) -> tuple[list[int], str]:
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **group, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", f"{__package__}.program", json.dumps(dataclasses.asdict(setup))]
    with TemporaryFile("w+") as out:
        ranks = [
            psutil.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            for rank in range(world_size)
        ]

        def end_all(ended: Any) -> None:
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if ended.returncode:  # the others wait for it
                        rank.kill()

        for rank in psutil.wait_procs(ranks, timeout=WAIT_S, callback=end_all)[1]:
            rank.kill()
        codes = [rank.wait() for rank in ranks]
        out.seek(0)
        return codes, out.read()


def train(folder: Path, world_size: int, *, flags: tuple[str, ...] = (), **setup: Any) -> dict[str, Any]:
    """Run a group to its end, which must be a good one; return its whole state."""
    codes, text = run(Setup(folder=str(folder), flags=[*FLAG, *flags], **setup), world_size)
    assert codes == [0] * world_size, text
    state: dict[str, Any] = torch.load(folder / "end.pt", weights_only=True)
    return state


def journal(folder: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"journal-{rank}.jsonl").read_text().splitlines()]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a training that was killed after the checkpoint of step AT."""
    folder = tmp_path_factory.mktemp("broken")
    make_assets(folder)
    setup = Setup(
        folder=str(folder),
        flags=[*FLAG, "--training.steps", str(TOTAL)],
        checkpoints=str(folder / "checkpoints"),
        kill_at=AT,
    )
    codes, text = run(setup, RANKS)
    assert codes == [-9] * RANKS, text
    return folder


def test_a_killed_training_resumes_bit_for_bit(tmp_path: Path, broken: Path) -> None:
    make_assets(tmp_path)
    setup: dict[str, Any] = {"flags": ("--training.steps", str(TOTAL))}
    calm = train(tmp_path, RANKS, **setup, checkpoints=str(tmp_path / "checkpoints"))
    setup |= {"checkpoints": str(broken / "checkpoints"), "resume": AT, "saved_ranks": RANKS}
    resumed = train(broken, RANKS, **setup)
    assert_equal(resumed, calm)
    for rank in range(RANKS):
        steps = [line[0] for line in journal(broken, rank)]
        assert steps == list(range(1, TOTAL + 1)), "no step was trained twice"
        assert journal(broken, rank) == journal(tmp_path, rank), "the same losses and tokens"


def test_another_number_of_ranks_has_the_same_weights_and_moments(tmp_path: Path, broken: Path) -> None:
    make_assets(tmp_path)
    saved: dict[str, Any] = {"checkpoints": str(broken / "checkpoints"), "resume": AT, "saved_ranks": RANKS}
    steps = ("--training.steps", str(AT))  # no step is left: the state at the end is the restored one
    anew = ("--checkpoint.exclude_from_loading", "dataloader")
    there, one, three = (
        {
            name: value
            for name, value in train(tmp_path, size, flags=flags, **saved).items()
            if name != "noise"
        }
        for size, flags in ((RANKS, steps), (1, steps + anew), (3, steps + anew))
    )
    assert any(name.endswith("exp_avg_sq") for name in there) and there["lr"].item() > 0
    assert_equal(one, there)
    assert_equal(three, there)
    codes, text = run(Setup(folder=str(tmp_path), flags=[*FLAG, *steps], **saved), 1)
    assert codes != [0]
    assert "dataloader: is that of dp_rank_0 of 2 in the checkpoint, of dp_rank_0 of 1 here" in text
    assert "--checkpoint.exclude_from_loading dataloader begins the data anew" in text
