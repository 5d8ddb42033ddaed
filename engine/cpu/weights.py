"""Weights as the kernels read them: outputs in panels of 64, side by side for each input."""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import nn

from engine.cpu.huge_pages import HugePages
from engine.cpu.library import PANEL, Linear

FORMATS: Final = {"float32": 0, "bfloat16": 1, "int8": 2}


class PackedWeights:
    """Several linear layers with the same input, packed as one."""

    def __init__(self, parts: Sequence[nn.Linear], format: str, memory: HugePages) -> None:
        weight = torch.cat([part.weight.detach().float() for part in parts])
        self.rows = weight.shape[0]
        more = -self.rows % PANEL
        if more:
            weight = torch.cat((weight, weight.new_zeros(more, weight.shape[1])))
        self.inputs, self.outputs, self.format = weight.shape[1], weight.shape[0], format
        self.scale: torch.Tensor | None = None
        if format == "int8":
            weight, self.scale = _as_int8(weight)
        elif format == "bfloat16":
            weight = weight.to(torch.bfloat16)
        self.panels = memory.copy(weight.view(-1, PANEL, self.inputs).transpose(1, 2))  # [panels, inputs, 64]
        self.bias: torch.Tensor | None = None
        if any(part.bias is not None for part in parts):
            biases = [part.bias if part.bias is not None else torch.zeros(part.out_features) for part in parts]
            self.bias = torch.cat([*(bias.detach().float() for bias in biases), torch.zeros(more)])

    def described(self) -> Linear:
        """The description for the kernels; valid as long as this object."""
        scale, bias = (0 if tensor is None else tensor.data_ptr() for tensor in (self.scale, self.bias))
        return Linear(self.panels.data_ptr(), scale, bias, self.inputs, self.outputs, FORMATS[self.format])

    def row(self, outputs: torch.Tensor) -> torch.Tensor:
        """[outputs, inputs] float32: of a tied embedding, those of some tokens."""
        rows = self.panels[outputs // PANEL, :, outputs % PANEL].float()
        return rows if self.scale is None else rows * self.scale[outputs, None]


def _as_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 numbers, and the scale of each output: its largest weight is 127."""
    scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


@torch.inference_mode()
def round_weights(layers: Iterable[nn.Linear], format: str) -> None:
    """Round weights in place to the precision of `format`, so that the model can serve as the reference."""
    for layer in layers:
        if format == "int8":
            numbers, scale = _as_int8(layer.weight)
            layer.weight.copy_(numbers.float() * scale[:, None])
        else:
            layer.weight.copy_(layer.weight.to(torch.bfloat16).float())
