"""Commands on the hosts of a cluster: by ssh, or on this machine, where each host may be a network namespace."""

import io
import shlex
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.cluster.file import ClusterFile, Host, travels
from launcher.process import python_command
from proto.errors import CrossdockError
from runtime.link.keys import NAME
from runtime.settings.options import SettingsError

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_AT_ONCE = 32
_PUBLIC, _SECRET = ".key", ".key_secret"


class HostFailed(CrossdockError):
    """A command failed on a host; `str()` names the host and ends with the command's output."""


@dataclass(frozen=True)
class HostAnswer:
    host: str
    status: int
    output: str


@dataclass(frozen=True)
class HostSite:
    """The hosts of one file."""

    path: Path
    file: ClusterFile
    local: bool

    def host(self, name: str) -> Host:
        return self.file.hosts[name]

    def command(self, name: str, script: str) -> list[str]:
        """Returns the command that runs a POSIX shell script on a host. The script sees the folder of the host's part as `$d`,
        and the command `crossdock`."""
        host = self.host(name)
        here = self.local or bool(host.netns)
        own = shlex.join(python_command("launcher.cli")) if here else self.file.command
        # The folder of `launcher.local.registry`, as the host's shell writes it.
        folder = '"${XDG_STATE_HOME:-$HOME/.local/state}/crossdock/runs/' + f'{self.file.name}.{name}"'
        script = f'crossdock() {{ {own} "$@"; }}\nd={folder}\n{script}'
        if not here:
            return [*_SSH, host.ssh or host.address, f"exec sh -c {shlex.quote(script)}"]
        return [*(("ip", "netns", "exec", host.netns) if host.netns else ()), "sh", "-c", script]

    def run(self, name: str, script: str, *, timeout_s: float, given: bytes = b"") -> HostAnswer:
        """Runs a script on a host. Raises `HostFailed` if no answer comes; an answer may have a status other than 0."""
        try:
            done = subprocess.run(
                self.command(name, script),
                input=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise HostFailed(f"{name}: no answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise HostFailed(f"{name}: {error}") from None
        return HostAnswer(name, done.returncode, done.stdout.decode("utf-8", "replace").strip())

    def run_all(self, scripts: dict[str, str], *, timeout_s: float) -> Iterator[HostAnswer]:
        """Runs scripts on several hosts at once; yields the answers as they come. A host that does not answer has status
        255."""

        def one(name: str, script: str) -> HostAnswer:
            try:
                return self.run(name, script, timeout_s=timeout_s)
            except HostFailed as error:
                return HostAnswer(name, 255, str(error))

        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            for done in as_completed([pool.submit(one, name, script) for name, script in scripts.items()]):
                yield done.result()


def parcel(site: HostSite, name: str) -> bytes:
    """Returns the files that a host needs, as tar: the cluster file, the tenants, the public keys and the host's own secret
    keys. Raises `SettingsError`."""
    folder = site.path.parent
    wanted = [site.path]
    for relative in travels(site.path.read_text(encoding="utf-8")):
        if ".." in PurePosixPath(relative).parts:
            raise SettingsError(f"FILE: {relative} is copied with the file, so it must be beside or below it")
        path = folder / relative
        if not path.exists():
            more = ", which crossdock keys new makes" if str(path) == site.file.keys else ""
            raise SettingsError(f"FILE: there is no {path}{more}")
        wanted += _keys_of(path, site.host(name)) if path.is_dir() else [path]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:  # a link would point to nothing on the host
        for path in wanted:
            inside = "cluster.toml" if path == site.path else str(path.relative_to(folder))
            try:
                tar.add(path, inside, recursive=False, filter=_plain)
            except OSError as error:
                raise SettingsError(f"FILE: cannot read {path}: {error.strerror}") from None
    return packed.getvalue()


def keys_there(site: HostSite) -> str:
    """Returns the folder of keys on a host, quoted for a script; a relative folder was copied with the file."""
    copied = travels(site.path.read_text(encoding="utf-8"))
    own = [path for path in copied if str(site.path.parent / path) == site.file.keys]
    return f'"$d"/{shlex.quote(own[0])}' if own else shlex.quote(site.file.keys)


def _keys_of(folder: Path, host: Host) -> Iterable[Path]:
    """Yields the key files for a host. The coordinator's host gets the client's key too, so that `crossdock status` works
    there."""
    roles = {
        "coordinator": host.coordinator,
        "client": host.coordinator,
        "gateway": host.gateways,
        "prefill": host.workers.prefill + host.workers.mixed,
        "decode": host.workers.decode + host.workers.mixed,
    }
    for path in sorted(folder.iterdir()):
        name = NAME.fullmatch(path.stem)
        if name and (path.suffix == _PUBLIC or (path.suffix == _SECRET and roles[name[1]])):
            yield path


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Makes the file belong to the user who unpacks it, and readable by no other user."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o600
    return info
