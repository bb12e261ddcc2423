"""A training under random faults, one after another as fast as it recovers: `make soak SECONDS=600`.

`python -m tests.fault.soak --seconds 600 --seed 1`. The seed gives the order of the faults and their
targets; when they strike within a save is up to the machine. Ends with 1 if a promise was broken.

After each fault the run must get going again: a step that is later than the fault must be acknowledged as
replicated. A group that dies with its fault is started again, as Ray Train would, and must restore at
least the newest step that was acknowledged at a level which covers the fault.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.demo.local_cluster import LocalCluster
from tests.fault import journal
from tests.fault.rig import Rig, away, flip, frozen, wait_for

NODES = ("node-a", "node-b", "node-c", "node-d")
RECOVERY_S = 90.0  # from any fault to the next acknowledged step, on a busy machine
PAUSE_S = 0.6  # at most, between recovery and the next fault, so that it strikes anywhere in a save
FREEZE_S = 2.0
AWAY_S = 3.0
CHECK_EVERY = 15  # faults between two looks of the oracle
OPTIONS: dict[str, Any] = {
    "every_steps": 1,
    "remote_every": 10,
    "keep_last": 3,
    "max_block_s": 0.5,
    "inventory_wait_s": 5.0,
    "attempt_timeout_s": 10.0,
    "goal_timeout_s": 5.0,
    "store_wait_s": 2.0,
    "retire_grace_s": 1.0,
    "scrub_every_s": 10.0,
}


class Soak:
    """One run under faults."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.floor = 0  # the step that the next restore must reach
        self.nodes: list[str] = []  # of the group
        self.slowest_s = 0.0
        # By weight: a node costs ten times the time of a process.
        self.kinds: Mapping[str, tuple[int, Callable[[], bool]]] = {
            "rank killed": (3, self.kill_rank),
            "agent killed": (6, self.kill_agent),
            "coordinator killed": (6, self.kill_coordinator),
            "node killed, its disk comes back": (2, self.kill_node),
            "node killed with its disk": (2, self.lose_node),
            "coordinator frozen": (1, self.freeze_coordinator),
            "bit flipped": (2, self.flip_bit),
            "storage path away": (1, self.storage_away),
        }

    @property
    def kills(self) -> int:
        return sum(count for kind, count in self.faults.items() if "killed" in kind)

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        self.start_group()
        self.recover("the start", 0)
        while time.monotonic() < end_s:
            time.sleep(self.rng.uniform(0.0, PAUSE_S))
            self.strike()
            if sum(self.faults.values()) % CHECK_EVERY == 0:
                self.rig.check()

    def strike(self) -> None:
        """Cause one fault, and end it."""
        kinds = list(self.kinds)
        kind = self.rng.choices(kinds, weights=[self.kinds[k][0] for k in kinds])[0]
        self.faults[kind] += 1
        step = self.rig.last_step()
        started_s = time.monotonic()
        group_dies = self.kinds[kind][1]()
        if group_dies:
            self.start_group()
        self.recover(kind, step)
        took_s = time.monotonic() - started_s
        self.slowest_s = max(self.slowest_s, took_s)
        print(f"{sum(self.faults.values()):4d} step {step:6d} {took_s:5.1f} s  {kind}", flush=True)

    def start_group(self) -> None:
        """Start a new group on two of the nodes; it must not restore less than is promised."""
        self.nodes = self.rng.sample(sorted(set(self.rig.cluster.nodes) - {"head"}), k=2)
        before = max((entry.session for entry in self._entries("restored")), default=0)
        self.rig.train(self.nodes)
        wait_for(lambda: self._restored(before) or self._ended(), within_s=RECOVERY_S, what="a restore")
        if self._ended():
            self._why()
        step = self._restored(before)[0].step
        assert step >= self.floor, f"restored step {step}, and step {self.floor} was acknowledged"

    def recover(self, fault: str, step: int) -> None:
        """Wait for a later step to be acknowledged as replicated."""
        wait_for(
            lambda: self.acked("replicated") > step or self._ended(),
            within_s=RECOVERY_S,
            what=f"a replicated step after {step}, after: {fault}",
        )
        if self._ended():
            self._why()

    def acked(self, level: str) -> int:
        """Return the last step that was acknowledged at `level` or above."""
        levels = ("local", "replicated", "durable")
        enough = levels[levels.index(level) :]
        return max((e.step for e in self._entries("acked") if e.level in enough), default=0)

    # -- faults: each returns True if the group dies with it ----------------------------------------------

    def kill_rank(self) -> bool:
        self.rig.kill_rank(self.rng.randrange(len(self.nodes)))
        self.floor = self.acked("local")
        return True

    def kill_agent(self) -> bool:
        self.rig.kill_agent(self.rng.choice(sorted(self.rig.cluster.nodes)))
        return False

    def kill_coordinator(self) -> bool:
        self.rig.kill_coordinator()
        return False

    def kill_node(self) -> bool:
        return self._kill_node(wipe=False)

    def lose_node(self) -> bool:
        return self._kill_node(wipe=True)

    def freeze_coordinator(self) -> bool:
        with frozen(*self.rig.actors("Coordinator")):
            time.sleep(FREEZE_S)
        return False

    def flip_bit(self) -> bool:
        """Damage one staged copy of the newest checkpoint; retention may delete it first."""
        commits = [c for c in self.rig.commits() if c.state == "live"]
        folder = self.rig.staged(self.rng.choice(self.nodes), commits[-1])
        paths = sorted(folder.glob("s*")) if folder.is_dir() else []
        if paths:
            try:
                flip(self.rng.choice(paths), self.rng.randrange(1 << 20))
            except FileNotFoundError:
                print("     the file was gone", flush=True)
        return False

    def storage_away(self) -> bool:
        with away(self.rig.folder.parent):
            time.sleep(AWAY_S)
        return False

    def _kill_node(self, *, wipe: bool) -> bool:
        name = self.rng.choice(sorted(set(self.rig.cluster.nodes) - {"head"}))
        self.rig.cluster.kill(name, wipe=wipe)
        self.floor = self.acked("replicated" if wipe else "local")
        self.rig.cluster.add(name)
        return name in self.nodes

    # -- what is seen ----------------------------------------------------------------------------------

    def _entries(self, kind: str) -> list[journal.Entry]:
        return [entry for entry in journal.read(self.rig.journal) if entry.kind == kind]

    def _restored(self, after: int) -> list[journal.Entry]:
        """Return the restored checkpoints of the sessions after this one."""
        return [entry for entry in self._entries("restored") if entry.session > after]

    def _ended(self) -> bool:
        return self.rig.group is not None and self.rig.group.ended()

    def _why(self) -> None:
        """A group that ends without a fault of its own is a failure of the service."""
        assert self.rig.group is not None
        self.rig.group.result()
        raise AssertionError("the training ended by itself")


def main(seconds: float, seed: int, root: Path) -> None:
    """Raises AssertionError for the first broken promise."""
    with LocalCluster(root / "staging", NODES) as cluster:
        rig = Rig(cluster, root, "soak", **OPTIONS)
        rig.job = replace(rig.job, pace_s=0.05, waits=(5, 4, 1))
        soak = Soak(rig, seed)
        try:
            soak.run(seconds)
            soak.floor = soak.acked("local")
            restored = rig.restore(soak.nodes)
            assert restored >= soak.floor, f"restored step {restored}, acknowledged {soak.floor}"
            verdict = rig.check()
        finally:
            rig.stop()
            for kind, count in sorted(soak.faults.items()):
                print(f"{count:5d} x {kind}")
    print(
        f"{soak.kills} kills, {verdict.commits} commits, {verdict.sessions} sessions, "
        f"{verdict.restores} restores by rank, {verdict.acked} acknowledged, lost={len(verdict.lost)}, "
        f"doubled={len(verdict.doubled)}, wrong={len(verdict.wrong)}; slowest recovery {soak.slowest_s:.1f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    args = parser.parse_args()
    chosen = args.seed if args.seed is not None else random.randrange(1 << 32)
    folder = Path(tempfile.mkdtemp(prefix="ray_ckpt-soak-"))
    print(f"seed {chosen}, files in {folder}", flush=True)
    main(args.seconds, chosen, folder)
    shutil.rmtree(folder)  # kept for a look after a failure
