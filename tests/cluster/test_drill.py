"""Recovery drills of a run in a cluster: what they find, what they name, and what the log keeps of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs import drill as drill_job
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.client import coordinator, get_result, open_run
from ray_ckpt.actors.ray_cluster import owner_here
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import app
from ray_ckpt.config import RunOptions
from ray_ckpt.format import names
from tests.cluster.ranks import RankGroup, Training
from tests.fault.rig import flip, shards, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NODES = ("node-a", "node-b", "node-c")
DOMAIN = "ray.io/node-id"  # a label that every node has: each is a rack of its own
OPTIONS: dict[str, Any] = {
    "failure_domain": DOMAIN,
    "every_steps": 2,
    "remote_every": 1000,
    "replicas": 1,
    "keep_last": 5,
    "scrub_bytes_per_s": 0,
}
SCRUB_S = 1.0  # age at which a checkpoint is read again, once scrub is on


@dataclass(frozen=True, slots=True)
class Trained:
    """A run of three ranks on three nodes, with steps 2 and 4, each with a replica of each part."""

    cluster: LocalCluster
    storage: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.storage}/{self.name}"

    @property
    def catalog(self) -> Catalog:
        return Catalog(self.path)

    def staged(self, node: str, step: int) -> Path:
        info = self.catalog[step].info
        return self.cluster.nodes[node].staging / info.id.run_uid / info.directory

    def holders(self, step: int, index: int) -> list[str]:
        status = get_result(coordinator().status.remote(self.path), 30)
        found = status.holders[self.catalog[step].info.id.attempt][index]
        return sorted(self.cluster.name_of(node) for node in found)

    def lose(self, node: str, *args: object) -> tuple[int, Any]:
        return self.drill("--lose-node", self.cluster.nodes[node].node_id[:10], *args)

    def drill(self, *args: object) -> tuple[int, Any]:
        return self.command("drill", *args)

    def plan(self, *args: object) -> tuple[int, Any]:
        return self.command("verify", "--plan", "--address", "auto", *args)

    def command(self, name: str, *args: object) -> tuple[int, Any]:
        """Exit code and JSON of a command."""
        call = [name, self.path, *map(str, args), "--json"]
        result = CliRunner().invoke(app, call, catch_exceptions=False)
        return result.exit_code, json.loads(result.stdout)


def train(storage: str, name: str) -> None:
    Training(name, storage, **OPTIONS).train(4)


@pytest.fixture
def trained(cluster: LocalCluster, storage: str, request: pytest.FixtureRequest) -> Iterator[Trained]:
    name = request.node.name.removeprefix("test_")[:40]
    group = RankGroup([cluster.nodes[node].node_id for node in NODES])
    group.run(train, storage, name)
    yield Trained(cluster, storage, name)
    group.stop()


def scrub_now(run: Trained) -> None:
    """Turn the run's scrub on; repair follows it."""
    options = RunOptions.parse(
        **{"ray_report": False, **OPTIONS, "scrub_bytes_per_s": 10**9, "scrub_every_s": SCRUB_S}
    )
    open_run(run.name, run.storage, options, owner=owner_here(by_job=True))


def test_drill_fails_with_a_damaged_replica_and_passes_after_repair(trained: Trained) -> None:
    for node in NODES:
        code, report = trained.lose(node)
        assert (code, report["passed"], report["resume_step"], report["recorded"]) == (0, True, 4, True)
        assert {c["step"]: c["verdict"] for c in report["checkpoints"]} == {4: "passed", 2: "passed"}
        assert set(report["tiers"]) == {"local", "peer"} and report["steps_lost"] == 0
    before = {path: path.read_bytes() for path in trained.staged("node-a", 4).iterdir()}

    home, holder = "node-a", next(n for n in trained.holders(4, 0) if n != "node-a")
    replica = shards(trained.staged(holder, 4), rank=0)[0]
    flip(replica)
    code, report = trained.lose(home)
    assert code == 1 and not report["passed"] and report["resume_step"] == 2 and report["steps_lost"] == 2
    newest, older = report["checkpoints"]
    assert (newest["verdict"], older["verdict"]) == ("failed", "passed")
    [problem] = newest["problems"]
    assert replica.name in problem and trained.cluster.nodes[holder].node_id[:12] in problem
    other = next(node for node in NODES if node not in (home, holder))
    assert trained.lose(other)[0] == 0, "that loss does not need the replica"
    info = trained.catalog[4].info
    assert info.drill == f"passed: lose-node {trained.cluster.nodes[other].node_id[:12]}"
    found = trained.catalog.events()
    drills = found.filter([op == "drilled" for op in found["op"].to_pylist()])
    assert drills.num_rows == 10

    scrub_now(trained)
    pen = trained.cluster.nodes[holder].staging / info.id.run_uid / "quarantine" / info.directory
    wait_for((pen / replica.name).exists, what="the bad file is in quarantine")
    wait_for(lambda: len(trained.holders(4, 0)) == 2, what="a new copy")
    code, report = trained.lose(home)
    assert code == 0 and report["passed"] and report["resume_step"] == 4
    assert trained.catalog[4].info.drill.startswith("passed: lose-node")
    assert before == {path: path.read_bytes() for path in before}, "a drill changes nothing"


def test_what_is_in_the_cluster_only_is_proven_on_each_of_its_copies(trained: Trained) -> None:
    code, document = trained.plan()
    [found] = document["checkpoints"]
    assert (code, document["ok"], found["is_restorable"], found["world_sizes"]) == (0, True, True, "any")
    assert found["folder"] == trained.catalog[4].info.directory, "the newest"
    nodes = {trained.cluster.nodes[node].node_id: node for node in NODES}
    held = {nodes[holder["node"]]: holder["fragments"] for holder in found["holders"]}
    copies = {node: [k for k in range(3) if node in trained.holders(4, k)] for node in NODES}
    assert held == copies and sum(map(len, held.values())) == 6

    home, holder = "node-a", next(n for n in trained.holders(4, 0) if n != "node-a")
    replica = shards(trained.staged(holder, 4), rank=0)[0]
    os.truncate(replica, replica.stat().st_size - 1)
    code, document = trained.plan()
    [found] = document["checkpoints"]
    assert (code, document["ok"], found["is_restorable"], found["damages"]) == (1, False, True, [])
    [bad] = (holder for holder in found["holders"] if holder["damages"])
    assert nodes[bad["node"]] == holder
    assert [(d["file"], d["where"]) for d in bad["damages"]] == [(replica.name, "size")]

    (trained.staged(home, 4) / replica.name).unlink()
    code, document = trained.plan("--all")
    older, newest = document["checkpoints"]
    assert (code, older["ok"], newest["is_restorable"], newest["world_sizes"]) == (1, True, False, None)
    assert [(d["file"], d["where"]) for d in newest["damages"]] == [(replica.name, "copies")]
    assert trained.plan("--step", 2)[0] == 0

    command = [sys.executable, "-m", "ray_ckpt.cli", "verify", trained.path, "--plan", "--nodes"]
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    for address, code, text in (
        (("--address", trained.cluster.address), 1, "CANNOT BE RESTORED (3 findings)"),
        (("--address", trained.cluster.address, "--step", "2"), 0, "All 6 copies of its files are whole"),
        ((), 2, "`--plan --address auto` proves"),
    ):
        done = subprocess.run([*command, *address], capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == code and text in done.stdout + done.stderr, done


def test_drill_of_the_storage_path_with_the_cluster_and_without(trained: Trained) -> None:
    code, report = trained.drill("--remote-only", "--address", "auto")
    assert code == 0 and not report["is_covered"] and report["resume_step"] is None
    assert get_result(coordinator().finish.remote(trained.path, 60.0), 120).step == 4
    code, report = trained.drill("--remote-only", "--address", "auto")
    assert (code, report["resume_step"], report["recorded"]) == (0, 4, True)
    assert set(report["tiers"]) == {"remote"} and trained.catalog[4].info.drill == "passed: remote-only"
    folder = Path(trained.path, names.SERVICE_DIR, names.CHECKPOINTS_DIR, trained.catalog[4].info.directory)
    flip(folder / names.shard_file(1, 3))
    for args in ((), ("--address", "auto")):
        code, report = trained.drill("--remote-only", *args)
        assert (code, report["recorded"]) == (1, bool(args))
        [problem] = report["checkpoints"][0]["problems"]
        assert names.shard_file(1, 3) in problem and "remote" in problem
    assert trained.catalog[4].info.drill == "failed: remote-only"
    assert trained.lose("node-b")[0] == 0, "the nodes have what the storage path has not"


def test_drill_from_a_process_of_its_own_and_on_a_schedule(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "ray_ckpt.cli", "drill", trained.path, "--address"]
    command += [trained.cluster.address, "--lose-node", trained.cluster.nodes["node-c"].node_id, "--json"]
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]
    rack = trained.cluster.nodes["node-b"].node_id
    code, report = trained.drill("--lose-rack", rack)
    assert (code, report["scenario"], report["nodes_lost"]) == (0, f"lose-rack {rack}", [rack])
    assert drill_job.main([trained.path, "--times", "4", "--every", "0.001", "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(turns) == 4 and all(turn["passed"] for turn in turns)
    assert len({turn["scenario"] for turn in turns}) > 1
    flip(shards(trained.staged("node-a", 4), rank=0)[0])
    flip(shards(trained.staged(next(n for n in trained.holders(4, 0) if n != "node-a"), 4), rank=0)[0])
    assert drill_job.main([trained.path, "--times", "1"]) == 1
    assert drill_job.main([f"{trained.path}-not", "--times", "1"]) == 2
