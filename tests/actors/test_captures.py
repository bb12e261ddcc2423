"""Sealed captures: their memory is released once, and not while it is being written."""

from __future__ import annotations

import asyncio

from ray_ckpt.actors.agent.captures import MAX_REPORTED, Captures
from ray_ckpt.trainer.link import SealedShard
from ray_ckpt.types import AttemptId, SaveFacts

ATTEMPT = AttemptId(run_uid="uid", session=1, step=10, attempt="first")


def sealed(rank: int, attempt: AttemptId = ATTEMPT, *, stall_s: float = 0.0, mesh: str = "") -> SealedShard:
    return SealedShard(
        attempt=attempt,
        rank=rank,
        state=b"",
        replicated=(),
        metrics=None,
        buffer=0,
        layout=None,
        layout_signature="",
        mesh=mesh,
        stall_s=stall_s,
        capture_s=0.5,
    )


def test_a_capture_is_released_after_its_write_has_ended() -> None:
    async def story() -> None:
        captures, shard = Captures(), sealed(0)
        captures.seal(shard)
        released = asyncio.ensure_future(captures.wait_released(shard))
        assert captures.begin_write(ATTEMPT, 0) is shard
        assert captures.begin_write(ATTEMPT, 0) is None, "it is being written"
        captures.release(ATTEMPT, 0)
        await asyncio.sleep(0)
        assert not released.done()
        captures.end_write(shard)
        captures.release(ATTEMPT, 0)
        assert not await released
        assert captures.begin_write(ATTEMPT, 0) is None

    asyncio.run(story())


def test_the_rank_learns_that_still_slices_have_changed_in_its_memory() -> None:
    async def story() -> None:
        captures, shards = Captures(), [sealed(0), sealed(1)]
        for shard in shards:
            captures.seal(shard)
            captures.begin_write(ATTEMPT, shard.rank)
        captures.note_changed(shards[1])
        for shard in shards:
            captures.end_write(shard)
            captures.release(ATTEMPT, shard.rank)
        assert [await captures.wait_released(shard) for shard in shards] == [False, True]

    asyncio.run(story())


def test_the_facts_of_a_save_are_the_worst_of_its_ranks_and_given_once() -> None:
    captures = Captures()
    captures.seal(sealed(0, stall_s=1.0))
    captures.seal(sealed(1, stall_s=3.0, mesh="dp=2"))
    captures.note_shared(ATTEMPT, 5)
    captures.note_shared(ATTEMPT, 2)
    facts = captures.facts(ATTEMPT)
    assert (facts.mesh, facts.stall_s, facts.capture_s) == ("dp=2", 3.0, 0.5)
    assert facts.local_s is not None and facts.local_s >= 0
    assert facts.shared_bytes == 7
    assert captures.facts(ATTEMPT) == SaveFacts()


def test_dropped_saves_make_room_for_later_ones() -> None:
    captures = Captures()
    attempts = [
        AttemptId(run_uid="uid", session=1, step=step, attempt=str(step)) for step in range(MAX_REPORTED + 1)
    ]
    for attempt in attempts:
        captures.seal(sealed(0, attempt, stall_s=1.0))
    assert captures.facts(attempts[0]) == SaveFacts()
    assert captures.facts(attempts[1]).stall_s == 1.0
