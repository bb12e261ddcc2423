"""A node is killed under the trainers of Transformers, TRL and Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from tests.cluster import hf_program, lightning_program
from tests.fault.conftest import Home
from tests.fault.rig import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
KILL_AT = 11


@contextmanager
def killing(cluster: LocalCluster, marker: Path) -> Iterator[None]:
    """Kill the node that `marker` names, with its disk."""

    def kill() -> str:
        wait_for(marker.exists, what="a worker is at the step", within_s=120)
        name = cluster.name_of(marker.read_text())
        cluster.kill(name, wipe=True)
        return name

    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill)
        yield
        assert killed.result() not in cluster.nodes


def assert_resumed(path: str) -> None:
    """A second session went on from a checkpoint of the first."""
    sessions = Catalog(path).sessions
    assert len(sessions) == 2 and sessions[1].resumed_from is not None


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "sft", "lora"])
def test_a_trainer_of_transformers_goes_on_without_the_node(home: Home, tmp_path: Path, kind: str) -> None:
    cluster, storage = home.start(), str(tmp_path / "storage")
    calm = hf_program.run("calm", storage, tmp_path / "calm", kind=kind)
    with killing(cluster, tmp_path / "broken" / "killed"):
        broken = hf_program.run(
            "broken", storage, tmp_path / "broken", kind=kind, kill_at=KILL_AT, kills_node=True
        )
    assert_resumed(f"{storage}/broken")
    shared = Path(storage).glob("broken/ray_ckpt/checkpoints/*/shard-*.1-of-*")
    assert any(shared) == (kind == "lora"), "a frozen base is in shards of its own"
    assert hf_program.losses(tmp_path / "broken") == hf_program.losses(tmp_path / "calm")
    assert calm.keys() == broken.keys() and all(torch.equal(calm[name], broken[name]) for name in calm)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_lightning_goes_on_without_the_node(home: Home, tmp_path: Path, fsdp: bool) -> None:
    cluster, storage = home.start(), str(tmp_path / "storage")
    calm = lightning_program.run("calm", storage, tmp_path / "calm", fsdp=fsdp)
    with killing(cluster, tmp_path / "broken" / "killed"):
        broken = lightning_program.run(
            "broken", storage, tmp_path / "broken", fsdp=fsdp, kill_at=KILL_AT, kills_node=True
        )
    assert_resumed(f"{storage}/broken")
    for rank in (0, 1):
        journals = [lightning_program.journal(tmp_path / name, rank) for name in ("broken", "calm")]
        assert journals[0] == journals[1]
    assert calm.keys() == broken.keys() and all(torch.equal(calm[name], broken[name]) for name in calm)
