"""Memory that two processes of this host share, and that leaves nothing behind.

The memory is an anonymous file (memfd). It has no name, so no file must be removed. The kernel frees it when the last process
that has it open or mapped ends, in any way. Its size is sealed, so a peer that maps it can neither cut it short (which would
kill a process that touches the missing part) nor make it grow.
"""

import fcntl
import mmap
import os

import torch

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """`tensor` is `bytes` zero bytes; the kernel provides their pages when they are first touched. Raises `OSError`."""

    def __init__(self, size: int) -> None:
        assert size > 0
        self.bytes = size
        self.descriptor = os.memfd_create("crossdock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self.tensor = torch.frombuffer(map_shared(self.descriptor, size), dtype=torch.uint8)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last tensor in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def map_shared(descriptor: int, size: int) -> mmap.mmap:
    """Raises `OSError`."""
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
