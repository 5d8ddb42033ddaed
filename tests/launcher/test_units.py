"""The systemd units of a host: systemd takes them, they are shut in well, and their options are those of the plan."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cluster import install_units, units
from launcher.cluster.file import ClusterError, parse
from launcher.cluster.plan import MODULES, HostPlan, plan_host, watchdog_s_of
from launcher.cluster.settings import UnitsSettings
from launcher.cluster.units import OPTIONS, UNITS, Installed
from runtime.link.keys import make
from runtime.settings.options import SettingsError, load

EXPOSURE_MAX = 3.0
read_text = Path.read_text
TEXT = """
model = "/srv/models/llama"
{security}
[hosts.a]
address = "10.0.0.1"
coordinator = true
gateways = 2
workers = "1P2D"
gpus = [0, 1, "GPU-1f"]
[hosts.b]
address = "10.0.0.2"
workers = "1P1D"
cores = "0-7"
[coordinator]
usage_db = "/var/lib/crossdock/usage.db"
[gateway]
api_keys = ['a "quoted" $KEY`x\\']
[decode]
prefix_cache = false
[autopilot]
mode = "on"
profile = "/srv/profile.json"
"""
ON = Installed(
    python="/bin/sh", prefixes=("/opt/venv",), root="/opt/crossdock"
)  # units call what exists; any program will do
NAMES = ("coordinator", "gateway", "prefill", "decode", "client")
KEYS = tuple(name + end for name in NAMES for end in (".key", ".key_secret"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation is where a unit can see it; this clone may lie in /tmp, or have a blank in its path."""
    monkeypatch.setattr(install_units, "_environment", lambda command: (ON.python, ON.prefixes, ON.root))


def plan(host: str, text: str = TEXT) -> HostPlan:
    folder = Path("/etc/crossdock")
    return plan_host(parse(text.format(security="insecure = true"), folder), host, "/srv/models/llama")


def write(root: Path, files: dict[str, str]) -> list[Path]:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return sorted((root / UNITS).glob("crossdock*.*"))


def analyze(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("systemd is not installed")
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("keys", ["", "/etc/crossdock/keys"])
@pytest.mark.parametrize("host", ["a", "b"])
def test_units_are_valid_and_confined(tmp_path: Path, host: str, keys: str) -> None:
    """systemd accepts the units and rates their exposure as low."""
    on = Installed(ON.python, ("/home/me/venv",), ON.root, keys, KEYS if keys else ())
    files = [path for path in write(tmp_path, units.render(plan(host), on)) if path.is_file()]
    assert len(files) == {"a": 6, "b": 3}[host]
    done = analyze("verify", "--man=no", *map(str, files))
    assert (done.returncode, done.stderr) == (0, "")
    for path in files:
        if path.suffix == ".service":
            said = analyze(
                "security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", "--no-pager", str(path)
            )
            found = re.search(r"exposure level for \S+ ([\d.]+)", said.stdout)
            assert said.returncode == 0 and found and float(found[1]) <= EXPOSURE_MAX, said.stdout


def test_invalid_unit_is_an_error(tmp_path: Path) -> None:
    """A unit that systemd does not accept is an error that names the cause."""
    analyze("--version")
    files = units.render(plan("b"), Installed("/nowhere/python", (), "/opt/crossdock"))
    write(tmp_path, files)
    with pytest.raises(install_units.CannotInstall, match="/nowhere/python"):
        install_units.verify(tmp_path, [path for path in files if path.endswith(".service")])


@pytest.mark.parametrize("host", ["a", "b"])
def test_unit_options_match_the_plan(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment files of the units load as the plan's settings."""
    for name in [name for name in os.environ if name.startswith("CROSSDOCK_")]:
        monkeypatch.delenv(name)
    files = units.render(plan(host), ON)
    for process in plan(host).processes:
        name = process.role if process.role in ("coordinator", "autopilot") else f"{process.role}-{process.index}"
        values = dict(line.split("=", 1) for line in files[f"{OPTIONS}/{name}.env"].splitlines())
        with monkeypatch.context() as patched:
            for key, value in values.items():
                patched.setenv(key, re.sub(r"\\(.)", r"\1", value[1:-1]))
            role = {"role": process.role} if process.role in ("prefill", "decode") else {}
            assert load(type(process.settings), role) == process.settings


def test_instance_files_hold_differences() -> None:
    """Options that differ between workers are in the files of their instances."""
    files = units.render(plan("a"), ON)
    assert 'VISIBLE_DEVICES="0"' in files[f"{OPTIONS}/prefill-0.env"]
    assert 'VISIBLE_DEVICES="GPU-1f"' in files[f"{OPTIONS}/decode-1.env"]
    assert [path for path, text in files.items() if "GLIBC_TUNABLES" in text] == [f"{OPTIONS}/prefill-0.env"]
    assert "DeviceAllow=char-nvidia rw" in files[f"{UNITS}/crossdock-decode@.service"]
    names = ("coordinator", "gateway@0", "gateway@1", "prefill@0", "decode@0", "decode@1", "autopilot")
    wants = " ".join(f"crossdock-{name}.service" for name in names)
    assert f"Wants={wants}\n" in files[f"{UNITS}/crossdock.target"]
    assert "TimeoutStopSec=15\n" in files[f"{UNITS}/crossdock-coordinator.service"]
    assert "TimeoutStopSec=35\n" in files[f"{UNITS}/crossdock-decode@.service"], "its streams may take 20 s to move on"
    files = units.render(plan("b"), ON)
    assert "CPUAffinity=0-7\n" in files[f"{UNITS}/crossdock-decode@0.service.d/cores.conf"]
    assert 'CPU_CORES="4-7"' in files[f"{OPTIONS}/decode-0.env"]
    assert "PrivateDevices=yes" in files[f"{UNITS}/crossdock-decode@.service"]


VLLM = '[worker]\nengine = "vllm"\nengine_python = "{}"\nvllm_args = "--tensor-parallel-size 2"\n'


def test_unit_sees_all_gpus_of_its_worker(tmp_path: Path) -> None:
    """The unit of a worker with several GPUs is valid and has them all; its vLLM must lie where a unit sees it."""
    several = TEXT.replace('[0, 1, "GPU-1f"]', '[[0, 1], [2, 3], [4, "GPU-1f"]]')
    several = several.replace('workers = "1P1D"\ncores = "0-7"', 'workers = "1P1D"')
    files = units.render(plan("a", several + VLLM.format("/opt/vllm/bin/python")), ON)
    assert 'VISIBLE_DEVICES="4,GPU-1f"' in files[f"{OPTIONS}/decode-1.env"]
    assert 'CROSSDOCK_VLLM_ARGS="--tensor-parallel-size 2"' in files[f"{OPTIONS}/decode-1.env"]
    assert "DeviceAllow=char-nvidia rw" in files[f"{UNITS}/crossdock-decode@.service"]
    done = analyze("verify", "--man=no", *(str(path) for path in write(tmp_path, files) if path.is_file()))
    assert (done.returncode, done.stderr) == (0, "")
    for hidden in ("/home/me/vllm/bin/python", "vllm/bin/python", "/tmp/python"):
        with pytest.raises(ClusterError, match=re.escape(f"[prefill] engine_python: a unit does not see {hidden}")):
            units.render(plan("a", several + VLLM.format(hidden)), ON)


def test_standby_has_its_own_unit() -> None:
    """A standby coordinator has its own unit and name, and the same options otherwise."""
    files = units.render(plan("a", TEXT.replace("[coordinator]\n", "[coordinator]\nstandby = true\n")), ON)
    pair = [files[f"{OPTIONS}/coordinator{kind}.env"] for kind in ("", "-standby")]
    assert all('CROSSDOCK_STANDBY="true"' in one for one in pair)
    assert [re.findall(r'_NAME="(.*)"', one) for one in pair] == [["coordinator"], ["coordinator-1"]]
    assert pair[0].replace('"coordinator"', '"coordinator-1"') == pair[1]
    own = f"{UNITS}/crossdock-coordinator-standby.service"
    assert f"EnvironmentFile=/{OPTIONS}/coordinator-standby.env" in files[own] and units.is_ours(own)
    assert "crossdock-coordinator.service crossdock-coordinator-standby.service" in files[f"{UNITS}/crossdock.target"]


def test_unit_gets_only_own_secret_key() -> None:
    """Each unit gets its own role's secret key and no other."""
    on = Installed(ON.python, (), ON.root, "/etc/crossdock/keys", KEYS)
    for role in ("coordinator", "gateway", "prefill", "decode", "autopilot"):
        text = units.render(plan("a"), on)[f"{UNITS}/{units.template(role)}"]
        assert re.findall(r"LoadCredential=(\w+)\.key_secret:/etc/crossdock/keys/(\w+)\.key_secret", text) == [
            ("client" if role == "autopilot" else role,) * 2
        ]
        assert len(re.findall(r"LoadCredential=\w+\.key:", text)) == len(NAMES)
        assert "--keys ${CREDENTIALS_DIRECTORY}" in text
    with pytest.raises(ClusterError, match=re.escape("has no coordinator.key_secret")):
        units.render(plan("a"), Installed(ON.python, (), ON.root, "/etc/crossdock/keys", ("decode.key_secret",)))


def test_impossible_unit_settings_are_refused() -> None:
    """Paths that a confined unit could not read or write are refused."""
    with pytest.raises(
        ClusterError, match=re.escape("[coordinator] usage_db: a unit can write to /var/lib/crossdock only")
    ):
        units.render(plan("a", TEXT.replace("/var/lib/crossdock", "/tmp")), ON)
    with pytest.raises(ClusterError, match=re.escape("[coordinator] event_log: a unit can write to")):
        units.render(plan("a", TEXT.replace("usage_db =", "event_log = '/tmp/events'\nusage_db =")), ON)
    with pytest.raises(ClusterError, match=re.escape("[gateway] tenants: ~/t.toml means another folder")):
        units.render(plan("a", TEXT.replace("[gateway]", "[gateway]\ntenants = '~/t.toml'")), ON)
    with pytest.raises(ClusterError, match="cannot stand in a unit"):
        units.render(plan("b"), Installed("/opt/my venv/bin/python", (), "/opt"))
    with pytest.raises(ClusterError, match=re.escape("/tmp/venv: a unit has a /tmp of its own")):
        units.render(plan("b"), Installed(ON.python, ("/tmp/venv",), ON.root))
    with pytest.raises(ClusterError, match="line break"):
        units.render(plan("a", 'model_id = "a\\nb"' + TEXT), ON)


@pytest.mark.usefixtures("elsewhere")
def test_reinstall_keeps_the_users_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second installation replaces its own files and keeps the administrator's."""
    path, root = tmp_path / "cluster.toml", tmp_path / "root"

    def install(text: str, *, dry_run: bool = False) -> str:
        path.write_text(text.format(security="insecure = true"))
        install_units.run(UnitsSettings(cluster_file=str(path), on_host="b", dest=str(root), dry_run=dry_run))
        return capsys.readouterr().out

    assert "ExecStart=" in install(TEXT, dry_run=True) and not root.exists()
    install(TEXT)
    (root / UNITS / "crossdock-prefill@.service.d").mkdir()
    own = root / UNITS / "crossdock-prefill@.service.d/mine.conf"
    own.write_text("[Service]\nNice=1\n")
    assert (root / OPTIONS / "decode-0.env").stat().st_mode & 0o777 == 0o600
    said = install(TEXT.replace('"1P1D"', '"2P0D"'))
    assert (
        f"remove {root / OPTIONS}/decode-0.env" in said and f"keep   {root / UNITS}/crossdock-prefill@.service" in said
    )
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert not [name for name in there if "decode" in name]
    assert f"{OPTIONS}/prefill-1.env" in there and own.exists(), "a drop-in of the operator's own is left alone"


@pytest.mark.usefixtures("elsewhere")
def test_unreadable_units_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that may not be read are reported with their path."""
    path, root = tmp_path / "cluster.toml", tmp_path / "root"
    path.write_text(TEXT.format(security="insecure = true"))
    settings = UnitsSettings(cluster_file=str(path), on_host="b", dest=str(root))
    install_units.run(settings)
    env = root / OPTIONS / "decode-0.env"
    env.write_bytes(b"\xff")
    install_units.run(settings)
    assert "CROSSDOCK_" in env.read_text()

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied", str(env))  # as for everyone but root

    monkeypatch.setattr(Path, "read_text", lambda at, *a, **k: refuse() if at == env else read_text(at, *a, **k))
    with pytest.raises(install_units.CannotInstall, match=r"decode-0\.env: Permission denied"):
        install_units.run(settings)


@pytest.mark.usefixtures("elsewhere")
def test_only_role_keys_are_credentials(tmp_path: Path) -> None:
    """Other key files in the folder do not become credentials."""
    make(tmp_path / "keys", ["coordinator", "gateway", "prefill", "decode"])
    (tmp_path / "keys" / "tls of ours.key").write_text("not for others")
    path, root = tmp_path / "cluster.toml", tmp_path / "root"
    path.write_text(TEXT.format(security='keys = "keys"'))
    install_units.run(UnitsSettings(cluster_file=str(path), on_host="b", dest=str(root)))
    text = (root / UNITS / "crossdock-decode@.service").read_text()
    assert "LoadCredential=prefill.key:" in text and "tls" not in text


def test_units_need_a_model_folder(tmp_path: Path) -> None:
    """Units without a model folder are refused."""
    (tmp_path / "c.toml").write_text(TEXT.replace("model =", "# model =").format(security="insecure = true"))
    with pytest.raises(SettingsError, match="model: units need a folder"):
        install_units.run(
            UnitsSettings(cluster_file=str(tmp_path / "c.toml"), on_host="b", dest=str(tmp_path / "root"))
        )


def test_units_use_the_named_environment(tmp_path: Path) -> None:
    """Units call the environment that the cluster file's command names, and refuse one without crossdock."""
    other = tmp_path / "bin/python"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nprintf '%s\\n' /opt/venv /usr /opt/crossdock\n")
    other.chmod(0o755)
    path, root = tmp_path / "cluster.toml", tmp_path / "root"

    def install(command: str) -> None:
        path.write_text(f'command = "{command}"\n' + TEXT.format(security="insecure = true"))
        install_units.run(UnitsSettings(cluster_file=str(path), on_host="b", dest=str(root), dry_run=True))

    with pytest.raises(SettingsError, match="command: /nowhere/bin/crossdock is in no environment with crossdock"):
        install("/nowhere/bin/crossdock")
    with pytest.raises(SettingsError, match=f"{other}: a unit has a /tmp of its own"):
        install(str(other.with_name("crossdock")))
    there = (str(other), ("/opt/venv", "/usr"), "/opt/crossdock")
    assert install_units._environment(str(other.with_name("crossdock"))) == there
    here = install_units._environment("crossdock")
    assert install_units._environment(str(Path(sys.executable).with_name("crossdock"))) == here
    other.with_name("crossdock").touch()
    link = tmp_path / "crossdock"  # as uv and pipx make one in ~/.local/bin
    link.symlink_to(other.with_name("crossdock"))
    assert install_units._environment(str(link)) == there


def test_units_restart_without_limit() -> None:
    """Each unit has a watchdog and is restarted however often it fails."""
    files = {path: text for path, text in units.render(plan("a"), ON).items() if path.endswith(".service")}
    assert len(files) >= 3
    for path, text in files.items():
        role = next(role for role in MODULES if f"crossdock-{role}" in path)
        assert f"\nWatchdogSec={watchdog_s_of(role):.0f}\n" in text
        assert "\nStartLimitIntervalSec=0\n" in text and "StartLimitBurst" not in text
        assert "\nRestart=on-failure\n" in text


def test_batch_gateway_may_write_its_file() -> None:
    """A gateway with a batch file gets a state directory, and the file must be in it."""
    text = TEXT.replace("[gateway]\n", '[gateway]\nbatch_db = "/var/lib/crossdock/batches.db"\n')
    with_batches, without = (units.render(plan("a", each), ON) for each in (text, TEXT))
    unit = next(path for path in without if "crossdock-gateway@" in path)
    assert "StateDirectory=crossdock\n" in with_batches[unit] and "StateDirectory" not in without[unit]
    with pytest.raises(ClusterError, match="batch_db: a unit can write to"):
        units.render(plan("a", text.replace("/var/lib/crossdock/batches", "/srv/batches")), ON)
