"""Faults around a bucket: agents and nodes die while they upload, the store is away. P1, P2, P6, P7, P8."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from ray_ckpt.storage.remote.object_store import PART_BYTES
from ray_ckpt.types import CheckpointInfo, Level
from tests.fault.conftest import Home
from tests.fault.rig import Rig, wait_for
from tests.servers.strict_store.faults import Down, Fault, Match, Status
from tests.servers.strict_store.process import StrictStore

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
BUCKET = "runs"
NODES = ["node-a", "node-b"]
KILLS = 20
WIDE = 450_000  # of the model's hidden layer: 38 MB of parameters and optimizer state on each of two ranks
DRAIN_BYTES_PER_S = 24 << 20  # so that a shard is on its way for a second or two
AWAY_S = 60.0
NO_ACKS = (0, 0, 0)


@pytest.fixture(scope="module")
def store() -> Iterator[StrictStore]:
    with StrictStore.process(buckets=(BUCKET,)) as store:
        yield store


@pytest.fixture
def rig(home: Home, store: StrictStore, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A run in the bucket whose every commit is drained, and of which nothing is retired or evicted."""
    query = f"endpoint_override={urlsplit(store.endpoint).netloc}&scheme=http"
    options: dict[str, Any] = {"remote_every": 1, "keep_last": 1000, "keep_local": 1000, "replicas": 1}
    run = request.node.name.removeprefix("test_")[:40]
    rig = Rig(home.start(), tmp_path, run, storage=f"s3://{BUCKET}/all?{query}", **options)
    yield rig
    store.clear_faults()
    rig.stop()


def wide(rig: Rig, **options: Any) -> Any:
    """Return a job whose shards are uploaded in several parts, long enough for a fault during an upload."""
    more = {"width": WIDE, "drain_bytes_per_s": DRAIN_BYTES_PER_S, **options}
    return replace(rig.job, waits=NO_ACKS, options={**rig.job.options, **more})


def uploaders(rig: Rig, store: StrictStore) -> list[str]:
    """Nodes whose agents send to the store, while a shard is unfinished there."""
    if not any(upload["parts"] for upload in store.uploads(BUCKET)):
        return []
    port = urlsplit(store.endpoint).port
    return [name for name in NODES if name in rig.cluster.nodes and _talks_to(rig, name, port)]


def uploading(rig: Rig, store: StrictStore) -> list[str]:
    """Wait for an unfinished upload, and return it."""
    found: list[str] = []

    def look() -> bool:
        found[:] = uploaders(rig, store)
        return bool(found)

    wait_for(look, what="an upload")
    return found


def _talks_to(rig: Rig, node: str, port: int | None) -> bool:
    with contextlib.suppress(psutil.Error):
        for process in rig.actors("NodeAgent", [node]):
            for connection in process.net_connections(kind="tcp"):
                if connection.raddr and connection.raddr.port == port and connection.status == "ESTABLISHED":
                    return True
    return False


def all_durable(rig: Rig) -> bool:
    return all(c.level is Level.DURABLE for c in rig.commits())


def steps_of(rig: Rig) -> list[int]:
    return [c.step for c in rig.commits()]


def no_uploads(store: StrictStore) -> bool:
    return not store.uploads(BUCKET)


def test_agents_killed_in_the_middle_of_uploads(rig: Rig, store: StrictStore) -> None:
    """Every checkpoint becomes durable, each byte of it is right, and no unfinished upload is left."""
    assert DRAIN_BYTES_PER_S < 2 * PART_BYTES < WIDE * 84
    job = wide(rig, every_steps=20, attempt_timeout_s=15.0)
    rig.train(NODES, job)
    killed = 0
    while killed < KILLS:
        busy = uploading(rig, store)
        begun_s = time.monotonic()
        rig.kill_agent(busy[killed % len(busy)])
        killed += 1
        before = _durable(rig.commits())
        wait_for(partial(_is_beyond, rig, before), within_s=90.0, what="a durable checkpoint after the kill")
        print(f"kill {killed}: durable again after {time.monotonic() - begun_s:.1f} s")
    rig.wait_commits(1)
    rig.stop()
    took_s = wait_for(lambda: all_durable(rig), within_s=120.0, what="all durable", every_s=rig.poll_s)
    wait_for(lambda: no_uploads(store), within_s=90.0, what="no unfinished upload")
    verdict = rig.check()
    print(f"{killed} kills, {verdict.commits} commits, all durable {took_s:.1f} s after the last one")
    assert verdict.commits > KILLS


def test_a_node_lost_in_the_middle_of_a_drain(rig: Rig, store: StrictStore) -> None:
    """Another holder uploads what the dead one had begun, and what it left is aborted."""
    job = wide(rig, every_steps=30)
    rig.train(NODES, job)
    rig.wait_commits(1)
    busy = uploading(rig, store)
    begun = {upload["key"] for upload in store.uploads(BUCKET)}
    rig.cluster.kill(busy[0], wipe=True)
    rig.stop()
    wait_for(lambda: all_durable(rig), within_s=120.0, what="all durable", every_s=rig.poll_s)
    wait_for(lambda: no_uploads(store), within_s=90.0, what="no unfinished upload")
    assert begun <= set(store.keys(BUCKET))
    verdict = rig.check()
    print(f"{busy[0]} died over {len(begun)} uploads; {verdict.commits} commits are durable")


def test_a_store_that_is_down_for_a_minute(rig: Rig, store: StrictStore) -> None:
    """Steps go on, what is complete is held, and all of it is in the log and in the bucket afterwards."""
    job = replace(rig.job, waits=NO_ACKS, options={**rig.job.options, "every_steps": 20, "max_block_s": 1.0})
    rig.train(NODES, job)
    rig.wait_commits(2)
    fault = store.add_fault(Fault(action=Down()))
    down_at, steps_before = time.monotonic(), rig.last_step()
    paces = []
    while time.monotonic() - down_at < AWAY_S:
        before = rig.last_step()
        time.sleep(5.0)
        paces.append(rig.last_step() - before)
    assert min(paces) > 0, f"steps in each 5 s: {paces}"
    gone_at = rig.last_step()
    store.remove_fault(fault)
    newest = gone_at - gone_at % 20
    wait_for(
        lambda: any(steps_before < s <= newest for s in steps_of(rig)), what="a held checkpoint is appended"
    )
    appended = [step for step in steps_of(rig) if steps_before < step <= gone_at]
    rig.wait_commits(2)
    rig.stop()
    took_s = wait_for(lambda: all_durable(rig), within_s=180.0, what="all durable", every_s=rig.poll_s)
    rig.check()
    print(
        f"{gone_at - steps_before} steps while away, {appended} held and appended, durable in {took_s:.1f} s"
    )


def test_a_restore_waits_for_a_store_that_refuses_reads(rig: Rig, store: StrictStore) -> None:
    """The newest checkpoint is on the storage path alone, which is too busy for the first reads."""
    rig.train(NODES)
    rig.wait_commits(3)
    rig.stop()
    wait_for(lambda: all_durable(rig), within_s=180.0, what="all durable", every_s=rig.poll_s)
    newest, num_sessions = rig.commits()[-1], rig.num_sessions()
    for node in rig.cluster.nodes:
        shutil.rmtree(rig.staged(node, newest), ignore_errors=True)
        rig.kill_agent(node)  # and its arenas
    fault = store.add_fault(
        Fault(
            match=Match(operation="GetObject", key=f"{newest.directory}/shard"),
            action=Status(503, "SlowDown"),
        )
    )
    with ThreadPoolExecutor(1) as pool:
        begun_s = time.monotonic()
        restoring = pool.submit(rig.restore, NODES)
        try:
            wait_for(lambda: rig.num_sessions() > num_sessions + 1, what="a second session", within_s=120.0)
        finally:
            store.remove_fault(fault)
        assert restoring.result(120.0) == newest.step
    print(f"restored after {rig.num_sessions() - num_sessions} sessions, {time.monotonic() - begun_s:.1f} s")


def _is_beyond(rig: Rig, durable: int) -> bool:
    return _durable(rig.commits()) > durable


def _durable(commits: tuple[CheckpointInfo, ...]) -> int:
    return sum(c.level is Level.DURABLE for c in commits)
