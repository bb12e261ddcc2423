"""Agents that cannot reach each other, on nodes in namespaces: `python -m tests.fault.partitions --all`.

Runs that save at different intervals train at the same time on nodes a and b; the head, a third node, is
free to hold copies. Then what a sends to b's agent is dropped (one-way), or that and what b sends to a's
(two-way), for a while. Ray's own ports stay open: everybody is alive. The promises, of each run and cut:

- commits go on: between two of them there is never more than the interval and `goal_timeout_s`;
- copies go elsewhere: the first save that begins after the cut is replicated within three times what a copy
  takes, and NOTICE_S for noticing that a node is silent;
- HEAL_S after the cut is over no copy is missing;
- nothing that was acknowledged is lost.

Prints a table, and ends with 1 if a promise was broken. Root, `ip` and `iptables` are needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast

import ray

from jobs.demo.local_cluster import LocalCluster, LocalNode
from ray_ckpt.config import RunOptions
from ray_ckpt.types import CheckpointInfo, Level
from tests.fault.namespaces import Namespaces, dropped, why_not
from tests.fault.rig import Rig, wait_for

Ways: TypeAlias = Literal["one-way", "two-way"]
NODES = ("a", "b")  # rank 0 and rank 1
NOTICE_S = 10.0  # for noticing a silent node, and asking another, while the machine is busy
HEAL_S = 30.0
CALM_S = 3.0  # without a cut, between two
FIRST_S = 90.0  # until each run has its first replicated checkpoint: after 30 s with the longest interval
ACK_S = 1.0  # a longer wait would hold up the saves that are counted here
SLACK_S = 3.0  # steps until the ranks agree to save, and a busy machine
GOAL_TIMEOUT_S = RunOptions().goal_timeout_s
ALL = tuple((ways, seconds) for seconds in (35.0, 70.0, 130.0) for ways in ("one-way", "two-way"))
INTERVALS_S = (1.0, 4.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cuts, one after another, while a run for each interval trains."""

    folder: str
    cuts: tuple[tuple[Ways, float], ...]
    intervals_s: tuple[float, ...]
    rules: dict[str, list[tuple[str, str]]]  # by the ways of a cut: (namespace, address of the sender)
    nodes: dict[str, tuple[str, str]]  # name -> address, staging folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one run under one cut. Seconds are by the coordinator's clock, as in the log."""

    ways: str
    cut_s: float
    every_s: float
    commits: int
    gap_s: float  # the longest without a commit, from the last one before the cut until it was over
    copy_s: float  # what copies took before the first cut, from local to replicated: the median
    replicated_s: float | None  # until the first save that began in the cut had a copy; None: during it none
    begun_s: float | None  # after the cut, when that save began
    healed_s: float | None  # after the cut, until no copy was missing; None: not within HEAL_S
    lost: int  # acknowledged before or during the cut

    def problems(self) -> list[str]:
        """Return the promises that were broken."""
        found = []
        if self.gap_s > self.every_s + GOAL_TIMEOUT_S:
            found.append(f"{self.gap_s:.0f} s without a commit")
        if self.cut_s > self.every_s + self.bound_s + SLACK_S:  # a save fell due early enough
            if self.replicated_s is None or self.begun_s is None:
                found.append("nothing was replicated")
            elif self.replicated_s - self.begun_s > self.bound_s:
                found.append(f"replicated {self.replicated_s - self.begun_s:.1f} s after the save began")
            if self.gap_s > self.every_s + self.bound_s + SLACK_S:
                found.append(f"{self.gap_s:.0f} s without a commit, though a node was free")
        if self.healed_s is None:
            found.append(f"copies are missing {HEAL_S:.0f} s after the cut")
        if self.lost:
            found.append(f"{self.lost} acknowledged checkpoints are lost")
        return found

    @property
    def bound_s(self) -> float:
        return 3 * self.copy_s + NOTICE_S


def run(
    cuts: Sequence[tuple[Ways, float]], intervals_s: Sequence[float], folder: Path, *, within_s: float
) -> list[Row]:
    """Cut a new cluster in each of these ways. Its files are below `folder`, a short name."""
    with Namespaces(folder, NODES) as net:
        a, b = (net.space(node) for node in NODES)
        to_b, to_a = (b, net.address("a")), (a, net.address("b"))
        plan = Plan(
            folder=str(folder),
            cuts=tuple(cuts),
            intervals_s=tuple(intervals_s),
            rules={"one-way": [to_b], "two-way": [to_b, to_a]},
            nodes={node: (net.address(node), str(net.staging(node))) for node in net.nodes},
        )
        driver = net.python("-m", "tests.fault.partitions", "--plan", json.dumps(asdict(plan)))
        assert driver.wait(within_s) == 0, "the driver failed: see what it printed"
    return [Row(**row) for row in json.loads((folder / "rows.json").read_text())]


# -- in the head's namespace ---------------------------------------------------------------------------


def drive(plan: Plan) -> None:
    """Train and cut; the rows are a file of the plan's folder."""
    ray.init(logging_level="warning", log_to_driver=False)
    root = Path(plan.folder)
    ids = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
    nodes = {
        name: LocalNode(name, ids[address], Path(staging), None)
        for name, (address, staging) in plan.nodes.items()
    }
    cluster = cast(LocalCluster, SimpleNamespace(nodes=nodes))
    rigs = {every_s: _rig(cluster, root, every_s) for every_s in plan.intervals_s}
    try:
        for rig in rigs.values():
            rig.train(NODES)
        for every_s, rig in rigs.items():
            wait_for(partial(_is_whole, rig, every_s), within_s=FIRST_S, what=f"{rig.job.run} has copies")
        calm = {every_s: _copy_s(rig) for every_s, rig in rigs.items()}
        rows: list[Row] = []
        for ways, cut_s in plan.cuts:
            rows += _cut(rigs, calm, ways, cut_s, plan.rules[ways])
            print(table(rows[-len(rigs) :], header=len(rows) == len(rigs)), flush=True)
        for rig in rigs.values():
            assert rig.group is not None and not rig.group.ended()
            rig.restore(NODES)  # also checks the journal and the log
    finally:
        for rig in rigs.values():
            rig.stop()
    root.joinpath("rows.json").write_text(json.dumps([asdict(row) for row in rows]))


def _rig(cluster: LocalCluster, root: Path, every_s: float) -> Rig:
    options: dict[str, Any] = {"every_s": every_s, "remote_every": 1000, "keep_last": 10}
    rig = Rig(cluster, root, f"each-{every_s:g}-s", **options)
    rig.job = replace(rig.job, waits=(6, 4, 0), ack_s=ACK_S)
    return rig


def _cut(
    rigs: dict[float, Rig],
    calm: dict[float, float],
    ways: str,
    cut_s: float,
    rules: Sequence[tuple[str, str]],
) -> list[Row]:
    """Cut links of all runs once; `calm` is the duration of copies before."""
    time.sleep(CALM_S)
    with dropped([(space, sender) for space, sender in rules]):
        begun_at_s = time.time()
        time.sleep(cut_s)
        healed_at_s = time.time()
    healed = dict.fromkeys(rigs)  # interval -> seconds until no copy was missing
    while None in healed.values() and time.time() < healed_at_s + HEAL_S:
        for every_s, rig in rigs.items():
            if healed[every_s] is None and _is_whole(rig, every_s):
                healed[every_s] = time.time() - healed_at_s
        time.sleep(0.2)
    found = []
    for every_s, rig in rigs.items():
        known = {"ways": ways, "cut_s": cut_s, "every_s": every_s, "copy_s": calm[every_s]}
        found.append(_row(rig, begun_at_s, healed_at_s, healed_s=healed[every_s], **known))
    return found


def _is_whole(rig: Rig, every_s: float) -> bool:
    """Return whether the newest commit is replicated and recent enough, and no copy is missing."""
    commits = rig.commits()
    if not commits or commits[-1].committed_at_s < time.time() - every_s - NOTICE_S:
        return False
    return commits[-1].level >= Level.REPLICATED and rig.is_protected()


def _row(rig: Rig, begun_at_s: float, healed_at_s: float, **known: Any) -> Row:
    commits = rig.commits()
    times_s = [c.committed_at_s for c in commits]
    during = [at_s for at_s in times_s if begun_at_s < at_s <= healed_at_s]
    before = max((at_s for at_s in times_s if at_s <= begun_at_s), default=begun_at_s)
    first = next((c for c in commits if _begun_at_s(c) > begun_at_s and _is_copied(c, healed_at_s)), None)
    return Row(
        commits=len(during),
        gap_s=max(b - a for a, b in pairwise([before, *during, healed_at_s])),
        replicated_s=(first.replicated_at_s or 0.0) - begun_at_s if first else None,
        begun_s=_begun_at_s(first) - begun_at_s if first else None,
        lost=len(rig.check().lost),
        **known,
    )


def _is_copied(commit: CheckpointInfo, until_s: float) -> bool:
    return commit.replicated_at_s is not None and commit.replicated_at_s <= until_s


def _begun_at_s(commit: CheckpointInfo) -> float:
    """Return the begin of a save, by the log."""
    return commit.committed_at_s - sum(
        took or 0.0 for took in (commit.capture_s, commit.local_s, commit.replicate_s)
    )


def _copy_s(rig: Rig) -> float:
    """Return the typical time of a copy so far."""
    return median(commit.replicate_s or 0.0 for commit in rig.commits())


def table(rows: Sequence[Row], *, header: bool = True) -> str:
    """Return the rows as text."""
    titles = ("cut", "for", "each", "commits", "gap", "copy", "replicated", "whole", "lost", "")
    cells = [
        (
            row.ways,
            f"{row.cut_s:g} s",
            f"{row.every_s:g} s",
            str(row.commits),
            f"{row.gap_s:.1f} s",
            f"{row.copy_s:.1f} s",
            "never" if row.replicated_s is None else f"{row.replicated_s:.1f} s",
            "no" if row.healed_s is None else f"{row.healed_s:.1f} s",
            str(row.lost),
            "; ".join(row.problems()) or "ok",
        )
        for row in rows
    ]
    widths = (8, 6, 5, 8, 8, 7, 11, 7, 5, 0)
    lines = [titles, *cells] if header else cells
    return "\n".join(
        " ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--all", action="store_true", help="both ways, 35, 70 and 130 s, saves each 1, 4, 30 s"
    )
    parser.add_argument("--ways", choices=("one-way", "two-way"), default="one-way")
    parser.add_argument("--seconds", type=float, default=70.0, help="how long a cut lasts")
    parser.add_argument("--every", type=float, nargs="+", default=[4.0], help="seconds between saves, by run")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan:
        found: dict[str, Any] = json.loads(args.plan)
        drive(Plan(**found))
        return 0
    if reason := why_not():
        print(f"This needs network namespaces: {reason}.", file=sys.stderr)
        return 2
    cuts: Any = ALL if args.all else ((args.ways, args.seconds),)
    folder = Path(tempfile.mkdtemp(prefix="cuts-"))
    rows = run(cuts, INTERVALS_S if args.all else args.every, folder, within_s=3600.0)
    print(table(rows))
    shutil.rmtree(folder)
    return int(any(row.problems() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
