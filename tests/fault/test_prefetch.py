"""Shards that are read ahead for groups that die, change, and come back elsewhere. P4, P8 on real Ray."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import psutil
import pytest

from tests.fault.conftest import MakeRig
from tests.fault.rig import Rig, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
RESTARTS = 50
SEED = 21
PLANS = (("node-a", "node-b"), ("node-b", "node-a"), ("node-a", "node-c"), ("node-b", "node-c"))
EARLY_S = 1.0  # a group that is stopped early lives at most so long: it restores, or is about to


def prefetched_memory(rig: Rig) -> list[str]:
    """Return the memory with prefetched files that agents hold."""
    found: list[str] = []
    for process in rig.actors("NodeAgent"):
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            targets = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
            found += [target for target in targets if "ray_ckpt-prefetch" in target]
    return found


def arenas_without_owner(rig: Rig) -> int:
    """Return the number of arenas that agents have closed, and map nevertheless."""
    found = 0
    for process in rig.actors("NodeAgent"):
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            folder = Path(f"/proc/{process.pid}")
            targets = [str(fd.readlink()) for fd in (folder / "fd").iterdir()]
            owned = sum("ray_ckpt-rank" in target for target in targets)
            found += max(0, (folder / "maps").read_text().count("memfd:ray_ckpt-rank") - owned)
    return found


def test_no_byte_is_wrong_and_no_memory_stays(make_rig: MakeRig) -> None:
    rng = random.Random(SEED)
    options = {"every_steps": 2, "keep_last": 3, "remote_every": 4, "max_block_s": 1.0, "prefetch": "always"}
    rig = make_rig("ahead", replicas=1, **options)
    prefetched, away = 0, ""
    for restart in range(RESTARTS):
        kind = rng.choices(("stop", "early", "rank", "node"), weights=(4, 3, 3, 1))[0]
        nodes = rng.choice(PLANS)
        if away:  # a node that was lost with its disk comes back late: while others restore
            rig.train([name for name in rig.cluster.nodes if name != "head"])
            rig.cluster.add(away)
            away = ""
        rig.train(nodes)
        if kind == "early":
            time.sleep(rng.uniform(0.0, EARLY_S))
            continue
        rig.wait_commits(2)
        parts = [part for rank in rig.status().restores for part in rank.parts]
        prefetched += any(part.is_prefetched for part in parts)
        wait_for(lambda: not prefetched_memory(rig), what="the end of prefetched memory")
        wait_for(lambda: not arenas_without_owner(rig), what="the end of the last group's arenas")
        if kind == "rank":
            rig.kill_rank(rng.randrange(len(nodes)))
        elif kind == "node" and rig.is_protected():
            away = rng.choice(nodes)
            rig.cluster.kill(away, wipe=True)
        if restart % 10 == 9:
            rig.stop()
            rig.check()
        print(f"{restart + 1:3d} {' '.join(nodes)}: {kind}", flush=True)
    rig.stop()
    rig.check()
    assert prefetched >= RESTARTS // 4, "the files of most groups of the same shape were read ahead"
    assert not prefetched_memory(rig)
