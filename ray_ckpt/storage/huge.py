"""Huge pages behind shared memory, also where the system gives none by itself.

`shmem_enabled` is `never` on most machines, so a memfd gets pages of 4 KiB: filling 1 GB takes more than half
a second, and every process that maps it pays for each page again. MADV_COLLAPSE (Linux 6.1) asks for huge
pages by name and is obeyed all the same. A block of a file that holds a single page is made into a huge one
by clearing the rest, which runs at the speed of memory: measured, 256 MiB in 16 ms against 160 ms in small
pages, and mapping and reading all of it later costs a tenth of the page faults.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import weakref

HUGE_BYTES = 2 << 20  # of x86-64, and of arm64 with small pages; elsewhere the kernel says no
STEP_BYTES = 64 << 20  # asked for at a time: a few milliseconds, so that a caller can stop in between
TRIES = 3  # a page that was just written may still be on its way into the kernel's lists

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

    What it holds stays, and others may be using it meanwhile. Returns up to where this was done, at least
    `start`: not all if the kernel is too old, has no huge page free, or the file is no shared memory. A
    single block that is in somebody's hands is left as it is.
    """
    at = first = start + -start % HUGE_BYTES
    last = end - end % HUGE_BYTES
    room = STEP_BYTES + HUGE_BYTES
    reserved = _libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        return start
    try:
        address = reserved + -reserved % HUGE_BYTES  # a mapping must be aligned as the file is
        while at < last and _collapse(fd, at, min(STEP_BYTES, last - at), address):
            at = min(last, at + STEP_BYTES)
    finally:
        _libc.munmap(reserved, room)
    return at if at > first else start


def map_shared(fd: int, start: int, end: int) -> memoryview:
    """The bytes [start, end) of a file, to read; mapped for as long as the view or a part of it lives.

    It lies in memory as it does in the file, so that huge pages of it are mapped as such: a page fault for
    each 2 MiB, where `mmap.mmap` takes one for each 64 KiB. OSError if it cannot be mapped. As with every
    mapping, a file that is cut short later kills the process that reads beyond its end.
    """
    first = start - start % HUGE_BYTES
    size = end - first
    room = size + HUGE_BYTES
    reserved = _libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        raise OSError(ctypes.get_errno(), "no room to map shared memory")
    address = reserved + -reserved % HUGE_BYTES
    if _libc.mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, first) == _FAILED:
        code = ctypes.get_errno()
        _libc.munmap(reserved, room)
        raise OSError(code, "shared memory cannot be mapped")
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, reserved, room)
    return memoryview(memory).cast("B")[start - first :].toreadonly()


def _collapse(fd: int, offset: int, size: int, address: int) -> bool:
    """False if there is no use in going on."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, protection, flags, fd, offset) == _FAILED:
        return False
    for block in range(address, address + size, HUGE_BYTES):  # an empty block would be refused
        if _libc.madvise(block, mmap.PAGESIZE, _MADV_POPULATE_READ):
            return False
    for _ in range(TRIES):
        if not _libc.madvise(address, size, _MADV_COLLAPSE):
            return True
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EBUSY):
            return False
    return True
