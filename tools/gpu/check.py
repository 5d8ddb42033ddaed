"""The checks of `scripts/gpu_check`: the machine, the kernels, the engine and KV beside the GPU's floors, the tests, and
answers of whole clusters on one GPU.

    python -m tools.gpu.check [--out FILE] [--device cpu] [MODEL_FOLDER] [PART,PART...]

Each result is a line of JSON that is appended to FILE at once. A part ends with its time, whatever it is doing, and what it has
found is kept; all together end within nine minutes. Prints a summary of at most 40 lines last. Status 0: all good; 1: something
is not; 77: there is no GPU here.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from tools.gpu.record import record, shortened

ROOT = Path(__file__).parents[2]
NO_GPU = 77
ALL_S = 535.0
PARTS_S = {
    "smoke": 60.0, "engine": 150.0, "kernels": 80.0, "kv": 110.0, "faults": 80.0, "tests": 150.0, "answers": 90.0, "host": 25.0,
    "vllm": 470.0,
}  # fmt: skip
"""Parts in their order, and the seconds that each may take."""
MODULES = {
    "engine": "engine_bench",
    "kernels": "kernel_bench",
    "kv": "bench",
    "host": "host_time",
    "vllm": "vllm_answers",
}
TESTS = {"tests": ["tests/gpu", "-k", "not killed"], "faults": ["tests/gpu/test_pairs.py", "-k", "killed"]}
LINES_MAX = 40
FIGURES = (
    "ratio",
    "step_ms",
    "ms",
    "tokens_per_s",
    "TFLOP_s",
    "GB_s",
    "first_s",
    "difference",
    "slower_ms",
    "p99_beside_ms",
    "error",
)


def command_of(part: str, model: str, report: Path) -> list[str]:
    if part in TESTS:
        spread = ["-n", "6"] if importlib.util.find_spec("xdist") else []
        if importlib.util.find_spec("pytest_timeout"):  # so that a test that hangs leaves time for the others
            spread.append(f"--timeout={PARTS_S[part] / 2 - 5:.0f}")
        options = ["-q", "-rf", "--no-header", "-p", "no:cacheprovider", f"--junitxml={report}", *spread]
        return ["pytest", *options, *TESTS[part]]
    return [f"tools.gpu.{MODULES.get(part, part)}", *([model] if part in ("answers", "vllm") and model else [])]


def run_part(part: str, model: str, limit_s: float) -> None:
    """Runs a part: it records lines of its own, and this adds one about the part itself."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words, report = Path(folder, "words"), Path(folder, "report.xml")
        with words.open("wb") as file:
            # A group of its own, so that all it started ends with it.
            process = subprocess.Popen(
                [sys.executable, "-m", *command_of(part, model, report)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            status: int | str
            try:
                status = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                status = f"not done in {limit_s:.0f} s"
                end_group(process)
        text = words.read_text(errors="replace")
        if part in TESTS:
            record_tests(part, report, text)
        failed = {} if status == 0 else {"error": str(status), "words": text[-3000:]}
        record(part, "part", took_s=round(time.monotonic() - began, 1), **failed)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends the group as Ctrl-C does first, so that pytest writes its report."""
    for signal_number in (2, 9):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(timeout=8)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def record_tests(part: str, report: Path, text: str) -> None:
    """Records the tests from pytest's report, which it writes at its end, or else from its output."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        found = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", text)}
        progress = re.findall(r"^[.sFExX]+", text, re.MULTILINE)
        record(part, "tests", error="there is no report", counts=found, progress="".join(progress))
        return
    for case in cases:
        bad = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        values = {} if bad is None else {"error": shortened(f"{bad.get('message')}")}
        name = f"{case.get('classname')}::{case.get('name')}"
        record(part, name, took_s=float(case.get("time") or 0), skipped=case.find("skipped") is not None, **values)
    if all(case.find("skipped") is not None for case in cases):
        record(part, "tests", error="no test ran")


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each part, then the failures, then as many figures of each part."""
    lines, bad, figures = [], [], []
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        errors = [row for row in own if "error" in row]
        took_s = next((row["took_s"] for row in own if row["name"] == "part"), 0.0)
        state = "good" if not errors else f"NOT GOOD: {len(errors)} of {len(own)}"
        lines.append(f"{part:<9}{state:<24}{len(own):>4} results{took_s:>8.1f} s")
        bad += [f"  {part}, {row['name']}: {' '.join(str(row['error']).split())}"[:150] for row in errors]
        if part not in (*TESTS, "smoke"):
            figures.append([f"  {part}, {row['name']}: {said}"[:120] for row in own if (said := figures_of(row))])
    left = LINES_MAX - len(lines)
    if len(bad) > left // 2:
        bad[left // 2 - 1 :] = [f"  and {len(bad) - left // 2 + 1} more that are not good"]
    left -= len(bad)
    return [*lines, *bad, *(line for own in figures for line in own[: left // len(figures)])]


def figures_of(row: dict[str, Any]) -> str:
    found = [f"{name} {row[name]:.4g}" for name in FIGURES if isinstance(row.get(name), int | float)]
    return "" if "error" in row else ", ".join(found)


def why_not(device: str) -> str:
    if importlib.util.find_spec("torch") is None:
        return "there is no torch here; name an interpreter that has one in CROSSDOCK_PYTHON"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here; nothing was checked"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", default="gpu_check.jsonl", help="File to which each result is appended.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run at tiny sizes.")
    parser.add_argument("model", nargs="?", default="", help="Folder of a model to answer with, besides a tiny one.")
    parser.add_argument(
        "parts", nargs="?", default="", help=f"Some of {','.join(PARTS_S)}; else all but vllm that there is time for."
    )
    asked = parser.parse_args(arguments)
    if not asked.parts and asked.model and set(asked.model.split(",")) <= set(PARTS_S):
        asked.model, asked.parts = "", asked.model
    wanted = asked.parts.split(",") if asked.parts else [part for part in PARTS_S if part != "vllm"]
    if unknown := sorted(set(wanted) - set(PARTS_S)):
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(PARTS_S)}")
    if why := why_not(asked.device):
        sys.stderr.write(f"gpu_check: {why}\n")
        return NO_GPU
    out = Path(asked.out).resolve()
    os.environ |= {"CROSSDOCK_CHECK_OUT": str(out), "CROSSDOCK_CHECK_DEVICE": asked.device, "HF_HUB_OFFLINE": "1"}
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    began, seen = time.monotonic(), len(out.read_text().splitlines()) if out.exists() else 0
    for part in wanted:
        limit_s = min(PARTS_S[part], ALL_S - (time.monotonic() - began))
        if limit_s < 10.0:
            record(part, "part", error="no time left", took_s=0.0)
        else:
            run_part(part, asked.model, limit_s)
    rows = [json.loads(line) for line in out.read_text().splitlines()[seen:]]
    sys.stdout.write("\n".join(summary(rows)) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
