"""The guide to the ratio lab, from a measurement to an applied ratio, with a tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import tiny_models
from tests.test_tidy import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    tiny_models.make("llama", folder / "model", max_position_embeddings=1024)
    return folder


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "launcher.cli", *words]


def crossdock(folder: Path, *words: str, allowed: tuple[int, ...] = (0,)) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        command(*words), cwd=folder, capture_output=True, text=True, timeout=400, check=False, env=environment
    )
    assert done.returncode in allowed, done.stdout + done.stderr
    return done.stdout


def test_calibration_feeds_tune_and_check(folder: Path) -> None:
    """Calibration gives a profile, tune ranks ratios with it, and a live check compares them with measurements."""
    said = crossdock(folder, "calibrate", "model", "--rounds", "1", "--out", "profile.json")
    assert "decode sequences" in said
    profile = json.loads((folder / "profile.json").read_text())
    assert profile["prefill"]["curve"]["ms"] == sorted(profile["prefill"]["curve"]["ms"])
    assert profile["transfer"]["bytes_per_token"] > 0
    assert profile["about"]["versions"]["torch"]
    mix = (
        "--rate",
        "2",
        "--duration",
        "120",
        "--prompt-tokens",
        "lognormal:120,0.5",
        "--output-tokens",
        "uniform:8-40",
    )
    crossdock(folder, "tune", *mix, "--workers", "3", "--out", "best.json", "--html", "best.html")
    best = json.loads((folder / "best.json").read_text())
    assert best["ranked"]
    words = ("tune", "check", "best.json", "--duration", "20", "--model", "model", "--ratios", "1P1D,2M", "--json")
    checked = json.loads(crossdock(folder, *words, allowed=(0, 3)))
    assert "best live" in checked["verdict"]["words"]
    runs = checked["runs"]
    assert [run["ratio"] for run in runs] == ["1P1D", "2M"]
    for run in runs:
        assert run["requests"] > 10
        for metric in ("ttft_ms", "tpot_ms"):
            assert run[metric]["p50"]["measured"] > 0
            # No assertion on how near: that is measured on a quiet machine, see docs/results.md.
            assert run[metric]["p50"]["predicted"] > 0


def test_ctrl_c_leaves_nothing_behind(folder: Path) -> None:
    """Ctrl-C ends a calibration and leaves no process and no file."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        command("calibrate", "model", "--out", "stopped.json"),
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    children: list[psutil.Process] = []
    while len(children) < 4 and time.monotonic() < deadline:
        assert run.poll() is None
        try:
            run.wait(0.5)
        except subprocess.TimeoutExpired:
            children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not (folder / "stopped.json").exists()
