"""Many runs one after another in one service: what the coordinator, the agents and the ranks keep of them.

`python -m tests.cluster.many_runs --runs 50` trains on two nodes of a local cluster, ends each run as Ray
Train's controller does, and prints threads, descriptors and memory of each process every ten runs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.attach import overview
from ray_ckpt.actors.client import coordinator, get_result
from ray_ckpt.errors import Unavailable
from tests.cluster.ranks import RankGroup, Training

NODES = ("node-a", "node-b")
GRACE_S = 1.0  # between the end of a run and the deletion of its copies on the nodes
STEPS = 4
FINISH_S = 60.0
PUT_AWAY_S = 60.0  # for the nodes to be empty, after the last run
LOOK_EVERY = 10  # runs
OWN_FILES = ("agent.lock", "disk")  # of a staging folder itself
MIB = 1 << 20

Look = Mapping[str, "Usage"]  # by process


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a process; the heap is memory of this process only, without files and shared memory."""

    threads: int
    descriptors: int
    heap_bytes: int

    def __str__(self) -> str:
        return f"{self.threads:3d} threads {self.descriptors:4d} descriptors {self.heap_bytes / MIB:7.1f} MiB"


def usage(process: psutil.Process) -> Usage:
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    anonymous = next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    return Usage(process.num_threads(), process.num_fds(), anonymous * 1024)


def train(run: str, storage: str, options: Mapping[str, Any]) -> None:
    Training(run, storage, every_steps=1, max_block_s=20.0, **options).train(STEPS)


def train_and_finish(group: RankGroup, run: str, storage: str, options: Mapping[str, Any]) -> None:
    group.run(train, run, storage, options)
    get_result(coordinator().finish.remote(f"{storage}/{run}", FINISH_S), FINISH_S + 30.0)


def look(cluster: LocalCluster, ranks: Mapping[str, int]) -> Look:
    """Return the resources of the coordinator, of each agent and of each rank."""
    found = {}
    for name, node in cluster.nodes.items():
        raylet = psutil.Process(node.handle.all_processes["raylet"][0].process.pid)
        for child in raylet.children():
            title = " ".join(child.cmdline())
            if title.startswith("ray::Coordinator"):
                found["coordinator"] = usage(child)
            elif title.startswith("ray::NodeAgent"):
                found[f"agent of {name}"] = usage(child)
    return found | {name: usage(psutil.Process(pid)) for name, pid in ranks.items()}


def staged(cluster: LocalCluster, run_uid: str = "") -> Iterator[Path]:
    """Return the files in the staging folders, of one run or of all, without the agents' own files."""
    for node in cluster.nodes.values():
        for folder, _, files in os.walk(node.staging):  # it passes over folders that are deleted meanwhile
            for path in (Path(folder), *(Path(folder) / file for file in files)):
                parts = path.relative_to(node.staging).parts
                if parts and parts[0] not in OWN_FILES and run_uid in ("", parts[0]):
                    yield path


def open_runs(*wanted: str) -> list[str]:
    """Return the runs, or those of `wanted`, that the service has not put away; all during a restart."""
    try:
        runs = {run.name for run in overview(coordinator()).runs if not run.is_put_away}
    except Unavailable:
        return [*wanted, "?"]
    return [*runs.intersection(wanted or runs)]


def wait_put_away(*wanted: str) -> None:
    deadline_s = time.monotonic() + PUT_AWAY_S
    while runs := open_runs(*wanted):
        assert time.monotonic() < deadline_s, f"{runs} are open"
        time.sleep(0.2)


def many_runs(
    cluster: LocalCluster,
    storage: str,
    runs: int,
    *,
    look_every: int = LOOK_EVERY,
    report: Callable[[str], None] = print,
    **options: Any,
) -> list[Look]:
    """Open many runs; return a look after each `look_every` runs, when these have ended."""
    group = RankGroup([cluster.nodes[name].node_id for name in NODES])
    ranks = {f"rank {k}": pid for k, pid in enumerate(group.run(_pid))}
    looks = []
    for number in range(1, runs + 1):
        options = {"retire_grace_s": GRACE_S, **options}
        train_and_finish(group, f"trial-{number}", storage, options)
        if number % look_every == 0:
            wait_put_away()
            assert not any(staged(cluster)) or options.get("keep_local_at_end")
            looks.append(look(cluster, ranks))
            for process, found in looks[-1].items():
                report(f"{number:4d} runs  {process:18} {found}")
    group.stop()
    return looks


def _pid() -> int:
    import os

    return os.getpid()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder) / "staging", NODES) as cluster:
        many_runs(cluster, f"{folder}/storage", runs)


if __name__ == "__main__":
    main()
