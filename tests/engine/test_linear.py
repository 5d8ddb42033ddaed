"""The packed form of a linear layer computes what the plain one does, and is only used where it may be."""

import pytest
import torch
from torch import nn

from engine import linear


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 300, bias=False)).requires_grad_(False)


@pytest.mark.skipif(not linear.packing_works(), reason="this torch lacks oneDNN's prepacked linear")
def test_packed_equals_plain_for_any_number_of_rows() -> None:
    plain = model()
    packed = model()
    assert linear.pack_linears(packed) == 4 * (40 * 24 + 24 * 300)
    assert isinstance(packed[0], linear.PackedLinear) and isinstance(packed[2], linear.PackedLinear)
    for rows in (0, 1, 2, 3, 4, 5, 16, 17, 128, 129):
        x = torch.randn(1, rows, 40)
        assert torch.allclose(packed(x), plain(x), rtol=1e-4, atol=1e-5), f"{rows} rows"
        if rows:
            assert torch.allclose(packed[0].packed(x), plain[0](x), rtol=1e-4, atol=1e-5), f"{rows} rows, packed"


def test_large_models_and_other_dtypes_keep_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    half = model().to(torch.bfloat16)
    assert linear.pack_linears(half) == 0 and type(half[0]) is nn.Linear
    monkeypatch.setattr(linear, "MAX_PACKED_BYTES", 1000)
    large = model()
    assert linear.pack_linears(large) == 0 and type(large[0]) is nn.Linear
