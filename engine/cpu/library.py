"""Builds the kernels for this CPU, once, and loads them.

The compiler is the one in the package `ziglang` (clang), so that nothing has to be installed on a host and all hosts have the
same. The library is kept in the user's cache folder, under a name that depends on the source, the compiler and the CPU.
"""

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from filelock import FileLock

from proto.errors import CrossdockError

_SOURCES = Path(__file__).with_name("kernels")
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
_TIMEOUT_S = 120.0

PANEL = 64  # outputs of a linear layer side by side, as in `kernels/linear.c`
LANES = 16  # sizes of a model's vectors must be multiples of this
QUERIES_MAX, HEAD_DIM_MAX = 48, 256


class KernelsUnavailable(CrossdockError):
    """The CPU kernels cannot be built or loaded here. Models then run as transformers has them."""


class Linear(Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("format", c_int64),
    ]


class Mlp(Structure):
    _fields_ = [("gate_up", Linear), ("down", Linear)]


class Layer(Structure):
    _fields_ = [
        ("qkv", Linear),
        ("out", Linear),
        ("router", Linear),
        ("mlps", POINTER(Mlp)),
        ("experts", c_int64),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        *((name, c_int64) for name in ("query_norm_size", "key_norm_size", "window", "rotary")),
    ]


class KernelModel(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("head", Linear),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("layer_count", "hidden", "heads", "kv_heads", "head_dim", "activation")),
        *((name, c_int64) for name in ("block_size", "experts_per_token", "normalises")),
        *((name, c_float) for name in ("epsilon", "scaling", "softcap", "residual", "logit_scale", "logit_softcap")),
    ]


class KernelBatch(Structure):
    _fields_ = [
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("rotary", c_int64),
        ("rows", c_int64),
        ("positions", c_void_p),
        ("tables", c_void_p),
        ("blocks", c_void_p),
        ("chunks", c_void_p),
        ("chunk_count", c_int64),
        ("wanted", c_void_p),
        ("wanted_count", c_int64),
        ("kv", c_void_p),
        *((name, c_void_p) for name in ("x", "normed", "qkv", "attended", "gate_up", "gated")),
        *((name, c_void_p) for name in ("routed", "expert_out", "mixed", "shares", "chosen", "expert_rows", "logits")),
    ]


def instruction_set() -> str:
    """The instruction set of the kernels: `avx512`, `avx2` or `neon`. Raises KernelsUnavailable where there is none of them.

    As torch does, it obeys ATEN_CPU_CAPABILITY=avx2.
    """
    if platform.system() != "Linux":
        raise KernelsUnavailable(f"the CPU kernels are built for Linux, not for {platform.system()}")
    if platform.machine() == "aarch64":
        return "neon"
    flags = set(_cpu_flags())
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags and os.environ.get("ATEN_CPU_CAPABILITY") != "avx2":
        return "avx512"
    if {"avx2", "fma"} <= flags:
        return "avx2"
    raise KernelsUnavailable("the CPU kernels need AVX2 and FMA")


def source_hash() -> str:
    """Digest of the kernels' source, which decides what they compute."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sorted(_SOURCES.iterdir()))).hexdigest()


def _cpu_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []


_TARGETS = {
    "avx512": ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v4"),
    "avx2": ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64_v3"),
    "neon": ("-target", "aarch64-linux-gnu.2.17"),
}


@cache
def load_kernels() -> ctypes.CDLL:
    """The kernels. Builds them first if needed, which takes a few seconds. Raises KernelsUnavailable."""
    try:
        library = ctypes.CDLL(str(_built()))
    except OSError as error:  # as where files of that folder may not be executed
        raise KernelsUnavailable(f"the CPU kernels cannot be loaded: {error}") from error
    library.start_threads.restype, library.start_threads.argtypes = c_int64, [c_int64]
    library.forward.restype, library.forward.argtypes = None, [POINTER(KernelModel), POINTER(KernelBatch), c_void_p]
    library.project.restype, library.project.argtypes = None, [POINTER(KernelModel), c_void_p, c_void_p, c_int64]
    library.multiply.restype = None
    library.multiply.argtypes = [POINTER(Linear), c_void_p, c_int64, c_void_p, c_int64, c_int64]
    return library


def _built() -> Path:
    if find_spec("ziglang") is None:
        raise KernelsUnavailable("no compiler is installed; the extra `cpu` of crossdock brings one (package ziglang)")
    target = _TARGETS[instruction_set()]
    made_by = " ".join([importlib.metadata.version("ziglang"), *_FLAGS, *target, source_hash()])
    name = hashlib.sha256(made_by.encode()).hexdigest()[:32]
    for folder in _folders():
        path = folder / f"crossdock-{name}.so"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(folder):
                continue
            with FileLock(f"{path}.lock", timeout=_TIMEOUT_S):
                if not _is_ours(path):
                    _compile(target, path)
            return path
        except OSError:
            continue  # a service that may not write to its home
    raise KernelsUnavailable("neither the user's cache folder nor that for temporary files can be written to")


def _folders() -> Iterator[Path]:
    """Where the kernels may be kept, the best place first."""
    yield Path(platformdirs.user_cache_dir("crossdock")) / "kernels"
    try:
        yield Path(tempfile.gettempdir()) / f"crossdock-{os.geteuid()}"
        yield Path(tempfile.mkdtemp(prefix="crossdock-"))  # another user has made a folder of that name
    except OSError:
        return  # no folder for temporary files can be written to


def _is_private(folder: Path) -> bool:
    """Whether nobody else can put files there. Raises `OSError`."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    if status.st_mode & 0o022:
        folder.chmod(0o700)
    return True


def _is_ours(path: Path) -> bool:
    """Returns whether this user owns the file. This process runs its code, so a file of another user is not trusted."""
    return path.is_file() and not path.is_symlink() and path.stat().st_uid == os.geteuid()


def _compile(target: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / "kernels.so"
        command = [sys.executable, "-m", "ziglang", "cc", *_FLAGS, *target, "-o", str(made)]
        command += map(str, sorted(_SOURCES.glob("*.c")))
        caches = {"ZIG_GLOBAL_CACHE_DIR": f"{scratch}/zig", "ZIG_LOCAL_CACHE_DIR": f"{scratch}/zig"}
        try:
            done = subprocess.run(
                command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KernelsUnavailable(f"the compiler was not done within {_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            raise KernelsUnavailable(f"the compiler failed: {done.stderr.strip()[:500]}")
        made.replace(path)
