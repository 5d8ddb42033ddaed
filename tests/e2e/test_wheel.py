"""The wheel alone, without the checkout, brings a cluster up that answers a question."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_tidy import EVERYTHING, ROOT


def _run(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def installed(folder: Path) -> Path:
    """A folder with what the wheel has; what crossdock needs is that of this environment."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "tests", "docs", "build", "*.egg-info", "__pycache__")
    )
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    _run(folder, *pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(source))
    [wheel] = (folder / "dist").glob("crossdock-*.whl")
    _run(folder, *pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    return site


def test_wheel_serves_an_answer(tiny: Path, tmp_path: Path) -> None:
    """The installed wheel serves an answer and contains neither tests nor tools."""
    site = installed(tmp_path)
    found = {path.name for path in site.iterdir() if path.is_dir() and not path.name.endswith(".dist-info")} - {"bin"}
    assert found == EVERYTHING, "neither tests nor tools are in it"
    where = {
        "PYTHONPATH": str(site),
        "XDG_STATE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "CROSSDOCK_KV_GIB": "0.5",
    }
    python = (sys.executable, "-P")
    assert str(site) in _run(tmp_path, *python, "-c", "import launcher; print(launcher.__file__)", **where)
    said = _run(tmp_path, *python, "-m", "launcher.cli", "serve", str(tiny), "--port", "0", "--once", **where)
    assert "\nA " in said

    # Another distribution with a package of the same name, installed into the same environment.
    (site / "proto" / "errors.py").write_text("raise ImportError('no such thing')\n")
    other = site / "proto_plus-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: proto-plus\nVersion: 1.0\n")
    (other / "RECORD").write_text("proto/__init__.py,,\nproto/errors.py,,\n")
    done = subprocess.run(
        [*python, "-m", "launcher.cli", "--version"],
        cwd=tmp_path, env=os.environ | where, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "proto-plus has installed files over crossdock's package 'proto'" in done.stderr
