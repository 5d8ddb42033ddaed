"""Memory for a KV pool that other processes of this host can map, and that leaves nothing behind.

An anonymous file (memfd): it has no name, so there is nothing to remove; it is gone with the last process that has it
open or mapped, however that ends. Its size is sealed, so a peer that maps it can neither cut it short (which would kill
whoever touches the missing part) nor make it grow.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Collection, Sequence

import torch

from kvtransfer.layout import runs_of

MADV_POPULATE_WRITE = 23
"""Linux 5.14: make the pages present and writable, and change nothing in them. Not in Python's mmap yet."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PIECE_BYTES = 4 << 20
"""Provided at once ahead of time; in between, the thread sees whether the memory was closed."""
_NICENESS, _JOIN_S = 10, 1.0

# `mmap.madvise` keeps the interpreter from everybody else meanwhile: 40 ms for 64 MiB.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Pages:
    """Which blocks of a mapping have their pages in this process's page table. Putting a segment's there all at once takes a
    fifth of the time of stumbling over each while copying (64 MiB of 4 KiB pages: 4 ms, not 19). Any threads."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._present: set[int] = set()

    def has(self, block_ids: Collection[int]) -> bool:
        return self._present.issuperset(block_ids)

    def provide(self, block_ids: Collection[int], block_bytes: int) -> None:
        """Raises `OSError` if there is no memory."""
        if self.has(block_ids):
            return
        absent = [block for block in block_ids if block not in self._present]
        for first, _, count in runs_of(absent, absent):
            start = first * block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            end = (first + count) * block_bytes
            assert start >= 0 and end <= len(self._mapped), f"blocks {first} to {first + count} are outside this memory"
            if _madvise(self._address + start, end - start, MADV_POPULATE_WRITE):
                fault = ctypes.get_errno()
                if fault != errno.EINVAL:
                    raise OSError(fault, os.strerror(fault))
                # An older kernel: the pages come with the first write.
        self._present.update(absent)


class SharedMemory:
    """One pool's memory. The kernel provides its pages, huge ones where it may, when they are asked for or first touched."""

    def __init__(self) -> None:
        self.bytes = 0
        self.descriptor = -1
        self._pages: Pages | None = None
        self._expected: queue.SimpleQueue[tuple[Sequence[int], int] | None] = queue.SimpleQueue()
        self._providing: threading.Thread | None = None

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

    def expect(self, block_ids: Sequence[int], block_bytes: int) -> None:
        """These blocks are going to be written to, but not yet: have their pages provided meanwhile, by a thread of ours that
        everything else comes before. A page's first use costs 13 µs on a virtual machine, 3 ms for a MiB."""
        assert self._pages is not None
        if self._pages.has(block_ids):
            return
        if self._providing is None:
            self._providing = threading.Thread(target=self._provide_expected, name="pool-pages", daemon=True)
            self._providing.start()
        self._expected.put((block_ids, block_bytes))

    def _provide_expected(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (expected := self._expected.get()) is not None:  # without a limit: `close` ends it, or the process
            block_ids, block_bytes = expected
            count = max(1, PIECE_BYTES // block_bytes)
            for start in range(0, len(block_ids), count):
                pages = self._pages
                if pages is None:
                    return
                try:
                    pages.provide(block_ids[start : start + count], block_bytes)
                except OSError:
                    break  # where they are granted it fails again, and is handled

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last tensor in it."""
        self._pages = None
        self._expected.put(None)
        if self._providing is not None:
            self._providing.join(_JOIN_S)
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def map_shared(descriptor: int, size: int) -> mmap.mmap:
    """Raises `OSError`."""
    mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without huge pages
            raise
    return mapped
