"""Spares: a node that replaces a lost one has the state on its own disk. P2 on real Ray."""

from __future__ import annotations

import pytest

from tests.fault.conftest import MakeRig
from tests.fault.rig import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_worker_on_a_spare_restores_from_its_own_disk(make_rig: MakeRig) -> None:
    rig = make_rig("spares", every_steps=2, replicas=1, remote_every=1000)
    spare = rig.cluster.nodes["node-c"].node_id
    rig.job.options["spare_nodes"] = f"ray.io/node-id={spare}"
    rig.train(["node-a", "node-b"], rig.job_to(6)).result()
    newest = rig.commits()[-1]
    wait_for(
        lambda: all("node-c" in names for names in rig.holders(newest).values()), what="copies on the spare"
    )
    assert rig.status().copies_missing == 0
    rig.cluster.kill("node-b", wipe=True)
    assert rig.restore(["node-a", "node-c"]) == 6
    on_spare = next(rank for rank in rig.status().restores if rank.rank == 1)
    assert {part.tier for part in on_spare.parts} == {"local"}
    rig.check()
