"""Misuse is named within a minute, with its ranks on one node as on several, with Ray Train and without.

Misuse ends training with an error that names the cause, or training continues with a warning that names it;
training never hangs silently. Unusual but correct use continues.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.train.torch import TorchTrainer

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import CheckpointError
from ray_ckpt.train import CheckpointCallback
from tests.cluster.ranks import RankGroup
from tests.cluster.test_train_traps import cause
from tests.cluster.wrong_uses import ARE_RIGHT, WRONG_USES, Rank, WrongUse

pytestmark = [pytest.mark.cluster, pytest.mark.slow]  # test_save_restore.py has a quick "save on rank 0"
NAMED_S = 60.0  # from the first step on
START_S = 120.0  # that a group takes to come up where the service has to be started, on a busy machine
OPTIONS: dict[str, Any] = {"every_steps": 5, "replicas": 0}
PLACES = {"one node": "aa", "two nodes": "ab", "three ranks on two nodes": "aab", "three on one": "aaa"}


def run_loop(name: str, run: str, storage: str, logs: str) -> None:
    """Run the loop on a rank without Ray Train."""
    import torch.distributed as dist

    use = WRONG_USES.get(name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options = {**OPTIONS, **(use.options if use else {})}
    ray_ckpt.connect(run=run, storage_path=storage, rank=rank, world_size=world_size, **options)
    run_timed(name, Path(logs))


def run_timed(name: str, folder: Path) -> None:
    """Run a loop. Leaves what this rank logs, and the seconds until an error named what is wrong."""
    import torch.distributed as dist

    began_s = time.monotonic()
    log = logging.getLogger("ray_ckpt")
    handler = logging.FileHandler(folder / f"rank-{dist.get_rank()}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers = [handler]
    try:
        (WRONG_USES[name].loop if name in WRONG_USES else ARE_RIGHT[name])(Rank())
    except CheckpointError:
        (folder / f"rank-{dist.get_rank()}.seconds").write_text(str(time.monotonic() - began_s))
        raise


def logged(logs: Path) -> str:
    return "".join(path.read_text() for path in sorted(logs.glob("rank-*.log")))


def first_error(group: RankGroup, *args: Any, limit_s: float) -> CheckpointError:
    """Return the first error of a rank; the other ranks may hang where they wait for it."""
    calls = [actor.run.remote(run_loop, *args) for actor in group.actors]
    left, end_s = calls, time.monotonic() + limit_s
    while left:
        done, left = ray.wait(left, timeout=max(end_s - time.monotonic(), 0.0))
        assert done, f"nothing was named within {limit_s:.0f} s"
        try:
            ray.get(done)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, CheckpointError):
                return error.cause
            if left:  # it lost the rank that it was training with
                continue
            raise
    raise AssertionError("training came to its end")


@pytest.fixture
def ranks(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """Start ranks for one test, on nodes a and b by the parameter."""
    group = RankGroup([cluster.nodes[f"node-{letter}"].node_id for letter in request.param])
    yield group
    group.stop()


def placed(places: dict[str, str], names: Any) -> list[Any]:
    """Return each name with each place."""
    return [
        pytest.param(letters, name, id=f"{name} ({place})")
        for place, letters in places.items()
        for name in names
    ]


@pytest.mark.parametrize(("ranks", "name"), placed(PLACES, WRONG_USES), indirect=["ranks"])
def test_a_wrong_use_is_named(ranks: RankGroup, name: str, storage: str, tmp_path: Path) -> None:
    if before := WRONG_USES[name].after:
        ranks.run(run_loop, before, "wrong", storage, str(tmp_path))
    error = first_error(ranks, name, "wrong", storage, str(tmp_path), limit_s=NAMED_S + START_S)
    assert_named(WRONG_USES[name], error, tmp_path)


def assert_named(use: WrongUse, error: CheckpointError | None, logs: Path) -> None:
    kinds = [kind.__name__ for kind in type(error).__mro__]  # one that is more exact is right as well
    assert use.error is None or use.error in kinds, repr(error)
    seconds = [float(path.read_text()) for path in logs.glob("rank-*.seconds")]
    warned = [float(found) for found in re.findall(r"waits for rank.* (\d+) s by now", logged(logs))]
    assert min(seconds + warned) < NAMED_S, (seconds, warned)
    output = f"{error}\n{logged(logs)}"
    assert re.search(use.words, output), output


@pytest.mark.parametrize(("ranks", "name"), placed({"one node": "aa"}, ARE_RIGHT), indirect=["ranks"])
def test_what_only_looks_odd_goes_on(ranks: RankGroup, name: str, storage: str, tmp_path: Path) -> None:
    ranks.run(run_loop, name, "odd", storage, str(tmp_path))
    newest = Catalog(f"{storage}/odd").newest()
    assert newest is not None and newest.info.step == 40


# -- Ray Train -------------------------------------------------------------------------------------------


def train_loop(config: dict[str, Any]) -> None:
    run_timed(config["name"], Path(config["logs"]))


def trainer(name: str, storage: str, logs: Path, **options: Any) -> TorchTrainer:
    use = WRONG_USES.get(name)
    return TorchTrainer(
        train_loop,
        train_loop_config={"name": name, "logs": str(logs)},
        scaling_config=ray.train.ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 0.5}, placement_strategy="STRICT_PACK"
        ),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=storage,
            callbacks=[CheckpointCallback(**{**OPTIONS, **(use.options if use else {}), **options})],
        ),
    )


@pytest.mark.parametrize("reports", [True, False], ids=["reports", "no reports"])
@pytest.mark.parametrize("name", WRONG_USES)
def test_a_wrong_use_under_ray_train_is_named_with_two_ranks_on_one_node(
    cluster: LocalCluster, name: str, reports: bool, storage: str, tmp_path: Path
) -> None:
    if before := WRONG_USES[name].after:
        trainer(before, storage, tmp_path, ray_report=reports).fit()
    with pytest.raises(ray.train.TrainingFailedError) as caught:
        trainer(name, storage, tmp_path, ray_report=reports).fit()
    assert_named(WRONG_USES[name], cause(caught.value), tmp_path)


@pytest.mark.parametrize("name", ARE_RIGHT)
def test_what_only_looks_odd_goes_on_under_ray_train(
    cluster: LocalCluster, name: str, storage: str, tmp_path: Path
) -> None:
    result = trainer(name, storage, tmp_path).fit()
    assert result.metrics is not None and result.metrics["step"] == 40
