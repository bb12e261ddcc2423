"""`ray-ckpt up`, `status`, `top`, `pin` and `down` with a real service and a group at work."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors import attach, names
from ray_ckpt.actors.client import coordinator, get_result
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import app
from ray_ckpt.errors import Unavailable
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster

WAIT_S = 30.0


def ray_ckpt_cli(*args: object, code: int = 0) -> str:
    """Return the output of a command that runs in this process, which is connected to the cluster."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def as_json(*args: object) -> Any:
    return json.loads(ray_ckpt_cli(*args, "--json"))


def process(cluster: LocalCluster, *args: str) -> Any:
    """Return the JSON output of a command that runs in a separate process."""
    command = [sys.executable, "-m", "ray_ckpt.cli", *args, "--json"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    named = f"ray-ckpt: the Ray cluster at {cluster.address}\n" if args[0] == "down" else ""
    assert (done.returncode, done.stderr) == (0, named)
    return json.loads(done.stdout)


def assert_top_ends_by_ctrl_c(cluster: LocalCluster) -> None:
    """Assert that `top` on a terminal continues until Ctrl-C."""
    command = [sys.executable, "-m", "ray_ckpt.cli", "top", "--interval", "0.2", "--address", cluster.address]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as top:
        os.close(theirs)
        shown = b""
        while shown.count(b"Ctrl-C ends it") < 3:
            shown += os.read(ours, 1 << 16)
        top.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # it has closed its end
            while more := os.read(ours, 1 << 16):
                shown += more
        os.close(ours)
        assert top.wait(WAIT_S) == 0, shown[-2000:]
    assert b"No run is open." in shown and b"Traceback" not in shown


def train(run: str, storage: str, total: int) -> int:
    """Saves every second step; the last one reaches the storage path only if the launcher ends the run."""
    return len(Training(run, storage, every_steps=2, keep_last=5, remote_every=1000).train(total))


def until(found: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (value := found()):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    return value


def test_a_group_at_work_is_shown_pinned_and_not_stopped(
    cluster: LocalCluster, group: RankGroup, storage: str
) -> None:
    where = f"{storage}/watched"
    group.run(train, "watched", storage, 4)

    service = as_json("up")
    assert (service["started"], service["protocol"]) == (False, names.PROTOCOL_VERSION)
    assert service["coordinator_node"] == cluster.nodes["head"].node_id

    def settled() -> Any:
        (run,) = as_json("status", where)["runs"]
        return run if [newest["step"] for newest in run["newest"]] == [4, 4] else None

    run = until(settled)
    assert (run["name"], run["state"], run["world_size"], run["session"]) == ("watched", "training", 2, 1)
    assert (run["step"], run["copies_missing"], run["saves"], run["drains"]) == (4, 0, [], [])
    group_nodes = [cluster.nodes[name].node_id for name in ("node-a", "node-b")]
    assert [node["node_id"] for node in run["nodes"] if node["ranks"]] == group_nodes
    assert all(node["exposure"]["steps_at_risk"] == 0 for node in run["nodes"] if node["ranks"])
    assert run["needed_in_cluster"] == [2, 4]

    text = ray_ckpt_cli("status", "watched")
    assert "training" in text and "2 rank(s) on 2 node(s)" in text and "step 4, from peer" in text
    assert "step 4, from peer" in ray_ckpt_cli("top", "watched")
    assert "watched" in ray_ckpt_cli("status")

    assert "pinned by eval until" in ray_ckpt_cli("pin", where, 2, "--owner", "eval", "--for", "1h")
    assert list(Catalog(Path(where))[2].info.pins) == ["eval"]
    assert as_json("unpin", where, 2, "--owner", "eval")["by"] == "service"
    assert not Catalog(Path(where))[2].info.pins

    refused = CliRunner().invoke(app, ["down"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "run watched is training on 2 rank(s)" in refused.stderr
    assert "run watched has steps 2, 4 in the cluster only" in refused.stderr and "--force" in refused.stderr
    agents = attach.overview(attach.find_service()).agents
    assert {agent.node_id for agent in agents} >= set(group_nodes), "nothing has changed"
    assert all(agent.staging and agent.endpoint.startswith("grpc") for agent in agents)


def test_a_run_that_is_not_open_is_shown_from_its_log(cluster: LocalCluster, storage: str) -> None:
    from tests.support.sample_run import write_run

    run = write_run(Path(storage))
    ray_ckpt_cli("up")
    document = as_json("status", run.folder)
    assert (document["source"], document["checkpoints"]) == ("log", {"live": 4})
    assert "By the log alone: The service has not opened this run." in ray_ckpt_cli("status", run.folder)
    assert as_json("pin", run.folder, 20, "--owner", "me")["by"] == "log"


@pytest.mark.slow
def test_after_down_the_next_service_finds_what_the_nodes_have(
    no_cluster: None, tmp_path: Path, storage: str
) -> None:
    with LocalCluster(tmp_path / "staging", ["node-a", "node-b"]) as cluster:
        assert not process(cluster, "down")["ended"], "there is none"
        assert process(cluster, "up")["started"]
        assert process(cluster, "status")["runs"] == process(cluster, "top")["runs"] == []
        assert_top_ends_by_ctrl_c(cluster)
        service = attach.find_service()
        assert service is not None
        get_result(service.shut_down.remote(False), WAIT_S)  # and the caller that requested it dies
        with pytest.raises(Unavailable, match="is being stopped"):
            coordinator()
        assert process(cluster, "down")["ended"], "nothing is in use"
        assert attach.find_service() is None
        nodes = [cluster.nodes[name].node_id for name in ("node-a", "node-b")]
        group = RankGroup(nodes)
        assert group.run(train, "kept", storage, 6) == [6, 6]
        group.stop()
        ray_ckpt_cli("down", code=1)
        ended = process(cluster, "down", "--force")
        assert ended["on_node_disks_only"] == {f"{storage}/kept": [2, 4, 6]}
        assert attach.find_service() is None and not attach._wait_gone(names.AGENT_PREFIX)
        assert list(cluster.nodes["node-a"].staging.rglob("shard-*")), "nothing is deleted"
        again = RankGroup(nodes)
        assert again.run(train, "kept", storage, 8) == [2, 2], "it goes on from step 6, on the nodes' disks"
        again.stop()
