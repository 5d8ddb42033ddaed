"""Memory for weights."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.cpu.huge_pages import HugePages


def test_copies_share_arena_without_overlap() -> None:
    """Copies are aligned, equal to their originals, side by side in one arena, and never overlap."""
    memory = HugePages(arena_bytes=4096)
    wanted = [torch.randn(7, 5).t(), torch.arange(300, dtype=torch.int8), torch.randn(3000), torch.randn(2, 3, 4)]
    found = [memory.copy(tensor) for tensor in wanted]
    for tensor, copy in zip(wanted, found, strict=True):
        assert torch.equal(tensor, copy) and copy.dtype == tensor.dtype
        assert copy.is_contiguous() and copy.data_ptr() % 64 == 0
    assert found[1].data_ptr() - found[0].data_ptr() == 192, "one arena, as long as there is room in it"
    spans = sorted((one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in found)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_huge_pages_use_private_memory() -> None:
    """Shared memory, which is what Python maps unless told otherwise, gets none where it is not allowed as well."""
    tensor = HugePages(arena_bytes=4 << 20).copy(torch.ones(1 << 18))
    smaps = Path("/proc/self/smaps")
    if not smaps.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("no huge pages here")
    permissions, flags, inside = "", "", False
    for line in smaps.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
            permissions = found[3] if inside else permissions
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert permissions == "rw-p" and "hg" in flags.split()
