"""The errors of CUDA that end a process's use of its GPU.

Some errors break the context: from then on every CUDA call of the process fails with the same error, until the process is
started again (the CUDA runtime API's page of error codes says of each whether it does). Others fail one call alone: too little
memory, an argument that is wrong, a kernel that the GPU does not have. The two kinds are told apart by their text, since
torch, Triton, NCCL and the driver pass nothing else to Python.
"""

import logging
import os
import re
from collections.abc import Iterator

from runtime.process.exits import GPU_EXIT
from runtime.process.log import Log
from runtime.process.zmq_sockets import close_sockets

_CHAIN_MAX = 8
_CUDA_ERROR = re.compile(r"(?:CUDA error|HIP error|Triton Error \[(?:CUDA|HIP)\]):\s*(?P<why>[^\n]*)", re.IGNORECASE)
_DRIVER_ERROR = re.compile(r"\bCUDA_ERROR_(?P<name>[A-Z_]+)")
_HARMLESS = re.compile(
    r"out of memory"
    r"|invalid (?:argument|value|configuration|pitch|resource handle|device ordinal|device function|device symbol|texture)"
    r"|invalid source|invalid kernel image|device kernel image is invalid"
    r"|no kernel image|too many resources|named symbol not found|not supported|not permitted|not ready"
    r"|peer access|previous error during capture|stream is capturing|dependency created on uncaptured"
    r"|PTX|busy or unavailable|insufficient for CUDA"
    r"|CUBLAS_STATUS_(?!EXECUTION_FAILED)|CUSPARSE_STATUS_(?!EXECUTION_FAILED)|CUSOLVER_STATUS_(?!EXECUTION_FAILED)",
    re.IGNORECASE,
)
_UNSUPPORTED_ADDRESS = re.compile(r"not supported on global/shared address space", re.IGNORECASE)
"""An exception of the hardware, whatever its text begins with."""
_BREAKING_DRIVER_ERRORS = frozenset(
    "ILLEGAL_ADDRESS ILLEGAL_INSTRUCTION MISALIGNED_ADDRESS INVALID_ADDRESS_SPACE INVALID_PC LAUNCH_FAILED LAUNCH_TIMEOUT"
    " ASSERT HARDWARE_STACK_ERROR ECC_UNCORRECTABLE NVLINK_UNCORRECTABLE CONTEXT_IS_DESTROYED CONTAINED"
    " DEINITIALIZED UNKNOWN".split()
)


def end_if_gpu_is_lost(error: BaseException, logger: Log) -> None:
    """End the process with `GPU_EXIT` if every further CUDA call fails after this error of the model or of a transfer.

    Call it on the event loop, after the failures of the affected requests were reported. Other workers continue the work of
    this process. A worker that stayed would fail every request that it gets.
    """
    if not breaks_cuda_context(error):
        return
    logger.critical(
        "this process cannot use its GPU any more; ending", error=(str(error).splitlines() or [""])[0][:300]
    )
    logging.shutdown()
    close_sockets()
    os._exit(GPU_EXIT)


def breaks_cuda_context(error: BaseException) -> bool:
    """Whether this process can compute nothing more on its GPU after this error, or one that caused it."""
    return any(_breaks(one) for one in _chain(error))


def _breaks(error: BaseException) -> bool:
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return False
    text = str(error)
    if driver := _DRIVER_ERROR.search(text):
        return driver["name"] in _BREAKING_DRIVER_ERRORS
    found = _CUDA_ERROR.search(text)
    if found is None:
        return "device-side assert triggered" in text
    return bool(_UNSUPPORTED_ADDRESS.search(found["why"])) or not _HARMLESS.search(found["why"])


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__
