"""Which errors end a process's use of its GPU, by the texts of torch 2.9 to 2.13, Triton, NCCL and the driver.

A worker ends after one of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtransfer.memory.cuda import CudaError
from kvtransfer.transports.transport import PairBroken
from proto.errors import CrossdockError
from runtime.process.exits import GPU_EXIT, HOPELESS_EXITS
from worker.gpu_faults import breaks_cuda_context

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)  # from torch 2.8 on; a RuntimeError before
HINT = (
    "\nSearch for `cudaError' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
BREAKING = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "misaligned address",
    "an illegal instruction was encountered",
    "invalid program counter",
    "hardware stack error",
    "operation not supported on global/shared address space",
    "unknown error",
    "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda, b)`",
)
HARMLESS = (
    "out of memory",
    "invalid argument",
    "invalid configuration argument",
    "invalid device ordinal",
    "no kernel image is available for execution on the device",
    "too many resources requested for launch",
    "operation not permitted when stream is capturing",
    "operation not supported",
    "invalid resource handle",
    "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`",
)


@pytest.mark.parametrize("kind", [ACCELERATOR_ERROR, RuntimeError])
def test_torch_errors_are_classified(kind):
    """Errors of torch are told apart by whether they break the CUDA context."""
    for text in BREAKING:
        assert breaks_cuda_context(kind(f"CUDA error: {text}{HINT}")), text
    for text in HARMLESS:
        assert not breaks_cuda_context(kind(f"CUDA error: {text}{HINT}")), text


@pytest.mark.parametrize(
    ("error", "breaks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 2 GiB"), False),
        (RuntimeError("HIP error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), False),
        (CudaError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"), False),
        (CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)"), False),
        (CudaError("cuIpcCloseMemHandle: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), True),
        (CudaError("cuCtxSetCurrent: CUDA_ERROR_ECC_UNCORRECTABLE (214)"), True),
        (PairBroken("the message was lost: RuntimeError: CUDA error: unspecified launch failure"), True),
        (PairBroken("the peer is gone: its connection has ended"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)"), False),
        (ValueError("no"), False),
        (IndexError(""), False),
    ],
)  # fmt: skip
def test_other_errors_are_classified(error, breaks):
    """Other errors are told apart by whether they break the CUDA context."""
    assert breaks_cuda_context(error) is breaks


def test_cause_of_error_is_considered():
    """An error counts as breaking the CUDA context if its cause does."""
    error = CrossdockError("the step failed")
    assert not breaks_cuda_context(error)
    error.__cause__ = ACCELERATOR_ERROR(f"CUDA error: misaligned address{HINT}")
    assert breaks_cuda_context(error)


WORKER = """
import asyncio, sys
from types import SimpleNamespace
import torch
from runtime.process import log
from runtime.process.driver import run_process
from worker.driver import WorkerDriver
from worker.step_watch import StepWatch
from {role}_worker import worker

said = []
def step_failed(*arguments):
    said.append(arguments)
    print("told", flush=True)
    if len(said) == 2:
        raise SystemExit("still here")

def forward(*_):
    raise {error}

class Engine:
    forward = staticmethod(forward)
    pipeline = None

begun = SimpleNamespace(work=[(None, SimpleNamespace(length=3))], step=SimpleNamespace(step_id=1))
async def main(stop):
    from concurrent.futures import ThreadPoolExecutor
    plan = SimpleNamespace(rows=[1, 2], copies=())
    role = SimpleNamespace(
        core=SimpleNamespace(
            step_failed=step_failed, begin_draw=lambda: [], begin_step=lambda: begun, plan=lambda: plan,
            suffixes=[],
        ),
        table=SimpleNamespace(batch=SimpleNamespace(in_flight=None, running=[])),
        metrics=SimpleNamespace(step_failed=lambda: None), engine=Engine(), sender=SimpleNamespace(digest=None),
    )
    worker.run_step = lambda engine, *_: engine.forward()
    for name in ("next_step", "_compute_step", "_step_done", "_step_failed"):
        if hasattr(worker.{kind}, name):
            setattr(role, name, getattr(worker.{kind}, name).__get__(role))
    driver = SimpleNamespace(
        role=role, log=log.configure(level="info", fmt="json", process="w"), _watch=StepWatch(1.0),
        _work=asyncio.Event(), _thread=ThreadPoolExecutor(1),
    )
    for name in ("_start_step", "_compute", "_finish_step"):
        setattr(driver, name, getattr(WorkerDriver, name).__get__(driver))
    await WorkerDriver._run_steps(driver)
    return 0
sys.exit(run_process(main))
"""


@pytest.mark.parametrize(("role", "kind"), [("decode", "DecodeRole"), ("prefill", "PrefillRole")])
def test_broken_context_ends_worker(role, kind):
    """A worker with a broken CUDA context fails what it runs and ends with GPU_EXIT."""
    error = "torch.AcceleratorError('CUDA error: an illegal memory access was encountered')"
    child = subprocess.run(
        [sys.executable, "-c", WORKER.format(role=role, kind=kind, error=error)],
        cwd=ROOT, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (child.returncode, child.stdout.count("told")) == (GPU_EXIT, 1), child.stdout + child.stderr
    assert "this process cannot use its GPU any more" in child.stdout + child.stderr
    assert GPU_EXIT not in HOPELESS_EXITS


def test_out_of_memory_step_keeps_worker():
    """A worker goes on if there was no GPU memory for a step."""
    script = WORKER.format(role="decode", kind="DecodeRole", error="torch.OutOfMemoryError('CUDA out of memory')")
    child = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert child.returncode != GPU_EXIT and child.stdout.count("told") == 2, child.stdout + child.stderr
