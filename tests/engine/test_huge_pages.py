"""Memory for weights."""

import itertools

import torch

from engine.cpu.huge_pages import HugePages


def test_copies_lie_side_by_side_and_apart() -> None:
    memory = HugePages(arena_bytes=4096)
    wanted = [torch.randn(7, 5).t(), torch.arange(300, dtype=torch.int8), torch.randn(3000), torch.randn(2, 3, 4)]
    found = [memory.copy(tensor) for tensor in wanted]
    for tensor, copy in zip(wanted, found, strict=True):
        assert torch.equal(tensor, copy) and copy.dtype == tensor.dtype
        assert copy.is_contiguous() and copy.data_ptr() % 64 == 0
    assert found[1].data_ptr() - found[0].data_ptr() == 192, "one arena, as long as there is room in it"
    spans = sorted((one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in found)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
