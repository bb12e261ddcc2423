"""The job with DeepSpeed under Ray Train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.train_deepspeed import build_trainer
from ray_ckpt.catalog.catalog import Catalog

pytestmark = pytest.mark.timeout(900)


@pytest.mark.usefixtures("node")
def test_the_job_goes_on_as_if_it_had_not_ended(storage: str, tmp_path: Path) -> None:
    for name, steps in (("job-calm", 8), ("job-broken", 5), ("job-broken", 8)):
        (out := tmp_path / name).mkdir(exist_ok=True)
        build_trainer(name, storage, steps, str(out)).fit()
    for rank in (0, 1):
        calm, broken = (lines(tmp_path / name, rank) for name in ("job-calm", "job-broken"))
        assert [step for step, _ in broken] == list(range(1, 9))
        assert broken == calm, "with dropout and accumulation"
    newest = Catalog(f"{storage}/job-broken").newest()
    assert newest is not None and newest.info.step == 8


def lines(out: Path, rank: int) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in (out / f"losses-{rank}.jsonl").read_text().splitlines()]
