"""Starts Triton kernels. The one place where that happens, so that a test can run the code around them without a GPU, and what
Triton raises is one kind of error. Triton itself need not be installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from proto.errors import CrossdockError

_COMPILE_S: Final = 120.0


class KernelFailed(CrossdockError):
    """A Triton kernel cannot be compiled or started here."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch on the current stream. Nothing is started for an empty grid. Raises KernelFailed."""
    if not all(grid):
        return
    try:
        kernel[grid](*arguments, **constants)
    except Exception as error:  # Triton's own errors have no base but Exception, and its compilers raise many others
        lines = str(error).strip().splitlines() or [""]
        name = getattr(kernel, "__name__", "kernel")
        raise KernelFailed(f"the Triton kernel {name} failed: {type(error).__name__}: {lines[0][:300]}") from error


def prepare() -> None:
    """Before the first launch on a GPU. Triton compiles a little C for its launches: by the compiler of the package ziglang
    where the host has none. Raises KernelFailed, which says what is missing."""
    if find_spec("triton") is None:
        raise KernelFailed("Triton is not installed")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise KernelFailed(f"Triton needs {header}, which is in the package python3-dev of most distributions")
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return
    if find_spec("ziglang") is None:
        raise KernelFailed(
            "Triton needs a C compiler, and this host has no gcc or clang, nor the package ziglang (extra `cpu`)"
        )
    from triton import knobs

    knobs.build.impl = build_with_zig


def build_with_zig(
    name: str, source: str, folder: str, library_dirs: list[str], include_dirs: list[str], libraries: list[str]
) -> str:
    """As Triton's own `_build`: compiles a C file to an extension module in the folder, and returns its path."""
    made = os.path.join(folder, name + str(sysconfig.get_config_var("EXT_SUFFIX")))
    # Files by name: the linker of zig does not know -l:libcuda.so.1.
    found = [
        next((path for one in library_dirs if (path := Path(one, library)).is_file()), f"-l{library}")
        for library in libraries
    ]
    command = [sys.executable, "-m", "ziglang", "cc", source, "-O3", "-shared", "-fPIC", "-w", "-o", made]
    command += [str(one) for one in found]
    command += [f"-L{one}" for one in library_dirs]
    command += [f"-I{one}" for one in (*include_dirs, folder, sysconfig.get_path("include")) if one]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise KernelFailed(f"the C compiler failed: {done.stderr.strip()[:500]}")
    return made
