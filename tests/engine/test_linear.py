"""The packed form of a linear layer computes what the plain one does, and is only used where it may be."""

import pytest
import torch
from torch import nn

from engine.model import linear


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 300, bias=False)).requires_grad_(False)


@pytest.mark.skipif(not linear.packing_works(), reason="this torch lacks oneDNN's prepacked linear")
def test_packed_equals_plain_for_any_number_of_rows() -> None:
    plain = model()
    packed = model()
    assert linear.pack_linears(packed) == 4 * (40 * 24 + 24 * 300)
    assert isinstance(packed[0], linear.PackedLinear) and isinstance(packed[2], linear.PackedLinear)
    for rows in (0, 1, 2, 3, 4, 5, 16, 17, 128, 129, 512, 513, 1100):
        x = torch.randn(1, rows, 40)
        assert torch.allclose(packed(x), plain(x), rtol=1e-4, atol=1e-5), f"{rows} rows"


@pytest.mark.skipif(not linear.packing_works(), reason="this torch lacks oneDNN's prepacked linear")
@pytest.mark.parametrize("in_features", [64, 1536, 2560])
def test_a_row_has_the_same_bits_whatever_is_computed_beside_it(in_features: int) -> None:
    torch.manual_seed(1)
    layer = nn.Sequential(nn.Linear(in_features, 192)).requires_grad_(False)
    linear.pack_linears(layer)
    x = torch.randn(1, 300, in_features)
    together = layer(x)
    for rows in (1, 2, 3, 4, 7, 16, 33, 64, 128, 129):
        assert torch.equal(layer(x[:, :rows]), together[:, :rows]), f"{rows} rows"
    assert torch.equal(layer(x[:, 299:]), together[:, 299:]), "the last row alone"


def test_few_sizes_of_products_compute_any_number_of_rows() -> None:
    sizes = {rows: linear.bucket_size(rows) for rows in range(1, linear.LARGEST + 1)}
    assert len(set(sizes.values())) == 26 and max(sizes.values()) == linear.LARGEST
    for rows, size in sizes.items():
        assert rows <= size <= rows + max(3, rows // 4) and linear.bucket_size(size) == size


@pytest.mark.skipif(not linear.packing_works(), reason="this torch lacks oneDNN's prepacked linear")
def test_a_layer_is_used_with_one_row_only_where_that_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = linear.PackedLinear._kernel
    seen: list[int] = []

    def off_alone(layer: linear.PackedLinear, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return kernel(layer, x) * (1 + 1e-6 * (x.shape[0] == 1))

    layer = nn.Linear(64, 192).requires_grad_(False)
    monkeypatch.setattr(linear.PackedLinear, "_kernel", off_alone)
    mended = linear.PackedLinear(layer)
    seen.clear()
    mended(torch.ones(1, 1, 64))
    assert seen == [2]


@pytest.mark.skipif(not linear.packing_works(), reason="this torch lacks oneDNN's prepacked linear")
def test_after_loading_no_number_of_rows_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = linear.PackedLinear._kernel
    seen: set[tuple[int, int, bool]] = set()

    def spy(layer: linear.PackedLinear, x: torch.Tensor) -> torch.Tensor:
        seen.add((x.shape[0], layer.out_features, layer.bias is None))
        return kernel(layer, x)

    twins = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48, bias=False)).requires_grad_(False)
    linear.pack_linears(twins)
    monkeypatch.setattr(linear.PackedLinear, "_kernel", spy)
    linear.warm_up(twins)
    compiled = set(seen)
    for rows in range(1, 2 * linear.LARGEST):
        twins(torch.ones(rows, 48))
    assert seen == compiled and len(compiled) >= 2 * 25


def test_large_models_and_other_dtypes_keep_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    half = model().to(torch.bfloat16)
    assert linear.pack_linears(half) == 0 and type(half[0]) is nn.Linear
    monkeypatch.setattr(linear, "MAX_PACKED_BYTES", 1000)
    large = model()
    assert linear.pack_linears(large) == 0 and type(large[0]) is nn.Linear
