"""A model that cannot have room is refused from the headers of its files, before any weight is read."""

import json
import struct
from pathlib import Path

import pytest
import torch

from engine.gpu.memory import GpuShare
from engine.model import loader, room
from engine.model.errors import GpuUnsupported, NoMemory
from engine.model.loader import load_engine
from tests import tiny_models
from tests.engine import support

GIB = 1 << 30
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def make_file(path: Path, parameters: int, stored: str = "BF16", itemsize: int = 2) -> None:
    """Of that many parameters; it takes no room on the disk."""
    header = {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": stored, "shape": [parameters], "data_offsets": [0, parameters * itemsize]},
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + parameters * itemsize)


def make_model(folder: Path, billions: int, dtype: str = "bfloat16") -> Path:
    """In two files and an index, beside another format of the same, which nobody loads."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in (*names, "consolidated.safetensors"):
        make_file(folder / name, billions * 500_000_000)
    weight_map = {f"weight{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def memory(monkeypatch: pytest.MonkeyPatch, free: float, total: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), int(total * GIB)))


def check(folder: Path, device: torch.device = CUDA, dtype: torch.dtype | None = None, kv_bytes: int | None = None,
          host_bytes: int | None = None) -> None:  # fmt: skip
    room.check_weights("m", folder, device, dtype, kv_bytes, GpuShare(0.9), host_bytes)


def test_too_large_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 70 billion parameters is refused on an 80 GB GPU, and the error says which would fit."""
    make_model(tmp_path, 70)
    memory(monkeypatch, 78.5, 79.2)
    why = (
        r"^m: its weights take 130.4 GiB as bfloat16, and --gpu-memory-share 0.9 of the GPU's 79.2 GiB, of which 78.5 are free,"
        r" is 71.3 GiB, for weights and KV cache. Models of up to 38.3 billion parameters fit$"
    )
    with pytest.raises(NoMemory, match=why):
        check(tmp_path)
    memory(monkeypatch, 180.0, 180.0)
    check(tmp_path)
    with pytest.raises(NoMemory, match=r"260.8 GiB as float32"):
        check(tmp_path, dtype=torch.float32)
    with pytest.raises(NoMemory, match=r"--kv-gib 60.0 leaves 120.0 of the GPU's 180.0 free GiB"):
        check(tmp_path, kv_bytes=60 * GIB)


def test_other_gpu_memory_users_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that others use on the GPU counts as taken."""
    memory(monkeypatch, 10.0, 79.2)
    with pytest.raises(NoMemory, match=r"of which 10.0 are free"):
        check(make_model(tmp_path, 8))


def test_configured_dtype_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are counted in the dtype of the configuration, else in that of the file."""
    memory(monkeypatch, 20.0, 24.0)
    make_file(tmp_path / "model.safetensors", 8_000_000_000, "F32", 4)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"dtype": "bfloat16"}}))
    check(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoMemory, match=r"29.8 GiB as float32"):
        check(tmp_path)


def test_cpu_model_counts_host_memory(tmp_path: Path) -> None:
    """A model on a CPU is refused if the host has too little free memory for its weights."""
    make_model(tmp_path, 8)
    check(tmp_path, CPU, torch.float32, host_bytes=32 * GIB)
    check(tmp_path, CPU, torch.float32, host_bytes=None)
    with pytest.raises(
        NoMemory, match=r"29.8 GiB as float32, and 28.0 GiB of memory are free. .* 7.52 billion .*--dtype bfloat16"
    ):
        check(tmp_path, CPU, torch.float32, host_bytes=28 * GIB)


@pytest.mark.parametrize(
    "damage", [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a":{}} ']
)
def test_room_check_skips_damaged_files(damage: bytes, tmp_path: Path) -> None:
    """The check for room passes over damaged weight files."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(damage)
    check(tmp_path, CPU, torch.float32, host_bytes=1)


def test_room_is_checked_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not fit is refused before any weights are loaded."""
    monkeypatch.setattr(loader, "_load_weights", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(NoMemory, match="of memory are free"):
        load_engine(str(make_model(tmp_path, 700)), kv_bytes=support.KV_BYTES, host_bytes=100 * GIB)


def test_fitting_model_is_loaded(tmp_path: Path) -> None:
    """A model that fits is loaded, and refused with less memory."""
    path = tiny_models.make("llama", tmp_path)
    assert load_engine(str(path), kv_bytes=support.KV_BYTES, host_bytes=GIB).blocks
    with pytest.raises(NoMemory):
        load_engine(str(path), kv_bytes=support.KV_BYTES, host_bytes=1000)


@pytest.mark.parametrize(("capability", "is_good"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_too_old_gpu_is_refused(capability: tuple[int, int], is_good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is refused if its compute capability is below 8.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    if is_good:
        room.check_gpu(CUDA)
    else:
        with pytest.raises(GpuUnsupported, match=r"Tesla T4 has compute capability 7.5; crossdock needs 8.0"):
            room.check_gpu(CUDA)
