"""Runs a worker of `--engine vllm` in the Python that has vLLM. vLLM pins its own torch and dozens of other packages, so it
lives in an environment of its own, often a container's, which needs only `structlog` and `xxhash` beside it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engine.vllm.order import VERSIONS
from runtime.process.exits import ConfigError
from runtime.settings.workers import WorkerSettings

NEEDED: Final = ("vllm", "structlog", "xxhash")
PACKAGES: Final = (
    "proto", "runtime", "worker", "engine", "kvtransfer", "prefill_worker", "decode_worker", "launcher",
)  # fmt: skip
"""Our packages that a worker imports. Only these are shown to the other Python, which has its own versions of the rest."""
_ROOT: Final = Path(__file__).resolve().parents[1]
_LOOK: Final = f"""
from importlib.metadata import version
from importlib.util import find_spec
absent = [name for name in {NEEDED!r} if find_spec(name) is None]
print(*absent, version("vllm") if "vllm" not in absent else "none")
"""
_ENTERED: Final = "_CROSSDOCK_ENTERED"


def enter(settings: WorkerSettings) -> None:
    """If the engine is vLLM and this Python does not have it, run the same command with the one that does, in this process.
    Raises `ConfigError`."""
    if settings.engine != "vllm" or (find_spec("vllm") is not None and not settings.engine_python):
        return
    python = settings.engine_python or python_of_vllm()
    if os.environ.get(_ENTERED) == python:
        return
    check(python)
    os.environ |= {_ENTERED: python, "PYTHONPATH": str(packages_alone(_ROOT))}
    try:
        os.execv(python, [python, *sys.orig_argv[1:]])
    except OSError as error:
        raise ConfigError(f"--engine-python: {python}: {error.strerror}") from None


def check(python: str) -> str:
    """Returns the version of vLLM that this Python has. Raises `ConfigError` with the command that installs what it lacks, or
    if crossdock does not know the version."""
    try:
        ran = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python: {python} does not run: {error}") from None
    if ran.returncode:
        raise ConfigError(f"--engine-python: {python} is no Python: {ran.stderr.strip()[-200:]}")
    *absent, version = ran.stdout.split()
    if absent:
        raise ConfigError(
            f"--engine vllm: {python} lacks {' and '.join(absent)}: {python} -m pip install {' '.join(absent)}"
        )
    if not version.startswith(VERSIONS):
        raise ConfigError(f"--engine vllm: {python} has vLLM {version}, and crossdock runs {' and '.join(VERSIONS)}")
    return version


def python_of_vllm() -> str:
    """The Python that the `vllm` command runs with."""
    command = shutil.which("vllm")
    if command is None:
        raise ConfigError(
            "--engine vllm: there is no vllm command on the PATH, and this Python has no vLLM;"
            " --engine-python names the Python that has it"
        )
    with Path(command).open("rb") as file:
        first = file.readline(4096).decode("utf-8", "replace").strip()
    python = first.removeprefix("#!").strip()
    if not first.startswith("#!") or not Path(python).is_file():
        raise ConfigError(f"--engine vllm: {command} does not say which Python it runs with; give --engine-python")
    return python


def packages_alone(root: Path) -> Path:
    """A folder with our packages and nothing else: installed in `root`, they lie beside all that they were installed with.
    Raises `ConfigError`."""
    if (root / "pyproject.toml").is_file():
        return root  # a checkout
    import platformdirs  # not in the other Python, which has no need of it

    folder = platformdirs.user_cache_path("crossdock") / "packages" / sha256(bytes(root)).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in PACKAGES:
            with contextlib.suppress(FileExistsError):  # workers start at the same time
                (folder / name).symlink_to(root / name)
    except OSError as error:
        raise ConfigError(f"--engine vllm: {folder} cannot be made: {error.strerror}") from None
    return folder
