"""A storage path that is away for a while. P2, P3, P6 and P7 on real Ray."""

from __future__ import annotations

import pytest

from tests.fault import journal
from tests.fault.conftest import MakeRig
from tests.fault.rig import away, wait_for

pytestmark = pytest.mark.cluster


def test_a_group_restores_what_is_held_and_the_log_hears_of_it_later(make_rig: MakeRig) -> None:
    """Training goes on, a new group restores the newest complete checkpoint, and no save is lost for it."""
    rig = make_rig("away", every_steps=2, remote_every=1000, keep_last=20, store_wait_s=2.0, max_block_s=1.0)
    rig.train(["node-a", "node-b"])
    rig.wait_commits(2)
    with away(rig.folder.parent):
        gone_at = rig.last_step()
        wait_for(lambda: rig.last_step() > gone_at + 10, what="training goes on")
        rig.kill_rank(1)
        rig.train(["node-a", "node-b"])
        resumed_at = rig.last_step()
        wait_for(lambda: rig.last_step() > resumed_at + 6, what="the new group trains")
    restored = max(e.step for e in journal.read(rig.journal) if e.kind == "restored")
    logged = {c.step for c in rig.commits()}
    print(f"the path went at step {gone_at}, the group restored step {restored}")
    assert restored > gone_at, "a checkpoint that only the nodes know of"
    wait_for(lambda: restored in {c.step for c in rig.commits()}, what="the held checkpoint is in the log")
    rig.wait_commits(2)
    print(f"in the log when the path came back: {sorted(logged)[-3:]}")
    newest = rig.commits()[-1].step
    assert rig.restore(["node-a", "node-b"]) >= newest
