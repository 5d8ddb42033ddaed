"""`scripts/install_units`: systemd units from `cluster.toml`, written and checked."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from launcher.cluster import units
from launcher.cluster.file import ClusterError
from launcher.cluster.plan import plan_host
from launcher.cluster.settings import UnitsSettings
from launcher.cluster.up import ClusterHost, place
from launcher.process import ROOT
from proto.errors import CrossdockError
from runtime.link.keys import NAME
from runtime.settings.options import SettingsError

_VERIFY_S = 60.0


class CannotInstall(CrossdockError):
    """The units cannot be written, or systemd does not take them."""


def run(settings: UnitsSettings) -> int:
    """Raises `SettingsError`, `CannotInstall`."""
    console = Console(soft_wrap=True, highlight=False)
    at = place(settings.cluster_file, settings.on_host)
    root = Path(settings.dest).expanduser().resolve()
    try:
        files = units.render(plan_host(at.file, at.host, _model(at)), _installed(at))
    except ClusterError as error:
        raise SettingsError(
            "\n".join(f"FILE: {settings.cluster_file}: {line}" for line in str(error).splitlines())
        ) from None
    try:
        todo = units.changes(files, _there(root))
    except OSError as error:
        raise CannotInstall(f"{error.filename}: {error.strerror} (--dest)") from None
    for what, path in todo:
        console.print(f"{what:6} {root / path}", markup=False)
        if settings.dry_run and what == "write":
            console.print("".join(f"    {line}\n" for line in files[path].splitlines()), markup=False)
    if settings.dry_run:
        return 0
    try:
        for what, path in todo:
            if what == "write":
                _write(root / path, files[path])
            elif what == "remove":
                (root / path).unlink()
    except OSError as error:
        raise CannotInstall(f"{error.filename}: {error.strerror} (--dest)") from None
    verify(root, [path for path in files if path.startswith(units.UNITS) and path.endswith((".service", ".target"))])
    console.print("Now: systemctl daemon-reload && systemctl enable --now crossdock.target", markup=False)
    console.print("Then: systemctl status 'crossdock-*'; journalctl -fu 'crossdock-*'", markup=False)
    return 0


def verify(root: Path, paths: list[str]) -> None:
    """Have systemd check the units, where it is installed. Raises `CannotInstall`."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    command = [analyze, "verify", "--man=no", *(str(root / path) for path in paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_VERIFY_S, check=False)
    if done.returncode:
        raise CannotInstall(f"systemd-analyze verify does not take them:\n{done.stderr.strip()}")


def _model(at: ClusterHost) -> str:
    """Raises `SettingsError`."""
    host = at.file.hosts[at.host]
    model = host.model or at.file.model
    if not model and (host.gateways or host.workers.total):
        raise SettingsError("FILE: model: units need a folder that they can read, like /srv/models/llama, or ORG/NAME")
    return model or "none"


def _installed(at: ClusterHost) -> units.Installed:
    """Raises `SettingsError`."""
    keys = Path(at.file.keys).expanduser() if at.file.keys else None
    if keys is not None and not keys.is_dir():
        raise SettingsError(f"FILE: keys: there is no folder {keys}; crossdock keys new makes it, on one host for all")
    python, prefixes, root = _environment(at.file.command)
    return units.Installed(
        python=python,
        prefixes=prefixes,
        root=root,
        keys=str(keys or ""),
        key_files=tuple(sorted(path.name for path in keys.iterdir() if NAME.fullmatch(path.stem))) if keys else (),
    )


def _environment(command: str) -> tuple[str, tuple[str, ...], str]:
    """Returns the interpreter, the folders that it and the packages lie in, and the folder of the packages. They belong to the
    environment that `command` names by its path, or else to this one. Raises `SettingsError`."""
    if not os.path.isabs(command) or Path(command).parent == Path(sys.executable).parent:
        return sys.executable, tuple(sorted({sys.prefix, sys.base_prefix})), ROOT
    script = Path(command)
    python = (script.resolve() if script.is_symlink() else script).with_name("python")  # uv and pipx make a link
    ask = (
        "import launcher, os, sys; print(sys.prefix, sys.base_prefix, os.path.dirname(launcher.__path__[0]), sep='\\n')"
    )
    try:
        done = subprocess.run(
            [python, "-P", "-c", ask], capture_output=True, text=True, timeout=_VERIFY_S, check=True, cwd="/"
        )
    except (OSError, subprocess.SubprocessError):
        raise SettingsError(f"FILE: command: {command} is in no environment with crossdock on this host") from None
    prefix, base, root = done.stdout.splitlines()
    return str(python), tuple(sorted({prefix, base})), root


def _there(root: Path) -> dict[str, str]:
    found = [*(root / units.UNITS).glob("crossdock*"), *(root / units.UNITS).glob("crossdock*/*.conf")]
    found += (root / units.OPTIONS).glob("*.env")
    paths = {str(path.relative_to(root)): path for path in found if path.is_file()}
    return {name: path.read_text("utf-8", "replace") for name, path in paths.items() if units.is_ours(name)}


def _write(path: Path, text: str) -> None:
    """Writes a file. Options may hold API keys, so only their owner can read them; everyone can read units."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.part")
    half.unlink(missing_ok=True)
    mode = 0o600 if path.suffix == ".env" else 0o644
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    half.chmod(mode)
    os.replace(half, path)
