"""The check of memory and disk before a group trains; without Ray."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ray_ckpt.actors.agent.rank_endpoints import RankEndpoints
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import SessionNode
from ray_ckpt.errors import InsufficientSpace
from ray_ckpt.format.names import make_attempt
from ray_ckpt.storage.local import files
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.trainer.link import SealedShard

GB = 10**9
UID = "0" * 32


def node_run(root: Path, resume_of: str | None, *, others: str = "", **options: Any) -> NodeRun:
    """Return a run on a node with two ranks, whose group restores a checkpoint of the run `resume_of`.

    Each letter of `others` is the holder of another node's copy; "n" is this node.
    """
    root.mkdir(mode=0o700)
    resume = SimpleNamespace(checkpoint=SimpleNamespace(id=SimpleNamespace(run_uid=resume_of)))
    resumed = resume if resume_of else None
    here = SessionNode(node_id="n", node_index=0, ranks=(2, 3), holders=())
    nodes = [here, *(replace(here, node_id=f"n-{at}", holders=(h,)) for at, h in enumerate(others))]
    plan = SimpleNamespace(resume=resumed, session_key=(1, 1), nodes=nodes, group_of=lambda index: None)
    machine = cast(Any, SimpleNamespace(plan=plan, here=here))
    spec = RunSpec(
        name="full", storage_path=str(root), options=RunOptions(replicas=1, reserve_bytes=0, **options)
    )
    host = cast(Any, SimpleNamespace(machine=machine))
    return NodeRun(spec, UID, Disks([root]), lambda run, made: host)


@pytest.mark.parametrize("resume_of", [None, "another run", UID])
def test_a_group_that_has_trained_starts_again_on_a_disk_that_is_full_of_its_checkpoints(
    resume_of: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 200 * GB  # two checkpoints of two ranks, each with a copy from another node
    monkeypatch.setattr(files, "free_bytes", lambda root: free)
    caplog.set_level(logging.WARNING)

    async def reserve() -> None:
        run = node_run(tmp_path / str(free), resume_of)
        monkeypatch.setattr(run.memory, "reserve", lambda *arguments, **options: None)
        for rank, size_bytes in ((2, GB), (3, 25 * GB), (2, 25 * GB)):
            run.reserve(rank, size_bytes, named=False)

    asyncio.run(reserve())
    free -= 1
    if resume_of != UID:
        with pytest.raises(InsufficientSpace, match="Two checkpoints with copies"):
            asyncio.run(reserve())
        return
    asyncio.run(reserve())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("saves of this group may not fit on this node: Two checkpoints with copies")


@pytest.mark.parametrize(("others", "num_copies"), [("ss", 0), ("sn", 1), ("nnn", 3)])
def test_with_labelled_holders_a_node_needs_room_for_the_copies_that_it_holds(
    others: str, num_copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 * 2 * 25 * GB * (1 + num_copies)
    monkeypatch.setattr(files, "free_bytes", lambda root: free)

    async def reserve() -> None:
        run = node_run(tmp_path / str(free), None, others=others, replica_nodes="role=storage")
        monkeypatch.setattr(run.memory, "reserve", lambda *arguments, **options: None)
        run.reserve(2, 25 * GB, named=False)

    asyncio.run(reserve())
    free -= 1
    with pytest.raises(InsufficientSpace, match="Two checkpoints with copies"):
        asyncio.run(reserve())


def test_a_rank_reserves_in_the_session_of_its_group() -> None:
    """The plan that is there before may be that of an earlier group, which had no checkpoint."""
    calls: list[str] = []

    async def wait(what: str) -> None:
        await asyncio.sleep(0)
        calls.append(what)

    run = SimpleNamespace(
        current_restore=lambda session_key: wait(f"session {session_key}"),
        memory=SimpleNamespace(freeing=SimpleNamespace(wait=lambda: wait("memory"))),
        reserve=lambda *arguments, **options: calls.append("reserve"),
    )
    endpoints = RankEndpoints()
    endpoints._runs = cast(Any, SimpleNamespace(get=lambda uid: run))
    asyncio.run(endpoints.reserve(UID, (1, 2), 0, GB, False))
    assert calls == ["session (1, 2)", "memory", "reserve"]


def test_a_capture_of_an_earlier_session_leaves_the_layout_of_the_arena_alone() -> None:
    """A rank of a group that is over may still live, and the rank of the next group has the arena."""
    took: list[SealedShard] = []
    events: list[n.ShardSealed] = []

    async def released(shard: SealedShard) -> bool:
        assert events[-1].attempt == shard.attempt
        return False

    def take_layout(shard: SealedShard) -> bool:
        took.append(shard)
        return True

    run = SimpleNamespace(
        machine=SimpleNamespace(plan=SimpleNamespace(has=lambda attempt: attempt.session == 2)),
        memory=SimpleNamespace(take_layout=take_layout),
        captures=SimpleNamespace(seal=lambda shard: None, wait_released=released),
        host=SimpleNamespace(handle=events.append),
    )
    endpoints = RankEndpoints()
    endpoints._runs = cast(Any, SimpleNamespace(get=lambda uid: run))
    shards = [
        SealedShard(
            attempt=make_attempt(run_uid=UID, session=session, step=9, attempt=0),
            rank=0,
            state=b"",
            replicated=(),
            metrics=None,
            buffer=0,
            layout=None,
            layout_signature="",
            mesh="",
            stall_s=0.0,
            capture_s=0.0,
        )
        for session in (1, 2)
    ]
    for shard in shards:
        asyncio.run(endpoints.seal(UID, shard))
    assert took == shards[1:] and len(events) == 2
