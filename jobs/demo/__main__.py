"""The demo: train, lose a node during the run, continue, and compare bit for bit with a run without a loss.

    python -m jobs.demo

The demo starts a Ray cluster of a head and three nodes on this machine, trains the GPT of `jobs.train_gpt`
twice on two of the nodes, kills one node in the second run and wipes the disk of that node. The exit code is
1 if anything differs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import ray

from jobs.demo.comparison import (
    CALM,
    TIER_NAMES,
    Watch,
    compare,
    conclude,
    console,
    make_parser,
    prepare,
    status_of,
    train,
)
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.errors import CheckpointError

# Every second checkpoint is durable and kept: enough points to draw curves.
OPTIONS = "--every-steps 5 --remote-every 2 --keep-every 10"
KILL_AFTER_STEP = 43  # some steps after a checkpoint, so that the run must repeat steps
STORMY = "gpt-with-failure"


def main(argv: list[str] | None = None) -> int:
    out = make_parser("python -m jobs.demo", __doc__).parse_args(argv).out.absolute()
    prepare(out)
    started_s = time.monotonic()
    console.rule("[bold]ray_ckpt: lose a node, lose nothing")
    console.print(
        "Starting a Ray cluster on this machine: a head and three nodes, each with its own disk folder ..."
    )
    storage_path = str(out / "storage")
    with LocalCluster(out / "staging", ["node-a", "node-b", "node-c"]) as cluster:
        console.print(f"Four nodes are up after {time.monotonic() - started_s:.0f} s.\n")
        console.rule("1. A calm run", align="left")
        with training(cluster, out, storage_path, CALM) as watch:
            watch.follow()
        console.print()
        console.rule("2. The same run, and a node dies", align="left")
        with training(cluster, out, storage_path, STORMY) as watch:
            watch.follow(until=KILL_AFTER_STEP)
            victim = cluster.name_of(status_of(storage_path, STORMY).nodes[-1].node_id)
            lost_at_s = time.time()
            cluster.kill(victim, wipe=True)
            console.print(
                f"  [bold red]✗ step {watch.step}: kill -9 of {victim}: raylet, worker and agent are gone, "
                "and its disk folder is wiped.[/]"
            )
            watch.follow()
        restores = status_of(storage_path, STORMY).restores
        for rank in restores:
            for part in rank.parts:
                where = "" if part.tier == "remote" else cluster.name_of(part.where)
                console.print(
                    f"  rank {rank.rank} read {part.file:36} {part.size_bytes / 1e6:6.2f} MB "
                    f"from {TIER_NAMES[part.tier]} {where} in {part.seconds * 1e3:.0f} ms"
                )
    console.print()
    console.rule("3. Was anything lost?", align="left")
    tiers, failures = compare(out, storage_path, STORMY, restores, lost_at_s)
    if "remote" in tiers:  # from a peer, or from the own disk if repair was faster than the restart
        failures.append(f"the lost shard should have come from a copy on a node, not from {tiers}")
    if code := conclude(failures, started_s):
        return code
    run = os.path.relpath(out / "storage" / STORMY)
    console.print(f"Look at it yourself:  [bold].venv/bin/ray-ckpt ls {run}[/]")
    console.print(f"Check its bytes:      [bold].venv/bin/ray-ckpt verify {run}[/]")
    return 0


@contextmanager
def training(cluster: LocalCluster, out: Path, storage_path: str, name: str) -> Iterator[Watch]:
    """Train in a thread while the caller watches."""
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            train(out, storage_path, name, OPTIONS)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit, name="trainer", daemon=True)
    thread.start()
    places = partial(places_of, cluster, storage_path, name)
    try:
        yield Watch(out, storage_path, name, thread.is_alive, places)
        thread.join()
    finally:
        if errors:
            raise errors[0]


def places_of(cluster: LocalCluster, storage_path: str, name: str, attempt: str) -> str:
    """Return the nodes that hold the shards of an attempt and their copies, as the coordinator knows them."""
    try:
        status = status_of(storage_path, name)
    except (CheckpointError, ray.exceptions.RayError):
        return ""
    holders = status.holders.get(attempt, {})
    parts = []
    for node in status.nodes:
        copies = [n for n in holders.get(node.node_index, ()) if n != node.node_id]
        names = ", ".join(cluster.name_of(n) for n in copies) or "-"
        ranks = ", ".join(map(str, node.ranks))
        parts.append(f"shard {ranks} on {cluster.name_of(node.node_id)} (copy: {names})")
    return ": " + "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
