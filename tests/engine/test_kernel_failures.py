"""What Triton raises is one kind of error: at load, the model runs without the kernels; while serving, its step fails."""

import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import triton_launch
from engine.engine import Engine
from engine.gpu.ops import Ops, TorchOps
from engine.gpu.runner import GpuRunner
from engine.model import backend
from engine.model.backend import BackendCandidate
from engine.model.loader import load_engine
from engine.triton_launch import KernelFailed
from proto.errors import CrossdockError
from tests import tiny_models
from tests.engine import support
from worker.gpu_faults import breaks_cuda_context

triton_errors = pytest.importorskip("triton.runtime.errors", reason="Triton is not installed")
compiler_errors = pytest.importorskip("triton.compiler.errors", reason="Triton is not installed")

LOST = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
ERRORS: dict[str, Exception] = {
    "OutOfResources": triton_errors.OutOfResources(115_200, 101_376, "shared memory"),
    "PTXASError": triton_errors.PTXASError("Internal Triton PTX codegen error"),
    "CompilationError": compiler_errors.CompilationError("x = 1", SimpleNamespace(lineno=1, col_offset=0), "no"),
    "no compiler": RuntimeError("Failed to find C compiler."),
    "compiler failed": subprocess.CalledProcessError(1, ["gcc"]),
    "no ptxas": FileNotFoundError("ptxas"),
    "GPU lost": LOST,
}


def failing(error: Exception) -> Any:
    def start(*_: object, **__: object) -> None:
        raise error

    return {(1,): start}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_triton_errors_fail_one_step(error: Exception) -> None:
    """Workers answer a CrossdockError of a step like any other, and end where the GPU is lost."""
    with pytest.raises(KernelFailed, match=type(error).__name__) as caught:
        triton_launch.launch(failing(error), (1,))
    assert isinstance(caught.value, CrossdockError)
    assert breaks_cuda_context(caught.value) == (error is LOST)


class FailingOps(TorchOps):
    def activate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        triton_launch.launch(failing(ERRORS["OutOfResources"]), (1,))
        return gate_up


def cannot_be_made(pool: torch.Tensor) -> Ops:
    raise KernelFailed("Triton needs Python.h")


def cannot_capture(runner: GpuRunner) -> None:
    raise KernelFailed("the Triton kernel decode failed: PTXASError")


def load_as_if_on_gpu(path: Path, monkeypatch: pytest.MonkeyPatch, make_ops: Any) -> tuple[Engine, list[str]]:
    """A model on the CPU, over the code for GPUs."""
    monkeypatch.setattr(BackendCandidate, "on_gpu", True)
    monkeypatch.setattr(BackendCandidate, "on_cpu", False)
    monkeypatch.setattr(backend, "make_ops", make_ops)
    said: list[str] = []
    return load_engine(str(path), kv_bytes=support.KV_BYTES, on_progress=said.append), said


@pytest.mark.parametrize(
    ("make_ops", "captures", "why"),
    [
        (FailingOps, None, "the Triton kernel kernel failed: OutOfResources: out of resource: shared memory"),
        (cannot_be_made, None, "Triton needs Python.h"),
        (TorchOps, cannot_capture, "the Triton kernel decode failed: PTXASError"),
    ],
    ids=["compare", "make", "capture"],
)
def test_failing_kernels_are_left_out(
    make_ops: Any, captures: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose kernels fail at load runs in transformers, and one line gives the reason."""
    path = tiny_models.make("llama", tmp_path)
    if captures is not None:
        monkeypatch.setattr(GpuRunner, "capture", captures)
    engine, said = load_as_if_on_gpu(path, monkeypatch, make_ops)
    assert engine.backend == "transformers (torch attention)" and engine.pipeline is None
    [line] = [one for one in said if "without" in one]
    assert line.startswith(f"without the GPU kernels: {why}") and line.endswith(", expect about 10 times slower")
    prompts = [[7, 8, 9], [11] * 40]
    assert support.engine_greedy(engine, prompts, 6, chunk=13) == support.plain_greedy(path, prompts, 6)


def test_kernels_failing_measurement_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose kernels fail while memory is measured runs without them."""
    asked: list[bool] = []

    def measured(candidate: BackendCandidate, fused: object) -> int:
        asked.append(fused is not None)
        if fused is not None:
            raise KernelFailed("the Triton kernel prefill failed: OutOfResources")
        return support.KV_BYTES

    monkeypatch.setattr(backend, "_measured", measured)
    monkeypatch.setattr(BackendCandidate, "on_gpu", True)
    monkeypatch.setattr(BackendCandidate, "on_cpu", False)
    said: list[str] = []
    engine = load_engine(str(tiny_models.make("llama", tmp_path)), kv_bytes=None, on_progress=said.append)
    assert asked == [True, False] and engine.backend == "transformers (torch attention)"
    assert len([one for one in said if "without the GPU kernels" in one]) == 1


def test_working_kernels_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose kernels run uses them and reports nothing."""
    engine, said = load_as_if_on_gpu(tiny_models.make("llama", tmp_path), monkeypatch, TorchOps)
    assert engine.backend.startswith("gpu (") and not any("without" in one for one in said)


def test_missing_triton_prerequisites_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the header or compiler that Triton needs and the host lacks."""
    from triton import knobs

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_launch.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(knobs.build, "impl", None)
    real = triton_launch.find_spec  # type: ignore[attr-defined]
    with monkeypatch.context() as without_header:
        without_header.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(KernelFailed, match=r"Triton needs .*/Python.h, which is in the package python3-dev"):
            triton_launch.prepare()
    header = tmp_path / "Python.h"
    header.touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for absent, why in (("ziglang", "no gcc or clang, nor the package ziglang"), ("triton", "Triton is not installed")):
        monkeypatch.setattr(
            triton_launch, "find_spec", lambda name, absent=absent: None if name == absent else real(name)
        )
        with pytest.raises(KernelFailed, match=why):
            triton_launch.prepare()
    monkeypatch.setattr(triton_launch, "find_spec", real)
    triton_launch.prepare()
    assert knobs.build.impl is triton_launch.build_with_zig


def test_packaged_compiler_builds_loadable_module(tmp_path: Path) -> None:
    """The packaged compiler builds an extension module that Python can load."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        pytest.skip("there is no Python.h here")
    build = pytest.importorskip("triton.runtime.build")
    source = tmp_path / "main.c"
    source.write_text(
        "#include <Python.h>\n#include <zlib_like.h>\n"
        'static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer", NULL, ANSWER, NULL};\n'
        "PyMODINIT_FUNC PyInit_answer(void) { return PyModule_Create(&module); }\n"
    )
    (tmp_path / "zlib_like.h").write_text("#define ANSWER -1\n")
    made = triton_launch.build_with_zig("answer", str(source), str(tmp_path), [], [str(tmp_path)], ["c"])
    assert build._load_module_from_path("answer", made).__name__ == "answer"
