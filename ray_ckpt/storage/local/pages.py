"""Pages of shared memory: huge pages where the kernel supports them, allocated before they are needed.

`shmem_enabled` is `never` on most machines, so a memfd has pages of 4 KiB: the first write of 1 GB takes more
than half a second, each process that maps the memfd has a fault for each page, and a disk reads the pages in
small pieces. MADV_COLLAPSE (Linux 6.1) makes huge pages regardless of this setting. First one small page of a
block is allocated; the kernel then makes the block huge and clears the rest of it at the speed of memory.
Measured: 256 MiB take 16 ms instead of 160 ms with small pages, and mapping and reading them later causes a
tenth of the page faults.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import weakref
from collections.abc import Iterator

HUGE_BYTES = 2 << 20  # x86-64, and arm64 with pages of 4 KiB; other kernels refuse the call
STEP_BYTES = 64 << 20  # per call: a few milliseconds, so that a caller can stop in between
TRIES = 3  # tries for a block: a page that was just written may not be in the kernel's lists yet

_MADV_DONTFORK, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 10, 22, 23, 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)  # calls through CDLL release the GIL
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
    """Make huge pages of the whole blocks of HUGE_BYTES in [start, end) of a memfd or a file in /dev/shm.

    The content does not change, and other threads and processes may use the memory at the same time. Return
    the end of the processed range, at least `start`. This end is less than `end` if the kernel is too old or
    has no free huge page, or if the file is not shared memory. A single busy block is skipped.
    """
    at = first = start + -start % HUGE_BYTES
    last = end - end % HUGE_BYTES
    room = STEP_BYTES + HUGE_BYTES
    try:
        reserved, address = _reserve(room)
    except OSError:
        return start
    try:
        while at < last and _collapse(fd, at, min(STEP_BYTES, last - at), address):
            at = min(last, at + STEP_BYTES)
    finally:
        _libc.munmap(reserved, room)
    return at if at > first else start


def map_shared(fd: int, start: int, end: int, *, writable: bool = False) -> memoryview:
    """Map the bytes [start, end) of a file for as long as the view or a part of it is referenced.

    The mapping has the alignment of the file, so that huge pages of the file are mapped as huge pages: one
    page fault for each 2 MiB, instead of one for each 64 KiB with `mmap.mmap`. As with every mapping, a
    process that reads beyond the end of a truncated file is killed. Raise OSError if the file cannot be
    mapped.
    """
    first = start - start % HUGE_BYTES
    size = end - first
    room = size + HUGE_BYTES
    reserved, address = _reserve(room)
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    if _libc.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, first) == _FAILED:
        code = ctypes.get_errno()
        _libc.munmap(reserved, room)
        raise OSError(code, "shared memory cannot be mapped")
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit, when threads may still use the mapping; the kernel removes the mapping with the process.
    weakref.finalize(memory, _libc.munmap, reserved, room).atexit = False
    view = memoryview(memory).cast("B")[start - first :]
    return view if writable else view.toreadonly()


def seal_writes(fd: int) -> bool:
    """Have the kernel refuse each further write to a memfd, by any process.

    Return False if a process still has the memfd mapped for writing, or if the file cannot be sealed.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except OSError:
        return False
    return True


def is_write_sealed(fd: int) -> bool:
    """Return whether no process can change the file's bytes or size; False for a file on a disk."""
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:
        return False


def keep_from_children(memory: memoryview) -> None:
    """Exclude a writable mapping from forked processes, because they would keep the memory allocated."""
    address = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    _libc.madvise(address, len(memory), _MADV_DONTFORK)


def populate(memory: memoryview, *, file: int | None = None) -> Iterator[int]:
    """Allocate every page of a writable mapping, step by step; yield the bytes that are allocated.

    `file` is the shared memory file of the mapping, from offset 0; if it is given, huge pages are tried
    first. On kernels before Linux 5.14 each page is read, which allocates the page in shared memory. Raise
    OSError (ENOMEM) if there is no memory.
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


def _reserve(size: int) -> tuple[int, int]:
    """Reserve address space; return its start, and the first address in it that a huge page can have."""
    reserved: int = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        raise OSError(ctypes.get_errno(), "no address space to map shared memory")
    return reserved, reserved + -reserved % HUGE_BYTES


def _collapse(fd: int, offset: int, size: int, address: int) -> bool:
    """Make huge pages of a range of a file; return False if further calls are useless."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, protection, flags, fd, offset) == _FAILED:
        return False
    for block in range(address, address + size, HUGE_BYTES):  # MADV_COLLAPSE refuses an empty block
        if _libc.madvise(block, mmap.PAGESIZE, _MADV_POPULATE_READ):
            return False
    for _ in range(TRIES):
        if not _libc.madvise(address, size, _MADV_COLLAPSE):
            return True
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EBUSY):
            return False
    return True
