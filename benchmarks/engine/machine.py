"""The rates of this machine without a model: reading memory, and a matrix product."""

import ctypes
import time
from collections.abc import Callable

import torch

from benchmarks.engine.floor import MachineRates
from engine.cpu import library
from engine.cpu.weights import FORMATS

BUFFER_BYTES = 512 << 20  # far beyond the caches
CPU_MATRIX, GPU_MATRIX = 1536, 8192  # rows and columns of the matrices that are multiplied
_TRIES = 3  # the fastest try counts, because a floor must not include the effects of other work on the machine


def timed(device: str, work: Callable[[], object]) -> float:
    """Seconds until `work` is done, on a GPU too."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Machine:
    """Measures the machine. `kernels`: whether the engine's own CPU kernels are measured too."""

    def __init__(self, device: str, dtype: torch.dtype, kernels: bool) -> None:
        self._device = device
        buffer = torch.ones(BUFFER_BYTES // dtype.itemsize, dtype=dtype, device=device)
        halves = buffer.chunk(2)
        size = GPU_MATRIX if device == "cuda" else CPU_MATRIX
        a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
        self._reads: dict[str, Callable[[], object]] = {"sum": buffer.sum}
        if device == "cuda":
            self._reads["copy"] = lambda: halves[0].copy_(
                halves[1]
            )  # reads half of the buffer and writes the other half
        else:
            self._reads["dot"] = lambda: halves[0].dot(halves[1])
        self._products: dict[str, Callable[[], object]] = {"torch": lambda: torch.mm(a, b, out=out)}
        if kernels:
            self._reads["engine"] = _multiply(buffer, a[:1])
            self._products["engine"] = _multiply(b.flatten(), a)
        self._product_flops = 2 * size**3
        self.read_bytes_per_s: dict[str, list[float]] = {name: [] for name in self._reads}
        """Results of each measurement, by the code that reads."""
        self.flops_per_s: dict[str, list[float]] = {name: [] for name in self._products}

    @torch.inference_mode()
    def measure(self) -> MachineRates:
        for name, read in self._reads.items():
            self.read_bytes_per_s[name].append(BUFFER_BYTES / self._fastest(read))
        for name, product in self._products.items():
            self.flops_per_s[name].append(self._product_flops / self._fastest(product))
        reads, products = self.read_bytes_per_s.values(), self.flops_per_s.values()
        return MachineRates(max(rates[-1] for rates in reads), max(rates[-1] for rates in products))

    def forget(self) -> None:
        """Drop the measurements so far, which were for warming up."""
        for rates in (*self.read_bytes_per_s.values(), *self.flops_per_s.values()):
            rates.clear()

    def _fastest(self, work: Callable[[], object]) -> float:
        return min(timed(self._device, work) for _ in range(_TRIES))


def _multiply(weights: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    """Returns the engine's product of `x` [rows, inputs] with a layer that is filled with as many of the `weights` as fit."""
    rows, inputs = x.shape
    outputs = weights.numel() // inputs // library.PANEL * library.PANEL
    y = torch.empty(rows, outputs)
    kernels = library.load_kernels()

    def multiply() -> None:
        linear = library.Linear(weights.data_ptr(), 0, 0, inputs, outputs, FORMATS["float32"])
        kernels.multiply(ctypes.byref(linear), x.data_ptr(), inputs, y.data_ptr(), outputs, rows)

    return multiply
