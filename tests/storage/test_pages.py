"""Huge pages behind shared memory, where the kernel has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ray_ckpt.storage.local.pages import HUGE_BYTES, STEP_BYTES, make_huge, map_shared

SIZE = STEP_BYTES + 3 * HUGE_BYTES + 5000


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("ray_ckpt-test")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def huge_kib() -> int:
    """Return the KiB of shared memory that this process maps as huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped"))


def num_mapped() -> int:
    """Mappings of the memfd in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:ray_ckpt-test")


def test_what_was_there_stays_and_the_rest_is_zero(memfd: int) -> None:
    places = (0, 4095, HUGE_BYTES - 1, HUGE_BYTES + 5, STEP_BYTES + 7, SIZE - 1)
    for place in places:
        os.pwrite(memfd, b"x", place)
    end = make_huge(memfd, 0, SIZE)
    assert not num_mapped()
    content = np.frombuffer(map_shared(memfd, 0, SIZE), np.uint8)
    assert np.flatnonzero(content).tolist() == list(places)
    if end == 0:
        pytest.skip("this kernel makes no huge pages of shared memory, or has none left")
    assert end in (STEP_BYTES, STEP_BYTES + 3 * HUGE_BYTES), "too few may be free for the second step"
    assert huge_kib() >= end // 1024 * 0.9, "a block that is in somebody's hands may be left"


def test_only_whole_blocks_inside_the_range(memfd: int) -> None:
    assert make_huge(memfd, 1, HUGE_BYTES) == 1
    assert make_huge(memfd, 5, 2 * HUGE_BYTES - 1) == 5
    assert make_huge(memfd, 5, 5) == 5
    assert make_huge(memfd, 5, 2 * HUGE_BYTES) in (5, 2 * HUGE_BYTES)


def test_a_file_on_a_disk_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"y" * 2 * HUGE_BYTES)
    fd = os.open(path, os.O_RDWR)
    make_huge(fd, 0, 2 * HUGE_BYTES)
    os.close(fd)
    assert path.read_bytes() == b"y" * 2 * HUGE_BYTES


@pytest.mark.parametrize(
    ("start", "end"), [(0, 1), (1, 2 * HUGE_BYTES + 1), (HUGE_BYTES, SIZE), (SIZE - 1, SIZE)]
)
def test_a_range_is_mapped_as_long_as_it_is_looked_at(memfd: int, start: int, end: int) -> None:
    os.pwrite(memfd, b"first", start)
    os.pwrite(memfd, b"!", end - 1)
    view = map_shared(memfd, start, end)
    assert view.nbytes == end - start and view.readonly
    assert bytes(view[-1:]) == b"!" and bytes(view[: min(5, end - start - 1)]) == b"first"[: end - start - 1]
    part = view[-1:]
    del view
    assert num_mapped() and bytes(part) == b"!", "a part of it holds it all"
    del part
    assert not num_mapped()


def test_what_cannot_be_mapped_is_an_error() -> None:
    end_of_pipe, other = os.pipe()
    with pytest.raises(OSError, match="cannot be mapped"):
        map_shared(end_of_pipe, 0, 10)
    os.close(end_of_pipe)
    os.close(other)
