"""A storage path that is away for a while. P2, P3, P6 and P7 on real Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.actors.client import coordinator, get_result
from ray_ckpt.actors.messages import ServiceView
from tests.fault.conftest import MakeRig
from tests.fault.rig import away, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NO_ACKS = (0, 0, 0)  # with the path away nothing is acknowledged, and nobody waits for it


def test_a_group_restores_what_is_held_and_is_recorded_later(make_rig: MakeRig) -> None:
    """Training goes on, a new group restores the newest complete checkpoint, and no save is lost for it."""
    options: dict[str, Any] = {"store_wait_s": 2.0, "attempt_timeout_s": 5.0, "max_block_s": 1.0}
    rig = make_rig("away", every_steps=2, remote_every=1000, keep_last=50, **options)
    job = replace(rig.job, waits=NO_ACKS)
    rig.train(["node-a", "node-b"], job)
    rig.wait_commits(2)
    with away(rig.folder.parent):
        gone_at = rig.last_step()
        wait_for(lambda: rig.last_step() > gone_at + 10, what="training goes on")
        rig.kill_rank(1)
        rig.train(["node-a", "node-b"], job)
        wait_for(lambda: rig.restored() > gone_at, what="a checkpoint that only the nodes know of")
        restored, resumed_at = rig.restored(), rig.last_step()
        wait_for(lambda: rig.last_step() > resumed_at + 6, what="the new group trains")
    print(f"the path went at step {gone_at}, the new group restored step {restored}")
    wait_for(lambda: restored in {c.step for c in rig.commits()}, what="the held checkpoint is in the log")
    rig.wait_commits(2)
    newest = rig.commits()[-1].step
    assert rig.restore(["node-a", "node-b"]) >= newest


def test_a_run_folder_that_is_gone_is_named_within_seconds(make_rig: MakeRig) -> None:
    """The training goes on, and its commits come when the folder is back."""
    rig = make_rig("vanished", every_steps=2, remote_every=1000, keep_last=50, attempt_timeout_s=5.0)
    rig.train(["node-a", "node-b"], replace(rig.job, waits=NO_ACKS))
    rig.wait_commits(2)
    parked = rig.folder.with_name("parked")
    rig.folder.rename(parked)
    try:
        named = f"{rig.folder} is not there any more"
        took_s = wait_for(lambda: named in _warning(rig.key), within_s=15.0, what="it is named")
        print(f"named after {took_s:.1f} s")
    finally:
        parked.rename(rig.folder)
    rig.wait_commits(2)


def _warning(key: str) -> str:
    """Return the last warning of the run's coordinator."""
    view: ServiceView = get_result(coordinator().overview.remote(), 10.0)
    return next(run.warning for run in view.runs if run.where == key)
