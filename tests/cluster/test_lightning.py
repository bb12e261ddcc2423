"""Lightning through ray_ckpt, on real nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from tests.cluster.lightning_program import journal, run


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param({}, id="ddp"),
        pytest.param({"fsdp": True}, id="fsdp2"),
        pytest.param({"every_steps": 4, "steps": 16}, id="saves at validations only"),
    ],
)
def test_a_killed_rank_changes_nothing(
    cluster: LocalCluster, storage: str, tmp_path: Path, setup: dict[str, Any]
) -> None:
    calm = run("calm", storage, tmp_path / "calm", **setup)
    broken = run("broken", storage, tmp_path / "broken", **setup, kill_at=11)
    assert (tmp_path / "broken" / "killed").exists()
    sessions = Catalog(f"{storage}/broken").sessions
    assert [session.resumed_from is not None for session in sessions] == [False, True]
    for rank in (0, 1):
        assert journal(tmp_path / "broken", rank) == journal(tmp_path / "calm", rank), (
            "same batches and losses"
        )
    assert calm.keys() == broken.keys() and all(torch.equal(calm[name], broken[name]) for name in calm)
    newest = Catalog(f"{storage}/broken").newest()
    assert newest is not None and newest.info.step == setup.get("steps", 14) and "loss" in newest.info.metrics
    first, second = (json.loads((tmp_path / name / "best.json").read_text()) for name in ("calm", "broken"))
    assert first == second and first[0] == 2, "ModelCheckpoint keeps its own best two"
