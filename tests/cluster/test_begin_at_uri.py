"""A run that begins at a checkpoint of another one, with all of its state or with some items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import ConfigError, Unprotected
from ray_ckpt.train import CheckpointCallback
from tests.cluster.ranks import RankGroup, Training
from tests.cluster.test_save_restore import make_durable, wait_until
from tests.support.examples import every_few

pytestmark = pytest.mark.cluster


def steps_of(run: str) -> list[int]:
    return [checkpoint.step for checkpoint in Catalog(run).checkpoints]


def train(run: str, storage: str, total: int, options: dict[str, Any]) -> list[float]:
    return Training(run, storage, every_steps=4, **options).train(total)


def begin(run: str, storage: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the state after the restore."""
    import torch
    from torch.distributed.tensor import DTensor

    training = Training(run, storage, **options)
    info = training.ckpt.restore()
    weight = training.model[0].weight
    assert isinstance(weight, DTensor)
    seen = {
        "info": None if info is None else (info.step, {part.tier for part in info.parts}),
        "weight": weight.full_tensor().tolist(),
        "count": training.extra["count"],
        "steps": len(training.optimizer.state),
        "lr": training.optimizer.param_groups[0]["lr"],
        "changed": [] if info is None else [str(changed) for changed in info.changed],
        "random": torch.rand(3).tolist(),
    }
    training.ckpt.close()
    return seen


@pytest.fixture
def source(group: RankGroup, storage: str) -> str:
    """The URI of a run with durable checkpoints of steps 4, 8 and 12."""
    group.run(train, "source", storage, 12, {"remote_every": 1})
    make_durable(storage, "source")
    return f"{storage}/source"


def test_a_run_goes_on_from_a_checkpoint_of_another(group: RankGroup, storage: str, source: str) -> None:
    calm = group.run(train, "calm", storage, 16, {})
    branch = group.run(train, "branch", storage, 14, {"resume": f"{source}@8"})
    assert branch == [losses[8:14] for losses in calm], "the same run as the one that it comes from"
    newest = Catalog(f"{storage}/branch").newest()
    assert newest is not None and newest.info.step == 14
    (session,) = Catalog(f"{storage}/branch").sessions
    assert session.origin_step == 8 and session.read_bytes["remote"] > 0
    # Once it has checkpoints of its own it goes on from these, with the same options.
    assert group.run(train, "branch", storage, 16, {"resume": f"{source}@8"}) == [r[14:] for r in calm]

    view = Catalog(source)[12]
    by_folder = group.run(begin, "by-folder", storage, {"resume": view.where})
    by_name = group.run(begin, "by-name", storage, {"resume": source})
    by_pointer = group.run(
        begin, "by-pointer", storage, {"resume": f"{source}/ray_ckpt_{view.info.directory}"}
    )
    assert by_folder == by_name == by_pointer
    assert [seen["info"] for seen in by_name] == [(12, {"remote"})] * 2
    assert [seen["count"] for seen in by_name] == [12, 12]


def test_a_checkpoint_of_the_run_itself_is_gone_back_to(group: RankGroup, source: str, storage: str) -> None:
    seen = group.run(begin, "source", storage, {"resume": f"{source}@4"})
    assert [each["info"][0] for each in seen] == [4, 4]
    assert [c.resumed_from for c in Catalog(source).sessions][-1] == Catalog(source)[4].info.id.attempt


def test_a_run_begins_with_some_items_of_another_at_step_0(
    group: RankGroup, storage: str, source: str
) -> None:
    fresh = group.run(begin, "fresh", storage, {})
    full = group.run(begin, "full", storage, {"resume": source})
    tuned = group.run(begin, "tuned", storage, {"init_from": source})
    for rank in (0, 1):
        assert tuned[rank]["info"] == (0, {"remote"})
        assert tuned[rank]["weight"] == full[rank]["weight"] != fresh[rank]["weight"]
        assert tuned[rank]["count"] == 0 and tuned[rank]["steps"] == 0, "nothing but the model"
        assert tuned[rank]["random"] == fresh[rank]["random"] != full[rank]["random"]
    both = group.run(
        begin, "both", storage, {"init_from": source, "init_items": ("model", "extra"), "resume": "never"}
    )
    assert [seen["count"] for seen in both] == [12, 12]
    losses = group.run(train, "tuned", storage, 4, {"init_from": source})
    assert [len(each) for each in losses] == [4, 4]
    assert group.run(begin, "tuned", storage, {"init_from": source})[0]["info"][0] == 4


@pytest.mark.parametrize(
    "options, problem",
    every_few(
        [
            ({"resume": "SOURCE@5"}, "5"),
            ({"resume": "SOURCE-gone"}, "There is no run at"),
            (
                {"init_from": "SOURCE", "init_items": ("modle",)},
                "init_items has modle, which is not registered",
            ),
            ({"keep": ("optimizer.momentum",)}, "optimizer.momentum"),
        ]
    ),
)
def test_a_missing_checkpoint_is_reported_before_the_first_step(
    group: RankGroup, storage: str, source: str, options: dict[str, Any], problem: str
) -> None:
    options = {k: v.replace("SOURCE", source) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(ConfigError, match=problem) as caught:
        group.run(begin, "wrong", storage, options)
    assert caught.value.hint


def begin_faster(run: str, storage: str, options: dict[str, Any]) -> tuple[float, list[str]]:
    import torch

    training = Training(run, storage, **options)
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.02, weight_decay=0.3)
    ckpt = training.ckpt.__class__(model=training.model, optimizer=optimizer, extra=training.extra)
    info = ckpt.restore()
    assert info is not None
    ckpt.close()
    return optimizer.param_groups[0]["lr"], sorted(str(changed) for changed in info.changed)


def adam_only(run: str, storage: str, total: int) -> None:
    import torch

    training = Training(run, storage)
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.1)
    ckpt = training.ckpt.__class__(model=training.model, optimizer=optimizer, extra=training.extra)
    for step in ckpt.steps(total=total):
        training.model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.close()


def test_hyperparameters_that_differ_are_listed_and_kept_on_request(group: RankGroup, storage: str) -> None:
    group.run(adam_only, "hyper", storage, 3)
    listed = [
        "optimizer.lr: built 0.02, saved 0.1; restored as saved",
        "optimizer.weight_decay: built 0.3, saved 0.01; restored as saved",
    ]
    assert group.run(begin_faster, "hyper", storage, {}) == [(0.1, listed)] * 2
    kept = [listed[0].replace("restored as saved", "kept as built"), listed[1]]
    assert group.run(begin_faster, "hyper", storage, {"keep": ("optimizer.lr",)}) == [(0.02, kept)] * 2


def save_what_cannot_be_saved(run: str, storage: str, options: dict[str, Any]) -> tuple[int, int]:
    """Return the step at which training ended, and the number of failed saves."""
    import torch
    import torch.distributed as dist

    import ray_ckpt

    rank, world_size = dist.get_rank(), dist.get_world_size()
    ray_ckpt.connect(
        run=run, storage_path=storage, rank=rank, world_size=world_size, every_steps=1, **options
    )
    extra: dict[str, Any] = {"weight": torch.zeros(4), "note": "plain"}
    ckpt = ray_ckpt.Checkpointer(extra=extra)
    done = 0
    try:
        for step in ckpt.steps(total=1000):
            done = step
            if step == 6:
                extra["note"] = object()
            ckpt.step(step)
    except Unprotected:
        ckpt.close()
        return done, ckpt.stats.dropped
    raise AssertionError("it went on without checkpoints")


def test_training_ends_when_too_many_saves_have_failed(group: RankGroup, storage: str) -> None:
    ended = group.run(
        save_what_cannot_be_saved, "failing", storage, {"unprotected_after": 3, "max_block_s": 5.0}
    )
    assert ended == [(8, 3)] * 2
    wait_until(lambda: steps_of(f"{storage}/failing")[-1:] == [5], lambda: steps_of(f"{storage}/failing"))


def count(config: dict[str, Any]) -> None:
    import torch

    import ray_ckpt

    weight = torch.zeros(4)
    ckpt = ray_ckpt.Checkpointer(weight=weight)
    with Path(config["seen"]).open("a") as seen:
        for step in ckpt.steps(total=config["total"]):
            seen.write(f"{step} {weight[0]:.0f}\n")
            seen.flush()
            if step == config.get("dies_at") and len(Path(config["seen"]).read_text().split("\n")) == 2:
                raise RuntimeError("a worker fails before the first checkpoint of its run")
            weight += 1
            ckpt.step(step)


@pytest.mark.slow
def test_a_worker_that_fails_before_the_first_checkpoint_begins_there_again(
    cluster: LocalCluster, storage: str, tmp_path: Path
) -> None:
    def fit(name: str, config: dict[str, Any], **options: Any) -> str:
        seen = tmp_path / name
        trainer = TorchTrainer(
            count,
            train_loop_config={**config, "seen": str(seen)},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name=name,
                storage_path=storage,
                callbacks=[CheckpointCallback(**options)],
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        trainer.fit()
        return seen.read_text()

    assert fit("one", {"total": 2}) == "1 0\n2 1\n"
    assert fit("two", {"total": 4, "dies_at": 3}, resume=f"{storage}/one") == "3 2\n3 2\n4 3\n"
