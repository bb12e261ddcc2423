"""Files compressed with zstd, with random access to any range.

The zstd seekable format 0.1.0 with the limits of FORMAT.md section 10: a frame for every FRAME_BYTES of the
raw file, then a table of their sizes in a frame that zstd skips. Frames in which that saves bytes are not of
zstd, but of byte planes (`format/planes.py`); a file without these is one that `zstd -d` decompresses.
https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md

No size in a stored file is trusted: the constants here bound the memory of a reader, and every frame must
contain a size and a checksum. These find most damage early. Only the digests of a manifest, which are of raw
bytes, prove that the bytes are equal to the saved bytes.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ray_ckpt.errors import CorruptionError, FormatError, missing_package
from ray_ckpt.format import planes
from ray_ckpt.format.blocks import BlockCutter

if TYPE_CHECKING:
    import zstandard
    from typing_extensions import Buffer

SUFFIX = ".zst"  # after the name of the raw file
FRAME_BYTES = 4 << 20  # raw bytes: longer frames compress no better, and each read takes whole frames
MAX_STORED_BYTES = FRAME_BYTES + (FRAME_BYTES >> 8)  # of a stored frame: ZSTD_COMPRESSBOUND, for random bytes
MAX_FRAMES = 1 << 20  # frames of a file: 4 TiB raw; the table takes 8 MiB, in the file and in a reader
TAIL_BYTES = 64 << 10  # read first, in one request: the whole table of a file of up to 31 GiB raw
MAX_RATIO = (
    0.95  # stored divided by raw; fp32 and moments of Adam reach 0.85, bf16 0.7. A file above it stays
)
# a file of safetensors; below it, restores pay with core time for the frames that shrink alone
NUM_SAMPLES = 8  # ranges in a sample of a file: 8 MiB take about 20 ms
SAMPLE_BYTES = 1 << 20  # size of each range: enough for the compressor to reach its usual ratio

_SKIPPABLE_MAGIC = 0x184D2A5E
_SEEKABLE_MAGIC = 0x8F92EAB1
_DESCRIPTOR = 0  # no checksums in the table: each frame ends with its checksum, which every decoder checks
_HEADER = struct.Struct("<II")  # of the table: magic, bytes that follow
_ENTRY = struct.Struct("<II")  # stored and raw bytes of a frame
_FOOTER = struct.Struct("<IBI")  # frames, descriptor, magic
_BOUND_EXTRA_BYTES = 64  # the largest addition of ZSTD_COMPRESSBOUND for short frames
_MIX = 0x9E3779B1  # 2**32 by the golden ratio: its multiples spread evenly

Blocks: TypeAlias = Generator[memoryview, None, None]

ReadStored: TypeAlias = Callable[[Sequence[tuple[int, int]]], Blocks]
"""Returns the stored bytes of ranges (offset, size), one after the other, in blocks of any size. A block may
be valid only until the next block is requested. Called and iterated from each reading thread."""


def check_installed() -> None:
    """Raise ConfigError if the package that compresses and decompresses is not installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise missing_package("zstandard", "zstd", "A shard compressed with zstd") from None


# -- writing -----------------------------------------------------------------------------------------


def encode(blocks: Iterable[Buffer], level: int) -> Iterator[bytes]:
    """Yield the stored file of the raw file that `blocks` make up: each frame, then the table.

    Two raw frames and a stored one are in memory. The result depends only on the raw file, the level and the
    version of zstd, not on the cuts between blocks. Raise FormatError for more than MAX_FRAMES frames.
    """
    check_installed()
    import zstandard

    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    of_planes = planes.plane_compressor()
    raw, entries = BlockCutter(blocks), bytearray()
    while frame := raw.take(FRAME_BYTES):
        if len(entries) == MAX_FRAMES * _ENTRY.size:
            raise FormatError(f"A file of more than {MAX_FRAMES * FRAME_BYTES} bytes cannot be compressed.")
        stored = planes.encode_frame(frame, of_planes, compressor)
        entries += _ENTRY.pack(len(stored), frame.nbytes)
        yield stored
    footer = _FOOTER.pack(len(entries) // _ENTRY.size, _DESCRIPTOR, _SEEKABLE_MAGIC)
    yield _HEADER.pack(_SKIPPABLE_MAGIC, len(entries) + len(footer)) + entries + footer


def max_encoded_bytes(size_bytes: int) -> int:
    """Return the largest result of `encode` for a raw file of this size, by ZSTD_COMPRESSBOUND."""
    num_frames = -(-size_bytes // FRAME_BYTES)
    table_bytes = _HEADER.size + num_frames * _ENTRY.size + _FOOTER.size
    return size_bytes + (size_bytes >> 8) + num_frames * _BOUND_EXTRA_BYTES + table_bytes


def sample_ranges(size_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges (offset, size) to sample: all of a small file, else NUM_SAMPLES ranges.

    The file is divided into equal parts with one range in each, at varying positions, so that the sample
    contains all kinds of alternating tensors. Each range begins with a whole number. No range is at the
    beginning, because the header would then count as an eighth of the file.
    """
    if size_bytes <= NUM_SAMPLES * SAMPLE_BYTES:
        return ((0, size_bytes),) if size_bytes else ()
    part = size_bytes // NUM_SAMPLES
    return tuple(
        (_whole(number * part + ((part - SAMPLE_BYTES) * ((number + 1) * _MIX % 2**32) >> 32)), SAMPLE_BYTES)
        for number in range(NUM_SAMPLES)
    )


def _whole(offset: int) -> int:
    return offset - offset % planes.ELEMENT_SIZES[-1]


def estimate(sample: Iterable[Buffer], level: int) -> float:
    """Return the ratio of stored to raw bytes of a sample, whose pieces have frames of their own."""
    raw_bytes = stored_bytes = 0
    for piece in sample:
        raw_bytes += memoryview(piece).nbytes
        stored_bytes += sum(map(len, encode([piece], level)))
    return stored_bytes / raw_bytes if raw_bytes else 1.0


def pays(ratio: float) -> bool:
    """Return whether a file of this ratio is worth the core time of writing and reading it."""
    return ratio <= MAX_RATIO


# -- reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SeekTable:
    """Positions of the frames in a stored file."""

    raw_size: int
    starts: npt.NDArray[np.int64]  # start of each frame in the stored file, then the end of the last frame

    @property
    def num_frames(self) -> int:
        return len(self.starts) - 1

    def raw_nbytes(self, frame: int) -> int:
        return min(FRAME_BYTES, self.raw_size - frame * FRAME_BYTES)

    def stored(self, frames: range) -> tuple[int, int]:
        """Return (offset, size) in the stored file of frames that follow each other."""
        start = int(self.starts[frames.start])
        return start, int(self.starts[frames.stop]) - start

    def runs(self, ranges: Iterable[tuple[int, int]]) -> tuple[range, ...]:
        """Return runs of the frames that hold the ranges (offset, size) of the raw file, in ascending order.

        Raise ValueError unless the ranges, which may be empty, ascend without overlaps; EOFError if a range
        ends beyond the file.
        """
        runs: list[range] = []
        end = 0
        for offset, nbytes in ranges:
            if offset < end or nbytes < 0:
                raise ValueError(f"{nbytes} bytes at {offset} after byte {end}: the ranges must rise.")
            end = offset + nbytes
            if end > self.raw_size:
                raise EOFError(f"it ends at byte {self.raw_size}")
            if not nbytes:
                continue
            first, stop = offset // FRAME_BYTES, -(-end // FRAME_BYTES)
            if runs and first <= runs[-1].stop:
                first = runs.pop().start
            runs.append(range(first, stop))
        return tuple(runs)


def table_nbytes(tail: bytes, stored_size: int) -> int:
    """Return the size of the table at the end of a stored file, from its last nine bytes.

    Raise FormatError if there can be no such table.
    """
    if len(tail) < _FOOTER.size:
        raise FormatError(f"A compressed file of {stored_size} bytes is too short.")
    num_frames, descriptor, magic = _FOOTER.unpack(tail[-_FOOTER.size :])
    if magic != _SEEKABLE_MAGIC:
        raise FormatError("A compressed file does not end with a seek table; it is cut short or damaged.")
    if descriptor != _DESCRIPTOR:
        raise FormatError(f"The seek table has the descriptor {descriptor}, not {_DESCRIPTOR}.")
    nbytes = _HEADER.size + num_frames * _ENTRY.size + _FOOTER.size
    if num_frames > MAX_FRAMES or nbytes > stored_size:
        raise FormatError(f"A seek table of {num_frames} frames in a file of {stored_size} bytes.")
    return int(nbytes)


def parse_table(tail: bytes, stored_size: int) -> SeekTable:
    """Return the table from the last bytes of a stored file, at least `table_nbytes` of them.

    Raise FormatError unless the frames fill the file up to the table, all but the last have FRAME_BYTES raw
    bytes, and no frame is larger than zstd makes it.
    """
    nbytes = table_nbytes(tail, stored_size)
    if len(tail) < nbytes:
        raise FormatError(f"{len(tail)} bytes of a seek table of {nbytes}.")
    table = tail[len(tail) - nbytes :]
    if _HEADER.unpack_from(table) != (_SKIPPABLE_MAGIC, nbytes - _HEADER.size):
        raise FormatError("The seek table does not begin where its footer puts it.")
    entries = np.frombuffer(table[_HEADER.size : -_FOOTER.size], "<u4").reshape(-1, 2).astype(np.int64)
    stored, raw = entries[:, 0], entries[:, 1]
    if not (np.all(raw[:-1] == FRAME_BYTES) and np.all((raw[-1:] > 0) & (raw[-1:] <= FRAME_BYTES))):
        raise FormatError(f"The seek table has frames that do not hold {FRAME_BYTES} bytes.")
    if not np.all((stored > 0) & (stored <= MAX_STORED_BYTES)):
        raise FormatError(f"The seek table has frames of no byte, or of more than {MAX_STORED_BYTES}.")
    starts = np.concatenate(([0], np.cumsum(stored)))
    if starts[-1] != stored_size - nbytes:
        raise FormatError(f"The frames end at byte {starts[-1]}, the table begins at {stored_size - nbytes}.")
    return SeekTable(int(raw.sum()), starts)


def decode(blocks: Iterable[Buffer], table: SeekTable, frames: Iterable[int]) -> Blocks:
    """Yield the raw bytes of `frames`, a view for each, from their stored bytes one after the other.

    One stored and one raw frame are in memory; each view has separate memory. zstd works without the GIL.
    Raise CorruptionError for a frame that is cut short or damaged, or whose size differs from the table
    (checked before memory is allocated), and for bytes after the last frame.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor(
        max_window_size=FRAME_BYTES
    )  # without this limit a frame can make the decompressor allocate 128 MiB
    cutter = BlockCutter(blocks)
    for frame in frames:
        _, nbytes = table.stored(range(frame, frame + 1))
        stored = cutter.take(nbytes)
        if stored.nbytes < nbytes:
            raise _damaged(frame, f"it has {stored.nbytes} of {nbytes} bytes")
        yield memoryview(_decode_frame(decompressor, stored, frame, table.raw_nbytes(frame)))
    _check_end(cutter)


class SeekableReader:
    """Reader of ranges of a raw file from its stored file, for any number of threads."""

    def __init__(self, read: ReadStored, stored_size: int) -> None:
        """Read the table, with one call of `read`, or two for a large table.

        Exceptions of `read` propagate. Raise FormatError for a bad table. `raw_size` is not verified: compare
        it with the manifest.
        """
        check_installed()
        self._read = read
        tail = self._last_bytes(min(TAIL_BYTES, stored_size), stored_size)
        nbytes = table_nbytes(tail, stored_size)
        if nbytes > len(tail):
            tail = self._last_bytes(nbytes, stored_size)
        self._table = parse_table(tail, stored_size)

    @property
    def raw_size(self) -> int:
        return self._table.raw_size

    @property
    def num_frames(self) -> int:
        return self._table.num_frames

    def read(self, ranges: Sequence[tuple[int, int]]) -> Blocks:
        """Yield the bytes of the ranges (offset, size), one after the other, in views of at most a frame.

        The ranges must ascend and not overlap. Each frame is read and decoded once; adjacent frames are
        requested together. Two raw frames and one stored frame are in memory. Exceptions of `read` propagate.
        Raise ValueError and EOFError as `SeekTable.runs`, CorruptionError as `decode`.
        """
        table = self._table
        runs = table.runs(ranges)
        if not runs:
            return
        with contextlib.closing(self._read([table.stored(run) for run in runs])) as blocks:
            frames = decode(blocks, table, chain.from_iterable(runs))
            yield from _cut(zip(frames, chain.from_iterable(runs), strict=True), ranges)

    def _last_bytes(self, nbytes: int, stored_size: int) -> bytes:
        if not nbytes:  # stores refuse an empty range
            return b""
        with contextlib.closing(self._read([(stored_size - nbytes, nbytes)])) as blocks:
            cutter = BlockCutter(blocks)
            tail = bytes(cutter.take(nbytes))
            _check_end(cutter)
        return tail


def _cut(frames: Iterator[tuple[memoryview, int]], ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
    """Yield the bytes of `ranges` from numbered raw frames, then run the iterator of frames to the end."""
    view, number = memoryview(b""), -1
    for offset, nbytes in ranges:
        end = offset + nbytes
        while offset < end:
            while number < offset // FRAME_BYTES:
                view, number = next(frames)
            start = offset - number * FRAME_BYTES
            piece = view[start : start + end - offset]
            offset += piece.nbytes
            yield piece
    next(frames, None)


def _decode_frame(
    decompressor: zstandard.ZstdDecompressor, stored: memoryview, frame: int, raw_nbytes: int
) -> Buffer:
    import zstandard

    try:
        if planes.is_planes(stored):
            return planes.decode_frame(stored, raw_nbytes, decompressor)
        header = zstandard.get_frame_parameters(stored)
        if header.content_size != raw_nbytes:  # the size that `decompress` allocates
            raise _damaged(
                frame, f"its header has {header.content_size} raw bytes, the seek table {raw_nbytes}"
            )
        if not header.has_checksum:
            raise _damaged(frame, "it has no checksum")
        return decompressor.decompress(stored, allow_extra_data=False)
    except (
        zstandard.ZstdError,
        planes.DamagedPlanes,
    ) as error:  # also for a frame whose size differs from its header
        raise _damaged(frame, str(error)) from error


def _check_end(cutter: BlockCutter) -> None:
    """Run the stream of blocks to the end. Raise CorruptionError if it has more bytes."""
    if not cutter.at_end():
        raise CorruptionError("A compressed file gave more bytes than were requested.")


def _damaged(frame: int, what: str) -> CorruptionError:
    end = (frame + 1) * FRAME_BYTES
    return CorruptionError(f"Frame {frame} of a compressed file is damaged: {what}.", frame=frame, end=end)
