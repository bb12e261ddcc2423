"""The Trainer of Transformers through ray_ckpt, on real nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from tests.cluster.hf_program import RAY_FIRST, RAY_LAST, losses, run


def assert_resumed(run: str) -> None:
    """A second group went on from a checkpoint, and not from the beginning."""
    assert [session.resumed_from is not None for session in Catalog(run).sessions] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "sft", "masking", "lora"])
def test_a_killed_rank_changes_nothing(
    cluster: LocalCluster, storage: str, tmp_path: Path, kind: str
) -> None:
    calm = run("calm", storage, tmp_path / "calm", kind=kind)
    broken = run("broken", storage, tmp_path / "broken", kind=kind, kill_at=11)
    assert (tmp_path / "broken" / "killed").exists()
    assert_resumed(f"{storage}/broken")
    done = losses(tmp_path / "broken")
    assert done == losses(tmp_path / "calm"), "with dropout and accumulation, over the end of an epoch"
    assert calm.keys() == broken.keys() and all(torch.equal(calm[name], broken[name]) for name in calm)
    newest = Catalog(f"{storage}/broken").newest()
    assert newest is not None and newest.info.step == 12
    assert (newest.info.shared_bytes > 0) is (kind == "lora"), "the frozen weights are linked"
    assert newest.info.metrics["loss"] == pytest.approx(next(iter(done[12]))[0])
    assert not list((tmp_path / "broken" / "hf").glob("checkpoint-*")), "no folder besides ours"


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(cluster: LocalCluster, storage: str, tmp_path: Path) -> None:
    args = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # so that an early step is the best one
    }
    best = run("best", storage, tmp_path / "b", args=args, keep_last=1, keep_best=("eval_loss", "max", 1))
    state = json.loads((tmp_path / "b" / "state.json").read_text())
    assert state["best_global_step"] == 3 and state["best_model_checkpoint"] == f"{storage}/best@3"
    early = run("early", storage, tmp_path / "e", steps=12, args={"num_train_epochs": 3, "save_steps": 3})
    assert not torch.equal(best["transformer.wte.weight"], early["transformer.wte.weight"])
    assert {c.step for c in Catalog(f"{storage}/best").checkpoints} == {3, 12}


@pytest.mark.slow
def test_rays_own_preparation_may_come_before_or_after(
    cluster: LocalCluster, storage: str, tmp_path: Path
) -> None:
    args = {"eval_strategy": "steps", "eval_steps": 3}
    calm = run("calm", storage, tmp_path / "calm", kind=RAY_FIRST, args=args)
    for name, kind in (("first", RAY_FIRST), ("last", RAY_LAST)):
        broken = run(name, storage, tmp_path / name, kind=kind, kill_at=11, args=args)
        assert (tmp_path / name / "killed").exists()
        assert_resumed(f"{storage}/{name}")
        assert losses(tmp_path / name) == losses(tmp_path / "calm"), name
        assert all(torch.equal(calm[key], broken[key]) for key in calm), name
        newest = Catalog(f"{storage}/{name}").newest()
        assert newest is not None and newest.info.step == 12
        assert newest.info.metrics["eval_loss"] > 0, "of a loader that only Ray's preparation makes"
