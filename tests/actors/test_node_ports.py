"""Work of a node's host on Ray, without Ray."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from ray_ckpt.actors.agent.arena import make_arena
from ray_ckpt.actors.agent.files import StoredFiles
from ray_ckpt.actors.agent.memory import RankMemory
from ray_ckpt.actors.agent.node import DISK_THREADS, Node
from ray_ckpt.actors.agent.ports import RayNodePorts
from ray_ckpt.actors.agent.prefetch import PrefetchRoom
from ray_ckpt.actors.agent.runs import NodeRuns
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.step_states import keep
from ray_ckpt.transport.credentials import ServiceKeys
from tests.support.still_nodes import StillNode, attempt

BASE = torch.arange(1 << 19, dtype=torch.float32)  # 2 MiB, above MIN_STILL_BYTES


def test_the_newest_state_is_sent_when_newer_ones_came_during_the_lookup_of_the_peer() -> None:
    """Of each rank only the states of a few steps are kept."""
    sent: list[tuple[str, tuple[int, int], str]] = []
    run: Any = SimpleNamespace(run_uid="uid", step_states={0: {1: "state 1"}}, sending_states=set())

    async def keep_state(run_uid: str, session_key: tuple[int, int], state: str) -> None:
        sent.append((run_uid, session_key, state))

    async def find(nodes: list[str]) -> dict[str, Any]:
        if not sent:
            for step in range(2, 6):
                keep(run.step_states, 0, step, f"state {step}")
        return {"peer": SimpleNamespace(keep_state=SimpleNamespace(remote=keep_state))}

    node = cast(Any, SimpleNamespace(agents=SimpleNamespace(find=find)))
    work = n.SendStepState(session_key=(1, 1), rank=0, step=1, peer="peer")
    asyncio.run(RayNodePorts(node, run, {})._send_step_state(work))
    assert sent == [("uid", (1, 1), "state 5")] and not run.sending_states


def test_no_state_is_sent_when_a_new_session_began_during_the_lookup_of_the_peer() -> None:
    run: Any = SimpleNamespace(run_uid="uid", step_states={0: {1: "state 1"}}, sending_states=set())

    async def find(nodes: list[str]) -> dict[str, Any]:
        run.step_states = {}
        return {"peer": SimpleNamespace()}

    node = cast(Any, SimpleNamespace(agents=SimpleNamespace(find=find)))
    work = n.SendStepState(session_key=(1, 1), rank=0, step=1, peer="peer")
    asyncio.run(RayNodePorts(node, run, {})._send_step_state(work))


def test_a_peer_of_the_last_session_that_hangs_keeps_no_state_of_the_next_one_back() -> None:
    sent: list[str] = []
    options = SimpleNamespace(prefetch="never")
    run: Any = SimpleNamespace(
        run_uid="uid",
        step_states={0: {1: "old"}},
        sending_states=set(),
        restore=None,
        memory=RankMemory(),
        spec=SimpleNamespace(options=options),
        take_start=lambda plan: None,
    )

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    async def keep_state(run_uid: str, session_key: tuple[int, int], state: str) -> None:
        sent.append(state)

    async def find(nodes: list[str]) -> dict[str, Any]:
        peers = {"hangs": hang, "lives": keep_state}
        return {name: SimpleNamespace(keep_state=SimpleNamespace(remote=peers[name])) for name in nodes}

    async def story() -> None:
        node = cast(
            Any, SimpleNamespace(agents=SimpleNamespace(find=find), node_id="n", prefetch_room=PrefetchRoom())
        )
        ports = RayNodePorts(node, run, {})
        first = n.SendStepState(session_key=(1, 1), rank=0, step=1, peer="hangs")
        hanging = asyncio.ensure_future(ports._send_step_state(first))
        await asyncio.sleep(0)
        ports.begin(cast(Any, SimpleNamespace(resume=None, nodes=())))
        keep(run.step_states, 0, 7, "new")
        again = n.SendStepState(session_key=(1, 2), rank=0, step=7, peer="lives")
        await ports._send_step_state(again)
        hanging.cancel()

    asyncio.run(story())
    assert sent == ["new"] and not run.sending_states


def test_a_run_opens_although_all_threads_of_the_disk_write(tmp_path: Path) -> None:
    """A coordinator that is restarted during a save waits for the epoch, and then counts the node as lost."""
    may_end = threading.Event()

    async def story() -> None:
        node = Node("n", ServiceKeys.make(datetime.now(UTC)))
        for _ in range(2 * DISK_THREADS):
            node.disk_io.submit(may_end.wait)
        try:
            spec = RunSpec(
                name="gpt",
                storage_path=str(tmp_path / "runs"),
                options=RunOptions(staging=str(tmp_path / "n")),
            )
            runs = NodeRuns(node)
            async with asyncio.timeout(10):
                assert await runs.read_marks(spec) == ()
                run = await runs.take_up(spec, "0" * 32)
                await run.obey(n.EpochSeen(epoch=3))
                (mark,) = await runs.read_marks(spec)
            assert mark.epoch == run.machine.epoch == 3
            assert [(found.is_finished, found.failed) for found in runs.opened()] == [(False, None)]
            for is_finished in (False, True):
                await run.obey(n.RunReleased(session_key=(1, 1), is_finished=is_finished, epoch=3))
                (found,) = runs.opened()
                assert (found.is_finished, found.failed is not None) == (is_finished, not is_finished)
            run.staging.close()
        finally:
            may_end.set()

    asyncio.run(story())


def test_a_save_is_refused_if_still_slices_that_were_not_copied_again_have_changed_in_the_arena(
    tmp_path: Path,
) -> None:
    """The rank has found its tensors unchanged, so the bytes in the arena are those of no step."""
    events: list[n.NodeEvent] = []
    (tmp_path / "storage" / "gpt" / "ray_ckpt").mkdir(parents=True)
    other = BASE + 1

    with ExitStack() as stack:
        made = StillNode(stack, tmp_path / "a", tmp_path / "storage")
        run = made.run
        run.host = SimpleNamespace(handle=events.append)
        run.spec.name = "gpt"
        pool = stack.enter_context(ThreadPoolExecutor(1))
        node: Any = SimpleNamespace(disk_io=pool, count_bytes=lambda *_: None)

        def flip() -> None:
            (buffer,) = run.memory.arenas[0].buffers
            buffer.data(buffer.layout, 1)[-1] ^= 1

        async def save(step: int, base: torch.Tensor, still_from: int | None = None) -> bool:
            shard = made.seal(step, base, torch.zeros(4), still_from=still_from)
            await RayNodePorts(node, run, {})._write_shard(n.WriteShard(attempt=shard.attempt, rank=0))
            run.captures.release(shard.attempt, 0)
            match events.pop():
                case n.ShardWritten(files=files, rows=rows):
                    made.complete(step, StoredFiles(files=files, rows=rows, shared_bytes=0))
                case n.SaveFailed(reason=reason):
                    assert "which rank 0 copied into its arena at step" in reason
            has_changed: bool = await run.captures.wait_released(shard)
            return has_changed

        async def story() -> None:
            assert not await save(1, BASE)
            assert not await save(2, BASE, still_from=1)
            flip()
            assert await save(3, BASE, still_from=1)
            assert await save(4, BASE, still_from=1), "the rank has not copied them again yet"
            assert not await save(5, BASE)
            assert not await save(6, other), "the rank has seen a change, and copied it"
            assert not await save(7, other, still_from=6)
            flip()
            assert await save(8, other, still_from=6)
            assert not await save(9, other)

        asyncio.run(story())
        assert made.steps() == [1, 2, 5, 6, 7, 9]
        base = [made.path(step).read_bytes()[-BASE.nbytes :] for step in made.steps()]
        assert base == [BASE.numpy().tobytes()] * 3 + [other.numpy().tobytes()] * 3


def test_still_slices_are_compared_with_those_of_one_capture_in_one_buffer() -> None:
    made = make_arena(0, 1 << 20, mode="double", all_bytes=1 << 20, free_bytes=1 << 34, named=False)
    first, second = made.buffers
    assert first.keeps_still(attempt(1), "a") and first.keeps_still(attempt(3), "b")
    assert second.keeps_still(attempt(1), "b"), "another buffer"
    assert not first.keeps_still(attempt(3), "a") and first.keeps_still(attempt(3), "b")
    made.close()
