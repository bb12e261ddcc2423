"""Bytes that rot, and disks that are full or lie. P4 and P7 on real Ray."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest

from ray_ckpt.format.names import is_still_name
from ray_ckpt.storage.local.scrub import verify_fragment
from ray_ckpt.types import CheckpointInfo
from tests.fault.conftest import MakeRig
from tests.fault.rig import can_mount, flip, lying_disk, shards, small_disk, wait_for

pytestmark = pytest.mark.cluster
needs_root = pytest.mark.skipif(not can_mount(), reason="mounts file systems")
MIB = 1 << 20
SCRUB_S = 4.0  # age at which a checkpoint is read again here


@pytest.mark.slow
def test_scrub_finds_a_flipped_bit_and_repair_makes_the_copy_again(make_rig: MakeRig) -> None:
    """P4: damage is found, moved aside and made good from the peer, before anybody needs the bytes."""
    rig = make_rig("scrub", every_steps=2, remote_every=1000, scrub_every_s=SCRUB_S)
    rig.train(["node-a", "node-b"], rig.job_to(4)).result()
    clean, bad = rig.commits()
    assert (clean.step, bad.step) == (2, 4)
    shard = shards(rig.staged("node-a", bad), rank=0)[0]
    flip(shard)
    pen = rig.cluster.nodes["node-a"].staging / bad.id.run_uid / "quarantine" / bad.directory / shard.name
    wait_for(pen.exists, what="the bad file is in quarantine")
    wait_for(lambda: len(rig.holders(bad)[0]) == 2, what="a new copy")
    for name in rig.holders(bad)[0]:
        assert not verify_fragment(rig.staged(name, bad).joinpath, 0, bad.num_nodes)
    wait_for(lambda: rig.catalog[2].info.verified_at_s is not None, what="step 2 is verified")
    assert rig.catalog[4].info.verified_at_s is None, "a round that found damage proves nothing"
    for name in rig.cluster.nodes:
        rig.kill_agent(name)
    assert rig.restore(["node-a", "node-b"]) == 4


@pytest.mark.slow
def test_a_flip_in_a_file_that_checkpoints_share_is_repaired_in_each(make_rig: MakeRig) -> None:
    """P4: a still file has one inode on a node; its damage is found, named and made good in all of them."""
    options = {"every_steps": 2, "remote_every": 1000, "keep_last": 3, "scrub_every_s": SCRUB_S}
    rig = make_rig("shared", frozen=4 * MIB, **options)
    rig.train(["node-a", "node-b"], rig.job_to(6)).result()
    saved = rig.commits()
    assert [checkpoint.step for checkpoint in saved] == [2, 4, 6]
    folders = [rig.staged("node-a", checkpoint) for checkpoint in saved]
    (file,) = {path.name for folder in folders for path in folder.iterdir() if is_still_name(path.name)}
    assert len({(folder / file).stat().st_ino for folder in folders}) == 1
    flip(folders[1] / file)
    pen = rig.cluster.nodes["node-a"].staging / saved[0].id.run_uid / "quarantine"
    for checkpoint in saved:
        wait_for((pen / checkpoint.directory / file).exists, what=f"step {checkpoint.step} in quarantine")

    def is_whole(checkpoint: CheckpointInfo) -> bool:
        """Return whether each fragment is on two nodes, perhaps others than before, and good there."""
        found = rig.holders(checkpoint)
        copies = [(rig.staged(node, checkpoint), index) for index, nodes in found.items() for node in nodes]
        is_good = not any(verify_fragment(f.joinpath, k, checkpoint.num_nodes) for f, k in copies)
        return is_good and all(len(nodes) == 2 for nodes in found.values())

    for checkpoint in saved:
        wait_for(partial(is_whole, checkpoint), what=f"good copies of step {checkpoint.step}", every_s=0.5)
    for node in rig.cluster.nodes:
        rig.kill_agent(node)
    assert rig.restore(["node-a", "node-b"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_flips_anywhere_give_the_right_state_or_an_older_right_one(make_rig: MakeRig, seed: int) -> None:
    """P4, with one flipped bit in some file of each of several copies; the oracle compares the states."""
    rig = make_rig(f"flips-{seed}", every_steps=2, remote_every=1000, scrub_bytes_per_s=0)
    rig.train(["node-a", "node-b"], rig.job_to(8)).result()
    rig.stop()
    rng = random.Random(seed)
    newest = rig.commits()[-1]
    folders = [rig.staged("node-a", newest), rig.staged("node-b", newest)]
    for folder in rng.sample(folders, k=rng.choice((1, 2))):
        for path in rng.sample(sorted(folder.iterdir()), k=rng.choice((1, 2, 4))):
            flip(path, rng.randrange(path.stat().st_size))
    for name in rig.cluster.nodes:
        rig.kill_agent(name)
    restored = rig.restore(["node-a", "node-b"])
    print(f"seed {seed}: restored step {restored} of {newest.step}")
    assert restored in (6, 8)


@pytest.mark.slow
@needs_root
def test_a_full_disk_costs_saves_and_no_training(make_rig: MakeRig) -> None:
    """P7: ENOSPC on a rank's node. Training goes on, and saves come back with the space."""
    rig = make_rig("full", every_steps=1, remote_every=1000, reserve_bytes=MIB, max_block_s=1.0)
    with small_disk(rig.staging_root / "small", 16 * MIB):
        rig.cluster.add("small")
        rig.train(["node-a", "small"])
        rig.wait_commits(2)
        filler = rig.cluster.nodes["small"].staging / "filler"
        _fill(filler)
        stuck = rig.commits()[-1].step
        wait_for(lambda: rig.last_step() > stuck + 15, what="training without saves")
        saved = rig.commits()[-1].step
        filler.unlink()
        rig.wait_commits(3)
        assert rig.group is not None and not rig.group.ended()
        assert saved <= stuck + 2, "nothing was committed without its bytes"
        rig.stop()
        rig.check()
        rig.cluster.kill("small", wipe=False)


@needs_root
@pytest.mark.slow
def test_an_fsync_that_fails_once_is_never_taken_for_a_success(make_rig: MakeRig) -> None:
    """P2, P4: the kernel reports a lost write once, and success afterwards."""
    rig = make_rig("lying", every_steps=1, remote_every=1000, keep_last=50, reserve_bytes=0, max_block_s=1.0)
    root = rig.staging_root
    with lying_disk(root / "lying", root, size_bytes=256 * MIB, real_bytes=24 * MIB) as backing:
        rig.cluster.add("lying")
        rig.train(["node-a", "lying"])
        rig.wait_commits(2)
        ballast = backing / "ballast"
        _fill(ballast)
        wait_for(lambda: rig.last_step() > rig.commits()[-1].step + 10, what="failing saves")
        ballast.unlink()
        rig.wait_commits(3)
        rig.stop()
        live = [c for c in rig.catalog.checkpoints if c.num_nodes == 2]
        Path("/proc/sys/vm/drop_caches").write_text("3")  # what is checked is the disk, not the page cache
        bad = {
            c.step: found for c in live if (found := verify_fragment(rig.staged("lying", c).joinpath, 1, 2))
        }
        print(f"{len(live)} commits, {len(bad)} of them damaged on the disk that lies")
        assert not bad
        rig.check()
        rig.cluster.kill("lying", wipe=False)


def _fill(path: Path) -> None:
    """Take all space that is left in a file system."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(MIB))
        except OSError:
            pass
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            os.fsync(file.fileno())
