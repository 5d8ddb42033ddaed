"""The decode step on tensors that claim to be on a GPU and hold nothing: whatever would read one on the host fails.

So nothing in a step waits for the device, as a CUDA graph also requires. Triton kernels are not started.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily

from engine import triton_launch
from engine.gpu.decoder import Decoder
from engine.gpu.ops import Ops, TorchOps
from engine.gpu.pipeline import GpuPipeline
from engine.gpu.weights import DecoderWeights, fuse
from engine.model.backend import recognised
from engine.pipeline import DecodeRow
from engine.sampling.sampler import SamplerState
from tests import tiny_models
from tests.engine.fake_gpu import FakeGpu
from tests.engine.gpu_runners import candidate_of
from tests.engine.test_gpu_runner import FORBIDDING, SAMPLINGS, OtherParity

ROWS = len(SAMPLINGS) + len(FORBIDDING)
OPS: dict[str, Callable[[torch.Tensor], Ops]] = {"torch": TorchOps}
try:
    from engine.gpu.triton_ops import TritonOps

    OPS["triton"] = TritonOps
except ImportError:
    pass


class Event:
    """In place of one of CUDA."""

    def record(self) -> None: ...


def as_fake(value: Any) -> Any:
    """The same weights, as fakes on a GPU."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=torch.bfloat16, device="cuda")
    if isinstance(value, tuple):
        return tuple(map(as_fake, value))
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: as_fake(getattr(value, name)) for name in value.__dataclass_fields__})
    return value


@pytest.fixture
def weights(tmp_path: Path) -> DecoderWeights:
    candidate, _ = candidate_of(tiny_models.make("qwen3", tmp_path))
    return fuse(recognised(candidate), 64)


def two_steps(
    weights: DecoderWeights, make_ops: Callable[[torch.Tensor], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences that ask for everything there is; all join in the first, and one leaves before the second."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(triton_launch, "launch", lambda *arguments, **constants: None)
    forbidden = SamplerState.forbidden
    monkeypatch.setattr(SamplerState, "forbidden", unset_fake_temporarily()(forbidden))  # it is computed on the host
    states = [
        SamplerState(one, 0, tiny_models.VOCAB, [7, 8], constraint=OtherParity() if one.grammar else None)
        for one in (*SAMPLINGS, *FORBIDDING)
    ]
    rows = [DecodeRow(name, 7, 39 + name, (3, 4, 5), state, 1) for name, state in enumerate(states)]
    gpu = FakeGpu()
    with gpu.on():
        pool = torch.empty((8, len(weights.layers), 2, 16, 2, 16), dtype=torch.bfloat16, device="cuda")
        pipeline = GpuPipeline(Decoder(as_fake(weights), make_ops(pool)), pool, 64, ROWS)
    pipeline._input._host = [torch.zeros(host.shape, dtype=torch.int64) for host in pipeline._input._host]
    with gpu.on():
        pipeline.launch(rows, [(3, 4)])
        pipeline.launch(rows[1:], [])
    assert pipeline._under_way[-1].tokens.shape == (2, ROWS - 1)
    assert pipeline._under_way[-1].tokens.device.type == "cpu"


@pytest.mark.parametrize("make_ops", OPS.values(), ids=OPS)
def test_steps_never_wait_for_device(
    make_ops: Callable[[torch.Tensor], Ops], weights: DecoderWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step on a device without data reads no tensor on the host."""
    two_steps(weights, make_ops, monkeypatch)


def _item(x: torch.Tensor) -> None:
    x.sum().item()


def _tolist(x: torch.Tensor) -> None:
    x.tolist()


def _branch(x: torch.Tensor) -> None:
    if (x > 0).any():
        raise AssertionError


def _mask(x: torch.Tensor) -> None:
    _ = x[x > 0]


@pytest.mark.parametrize("wait", [_item, _tolist, _branch, _mask])
def test_host_reads_are_detected(
    wait: Callable[[torch.Tensor], None], weights: DecoderWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that reads a tensor on the host fails."""

    class Waiting(TorchOps):
        def activate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
            wait(gate_up)
            return super().activate(gate_up, activation)

    with pytest.raises((DataDependentOutputException, AssertionError)):
        two_steps(weights, Waiting, monkeypatch)
