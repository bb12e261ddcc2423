"""DCP's own functions with the Writer and the Reader, on real nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from jobs.demo.local_cluster import LocalCluster
from jobs.train_dcp import build_trainer
from ray_ckpt.catalog.catalog import Catalog
from tests.cluster import dcp_program
from tests.cluster.ranks import RankGroup

pytestmark = pytest.mark.cluster


def on(cluster: LocalCluster, nodes: str, function: Callable[..., Any], *args: Any) -> Sequence[Any]:
    """Run a function on a new group, rank k on the k-th of these nodes."""
    group = RankGroup([cluster.nodes[f"node-{name}"].node_id for name in nodes])
    try:
        return group.run(function, *args)
    finally:
        group.stop()


@pytest.mark.slow  # 12 s and 15 s; tests/interop/test_dcp_state.py has their parts
@pytest.mark.parametrize("nodes", ["c", "abc"])
def test_saves_of_two_ranks_are_loaded_by_another_number(
    cluster: LocalCluster, group: RankGroup, storage: str, nodes: str
) -> None:
    options = {"every_steps": 1000, "remote_every": 1000}
    saved = group.run(dcp_program.train_and_save, "dcp", storage, options)
    loaded = on(cluster, nodes, dcp_program.load_and_go_on, "dcp", storage, options)
    assert len(loaded) == len(nodes)
    for rank in loaded:
        assert rank["step"] == 4
        assert rank["state"]["step"] == 4
        assert rank["state"]["more"]["losses"] == [4.5]
        assert rank["state"]["more"]["pair"] == (1, "two")
        assert torch.equal(rank["state"]["more"]["table"], torch.arange(6.0))
        for name, tensor in saved[0]["at_4"].items():
            assert torch.equal(rank["loaded"][name], tensor), name


@pytest.mark.slow
def test_a_save_that_only_some_ranks_have_staged_is_none(cluster: LocalCluster, storage: str) -> None:
    options = {"every_steps": 1000, "remote_every": 1000}
    with pytest.raises(ray.exceptions.RayActorError):
        on(cluster, "ab", dcp_program.die_in_a_save, "died", storage, options)
    loaded = on(cluster, "ab", dcp_program.load_step, "died", storage, options)
    assert loaded == [(2, 2), (2, 2)]


@pytest.mark.slow
def test_one_state_through_dcp_a_checkpointer_and_a_uri(cluster: LocalCluster, storage: str) -> None:
    options = {"every_steps": 1000, "remote_every": 1000}
    saved = on(cluster, "ab", dcp_program.save_flat, "flat", storage, options)[0]
    pickled = [path for path in Path(storage, "flat").rglob("*") if path.is_file() and has_pickle(path)]
    assert not pickled
    by_uri = on(cluster, "a", dcp_program.load_of_uri, f"{storage}/flat@2")
    errors = on(cluster, "ab", dcp_program.misuse, "flat", storage, options)
    natively = on(cluster, "abc", dcp_program.load_natively, "flat", storage, options)
    for found in (*by_uri, *natively):
        assert found.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(found[name], tensor), name
    for rank in errors:
        assert "checkpoint of step 2, which was not loaded" in rank["unloaded"]
        assert "Missing key" in rank["missing"]
        assert "has loaded already" in rank["twice"]
        assert "F16" in rank["dtype"]
        assert "x" in rank["pickle"] and "was not saved" in rank["pickle"]


def has_pickle(path: Path) -> bool:
    """Return whether a file begins as a pickle, or as the zip file of torch.save."""
    return path.read_bytes()[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@pytest.mark.slow
def test_the_job_with_dcp_goes_on_as_if_it_had_not_ended(
    cluster: LocalCluster, storage: str, tmp_path: Path
) -> None:
    for name, steps in (("calm", 12), ("broken", 7), ("broken", 12)):
        (out := tmp_path / name).mkdir(exist_ok=True)
        build_trainer(name, storage, steps, str(out)).fit()
    calm, broken = ((tmp_path / name / "weight-12.txt").read_text() for name in ("calm", "broken"))
    assert calm == broken, "with dropout, so random state was restored too"
    newest = Catalog(f"{storage}/broken").newest()
    assert newest is not None and newest.info.step == 12
