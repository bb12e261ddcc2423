"""Processes that die: the coordinator, agents, ranks. P2, P3 and P7 on real Ray."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_ckpt.actors.client import coordinator, get_result
from tests.fault.conftest import MakeRig
from tests.fault.rig import Rig, frozen, wait_for

pytestmark = pytest.mark.cluster
RECOVERY_S = 5.0  # from the death of the coordinator to the next commit
KILLS = 3
IDLE_S = 3.0
RESTORE_S = 3.0  # in which the first rank restores its few bytes
RECOVERED_S = 60.0
HUNG_S = 60.0  # half of the time that one call of an agent that hangs took before


@pytest.mark.slow
def test_the_next_commit_comes_soon_after_the_coordinator_died(make_rig: MakeRig) -> None:
    """P3, P6: training goes on, the log has one history, and what was acknowledged is restored."""
    rig = make_rig("coordinator", every_steps=1, remote_every=5, max_block_s=1.0)
    rig.train(["node-a", "node-b"])
    took_s = []
    for _ in range(KILLS):
        rig.wait_commits(3)
        rig.kill_coordinator()
        took_s.append(rig.wait_commits(1))
    print("from the coordinator's death to the next commit:", ", ".join(f"{s:.2f} s" for s in took_s))
    assert statistics.median(took_s) < RECOVERY_S
    acked = rig.commits()[-1].step
    rig.kill_rank(1)
    assert rig.restore(["node-a", "node-b"]) >= acked


def kill_the_coordinator(rig: Rig) -> None:
    epoch = rig.epoch()
    rig.kill_coordinator()
    wait_for(lambda: rig.epoch() > epoch, what="the next coordinator")


def kill_the_agents(rig: Rig) -> None:
    for name in ("node-a", "node-b"):
        rig.kill_agent(name)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_the_coordinator, kill_the_agents])
def test_a_restore_goes_on_when_the_service_dies_in_it(
    kill: Callable[[Rig], None], make_rig: MakeRig, tmp_path: Path
) -> None:
    """P7: rank 0 has restored and waits for the group, and rank 1 has not begun."""
    rig = make_rig("restoring", every_steps=1, max_block_s=1.0)
    rig.train(["node-a", "node-b"])
    rig.wait_commits(3)
    rig.stop()
    newest, num_sessions = rig.commits()[-1].step, rig.num_sessions()
    begin = tmp_path / "begin"
    with ThreadPoolExecutor(1) as pool:
        restoring = pool.submit(rig.restore, ["node-a", "node-b"], until=begin)
        try:
            wait_for(lambda: rig.num_sessions() > num_sessions, what="a session")
            time.sleep(RESTORE_S)
            kill(rig)
        finally:
            begin.touch()
        assert restoring.result(RECOVERED_S) >= newest
    assert rig.num_sessions() == num_sessions + 1


@pytest.mark.slow
def test_an_agent_that_died_is_replaced_and_finds_its_disk(make_rig: MakeRig) -> None:
    """P2: death of an agent costs its memory, nothing that it has acknowledged."""
    rig = make_rig("agent", every_steps=1, remote_every=1000, keep_last=50, max_block_s=1.0)
    rig.train(["node-a", "node-b"])
    rig.wait_commits(3)
    rig.kill_agent("node-a")
    rig.wait_commits(3)
    node = rig.cluster.nodes["node-a"].node_id
    before = next(c for c in rig.commits() if rig.staged("node-a", c).is_dir())
    assert node in rig.status().holders[before.id.attempt][0], "the new agent has reported its files"
    rig.stop()
    for name in rig.cluster.nodes:
        rig.kill_agent(name)
    newest = rig.commits()[-1].step
    assert rig.restore(["node-a", "node-b"]) >= newest


@pytest.mark.slow
def test_a_group_starts_while_the_agent_of_another_node_hangs(make_rig: MakeRig) -> None:
    """P7: a node whose agent does not answer holds up nobody, and counts again when it does."""
    rig = make_rig("hung", every_steps=1, max_block_s=1.0)
    rig.train(["node-a", "node-b"])
    rig.wait_commits(3)
    rig.stop()
    newest, begun_s = rig.commits()[-1].step, time.monotonic()
    with frozen(*rig.actors("NodeAgent", ["node-c"])):
        assert rig.restore(["node-a", "node-b"]) >= newest
        took_s = time.monotonic() - begun_s
        print(f"restored in {took_s:.1f} s beside an agent that hangs")
        assert took_s < HUNG_S
    assert rig.restore(["node-a", "node-c"]) >= newest


@pytest.mark.slow
def test_agents_of_a_finished_run_end_and_come_back_for_the_next(no_cluster: None, make_rig: MakeRig) -> None:
    """P8: no process stays where nothing needs it."""
    rig = make_rig("idle", every_steps=2, agent_idle_s=IDLE_S)
    group = rig.train(["node-a", "node-b"], rig.job_to(4))
    wait_for(lambda: len(rig.actors("NodeAgent")) == len(rig.cluster.nodes), what="an agent on every node")
    group.result()
    rig.stop()
    get_result(coordinator().finish.remote(rig.key, 60.0), 90.0)
    wait_for(lambda: not rig.actors("NodeAgent"), what="all agents have ended")
    again = Rig(rig.cluster, rig.root, "next", every_steps=2)
    again.train(["node-b", "node-c"], again.job_to(4)).result()
    assert again.restore(["node-b", "node-c"]) == 4
    assert rig.restore(["node-a", "node-c"]) == 4
    again.stop()
