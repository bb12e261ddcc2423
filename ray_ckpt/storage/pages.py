"""Memory pages of a mapping, asked for before they are needed."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator

from ray_ckpt.storage.huge import make_huge

MADV_POPULATE_WRITE = 23  # Linux 5.14
POPULATE_BLOCK_BYTES = 64 << 20  # asked for at a time, so that a caller can report and stop in between

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL; mmap.madvise() does not


def populate(memory: mmap.mmap, *, file: int | None = None) -> Iterator[int]:
    """Put memory behind every page of a writable mapping, block by block; yields the bytes that have it.

    With `file`, the shared memory that is mapped, it gets huge pages where the kernel gives them: a disk
    takes them in one piece. OSError (ENOMEM) if there is no memory. An older kernel is served by reading
    each page, which changes nothing and makes shared memory allocate it.
    """
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    address, size = ctypes.addressof(view), len(memory)
    for start in range(0, size, POPULATE_BLOCK_BYTES):
        length = min(POPULATE_BLOCK_BYTES, size - start)
        if file is not None:
            make_huge(file, start, start + length)
        code = _advise(address + start, length, MADV_POPULATE_WRITE)
        if code == errno.EINVAL:
            for place in range(start, start + length, mmap.PAGESIZE):
                view[place]
        elif code:
            raise OSError(code, "no memory for the pages of a mapping")
        yield start + length


def _advise(address: int, size: int, advice: int) -> int:
    """0, or the errno of madvise."""
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if failed else 0
