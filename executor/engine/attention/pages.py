"""Memory given back to the system while nobody needs it."""

from __future__ import annotations

import ctypes
import mmap


def release_pages(address: int, num_bytes: int) -> None:
    """Give the whole pages in this range of private memory back to the system.

    The range stays mapped where it is and reads as zeros; a page comes back when it
    is touched. Memory that something has pinned must not be given back so.
    Raises OSError.
    """
    page = mmap.PAGESIZE
    begin = -(-address // page) * page
    length = (address + num_bytes) // page * page - begin
    if length <= 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED)
    if libc.madvise(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise over {length} bytes of the KV pool")


def trim_heap() -> None:
    """Give what `free` has kept back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
