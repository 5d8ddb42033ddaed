"""Helpers that the benchmarks share: where they print, and JSON."""

import json
import os
import platform
import sys
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from launcher import tables
from runtime.settings.options import SettingsError
from runtime.settings.types import JsonOption


def write(path: str, data: bytes) -> None:
    Path(path).expanduser().write_bytes(data)


def check_writable(path: str, option: str) -> None:
    """Before minutes are spent. Raises `SettingsError`."""
    if not path:
        return
    file = Path(path).expanduser()
    folder = file.absolute().parent
    if not folder.is_dir():
        raise SettingsError(f"{option}: there is no folder {file.parent}")
    if file.is_dir():
        raise SettingsError(f"{option}: {path} is a folder, not a file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise SettingsError(f"{option}: {path} cannot be written")


def console_for(settings: JsonOption, **more: Any) -> Console:
    """Returns the console for text that people read: stdout, or stderr if stdout has the JSON."""
    return tables.console(stderr=settings.as_json, **more)


def installs(package: str) -> str:
    """Returns how to add a package to the environment that this process runs in."""
    prefix = Path(sys.prefix)
    if (prefix / "made-in").is_file():  # by scripts/_env.sh
        command = f"{quote(f'{prefix}/bin/pip')} install -c {quote(f'{prefix.parent}/constraints.txt')} {package}"
    elif (prefix / "uv-receipt.toml").is_file():
        command = f'uv tool install --with {package} -c constraints.txt ".[cpu]" (in a clone)'
    elif (prefix / "pipx_metadata.json").is_file():
        command = f"pipx inject crossdock {package}"
    else:
        command = f"{quote(sys.executable)} -m pip install {package}"
    return f"install it with: {command}"


def machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "cores": os.cpu_count(), "machine": platform.machine()}


def write_json(settings: JsonOption, result: dict[str, Any]) -> None:
    """Write JSON to stdout, where it was asked for."""
    if settings.as_json:
        sys.stdout.write(json.dumps(result | {"machine": machine()}, indent=1) + "\n")
