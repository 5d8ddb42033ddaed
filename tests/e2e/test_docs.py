"""The commands of README.md and docs/ that can run on one machine, run: against a small cluster, in the order of the pages.
Addresses and the model's name are put in. `tests/launcher/test_docs.py` checks the options of all the others."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.cluster import units
from launcher.local.ports import free_port
from tests.documents import ROOT, Command, blocks, commands
from tests.e2e.live import Live, live
from tests.e2e.netns import network
from tests.e2e.test_launch_ssh import launched

RUN_HERE = re.compile(
    r"curl |crossdock (--help|batch|status|tenants|usage|explain|replay|simulate|drain|cluster|keys)\b"
    r"|scripts/install_units .*--dry-run"
)
"""Of these, what names a host of a guide needs that host."""
GUIDE = "docs/multi-node.md"
RUN = [
    command
    for command in commands()
    if RUN_HERE.match(command.text.removeprefix("sudo ")) and "tcp://10.0.0.1" not in command.text
]
ADDRESS = re.compile(r"http://(127\.0\.0\.1|10\.0\.0\.1):8000")
SHIM = '#!/bin/sh\nexec env PYTHONPATH="{root}" "{python}" -P -m launcher.cli "$@"\n'


@dataclass
class Desk:
    """A folder with the files of the pages, and a cluster that has answered one request."""

    folder: Path
    cluster: Live
    request: str
    made: dict[str, str] = field(default_factory=dict)
    """Ids of the last file and batch that a command made, by their beginnings."""

    def run(self, text: str) -> str:
        said = self._run(text)
        self.made |= {found[2]: found[1] for found in re.finditer(r'"id":"((file-|batch_)[0-9a-f]{28})"', said)}
        return said

    def _run(self, text: str) -> str:
        text = ADDRESS.sub(self.cluster.base_url, text).removeprefix("sudo ")
        for start, made in self.made.items():
            text = re.sub(rf"{start}[0-9a-f]{{28}}", made, text)
        text = re.sub(r'"model": "[\w/.-]+"', f'"model": "{self.cluster.model_id}"', text)
        text = re.sub(r"cmpl-[0-9a-f]{24}", self.request, text)
        return sh(text, self.folder, {"XDG_STATE_HOME": str(self.cluster.home)})


def sh(text: str, folder: Path, more: dict[str, str]) -> str:
    """What it printed. It must end with status 0."""
    environment = {"PATH": f"{folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environment |= {"CROSSDOCK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "COLUMNS": "150", **more}
    done = subprocess.run(
        ["sh", "-ec", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


def furnish(folder: Path) -> None:
    (folder / "bin").mkdir()
    shim = folder / "bin" / "crossdock"
    shim.write_text(SHIM.format(root=ROOT, python=sys.executable))
    shim.chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text("# crossdock is on the path already\n")
    for name in ("docs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    for block in blocks("toml"):
        for mark, name in (("[tenants.", "tenants.toml"), ("[hosts.", "cluster.toml")):  # others are parts of these
            if block.page in ("docs/tenants.md", GUIDE) and mark in block.text:
                here = str(Path(sys.executable).with_name("crossdock"))
                (folder / name).write_text(block.text.replace("/opt/crossdock/.venv/bin/crossdock", here))


@pytest.fixture(scope="module")
def desk(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    furnish(folder)
    event_log, usage = folder / "events.log", folder / "state" / "crossdock" / "usage.sqlite"
    usage.parent.mkdir(parents=True)
    (lines,) = blocks("jsonl")
    (folder / "requests.jsonl").write_text(lines.text.replace("smollm2-135m-instruct", tiny.name))
    with live(tiny, folder / "state", "--event-log", str(event_log), "--usage-db", str(usage)) as cluster:
        request = cluster.complete([1, 2, 3], 5)["id"]
        yield Desk(folder, cluster, request)


SAYS = {
    "curl -N": "data: [DONE]",
    "curl http://127.0.0.1:8000/v1/models": "tiny-llama",
    "curl -i": "200 OK",
    "curl http://127.0.0.1:8000/v1/files -F": '"purpose":"batch"',
    "curl http://127.0.0.1:8000/v1/batches -H": '"status":"validating"',
    "curl http://127.0.0.1:8000/v1/batches/batch_": '"request_counts"',
    "curl 'http://127.0.0.1:8000/v1/files?purpose=batch_output": '"object":"list"',
    "crossdock batch run": "2 of 2 answered",
    "crossdock status --json": '"workers"',
    "crossdock tenants key": "sk-",
    "crossdock tenants check": "acme/ann",
    "crossdock usage --tenant ": "[",
    "crossdock usage --since": "default",
    "crossdock keys new": "Wrote to",
    "crossdock cluster check": "beta",
    "crossdock drain decode-0 --undo": "takes requests again",
    "crossdock explain ledger cmpl": "finished",
}


@pytest.mark.parametrize("command", RUN, ids=str)
def test_documented_command_runs(desk: Desk, command: Command) -> None:
    """Each command of the documentation runs and prints the text expected of it."""
    if "install_units" in command.text and sys.executable.startswith(units._ABSENT):
        pytest.skip("no unit sees the folder of this clone, and the command says so")
    said = desk.run(command.text)
    expected = [text for start, text in SAYS.items() if command.text.startswith(start)]
    assert all(text in said for text in expected), said


def test_quick_start_program_runs(desk: Desk) -> None:
    """The Python program of the quick start runs and prints an answer."""
    pytest.importorskip("openai")
    (program,) = blocks("python")
    source = ADDRESS.sub(desk.cluster.base_url, program.text).replace("smollm2-135m-instruct", desk.cluster.model_id)
    (desk.folder / "ask.py").write_text(source)
    assert sh(f'"{sys.executable}" ask.py', desk.folder, {}).strip()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_hosts_guide_works_literally(tiny: Path, tmp_path: Path) -> None:
    """Each host is a network namespace, so `launch_ssh` needs no ssh; addresses and the model are put in."""
    steps = [
        one.text for one in commands() if one.page == GUIDE and one.heading == "Two hosts" and "/opt/" not in one.text
    ]
    assert [one.split()[1] for one in steps if one.startswith("scripts/launch_ssh")] == [
        "--help",
        "up",
        "status",
        "logs",
        "down",
    ]
    (text,) = (one.text for one in blocks("toml") if one.page == GUIDE and "[hosts." in one.text)
    with network() as net:
        for name, address in (("alpha", "10.0.0.1"), ("beta", "10.0.0.2")):
            text = text.replace(f'"{address}"', f'"{net.host(name)}"\nnetns = "{net.inside(name)[-1]}"')
        alpha = re.search(r'address = "([\d.]+)"', text)
        assert alpha is not None
        text = text.replace("/srv/models/llama", str(tiny)).replace("/opt/crossdock/.venv/bin/crossdock", "crossdock")
        furnish(tmp_path)
        with launched(tmp_path, text + "[worker]\nkv_gib = 0.25\n") as cluster:
            said = []
            for step in steps:
                step = ADDRESS.sub(f"http://{alpha[1]}:8000", step).replace('"llama"', f'"{tiny.name}"')
                said.append(sh(step, tmp_path, {"XDG_STATE_HOME": str(cluster.state)}))
            assert f"Base URL   http://{alpha[1]}:8000/v1" in said[4]
            assert said[5].count("up (pid") == 2 and "beta.decode-0" in said[5]
            assert "data: [DONE]" in said[7]
            assert said[9].count("is down") == 2
            assert not cluster.processes()


@pytest.mark.long
def test_one_machine_guide_works(tiny: Path, tmp_path: Path) -> None:
    """The guide's steps to try a cluster file on one machine bring the cluster up and down."""
    steps = [one.text for one in commands() if one.page == GUIDE and one.heading == "Try a file on one machine"]
    (text,) = (one.text for one in blocks("toml") if one.page == GUIDE and "[hosts." in one.text)
    for old, new in (("10.0.0.", "127.0.0."), ("/srv/models/llama", str(tiny))):
        text = text.replace(old, new)
    text += (
        f"[worker]\nkv_gib = 0.25\n[ports]\ncoordinator = {free_port('127.0.0.1')}\nhttp = {free_port('127.0.0.1')}\n"
    )
    furnish(tmp_path)
    with launched(tmp_path, text) as cluster:
        sh("crossdock keys new keys", tmp_path, {})
        up, down = (sh(step, tmp_path, {"XDG_STATE_HOME": str(cluster.state)}) for step in steps)
        assert "Base URL   http://127.0.0.1:" in up and down.count("is down") == 2
