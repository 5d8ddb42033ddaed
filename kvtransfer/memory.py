"""Memory for a KV pool that other processes of this host can map, and that leaves nothing behind.

An anonymous file (memfd): it has no name, so there is nothing to remove; it is gone with the last process that has it
open or mapped, however that ends. Its size is sealed, so a peer that maps it can neither cut it short (which would kill
whoever touches the missing part) nor make it grow.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable

import torch

_MADV_POPULATE_WRITE = 23
"""Linux 5.14: make the pages present and writable, and change nothing in them. Not in Python's mmap yet."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """One pool's memory. Pages are provided by the kernel when first touched, huge ones where it may."""

    def __init__(self) -> None:
        self.bytes = 0
        self.descriptor = -1
        self._mapped: mmap.mmap | None = None
        self._present: set[int] = set()
        """Blocks that have been provided."""

    def allocate(self, size: int) -> torch.Tensor:
        """`size` zero bytes, as a tensor of bytes; called once. Raises `OSError`."""
        assert self._mapped is None and size > 0
        descriptor = os.memfd_create("crossdock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._mapped = map_shared(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor, self.bytes = descriptor, size
        return torch.frombuffer(self._mapped, dtype=torch.uint8)

    def provide(self, block_ids: Iterable[int], block_bytes: int) -> None:
        """Have the kernel provide the pages of these blocks now, on this process's account rather than on that of the
        sender which writes to them, and where a failure can be handled. Raises `OSError` if there is no memory."""
        assert self._mapped is not None
        for block in block_ids:
            if block in self._present:
                continue
            start = block * block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                self._mapped.madvise(_MADV_POPULATE_WRITE, start, (block + 1) * block_bytes - start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # An older kernel: the pages come with the first write.
            self._present.add(block)

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last tensor in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._mapped = -1, None


def map_shared(descriptor: int, size: int) -> mmap.mmap:
    """Raises `OSError`."""
    mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without huge pages
            raise
    return mapped
