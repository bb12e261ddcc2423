"""Copies on labelled nodes: a node that does not train holds them, for lost ones. P2 on real Ray."""

from __future__ import annotations

import pytest

from tests.fault.conftest import MakeRig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_labelled_node_alone_holds_the_copies(make_rig: MakeRig) -> None:
    rig = make_rig("labelled", every_steps=2, replicas=1, remote_every=1000)
    storage = rig.cluster.nodes["node-c"].node_id
    rig.job.options["replica_nodes"] = f"ray.io/node-id={storage}"
    rig.train(["node-a", "node-b"], rig.job_to(6)).result()
    newest = rig.commits()[-1]
    assert sorted(map(sorted, rig.holders(newest).values())) == [["node-a", "node-c"], ["node-b", "node-c"]]
    assert rig.status().copies_missing == 0
    rig.cluster.kill("node-b", wipe=True)
    assert rig.restore(["node-a", "node-c"]) == 6
    rig.check()
