"""A loop with Accelerate through ray_ckpt, on real nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jobs.demo.local_cluster import LocalCluster
from tests.cluster.accelerate_program import run


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [{}, {"is_stateful": True}, {"fsdp": True}], ids=["ddp", "stateful", "fsdp2"]
)
def test_a_loop_goes_on_as_if_it_had_not_ended(
    cluster: LocalCluster, storage: str, tmp_path: Path, config: dict[str, bool]
) -> None:
    run("calm", storage, tmp_path / "calm", **config)
    run("broken", storage, tmp_path / "broken", until=8, **config)  # in the second epoch
    run("broken", storage, tmp_path / "broken", **config)
    for rank in (0, 1):
        calm, broken = (_journal(tmp_path / name, rank) for name in ("calm", "broken"))
        assert calm == broken, "the same batches and losses, none twice"
    states = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("calm", "broken")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def _journal(out: Path, rank: int) -> list[list[float]]:
    return [json.loads(line) for line in (out / f"journal-{rank}.jsonl").read_text().splitlines()]
