"""Memory for a KV pool that other processes of this host can map, and that leaves nothing behind.

An anonymous file (memfd): it has no name, so there is nothing to remove; it is gone with the last process that has it
open or mapped, however that ends. Its size is sealed, so a peer that maps it can neither cut it short (which would kill
whoever touches the missing part) nor make it grow.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Collection

import torch

from kvtransfer.layout import runs_of

MADV_POPULATE_WRITE = 23
"""Linux 5.14: make the pages present and writable, and change nothing in them. Not in Python's mmap yet."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Pages:
    """Which blocks of a mapping have their pages in this process's page table. Putting a segment's there all at once takes a
    fifth of the time of stumbling over each while copying (64 MiB of 4 KiB pages: 4 ms, not 19). Any thread, one at a time."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._present: set[int] = set()

    def provide(self, block_ids: Collection[int], block_bytes: int) -> None:
        """Raises `OSError` if there is no memory."""
        if self._present.issuperset(block_ids):
            return
        absent = [block for block in block_ids if block not in self._present]
        for first, _, count in runs_of(absent, absent):
            start = first * block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                self._mapped.madvise(MADV_POPULATE_WRITE, start, (first + count) * block_bytes - start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # An older kernel: the pages come with the first write.
        self._present.update(absent)


class SharedMemory:
    """One pool's memory. Pages are provided by the kernel when first touched, huge ones where it may."""

    def __init__(self) -> None:
        self.bytes = 0
        self.descriptor = -1
        self._pages: Pages | None = None

    def allocate(self, size: int) -> torch.Tensor:
        """`size` zero bytes, as a tensor of bytes; called once. Raises `OSError`."""
        assert self._pages is None and size > 0
        descriptor = os.memfd_create("crossdock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            mapped = map_shared(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor, self.bytes, self._pages = descriptor, size, Pages(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def provide(self, block_ids: Collection[int], block_bytes: int) -> None:
        """Have the kernel provide the pages of these blocks now, on this process's account rather than on that of the
        sender which writes to them, and where a failure can be handled. Raises `OSError` if there is no memory."""
        assert self._pages is not None
        self._pages.provide(block_ids, block_bytes)

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last tensor in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._pages = -1, None


def map_shared(descriptor: int, size: int) -> mmap.mmap:
    """Raises `OSError`."""
    mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without huge pages
            raise
    return mapped
