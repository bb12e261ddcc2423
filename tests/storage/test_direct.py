"""Files past the page cache: the same bytes at any size and alignment, whole or absent if something fails."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from typing_extensions import Buffer

from ray_ckpt.errors import CorruptionError
from ray_ckpt.format.digest import digest
from ray_ckpt.storage.local import direct, files
from ray_ckpt.storage.local.direct import hashed, read_blocks_direct, write_direct
from tests.support.examples import examples

PAGE = direct.PAGE_BYTES
BLOCK = 4 * PAGE  # of these tests, so that a few pages are many blocks
SIZES = sorted(
    {0, 1, 511} | {n * PAGE + d for n in (1, 2, 3, 4, 5, 8, 15, 16, 17, 40, 99) for d in (-1, 0, 1)}
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(direct, "COPY_BYTES", 3 * PAGE)


@pytest.fixture(params=["direct", "cached", "turns cached"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems that take O_DIRECT, that refuse it when a file is opened, or at the first use."""
    real = {name: getattr(os, name) for name in ("open", "pwrite", "preadv")}

    def refuse_open(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = int(real["open"](path, flags & ~os.O_DIRECT, mode))
        if flags & os.O_DIRECT:  # older kernels make the file before they refuse
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    def refuse(name: str) -> Callable[..., int]:
        def call(fd: int, *rest: object) -> int:
            if os.O_DIRECT & flags_of(fd):
                raise OSError(errno.EINVAL, "Invalid argument")
            return int(real[name](fd, *rest))

        return call

    if request.param == "cached":
        monkeypatch.setattr(os, "open", refuse_open)
    elif request.param == "turns cached":
        for name in ("pwrite", "preadv"):
            monkeypatch.setattr(os, name, refuse(name))
    return str(request.param)


def flags_of(fd: int) -> int:
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return int(text.split("flags:")[1].split()[0], 8)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def aligned(size: int, shift: int = 0) -> memoryview:
    """Noise `shift` bytes after the beginning of a page."""
    memory = memoryview(mmap.mmap(-1, max(1, size + shift)))
    memory[shift : shift + size] = noise(size, shift)
    return memory[shift : shift + size]


def joined(blocks: Iterator[memoryview]) -> bytes:
    """Join the blocks, each copied before the next is requested; `join` alone would request all first."""
    return b"".join(map(bytes, blocks))


def open_targets() -> set[tuple[str, str]]:
    """Return the descriptors of this process and what they refer to."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed in the meantime
            found.add((path.name, str(path.readlink())))
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Draw a size, and the offsets at which its bytes are cut."""
    size = draw(st.sampled_from(SIZES) | st.integers(0, 12 * BLOCK))
    points = draw(st.lists(st.integers(0, size) | st.sampled_from(range(0, size + 1, PAGE)), max_size=8))
    return size, [0, *sorted(points), size]


@pytest.mark.usefixtures("small_blocks")
@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=cuts(), marks=cuts(), shift=st.sampled_from([0, 0, 1, 64]), knows_size=st.booleans())
def test_what_is_written_is_what_was_given(
    tmp_path: Path,
    way: str,
    cut: tuple[int, list[int]],
    marks: tuple[int, list[int]],
    shift: int,
    knows_size: bool,
) -> None:
    size, points = cut
    data = aligned(size, shift)
    ends = [min(point, size) for point in marks[1]]
    spans = [(a, b - a) for a, b in list(itertools.pairwise(ends))[:: 1 + shift % 2]]
    chunks: Iterator[Buffer] = (data[a:b] for a, b in itertools.pairwise(points))
    path, written = write_direct(tmp_path, chunks, size_bytes=size if knows_size else None, spans=spans)
    assert path.read_bytes() == data
    assert files.is_temporary(path.name) and path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == files.FILE_MODE
    assert written.size_bytes == size and written.digest == digest(data)
    assert written.spans == tuple(digest(data[a : a + n]) for a, n in spans)
    path.unlink()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [0, 1, PAGE, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 77])
def test_any_range_is_read(tmp_path: Path, way: str, size: int) -> None:
    path, data = tmp_path / "file", noise(size)
    path.write_bytes(data)
    starts = {0, 1, PAGE - 1, PAGE, BLOCK - 1, BLOCK, BLOCK + 1, size // 2, size}
    for start in (start for start in starts if start <= size):
        assert joined(read_blocks_direct(path, start)) == data[start:]
        for nbytes in {0, 1, PAGE, BLOCK, BLOCK + 1, size - start}:
            if start + nbytes <= size:
                blocks = [bytes(block) for block in read_blocks_direct(path, start, nbytes)]
                assert b"".join(blocks) == data[start : start + nbytes]
                assert all(0 < len(block) <= BLOCK for block in blocks)
    for start, nbytes in ((0, size + 1), (size, 1), (size + 10 * BLOCK, 1), (0, size + 20 * BLOCK)):
        with pytest.raises(EOFError, match=f"{path} ends at byte"):
            list(read_blocks_direct(path, start, nbytes))


def test_the_real_block_size(tmp_path: Path) -> None:
    size = 9 * direct.BLOCK_BYTES + 12345
    data = aligned(size)
    middle = (direct.BLOCK_BYTES - 5, 2 * direct.BLOCK_BYTES)
    path, written = write_direct(tmp_path, [data], size_bytes=size, spans=[(0, 10), middle])
    assert written.spans == (digest(data[:10]), digest(data[middle[0] : sum(middle)]))
    seen = 0
    for block in read_blocks_direct(path):
        time.sleep(0.01)  # for the reads ahead, which must not be into this
        assert block == data[seen : seen + block.nbytes]
        seen += block.nbytes
    assert seen == size and written.digest == digest(data)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("sizes", [[9 * BLOCK], [PAGE, 9 * BLOCK], [64, 9 * BLOCK], [9 * BLOCK + 5, PAGE, 7]])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_all_but_the_end_goes_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], shift: int
) -> None:
    pwrite, cached = os.pwrite, []

    def note(fd: int, data: Buffer, offset: int) -> int:
        count = pwrite(fd, data, offset)
        if not os.O_DIRECT & flags_of(fd):
            cached.append((offset, count))
        return count

    monkeypatch.setattr(os, "pwrite", note)
    path, written = write_direct(tmp_path, [aligned(size, shift) for size in sizes])
    rest = sum(sizes) % PAGE
    assert cached == ([(sum(sizes) - rest, rest)] if rest else [])
    assert written.digest == digest(path.read_bytes())


@pytest.mark.usefixtures("small_blocks")
def test_a_chunk_may_change_when_the_next_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer, filled again and again: what is written is what it held when it was given."""
    pwrite = os.pwrite

    def late(fd: int, data: Buffer, offset: int) -> int:
        time.sleep(0.001)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", late)
    buffer, count = aligned(BLOCK), 40

    def chunks() -> Iterator[Buffer]:
        for number in range(count):
            buffer[:] = bytes([number]) * BLOCK
            yield buffer

    path, written = write_direct(tmp_path, chunks(), size_bytes=BLOCK * count)
    expected = b"".join(bytes([number]) * BLOCK for number in range(count))
    assert path.read_bytes() == expected and written.digest == digest(expected)


def test_the_digests_of_memory_that_changes_meanwhile_are_of_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = bytearray(b"old" * PAGE)

    def after_a_change(part: Buffer) -> str:
        data[:] = b"new" * PAGE
        return digest(part)

    monkeypatch.setattr(direct, "digest", after_a_change)
    found = hashed(memoryview(data), [(0, len(data))])
    assert found.spans == (found.digest,)


@pytest.mark.parametrize("spans", [[(5, 2), (4, 1)], [(0, 3), (2, 1)], [(0, -1)], [(0, 11)], [(11, 0)]])
def test_spans_out_of_order_or_out_of_the_file_are_refused(
    tmp_path: Path, spans: list[tuple[int, int]]
) -> None:
    with pytest.raises(ValueError, match="span"):
        write_direct(tmp_path, [b"0123456789"], spans=spans)
    assert not names_in(tmp_path)


@pytest.mark.parametrize("spans", [(), [(0, 20), (20, 20)]])
@pytest.mark.parametrize("count", [0, 3, 5, 1000])
def test_another_size_than_announced_is_refused(
    tmp_path: Path, count: int, spans: list[tuple[int, int]]
) -> None:
    requested = iter(range(count))
    with pytest.raises(CorruptionError, match="arrived for a file of 40"):
        write_direct(tmp_path, (b"0123456789" for _ in requested), size_bytes=40, spans=spans)
    assert not names_in(tmp_path)
    assert (next(requested, None) is None) == (count < 1000), "and no more is taken than shows it"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real, calls = getattr(os, call), [0]

    def fail(*args: object) -> object:
        calls[0] += 1
        if call == "fsync" or calls[0] == 5:
            raise OSError(errno.EIO, "injected")
        return real(*args)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="injected"):
        write_direct(tmp_path, [aligned(30 * BLOCK)])
    assert not names_in(tmp_path)
    assert calls[0] <= 5 + direct.DEPTH, "and it is not tried again"


@pytest.mark.usefixtures("small_blocks")
def test_chunks_that_raise_leave_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[Buffer]:
        yield aligned(20 * BLOCK)
        raise ValueError("the peer went away")

    with pytest.raises(ValueError, match="went away"):
        write_direct(tmp_path, chunks())
    assert not names_in(tmp_path)


@pytest.mark.usefixtures("small_blocks")
def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data)[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:1000]], offset))
    data = aligned(3 * BLOCK + 7)
    path, _ = write_direct(tmp_path, [data], size_bytes=data.nbytes)
    assert path.read_bytes() == data
    assert joined(read_blocks_direct(path)) == data


@pytest.mark.usefixtures("small_blocks")
def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    """The kernel writes up to the limit, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * BLOCK + 1000, hard))
    try:
        for size in (None, 8 * BLOCK):
            with pytest.raises(OSError) as caught:
                write_direct(tmp_path, [aligned(8 * BLOCK)], size_bytes=size)
            assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not names_in(tmp_path)


def mount(kind: str, options: str, at: Path) -> None:
    at.mkdir()
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, at], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount does not work here: {done.stderr.strip()}")


@pytest.fixture(params=["tmpfs", "ramfs"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """File systems in memory: tmpfs takes O_DIRECT on newer kernels, ramfs never; neither has a disk."""
    mount(request.param, "size=8m", tmp_path / "odd")
    yield tmp_path / "odd"
    subprocess.run(["umount", tmp_path / "odd"], check=True)


@pytest.mark.usefixtures("small_blocks")
def test_other_file_systems(odd: Path) -> None:
    data = aligned(30 * BLOCK + 5)
    path, written = write_direct(odd, [data], size_bytes=data.nbytes)
    assert joined(read_blocks_direct(path)) == data and written.digest == digest(data)


def test_a_full_disk_shows_before_any_block_is_requested(tmp_path: Path) -> None:
    mount("tmpfs", "size=4m", tmp_path / "small")
    disk, requested = tmp_path / "small", []

    def chunks() -> Iterator[Buffer]:
        for number in range(8):
            requested.append(number)
            yield bytes(1 << 20)

    try:
        free = files.free_bytes(disk)
        for size, first in ((8 << 20, 0), (None, 4)):
            requested.clear()
            with pytest.raises(OSError) as caught:
                write_direct(disk, chunks(), size_bytes=size)
            assert caught.value.errno == errno.ENOSPC
            assert len(requested) >= first if first else not requested
            assert files.free_bytes(disk) == free and not names_in(disk)
    finally:
        subprocess.run(["umount", disk], check=True)


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        count = -(-len(pages) // PAGE)
        found = (ctypes.c_ubyte * count)()
        start = ctypes.c_char.from_buffer(pages)
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(pages)), found)
        del start
        return sum(page & 1 for page in found)


def test_the_page_cache_is_left_alone(tmp_path: Path, way: str) -> None:
    data = aligned((3 << 20) + 99)
    path, _ = write_direct(tmp_path, [data], size_bytes=data.nbytes)
    assert cached_pages(path) == 0
    assert sum(block.nbytes for block in read_blocks_direct(path)) == data.nbytes
    assert cached_pages(path) == 0
    path.read_bytes()
    assert cached_pages(path) > 700, "this can be seen"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("blocks_read", [0, 1, 3])
def test_a_reader_may_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks_read: int) -> None:
    monkeypatch.setattr(direct, "_BUFFERS", pool := direct._Buffers())
    (tmp_path / "file").write_bytes(noise(30 * BLOCK))
    blocks = read_blocks_direct(tmp_path / "file")
    before = open_targets()
    for _ in range(blocks_read):
        next(blocks)
    blocks.close()  # type: ignore[attr-defined]
    opened = open_targets() - before  # threads of other tests may open and close what they like
    assert not [target for _, target in opened if target.startswith(str(tmp_path))]
    assert len(pool._idle) == (direct.READ_AHEAD + 1 if blocks_read else 0)


@pytest.mark.usefixtures("small_blocks")
def test_buffers_are_used_again_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_BUFFERS", pool := direct._Buffers())
    for _ in range(3):
        write_direct(tmp_path, [noise(40 * BLOCK)])
        assert 0 < len(pool._idle) <= direct.DEPTH + 1
    for buffer in [pool.take() for _ in range(2 * direct.MAX_IDLE_BUFFERS)]:
        pool.give(buffer)
    assert len(pool._idle) == direct.MAX_IDLE_BUFFERS


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_blocks_direct(tmp_path / "no"))
    with pytest.raises(FileNotFoundError):
        write_direct(tmp_path / "no", [b""])
