"""Keys of the links: a folder with a pair of CURVE keys for each role. A process reads its own pair and all public keys.

    NAME.key            public; NAME is a role, or `ROLE-anything` where a role has several keys
    NAME.key_secret     secret, and where possible on the hosts of that role only

The key of a process decides its role (`role_of`), whatever it calls itself. Public files are read again on SIGHUP, so
that a key can be added before it is used, and removed afterwards. Files are as pyzmq's `zmq.auth` writes them.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.auth import load_certificate

from proto.errors import CrossdockError
from proto.messages import Role
from runtime.process import hangup, log
from runtime.process.exits import ConfigError
from runtime.settings.addresses import host_of
from runtime.settings.types import KeyOptions, SecurityOptions

ROLES: Final = {
    "coordinator": Role.COORDINATOR,
    "gateway": Role.GATEWAY,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "client": Role.OBSERVER,
}
"""Names of files; `client` is for `crossdock status` and other tools of the operator."""
NAME: Final = re.compile(rf"({'|'.join(ROLES)})(-[A-Za-z0-9_.-]{{1,64}})?")
_CONNECTS_TO: Final = {
    Role.COORDINATOR: (),
    Role.GATEWAY: (Role.COORDINATOR,),
    Role.PREFILL: (Role.COORDINATOR, Role.GATEWAY, Role.DECODE),
    Role.DECODE: (Role.COORDINATOR, Role.GATEWAY),
    Role.OBSERVER: (Role.COORDINATOR,),
}
_PUBLIC, _SECRET = ".key", ".key_secret"
_OTHERS_MAY = 0o007
_log = log.get("crossdock.keys")


class KeysError(CrossdockError):
    """The folder's keys cannot be used; `str()` says which file and why, and never what is in it."""


@dataclass(frozen=True)
class Listed:
    """A public key of the folder."""

    name: str
    role: Role


class Keys:
    """One process's view of a folder of keys."""

    def __init__(self, folder: str | Path, role: Role) -> None:
        """Raises `KeysError`."""
        self.folder = Path(folder).expanduser()
        self.role = role
        self.name, self.secret = _own(self.folder, role)
        self.public: bytes = zmq.curve_public(self.secret)
        self._on_change: list[Callable[[], None]] = []
        self._listed = _read_public(self.folder)
        for other in _CONNECTS_TO[role]:
            if not self.of(other):
                raise KeysError(f"{self.folder} has no {_name_of(other)}{_PUBLIC}, which a {role} needs")
        hangup.on_hangup(self.read_again)

    def __repr__(self) -> str:
        return f"Keys({str(self.folder)!r}, {self.name!r})"

    def listed(self, public: str) -> Listed | None:
        """The entry of a public key, as Z85; None: it is not allowed."""
        return self._listed.get(public)

    def of(self, role: Role) -> list[bytes]:
        """The public keys a process of this role may have."""
        return [key.encode() for key, listed in self._listed.items() if listed.role is role]

    def on_change(self, call: Callable[[], None]) -> Callable[[], None]:
        """Register a function to call after the public keys were read again. Returns a function that removes it."""
        self._on_change.append(call)
        return lambda: self._on_change.remove(call)

    def read_again(self) -> None:
        """Read the public keys again. If they have a fault, it is logged and the earlier keys stay in force."""
        try:
            self._listed = _read_public(self.folder)
        except KeysError as error:
            _log.error("keys not taken, the earlier ones stay", error=str(error))
            return
        _log.info("keys taken", names=sorted(listed.name for listed in self._listed.values()))
        for call in list(self._on_change):
            call()


def _name_of(role: Role) -> str:
    return next(name for name, known in ROLES.items() if known is role)


def _own(folder: Path, role: Role) -> tuple[str, bytes]:
    """(name, secret key) of this role: `ROLE.key_secret`, or the only one of `ROLE-….key_secret`."""
    wanted = _name_of(role)
    plain = folder / f"{wanted}{_SECRET}"
    try:
        found = [plain] if plain.exists() else sorted(folder.glob(f"{wanted}-*{_SECRET}"))
        if not found:
            raise KeysError(f"{folder} has no {plain.name}" if folder.is_dir() else f"there is no folder {folder}")
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise KeysError(f"{folder} has {names}; a process has one key, in {plain.name} or the only such file")
        path = found[0]
        if (mode := path.stat().st_mode) & _OTHERS_MAY:
            raise KeysError(f"{path} is open to every user of this host (mode {mode & 0o777:o}): chmod 600 it")
        secret = load_certificate(path)[1]
    except (OSError, ValueError) as error:
        raise KeysError(f"{getattr(error, 'filename', None) or plain}: {_why(error)}") from None
    if secret is None or not _is_key(secret):
        raise KeysError(f"{path}: has no secret key")
    return path.name.removesuffix(_SECRET), secret


def _read_public(folder: Path) -> dict[str, Listed]:
    """The public keys of the folder as Z85, with their files. Files of other names are ignored: credentials of a unit lie in
    one folder. Raises `KeysError`."""
    listed: dict[str, Listed] = {}
    try:
        paths = sorted(folder.glob(f"*{_PUBLIC}"))
        for path in paths:
            name = path.name.removesuffix(_PUBLIC)
            if not (match := NAME.fullmatch(name)):
                continue
            key = load_certificate(path)[0]
            if not _is_key(key):
                raise KeysError(f"{path}: has no public key")
            entry, twin = Listed(name, ROLES[match[1]]), listed.get(key.decode())
            if twin is not None and twin.role is not entry.role:
                raise KeysError(f"{path}: is the same key as {twin.name}{_PUBLIC}; each role needs one of its own")
            listed[key.decode()] = entry
    except (OSError, ValueError) as error:
        raise KeysError(f"{folder}: {_why(error)}") from None
    return listed


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or "is not a file of a key"


def _is_key(key: bytes) -> bool:
    try:
        zmq.curve_public(key)  # any 40 characters of Z85 will do
    except (ValueError, zmq.ZMQError):
        return False
    return len(key) == 40


# --- making them ------------------------------------------------------------------------------------------------------


def make(folder: Path, names: list[str]) -> list[str]:
    """New pairs of keys in `folder`, which is made where it is missing: files of mode 600 in a folder of mode 700. Returns
    what was written. Raises `KeysError`, before anything is written, where a file is there already."""
    for name in names:
        if not NAME.fullmatch(name):
            raise KeysError(f"{name!r} is not a role or ROLE-NAME; roles are {', '.join(ROLES)}")
    there = [name + end for name in names for end in (_PUBLIC, _SECRET) if (folder / (name + end)).exists()]
    if there:
        raise KeysError(f"{folder} has {', '.join(there)} already, and keys are not overwritten")
    written = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            raise KeysError(f"{folder} is open to others: chmod 700 it")
        for name in names:
            public, secret = (key.decode() for key in zmq.curve_keypair())
            _write(folder / (name + _SECRET), f'    public-key = "{public}"\n    secret-key = "{secret}"\n')
            _write(folder / (name + _PUBLIC), f'    public-key = "{public}"\n')
            written += [name + _SECRET, name + _PUBLIC]
    except OSError as error:
        raise KeysError(f"{error.filename or folder}: {error.strerror}") from None
    return written


def _write(path: Path, lines: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"metadata\ncurve\n{lines}")


# --- what a role asks for ---------------------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    """Returns whether a socket bound to this address can be reached from this host only."""
    host = host_of(address).strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def keys_for(settings: KeyOptions, role: Role, bound: Mapping[str, str] | None = None) -> Keys | None:
    """The keys of a process that binds the addresses of these options; None: it goes without. Raises `ConfigError`."""
    if settings.keys:
        try:
            return Keys(settings.keys, role)
        except KeysError as error:
            raise ConfigError(f"--keys: {error}") from None
    insecure = isinstance(settings, SecurityOptions) and settings.insecure
    for option, address in (bound or {}).items():
        if not (is_loopback(address) or insecure):
            why = f"{option} {address} can be reached by other hosts, and without keys anybody there is let in"
            raise ConfigError(
                f"--keys: needed, since {why}; make some with 'crossdock keys new DIR', or say --insecure"
            )
    return None
