"""Processes that die: the coordinator, agents, ranks. P2, P3 and P7 on real Ray."""

from __future__ import annotations

import pytest

from tests.fault.conftest import MakeRig

pytestmark = pytest.mark.cluster
RECOVERY_S = 5.0  # from the death of the coordinator to the next commit


def test_the_next_commit_comes_soon_after_the_coordinator_died(make_rig: MakeRig) -> None:
    rig = make_rig("coordinator", every_steps=1, remote_every=5, max_block_s=1.0)
    rig.train(["node-a", "node-b"])
    rig.wait_commits(3)
    rig.kill_coordinator()
    took_s = rig.wait_commits(1)
    print(f"the next commit came {took_s:.2f} s after the coordinator's death")
    assert took_s < RECOVERY_S
    rig.wait_commits(2)
    rig.kill_rank(1)
    acked = max(c.step for c in rig.commits())
    assert rig.restore(["node-a", "node-b"]) >= acked
