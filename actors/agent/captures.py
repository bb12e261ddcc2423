"""Captures that ranks have handed over, kept until they are written and their memory is free again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from ray_ckpt.trainer.link import SealedShard
from ray_ckpt.types import AttemptId, SaveFacts

MAX_REPORTED = 16  # saves, not yet stored, whose times are kept; the oldest were dropped, and are removed


@dataclass(slots=True)
class _SaveTimes:
    """Times of a save, as the ranks report them."""

    mesh: str = ""
    stall_s: float = 0.0
    capture_s: float = 0.0
    shared_bytes: int = 0  # in files that are linked to those of an earlier save
    is_rewritten: bool = False  # a still shard of the last save was written, not linked
    bad_copies: set[str] = field(default_factory=set)  # attempts whose still shards here are damaged
    sealed_s: float = 0.0  # when the last rank's capture arrived (monotonic)

    def add(self, shard: SealedShard) -> None:
        self.mesh = self.mesh or shard.mesh
        self.stall_s = max(self.stall_s, shard.stall_s)
        self.capture_s = max(self.capture_s, shard.capture_s)
        self.sealed_s = time.monotonic()


class Captures:
    """Sealed captures by attempt and rank."""

    def __init__(self) -> None:
        self._sealed: dict[tuple[str, int], SealedShard] = {}
        self._released: dict[tuple[str, int], asyncio.Event] = {}
        self._writing: set[tuple[str, int]] = set()  # captures whose memory is in use by a write
        self._changed: set[tuple[str, int]] = set()  # sealed captures with still slices that have changed
        self._times: dict[str, _SaveTimes] = {}  # by attempt

    def seal(self, shard: SealedShard) -> None:
        key = (shard.attempt.attempt, shard.rank)
        self._released.setdefault(key, asyncio.Event())
        self._sealed[key] = shard
        self._times.setdefault(shard.attempt.attempt, _SaveTimes()).add(shard)
        while len(self._times) > MAX_REPORTED:
            del self._times[next(iter(self._times))]

    async def wait_released(self, shard: SealedShard) -> bool:
        """Wait until the memory of a sealed capture may be used again; return whether to copy all of it."""
        key = (shard.attempt.attempt, shard.rank)
        await self._released[key].wait()
        self._released.pop(key, None)
        is_changed = key in self._changed
        self._changed.discard(key)
        return is_changed

    def begin_write(self, attempt: AttemptId, rank: int) -> SealedShard | None:
        """Return the capture to write; None if the capture was released, or is being written."""
        key = (attempt.attempt, rank)
        shard = self._sealed.get(key)
        if shard is None or key in self._writing:
            return None
        self._writing.add(key)
        return shard

    def note_shared(self, attempt: AttemptId, size_bytes: int) -> None:
        """Note that so many bytes of a save were linked instead of written."""
        if times := self._times.get(attempt.attempt):
            times.shared_bytes += size_bytes

    def note_changed(self, shard: SealedShard) -> None:
        """Note that still slices in the memory of a capture, which is being written, have changed."""
        self._changed.add((shard.attempt.attempt, shard.rank))

    def note_rewritten(self, attempt: str) -> None:
        """Note that a save has written a still shard of the last save anew."""
        if times := self._times.get(attempt):
            times.is_rewritten = True

    def note_bad(self, attempt: str, other: str) -> None:
        """Note that a save has found a still shard of another attempt damaged."""
        if times := self._times.get(attempt):
            times.bad_copies.add(other)

    def end_write(self, shard: SealedShard) -> None:
        self._writing.discard((shard.attempt.attempt, shard.rank))

    def release(self, attempt: AttemptId, rank: int) -> None:
        """Release a capture, unless it is being written; then the end of the write releases the capture."""
        key = (attempt.attempt, rank)
        if key in self._writing:
            return
        self._sealed.pop(key, None)
        if event := self._released.get(key):
            event.set()

    def facts(self, attempt: AttemptId) -> SaveFacts:
        """Return the facts of a save that has just been stored, and drop its times."""
        times = self._times.pop(attempt.attempt, None)
        if times is None:
            return SaveFacts()
        local_s = time.monotonic() - times.sealed_s
        return SaveFacts(
            mesh=times.mesh,
            stall_s=times.stall_s,
            capture_s=times.capture_s,
            local_s=local_s,
            shared_bytes=times.shared_bytes,
            is_rewritten=times.is_rewritten,
            bad_copies=tuple(sorted(times.bad_copies)),
        )
