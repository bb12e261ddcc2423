"""Streams of byte blocks cut to wanted sizes, and byte ranges joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class BlocksEnded(EOFError):
    """A stream of blocks has fewer bytes than were wanted."""


class BlockCutter:
    """A stream of blocks of any size, read in pieces of any other size.

    A piece may be a view of a block and is valid until the next piece is taken.
    """

    def __init__(self, blocks: Iterable[Buffer]) -> None:
        self._blocks = iter(blocks)
        self._rest = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return the next `nbytes` bytes, fewer at the end; only bytes from several blocks are copied."""
        self._fill()
        if self._rest.nbytes >= nbytes:
            return self._split(nbytes)
        piece = bytearray()
        while len(piece) < nbytes and self._fill():
            piece += self._split(nbytes - len(piece))
        return memoryview(piece)

    def take_whole(self, nbytes: int) -> memoryview | None:
        """Return the next `nbytes` bytes if the current block has all of them."""
        return self._split(nbytes) if nbytes <= self._rest.nbytes else None

    def pieces(self, nbytes: int, max_bytes: int | None = None) -> Iterator[memoryview]:
        """Yield the next `nbytes` bytes without a copy, in pieces of at most `max_bytes`.

        Raise BlocksEnded if there are fewer bytes.
        """
        while nbytes:
            if not self._fill():
                raise BlocksEnded("it ends too early")
            piece = self._split(min(nbytes, max_bytes or nbytes))
            nbytes -= piece.nbytes
            yield piece

    def at_end(self) -> bool:
        """Return whether no byte is left; if so, the stream has been read to the end."""
        return not self._fill()

    def _split(self, nbytes: int) -> memoryview:
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return piece

    def _fill(self) -> bool:
        """Take the next block if the current block is used up; return False if no bytes are left."""
        while not self._rest.nbytes:
            block = next(self._blocks, None)
            if block is None:
                return False
            self._rest = memoryview(block).cast("B")
        return True


def merge_ranges(ranges: Iterable[tuple[int, int]], *, gap_bytes: int = 0) -> tuple[tuple[int, int], ...]:
    """Join ranges (offset, size) that follow each other with at most `gap_bytes` between them.

    With `gap_bytes=0` the result has the same bytes in the same order, in as few ranges as possible.
    """
    found: list[tuple[int, int]] = []
    for offset, size in ranges:
        if found and 0 <= offset - sum(found[-1]) <= gap_bytes:
            found[-1] = (found[-1][0], offset + size - found[-1][0])
        elif size:
            found.append((offset, size))
    return tuple(found)
