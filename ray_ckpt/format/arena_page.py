"""The arena's first page: state that a rank and its agent share through memory, without messages.

    byte 0     16 hex digits of the attempt that is sealed here; zeros during a write
    byte 64    u64, bytes of the arena that have memory behind them (written by the agent)
    byte 128   u64, blocks of a stream that the rank has filled
    byte 192   u64, blocks of a stream that the agent has written
    byte 256   u64, 1 when the rank abandons the stream
    byte 320   16 hex digits of the attempt that is being streamed
    byte 4096  the shard file, or the ring of a stream

Each counter has one writer and a separate cache line, and is written after the bytes that it counts. Readers
see this order because of the order of stores on x86, and on other processors because of the interpreter's
locking between two Python operations.
"""

from __future__ import annotations

import struct

from ray_ckpt.types import ARENA_PAGE_BYTES

RING_BLOCK_BYTES = 8 << 20  # large enough to write at the full speed of a disk
RING_BLOCKS = 16  # 128 MiB for a rank: writes in flight, the block being filled, and filled blocks
RING_BYTES = RING_BLOCK_BYTES * RING_BLOCKS

_SEAL_BYTES = 16
_STREAM = 320
_COUNTER = struct.Struct("<Q")


class _Counter:
    """An attribute of an `ArenaPage` in 8 bytes of its memory."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, page: ArenaPage, kind: type[ArenaPage] | None = None) -> int:
        value: int = _COUNTER.unpack_from(page._memory, self._place)[0]
        return value

    def __set__(self, page: ArenaPage, value: int) -> None:
        _COUNTER.pack_into(page._memory, self._place, value)


class ArenaPage:
    """The state page of a mapped arena; rank and agent each create one over their own mapping."""

    populated_bytes = _Counter(64)
    filled_blocks = _Counter(128)
    done_blocks = _Counter(192)
    _given_up = _Counter(256)

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @property
    def sealed(self) -> str:
        """The attempt whose capture is complete here, or an empty string."""
        return bytes(self._memory[:_SEAL_BYTES]).strip(b"\0").decode()

    def seal(self, attempt: str) -> None:
        self._memory[:_SEAL_BYTES] = attempt.encode()

    def unseal(self) -> None:
        """Invalidate the sealed capture, before its first byte changes."""
        self._memory[:_SEAL_BYTES] = bytes(_SEAL_BYTES)

    @property
    def stream(self) -> str:
        """The attempt whose blocks are counted here."""
        return bytes(self._memory[_STREAM : _STREAM + _SEAL_BYTES]).strip(b"\0").decode()

    def begin_stream(self, attempt: str) -> None:
        """Start a stream under a new name, so that a reader of the previous one notices it."""
        self._memory[_STREAM : _STREAM + _SEAL_BYTES] = attempt.encode()
        self.filled_blocks = self.done_blocks = self._given_up = 0

    @property
    def is_given_up(self) -> bool:
        return self._given_up == 1

    def give_up(self) -> None:
        self._given_up = 1


def ring_block(index: int) -> slice:
    """Return the slice of the arena that holds block `index` of a stream."""
    start = ARENA_PAGE_BYTES + index % RING_BLOCKS * RING_BLOCK_BYTES
    return slice(start, start + RING_BLOCK_BYTES)
