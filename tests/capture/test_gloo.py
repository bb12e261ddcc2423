"""The same on real processes, one world after another, with `full_tensor()` as the judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ckpt.format.manifest import check_coverage
from tests.capture.gloo import run_processes
from tests.capture.ranks import Files


@pytest.mark.slow
def test_four_ranks_then_two_then_three_then_one(tmp_path: Path) -> None:
    files: Files | None = None
    for kind, world_size in (("fsdp2 and tp", 4), ("ddp", 2), ("fsdp2", 3), ("single", 1)):
        folder = tmp_path / kind
        folder.mkdir()
        files = run_processes(kind, world_size, folder, files)
        check_coverage(files.rows)
