"""Wrong paths, options and resources: each a clear error before training time is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray

from jobs.demo.local_cluster import LocalCluster, kill_family
from ray_ckpt.actors.client import open_run
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.config import STAGING_ENV, RunOptions
from ray_ckpt.errors import (
    ConfigError,
    InsufficientSpace,
    NotConnected,
    StagingError,
    StorageNotShared,
    StoragePathError,
    Unavailable,
)
from ray_ckpt.storage.local import files
from ray_ckpt.train import CheckpointCallback
from tests.cluster.conftest import everywhere
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster
NODE_START_S = 60.0


def test_an_unknown_option_names_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"'replica'.*Did you mean replicas"):
        CheckpointCallback(replica=2)


def test_impossible_values_are_errors_that_name_possible_ones() -> None:
    with pytest.raises(ConfigError, match=r"keep_last is 0.*at least 1"):
        CheckpointCallback(keep_last=0)
    with pytest.raises(ConfigError, match=r"resume is 'yes'.*'auto'"):
        CheckpointCallback(resume="yes")


def test_a_checkpointer_outside_a_run_names_both_ways_in() -> None:
    import ray_ckpt

    with pytest.raises(NotConnected, match=r"CheckpointCallback.*ray_ckpt\.connect"):
        ray_ckpt.Checkpointer(thing={"a": 1})


def test_a_storage_path_that_cannot_be_written(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoragePathError, match=r"cannot be written.*write access"):
        open_run("run", str(tmp_path / "file" / "storage"), RunOptions(), owner="test")


def test_a_url_that_cannot_be_opened_or_a_relative_path_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="holds credentials"):
        open_run("run", "s3://key:secret@bucket/runs", RunOptions(), owner="test")
    with pytest.raises(ConfigError, match=r"nosuch://.*Install the fsspec implementation"):
        open_run("run", "nosuch://bucket/runs", RunOptions(), owner="test")
    with pytest.raises(ConfigError, match="relative"):
        open_run("run", "runs", RunOptions(), owner="test")
    with pytest.raises(ConfigError, match="cannot be a folder name"):
        open_run("../run", "/tmp/x", RunOptions(), owner="test")


@pytest.fixture
def odd_node(cluster: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A node started by a shell command of the test's, so that it may see another file system."""
    before = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
    script = f"{request.param} && exec ray start --address={cluster.address} --num-cpus=0 --block"
    script = script.replace("TMP", str(tmp_path))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.setdefault(STAGING_ENV, str(tmp_path / "odd-staging"))
    process = subprocess.Popen(
        ["unshare", "--mount", "bash", "-c", script],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    from ray._common.test_utils import wait_for_condition

    wait_for_condition(
        lambda: len({n["NodeID"] for n in ray.nodes() if n["Alive"]} - before) == 1, timeout=NODE_START_S
    )
    (node,) = {n["NodeID"] for n in ray.nodes() if n["Alive"]} - before
    yield node
    kill_family(process.pid)
    process.wait()
    wait_for_condition(
        lambda: node not in {n["NodeID"] for n in ray.nodes() if n["Alive"]}, timeout=NODE_START_S
    )


needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="a mount namespace needs root and unshare"
)


@pytest.mark.slow  # a cluster of its own
@needs_root
@pytest.mark.parametrize(
    "odd_node", ["mkdir -p TMP/storage && mount -t tmpfs none TMP/storage"], indirect=True
)
def test_a_storage_path_that_is_not_shared_is_found(odd_node: str, tmp_path: Path) -> None:
    with pytest.raises(StorageNotShared, match=rf"{odd_node[:12]} does not see.*every node reaches"):
        open_run("unshared", str(tmp_path / "storage"), RunOptions(), owner="test")
    assert not list((tmp_path / "storage").rglob("*.safetensors"))


@pytest.mark.slow  # a cluster of its own
@needs_root
@pytest.mark.parametrize("odd_node", ["touch TMP/odd-staging"], indirect=True)
def test_a_staging_folder_that_cannot_be_used_is_named(odd_node: str, tmp_path: Path) -> None:
    with pytest.raises(StagingError, match=r"odd-staging cannot be used.*staging="):
        open_run("no-staging", str(tmp_path / "storage"), RunOptions(), owner="test")


def train(run: str, storage: str, total: int, options: dict[str, Any]) -> list[float]:
    return Training(run, storage, **options).train(total)


@everywhere
def test_too_little_disk_is_found_before_training(spare_group: RankGroup, storage: str) -> None:
    with pytest.raises(InsufficientSpace, match=r"Two checkpoints with copies needs .* free") as caught:
        spare_group.run(train, "full", storage, 2, {"reserve_bytes": 1 << 60})
    assert caught.value.hint and caught.value.fields["free_bytes"] > 0


def reserve_memory(run: str, storage: str) -> None:
    training = Training(run, storage, memory="single")
    training.ckpt._link.reserve(1 << 50)


@pytest.mark.slow  # the next one is quick
@everywhere
def test_too_little_memory_is_named(spare_group: RankGroup, storage: str) -> None:
    with pytest.raises(InsufficientSpace, match=r"memory='single' needs.*put fewer ranks on a node"):
        spare_group.run(reserve_memory, "memory", storage)


def reserve_memory_in_dev_shm(run: str, storage: str) -> None:
    """Reserve memory as a rank that may not open its agent's memory, because of ptrace rules."""
    training = Training(run, storage, memory="single")
    with mock.patch("ray_ckpt.actors.rank_link._can_open", return_value=False):
        training.ckpt._link.reserve(1 << 20)
        training.ckpt._link.reserve(1 << 50)


@pytest.mark.slow  # 6 s
def test_too_little_room_in_dev_shm_is_named(group: RankGroup, storage: str) -> None:
    with pytest.raises(InsufficientSpace, match=r"in /dev/shm, which has .*--shm-size.*ptrace_scope"):
        group.run(reserve_memory_in_dev_shm, "shm", storage)


def save_while_the_disk_fills_up(run: str, storage: str, mount: str) -> dict[str, Any]:
    """Train one rank whose staging disk is full for a while, without an effect on training."""
    import torch

    import ray_ckpt

    ray_ckpt.connect(run=run, storage_path=storage, reserve_bytes=4 << 20, max_block_s=10, replicas=0)
    weights = torch.ones(500_000)
    ckpt = ray_ckpt.Checkpointer(weights=weights)
    ckpt.restore()
    ballast = Path(mount) / "ballast"
    outcomes = []
    for step in range(1, 7):
        if step == 3:
            ballast.write_bytes(b"x" * (files.free_bytes(Path(mount)) - (5 << 20)))
        if step == 5:
            ballast.unlink()
        weights += 1
        ckpt.save(step)
        try:
            ckpt.wait("local", timeout_s=20)
            outcomes.append("saved")
        except Unavailable as error:
            outcomes.append(str(error))
    ckpt.close()
    return {"outcomes": outcomes, "dropped": ckpt.stats.dropped}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "odd-staging"
    mount.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "none", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.slow  # a cluster of its own
@needs_root
@pytest.mark.parametrize("odd_node", ["true"], indirect=True)
def test_a_full_disk_costs_saves_and_nothing_else(small_disk: Path, odd_node: str, storage: str) -> None:
    group = RankGroup([odd_node])
    (result,) = group.run(save_while_the_disk_fills_up, "filling", storage, str(small_disk))
    group.stop()
    saved = [outcome == "saved" for outcome in result["outcomes"]]
    assert saved == [True, True, False, False, True, True], result
    assert "in reserve" in result["outcomes"][2] and result["dropped"] >= 1
    assert [c.step for c in Catalog(f"{storage}/filling").checkpoints][-2:] == [5, 6]
