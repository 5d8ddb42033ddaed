"""Files of a model that the gateway cannot use are named in one line, with the cause and what to do."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.main import _say_warnings
from gateway.openai.context import ServedModel
from gateway.openai.prepare import ModelRules
from gateway.text.model_files import ModelFilesError, load
from runtime.process import log
from tests import tiny_models
from tests.helpers import printed

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("models") / "tiny")


def with_files(model: Path, folder: Path, files: dict[str, Any]) -> str:
    """A copy of the model with these contents of files: text, bytes, None for no file, or what is changed in a JSON object."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink()
        elif isinstance(content, dict):
            path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer.json": None}, "has no tokenizer.json"),
        ({"tokenizer.json": '{"version": '}, "tokenizer.json is not JSON"),
        ({"tokenizer.json": POINTER}, "git lfs pull"),
        ({"tokenizer.json": {"model": {"type": "Other"}}}, "cannot be used"),
        ({"tokenizer_config.json": "["}, "tokenizer_config.json is not JSON"),
        ({"chat_template.jinja": POINTER}, "chat_template.jinja is not there"),
        ({"chat_template.jinja": b"\xff\xfe"}, "chat_template.jinja is not UTF-8"),
        ({"config.json": POINTER}, "config.json is not there"),
        ({"config.json": "{"}, "config.json is not JSON"),
        ({"config.json": None}, "has no config.json"),
        ({"generation_config.json": "[1]"}, "generation_config.json is not a JSON object"),
        ({"chat_template.jinja": None, "tokenizer_config.json": {"chat_template": 5}}, "cannot be used"),
        ({"tokenizer_config.json": {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["x.Y", None]}}}, "does not run"),
    ],
)  # fmt: skip
def test_faulty_model_file_is_named(model: Path, tmp_path: Path, files: dict[str, Any], said: str) -> None:
    """The message has one line and names the file at fault."""
    with pytest.raises(ModelFilesError) as caught:
        load(with_files(model, tmp_path, files))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("", "no chat template"),
        (None, "no chat template"),
        ("{% if %}", "serves completions only: the model's chat template"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "text of assistant, system:"),
    ],
)
def test_missing_template_is_said(
    model: Path, tmp_path: Path, template: str | None, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a chat template, or with one that cannot show all messages, the start says what is not served."""
    served = ServedModel(load(with_files(model, tmp_path, {"chat_template.jinja": template})), ModelRules("m", 1))
    asyncio.run(_say_warnings([served], log.configure(level="warning", fmt="json", process="g")))
    assert said in served.warnings[0] and said in printed(capfd)
