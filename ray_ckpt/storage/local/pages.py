"""Pages of shared memory: huge ones where the kernel can make them, and in place before they are needed.

`shmem_enabled` is `never` on most machines, so a memfd gets pages of 4 KiB: filling 1 GB takes more than half
a second, every process that maps it pays for each page again, and a disk takes it in small pieces.
MADV_COLLAPSE (Linux 6.1) asks for huge pages by name and is obeyed all the same. A block of a file that holds
a single page is made into a huge one by clearing the rest, which runs at the speed of memory: measured, 256
MiB in 16 ms against 160 ms in small pages, and mapping and reading all of it later costs a tenth of the page
faults.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import weakref
from collections.abc import Iterator

HUGE_BYTES = 2 << 20  # of x86-64, and of arm64 with small pages; elsewhere the kernel says no
STEP_BYTES = 64 << 20  # asked for at a time: a few milliseconds, so that a caller can stop in between
TRIES = 3  # a page that was just written may still be on its way into the kernel's lists

_MADV_DONTFORK, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 10, 22, 23, 25
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


def map_shared(fd: int, start: int, end: int, *, writable: bool = False) -> memoryview:
    """The bytes [start, end) of a file, mapped for as long as the view or a part of it lives.

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
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    if _libc.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, first) == _FAILED:
        code = ctypes.get_errno()
        _libc.munmap(reserved, room)
        raise OSError(code, "shared memory cannot be mapped")
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at the exit of the process, when threads may still use it: the kernel does it after them.
    weakref.finalize(memory, _libc.munmap, reserved, room).atexit = False
    view = memoryview(memory).cast("B")[start - first :]
    return view if writable else view.toreadonly()


def keep_from_children(memory: memoryview) -> None:
    """Leave a whole writable mapping out of processes that are forked: they would keep its memory alive."""
    address = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    _libc.madvise(address, len(memory), _MADV_DONTFORK)


def populate(memory: memoryview, *, file: int | None = None) -> Iterator[int]:
    """Put memory behind every page of a writable mapping, step by step; yields the bytes that have it.

    With `file`, the shared memory whose beginning is mapped there, huge pages are asked for first. OSError
    (ENOMEM) if there is no memory. A kernel before Linux 5.14 is served by reading each page, which changes
    nothing and makes shared memory allocate it.
    """
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    address = ctypes.addressof(view)
    for start in range(0, len(memory), STEP_BYTES):
        size = min(STEP_BYTES, len(memory) - start)
        if file is not None:
            make_huge(file, start, start + size)
        if _libc.madvise(address + start, size, _MADV_POPULATE_WRITE):
            if ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), "there is no memory for all pages of a mapping")
            for place in range(start, start + size, mmap.PAGESIZE):
                view[place]
        yield start + size


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
