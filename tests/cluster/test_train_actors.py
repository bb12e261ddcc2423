"""The example jobs without Ray Train, each twice: the second run goes on where the first one ended."""

from __future__ import annotations

import pytest

from jobs.demo.local_cluster import LocalCluster
from jobs.train_actors import KINDS, run_kind
from ray_ckpt.catalog.catalog import Catalog

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_plain_actors_goes_on_as_if_it_had_not_ended(
    cluster: LocalCluster, storage: str, kind: str
) -> None:
    calm = run_kind(kind, "calm", storage, 12)
    run_kind(kind, "broken", storage, 7)
    resumed = run_kind(kind, "broken", storage, 12)
    assert {result["steps"] for result in resumed} == {5}
    assert [r["weight"] for r in resumed] == [r["weight"] for r in calm]
    newest = Catalog(f"{storage}/broken").newest()
    assert newest is not None and newest.info.step == 12
    assert newest.info.world_size == {"single": 1, "rank-zero": 1, "ddp": 2, "actor-critic": 3}[kind]
