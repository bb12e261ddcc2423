"""Nodes that die, and come back with their disks. P2 on real Ray."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.client import coordinator, get_result
from ray_ckpt.storage.local.scrub import verify_fragment
from ray_ckpt.types import Level
from tests.fault.conftest import MakeRig
from tests.fault.rig import Rig, frozen, wait_for

pytestmark = pytest.mark.cluster
FOUR = ("node-a", "node-b", "node-c", "node-d")


@pytest.mark.slow
def test_a_lost_holder_is_replaced_by_an_idle_node(make_rig: MakeRig) -> None:
    """P2 stays true after the loss: `replicas` copies again, without a new save."""
    rig = make_rig("repair", every_steps=2, remote_every=1000)
    rig.train(["node-a", "node-b"], rig.job_to(4)).result()
    newest = rig.commits()[-1]
    assert rig.holders(newest) == {0: {"node-a", "node-b"}, 1: {"node-a", "node-b"}}
    before = rig.status()
    assert before.copies_missing == 0
    assert [(e.step, e.tier, e.steps_at_risk) for e in before.exposure] == [(4, "peer", 0)] * 2
    killed_s = time.monotonic()
    rig.cluster.kill("node-b", wipe=True)
    wait_for(lambda: all(len(names) == 2 for names in rig.holders(newest).values()), what="two copies each")
    print(f"all copies were back {time.monotonic() - killed_s:.1f} s after the node's death")
    wait_for(rig.is_protected, what="nothing is missing")
    for index, names in rig.holders(newest).items():
        for name in names:
            assert not verify_fragment(rig.staged(name, newest).joinpath, index, newest.num_nodes)
    after = rig.status()
    alone = next(e for e in after.exposure if e.node_id == rig.cluster.nodes["node-a"].node_id)
    assert (alone.step, alone.tier) == (4, "peer")
    assert rig.restore(["node-a", "node-c"]) == 4


@pytest.mark.slow
def test_a_pinned_checkpoint_stays(make_rig: MakeRig) -> None:
    """P5: retention takes nothing that somebody has a hold on."""
    rig = make_rig("pins", every_steps=2, keep_last=1, remote_every=4, retire_grace_s=0.0, max_block_s=5.0)
    rig.train(["node-a", "node-b"], rig.job_to(2)).result()
    pinned = rig.commits()[0]
    get_result(coordinator().pin.remote(rig.key, pinned.step, "a test", None), 30.0)
    rig.train(["node-a", "node-b"])
    rig.wait_commits(4)
    live = {c.step for c in rig.catalog.checkpoints}
    assert pinned.step in live and len(live) <= 5
    assert any(folder.is_dir() for folder in (rig.stored(pinned), rig.staged("node-a", pinned)))
    assert rig.catalog[pinned.step].info.pins == {"a test": None}
    get_result(coordinator().unpin.remote(rig.key, pinned.step, "a test"), 30.0)
    wait_for(lambda: pinned.step not in {c.step for c in rig.catalog.checkpoints}, what="it is retired")
    wait_for(lambda: not rig.stored(pinned).exists() and not rig.staged("node-a", pinned).exists())


@pytest.mark.slow
def test_disks_that_return_after_the_whole_cluster_died_serve_what_they_can(
    no_cluster: None, tmp_path: Path
) -> None:
    """P2: with one replica any three of four disks, and two of different pairs, give the newest; two of one
    pair give the newest durable one."""
    staging = tmp_path / "staging"
    with LocalCluster(staging, FOUR) as cluster:
        rig = Rig(cluster, tmp_path, "returns", every_steps=1, remote_every=4, keep_last=20, max_block_s=5.0)
        rig.train(FOUR)
        wait_for(lambda: rig.commits() and rig.catalog.newest(Level.DURABLE) is not None)
        wait_for(lambda: rig.commits()[-1].level is Level.REPLICATED, what="a newer one that is not durable")
        with frozen(*rig.actors("Coordinator")):  # or it would repair between one death and the next
            for name in FOUR:
                cluster.kill(name, wipe=False)
        rig.stop()
    held = [c for c in rig.commits() if c.level >= Level.REPLICATED]
    newest, durable = held[-1].step, max(c.step for c in held if c.level is Level.DURABLE)
    backup = tmp_path / "backup"
    for folder in (staging, tmp_path / "storage"):
        shutil.copytree(folder, backup / folder.name)
    for back, least in ((("node-a", "node-b", "node-d"), newest), (("node-b", "node-c"), newest)):
        assert _restored_by(rig, back, tmp_path, backup) >= least
    assert _restored_by(rig, ("node-c", "node-d"), tmp_path, backup) == durable


def _restored_by(rig: Rig, names: Sequence[str], root: Path, backup: Path) -> int:
    """Restore four ranks in a new cluster of these nodes with their disks; return the step."""
    for folder in ("staging", "storage"):
        shutil.rmtree(root / folder)
        shutil.copytree(backup / folder, root / folder)
    with LocalCluster(root / "staging", names) as cluster:
        rig.cluster = cluster
        nodes = [names[k % len(names)] for k in range(len(FOUR))]
        step = rig.restore(nodes)
        rig.stop()
    print(f"with {', '.join(names)} back: step {step}")
    return step
