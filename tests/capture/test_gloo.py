"""The same on real processes, one world after another, with `full_tensor()` as the judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ckpt.capture.replica_watch import WINDOWS
from ray_ckpt.format.manifest import check_coverage
from tests.capture.gloo import run_processes
from tests.capture.ranks import Files
from tests.capture.watched_ranks import Run, findings


@pytest.mark.slow
def test_four_ranks_then_two_then_three_then_one(tmp_path: Path) -> None:
    files: Files | None = None
    for kind, world_size in (("fsdp2 and tp", 4), ("ddp", 2), ("fsdp2", 3), ("single", 1)):
        folder = tmp_path / kind
        folder.mkdir()
        files = run_processes(kind, world_size, folder, files)
        check_coverage(files.rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_a_flipped_bit_is_found_within_a_rotation_and_its_node_is_named(kind: str, tmp_path: Path) -> None:
    """Before that there is no finding; the difference stays, so it is found again in each rotation."""
    flip_at = 20
    run = Run(kind=kind, saves=flip_at + WINDOWS, flip_at=flip_at)
    found = findings(run, tmp_path)
    assert found and flip_at <= min(found) < flip_at + WINDOWS
    assert all("rank(s) 1 on node(s) node1 differ from 2 others" in text for text in found.values())
    assert any("3.weight" in text for text in found.values()), found
