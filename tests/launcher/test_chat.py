"""`crossdock chat` against a server that says what a script tells it, and `crossdock config show`."""

import asyncio
import io
import json
import sys
from pathlib import Path

import pytest

from launcher import chat, config
from launcher.chat import ChatSettings
from launcher.config import ConfigShowSettings
from runtime.settings.options import SettingsError
from tests.launcher.scripted_server import DONE, STREAM, refusal, serving
from tests.launcher.scripted_server import chat as said


def _talk(
    script: list[tuple[float, bytes]], lines: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[list[str]]]:
    """Returns the exit status, and what each request had as messages."""

    async def scene() -> tuple[int, list[list[str]]]:
        async with serving(script) as server:
            settings = ChatSettings(url=server.url + "/v1", model="m", system="Be brief.", api_key="k")
            status = await asyncio.to_thread(chat.run, settings)
            return status, [[message["content"] for message in body["messages"]] for body in server.bodies]

    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return asyncio.run(scene())


def test_chat_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers stream, the next message comes with those before it, and /reset begins anew."""
    script = [(0.0, STREAM), (0.0, said("one ")), (0.0, said("[two]")), (0.0, DONE)]
    status, asked = _talk(script, "A\nB\n/reset\nC\n/quit\nD\n", monkeypatch)
    assert status == 0 and capsys.readouterr().out == "one [two]\n" * 3
    assert asked == [["Be brief.", "A"], ["Be brief.", "A", "one [two]", "B"], ["Be brief.", "C"]]


def test_chat_goes_on_after_a_refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused message is told and left out of the conversation; the status says that something failed."""
    status, asked = _talk([(0.0, refusal(429))], "A\nB\n", monkeypatch)
    assert status == 1 and "HTTP 429: busy" in capsys.readouterr().out
    assert asked == [["Be brief.", "A"], ["Be brief.", "B"]]


def test_config_shows_where_values_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option of a command is shown with its value and source, without secrets; a mistake is told as at a start."""
    file = tmp_path / "crossdock.toml"
    file.write_text("[gateway]\nport = 8080\nhost = '0.0.0.0'\n")
    monkeypatch.setenv("CROSSDOCK_PORT", "9000")
    monkeypatch.setenv("CROSSDOCK_MODEL", "m")
    monkeypatch.setenv("CROSSDOCK_API_KEYS", "sk-secret")
    settings = ConfigShowSettings(name="gateway", config_file=str(file), as_json=True)
    assert config.show(settings) == 0
    out = capsys.readouterr().out
    rows = {row["option"]: (row["value"], row["source"]) for row in json.loads(out)}
    assert rows["--port"] == (9000, "environment CROSSDOCK_PORT") and "sk-secret" not in out
    assert rows["--host"] == ("0.0.0.0", f"[gateway] in {file}") and rows["--log-level"] == ("info", "default")
    assert config.show(settings.model_copy(update={"as_json": False, "changed": True})) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    with pytest.raises(SettingsError, match="NAME: decode-7 is no command, and no process here"):
        config.show(ConfigShowSettings(name="decode-7"))
    monkeypatch.setenv("CROSSDOCK_PORT", "many")
    with pytest.raises(SettingsError, match=r"--port: many is not a whole number \(from environment"):
        config.show(settings)
