"""Whether a model can have room on a device, known from its files' headers before any weight is read."""

import json
import math
import struct
from pathlib import Path
from typing import Any, Final

import torch

from engine.gpu.memory import GpuShare
from engine.model.errors import GpuUnsupported, NoMemory

_FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEADER_BYTES_MAX: Final = 100 << 20  # as the format allows
_CAPABILITY_MIN: Final = (8, 0)  # least with products in bfloat16; on older GPUs the kernels do not fit the registers


def check_gpu(device: torch.device) -> None:
    """Raises GpuUnsupported."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY_MIN:
        raise GpuUnsupported(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; crossdock needs 8.0,"
            " which an A100, A10, L4, RTX 30 or any newer GPU has, or --device cpu"
        )


def check_weights(
    model: str, folder: Path, device: torch.device, dtype: torch.dtype | None, kv_bytes: int | None, gpu: GpuShare,
    host_bytes: int | None,
) -> None:  # fmt: skip
    """`dtype`: of the weights; None: as stored. `host_bytes`: what the host has free, if that is known. Raises NoMemory if the
    weights do not fit. Accepts files that cannot be read: loading them reports why."""
    try:
        dtype = dtype or _stated_type(folder)
        needed, stored = weights_of(folder, dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return
    name = str(dtype or stored).removeprefix("torch.")
    takes = f"{model}: its weights take {_gib(needed)} GiB as {name}"
    itemsize = (dtype or stored).itemsize
    if device.type == "cpu":
        if host_bytes is not None and needed > host_bytes:
            smaller = "" if itemsize < 4 else "; --dtype bfloat16 takes half as much, but is slow on a CPU"
            raise NoMemory(
                f"{takes}, and {_gib(host_bytes)} GiB of memory are free. {_fits(host_bytes, itemsize)}{smaller}"
            )
        return
    free, total = torch.cuda.mem_get_info(device)
    if kv_bytes is not None:
        room, why = (
            free - kv_bytes,
            f"--kv-gib {_gib(kv_bytes)} leaves {_gib(free - kv_bytes)} of the GPU's {_gib(free)} free GiB",
        )
    else:
        room = min(int(total * gpu.memory), free)
        why = (
            f"--gpu-memory-share {gpu.memory:g} of the GPU's {_gib(total)} GiB, of which {_gib(free)} are free, is {_gib(room)}"
            " GiB, for weights and KV cache"
        )
    if needed > room:
        raise NoMemory(f"{takes}, and {why}. {_fits(room, itemsize)}")


def weights_of(folder: Path, dtype: torch.dtype | None) -> tuple[int, torch.dtype]:
    """(bytes of all weights once they are of this type, the type that most of their bytes are stored in). Raises various
    exceptions for malformed files."""
    by_type: dict[torch.dtype, int] = {}
    total = 0
    for path in _files(folder):
        for name, tensor in _header(path).items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            stored = _FLOATS.get(tensor["dtype"])
            if stored is not None:
                by_type[stored] = by_type.get(stored, 0) + end - start
            total += end - start if dtype is None or stored is None else math.prod(tensor["shape"]) * dtype.itemsize
    return total, max(by_type, key=lambda one: by_type[one], default=torch.float32)


def _stated_type(folder: Path) -> torch.dtype | None:
    """The type that transformers uses for `auto`; None: as stored."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    for one in (config, config.get("text_config") or {}):
        name = one.get("dtype") or one.get("torch_dtype")
        if name in ("float32", "float16", "bfloat16"):
            found: torch.dtype = getattr(torch, name)
            return found
    return None


def _files(folder: Path) -> list[Path]:
    """Returns the files that transformers would load: a folder may hold the weights twice, in two layouts."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"].values())
        return [folder / Path(name).name for name in names]
    return list(folder.glob("*.safetensors"))


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _HEADER_BYTES_MAX:
            raise ValueError(f"a header of {size} bytes")
        header: dict[str, Any] = json.loads(file.read(size))
    return header


def _fits(room: int, itemsize: int) -> str:
    return f"Models of up to {max(room, 0) / itemsize / 1e9:.3g} billion parameters fit"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"
