"""Huge pages behind shared memory, where the kernel has them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ray_ckpt.storage.huge import HUGE_BYTES, STEP_BYTES, make_huge

SIZE = STEP_BYTES + 3 * HUGE_BYTES + 5000


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("ray_ckpt-test")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def huge_kib() -> int:
    with open("/proc/meminfo") as file:  # noqa: PTH123
        return next(int(line.split()[1]) for line in file if line.startswith("ShmemHugePages"))


def mapped_kib() -> int:
    """Address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE // 1024


def test_what_was_there_stays_and_the_rest_is_zero(memfd: int) -> None:
    places = (0, 4095, HUGE_BYTES - 1, HUGE_BYTES + 5, STEP_BYTES + 7, SIZE - 1)
    for place in places:
        os.pwrite(memfd, b"x", place)
    before, space = huge_kib(), mapped_kib()
    end = make_huge(memfd, 0, SIZE)
    assert abs(mapped_kib() - space) < 1024, "nothing stays mapped"
    if end == 0:
        pytest.skip("this kernel makes no huge pages of shared memory")
    assert end == STEP_BYTES + 3 * HUGE_BYTES
    assert huge_kib() - before >= end // 1024 * 0.9
    with mmap.mmap(memfd, SIZE, prot=mmap.PROT_READ) as memory:
        content = np.frombuffer(memory, np.uint8)
        assert np.flatnonzero(content).tolist() == list(places)
        del content


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
