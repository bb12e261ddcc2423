"""Huge pages behind shared memory, also where the system gives none by itself.

`shmem_enabled` is `never` on most machines, so a memfd gets pages of 4 KiB: filling 1 GB takes more than half
a second, and every process that maps it pays for each page again. MADV_COLLAPSE (Linux 6.1) asks for huge
pages by name and is obeyed all the same. A block of a file that holds a single page is made into a huge one
by clearing the rest, which runs at the speed of memory: measured, 256 MiB in 16 ms against 160 ms in small
pages, and mapping and reading all of it later costs a tenth of the page faults.
"""

from __future__ import annotations

import ctypes
import mmap

HUGE_BYTES = 2 << 20  # of x86-64, and of arm64 with small pages; elsewhere the kernel says no
STEP_BYTES = 64 << 20  # asked for at a time: a few milliseconds, so that a caller can stop in between

_MADV_POPULATE_READ, _MADV_COLLAPSE = 22, 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_huge(fd: int, start: int, end: int) -> int:
    """Put huge pages behind the whole blocks of HUGE_BYTES in [start, end) of a memfd or a file in /dev/shm.

    What it holds stays. Returns the bytes up to which all blocks are huge, at least `start`: less than was
    asked for if the kernel is too old, has no free huge page, or the file is no shared memory. Others may
    be using the file meanwhile.
    """
    at = first = start + -start % HUGE_BYTES
    last = end - end % HUGE_BYTES
    if at >= last:
        return start
    room = STEP_BYTES + HUGE_BYTES
    reserved = _libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        return start
    try:
        address = reserved + -reserved % HUGE_BYTES  # a mapping must be aligned as the file is
        while at < last:
            size = min(STEP_BYTES, last - at)
            if not _collapse(fd, at, size, address):
                break
            at += size
    finally:
        _libc.munmap(reserved, room)
    return at if at > first else start


def _collapse(fd: int, offset: int, size: int, address: int) -> bool:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, protection, flags, fd, offset) == _FAILED:
        return False
    for block in range(address, address + size, HUGE_BYTES):  # an empty block would be refused
        if _libc.madvise(block, mmap.PAGESIZE, _MADV_POPULATE_READ):
            return False
    return not _libc.madvise(address, size, _MADV_COLLAPSE)
