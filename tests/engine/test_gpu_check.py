"""`scripts/gpu_check` without a GPU: what it runs, on a CPU at tiny sizes; what it keeps, and what it says."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.gpu.step_input import StepInput, StepShape
from tests.e2e.parts import parts

ROOT = Path(__file__).parents[2]


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("tools.gpu")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of results. The modules are imported anew, as for a CPU."""
    forget()
    monkeypatch.setenv("CROSSDOCK_CHECK_DEVICE", "cpu")
    monkeypatch.setenv("CROSSDOCK_CHECK_OUT", str(tmp_path / "out.jsonl"))
    yield tmp_path / "out.jsonl"
    forget()


def check() -> ModuleType:
    from tools.gpu import check as module

    return module


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_each_draw_mode_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the one before had the same rows."""
    from tools.gpu import engine_bench

    runner = engine_bench.make_runner(2, engine_bench.make_weights(1))
    shapes: list[StepShape] = []
    fill = StepInput.fill
    monkeypatch.setattr(StepInput, "fill", lambda self, rows: shapes.append(fill(self, rows)) or shapes[-1])
    for name, samples, filters in (
        ("greedy", False, False), ("top_p", True, True), ("temperature", True, False), ("greedy", False, False),
        ("top_k", True, True),
    ):  # fmt: skip
        shapes.clear()
        engine_bench.decode_steps(runner, 2, engine_bench.SAMPLINGS[name], steps=3)
        assert [(shape.samples, shape.filters) for shape in shapes] == [(samples, filters)] * 3, name
        assert [len(shape.joins) for shape in shapes] == [2, 0, 0], name


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tiny_smoke_and_engine_parts_pass(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The smoke and engine parts pass on a CPU at tiny sizes and record their rows."""
    assert check().main(["--device", "cpu", "--out", str(out), "smoke,engine"]) == 0, out.read_text()
    found = {(row["part"], row["name"]) for row in lines(out)}
    assert {("smoke", "machine"), ("smoke", "add_norm"), ("engine", "decode 2, top_p"), ("engine", "part")} <= found
    assert {("engine", "prefill 70"), ("engine", "isolation"), ("engine", "recompiles")} <= found
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("smoke") and "good" in said[0] and len(said) <= 40


@pytest.mark.long
@pytest.mark.timeout(900)
def test_remaining_parts_pass_on_cpu(out: Path) -> None:
    """The parts kernels, kv, host and answers pass on a CPU."""
    assert check().main(["--device", "cpu", "--out", str(out), "kernels,kv,host,answers"]) == 0, out.read_text()


def test_part_at_time_limit_keeps_results(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that runs out of time keeps the rows that it recorded before."""
    (tmp_path / "slow_part.py").write_text(
        "import time\nfrom tools.gpu.record import record\nrecord('kernels', 'first', GB_s=3.0)\nprint('busy', flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check(), "command_of", lambda *_: ["slow_part"])
    check().run_part("kernels", "", 4.0)
    first, last = lines(out)
    assert first == {"part": "kernels", "name": "first", "GB_s": 3.0}
    assert last["error"] == "not done in 4 s" and last["words"].startswith("busy")


def test_incomplete_reports_are_read(tmp_path: Path, out: Path) -> None:
    """Test results are recorded from a report, and from the output if there is no report."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one" time="1.5"/><testcase classname="a" name="two" time="2">'
        '<failure message="assert 1 == 2">...</failure></testcase></testsuite></testsuites>'
    )
    check().record_tests("tests", report, "")
    one, two = lines(out)
    assert one == {"part": "tests", "name": "a::one", "took_s": 1.5, "skipped": False}
    assert two["error"] == "assert 1 == 2"
    out.unlink()
    check().record_tests("tests", tmp_path / "absent.xml", "..F.s\n1 failed, 3 passed in 2 s\n")
    [row] = lines(out)
    assert row["progress"] == "..F.s" and row["counts"] == {"failed": 1, "passed": 3} and row["error"]


def test_summary_is_short_and_names_failures() -> None:
    """The summary has at most forty lines and names the failures."""
    rows = [{"part": part, "name": f"{part} {n}", "GB_s": 1.0} for part in check().PARTS_S for n in range(50)]
    said = check().summary([*rows, {"part": "kv", "name": "nccl", "error": "RuntimeError: no\npeer"}])
    assert len(said) <= 40 and "  kv, nccl: RuntimeError: no peer" in said
    assert any("engine, engine 0: GB_s 1" in line for line in said) and any("host, host 0" in line for line in said)
    everything = check().summary([*rows, *({"part": "tests", "name": f"t{n}", "error": "bad"} for n in range(90))])
    assert len(everything) <= 40 and any("more that are not good" in line for line in everything)
    assert check().summary([]) == []


def test_parts_and_model_are_distinguished(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    """Arguments are recognised as parts or as a model path, and a model alone runs all parts."""
    ran: list[tuple[str, str]] = []
    module = check()
    monkeypatch.setattr(module, "run_part", lambda part, model, limit_s: ran.append((part, model)))
    out.touch()
    for arguments, expected in (
        (["smoke,kernels"], [("smoke", ""), ("kernels", "")]),
        (["/models/one", "answers"], [("answers", "/models/one")]),
        (["/models/one"], [(part, "/models/one") for part in module.PARTS_S if part != "vllm"]),
        (["/models/one", "vllm"], [("vllm", "/models/one")]),
    ):
        ran.clear()
        module.main(["--device", "cpu", "--out", str(out), *arguments])
        assert ran == expected
    with pytest.raises(SystemExit):
        module.main(["--device", "cpu", "--out", str(out), "/models/one", "smoke,nonsense"])
    assert sum(module.PARTS_S[part] for part in ("smoke", "engine", "kernels")) <= module.ALL_S < 540
    assert sum(module.PARTS_S[part] for part in ("kv", "faults", "answers")) <= module.ALL_S
    assert sum(module.PARTS_S[part] for part in ("tests", "host")) <= module.ALL_S
    assert module.PARTS_S["vllm"] <= module.ALL_S


def test_wheels_are_carried_without_pip(tmp_path: Path) -> None:
    """A Python that has no pip: it only unpacks, and finds what was in the wheel."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "HERE = True\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n"-m zipfile "*) exec "{sys.executable}" "$@" ;;\n'
        f'"-m tools.gpu.check smoke") exec "{sys.executable}" -c "import carried, tools.gpu.record; print(carried.HERE)" ;;\n'
        'esac\necho "asked for $*" >&2\nexit 9\n'
    )
    python.chmod(0o755)
    environment = {**os.environ, "WHEELS": str(wheels), "CROSSDOCK_PYTHON": str(python)}
    done = subprocess.run(
        [ROOT / "scripts/gpu_check", "smoke"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_ended_cluster_process_fails_at_once(tmp_path: Path) -> None:
    """The wait for a cluster ends with an error when one of its processes has ended."""
    with parts(tmp_path) as cluster:
        cluster.start("absent_role")
        with pytest.raises(AssertionError, match=r"(?s)absent_role ended with status 1\n.*No module named"):
            cluster.wait_registered(2)


def test_missing_gpu_is_reported(out: Path) -> None:
    """The check ends with status NO_GPU on a machine that has no GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert check().main(["--out", str(out)]) == check().NO_GPU
