"""The table of commands: each loads and takes its settings; help is quick, and whole at 80 columns."""

import inspect
import json
import os
import subprocess
import sys
import typing

import pytest

from lab.commands.profiles.settings import EstimateSettings
from launcher.commands import TABLE, as_listed, build_app, only_groups
from runtime.settings.command_line import Command, CommandGroup, Table, _named, commands_in, invoke
from runtime.settings.option_help import panels_of, value_name
from runtime.settings.options import option_name
from tests.documents import ROOT

COMMANDS = dict(commands_in(TABLE))


def groups_in(table: Table, prefix: str = "") -> list[str]:
    found = []
    for name, row in table.items():
        if isinstance(row, CommandGroup):
            found += [prefix + name, *groups_in(row.commands, f"{prefix}{name} ")]
    return found


def help_of(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    assert invoke(build_app(), [*as_listed(name.split()), "-h"], "crossdock") == 0
    return capsys.readouterr().out


def in_python(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_command_function_takes_its_settings(command: Command) -> None:
    """Each command's function takes its settings class and returns int; its help begins like the list's."""
    settings = command.settings_class()
    run = _named(command.run)
    (parameter,) = inspect.signature(run).parameters
    hints = typing.get_type_hints(run)
    assert hints[parameter] is settings and hints["return"] is int
    about = " ".join((inspect.getdoc(settings) or "").split())
    assert about.startswith(command.help), "the list of commands says what the command's own help begins with"


@pytest.mark.parametrize("name", ["", *groups_in(TABLE), *COMMANDS])
def test_help_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The help of every command shows all of its options uncut at 80 columns."""
    shown = help_of(name, capsys, monkeypatch)
    assert "-h" in shown and "<bool>" not in shown and "<str>" not in shown
    assert not [line for line in shown.splitlines() if "… " in line and "KEY,…" not in line and "NAME,…" not in line
                and "KIB,…" not in line and "RATIO,…" not in line and "chatcmpl-…" not in line], shown  # fmt: skip
    if name in COMMANDS:
        for key, field in COMMANDS[name].settings_class().model_fields.items():
            assert option_name(key, field) in shown
            if field.annotation is bool and not field.default:
                assert "--no-" + option_name(key, field).removeprefix("--") not in shown


def test_help_shows_metavars_unchanged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The help of bench serve shows a placeholder with brackets as it was written."""
    shown = help_of("bench serve", capsys, monkeypatch)
    assert "NAME:KEY:SHARE[:WEIGHT[:PRIORITY]]" in shown


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_panels_name_known_fields(command: Command) -> None:
    """Help panels name existing fields only, and long helps have panels."""
    settings = command.settings_class()
    panels = panels_of(settings)
    known = {field for cls in settings.__mro__ for field in getattr(cls, "model_fields", {})}
    others = {
        "ratios",
        "start",
        "url",
        "api_key",
        "model_id",
        "prefill",
        "decode",
        "mixed",
        "event_log",
    }  # of two kinds of load
    assert set(panels) <= known | others
    if len(settings.model_fields) > 8 and panels:
        assert set(settings.model_fields) <= set(panels)
    assert panels or len(settings.model_fields) <= 9


def test_help_imports_no_command() -> None:
    """The top-level help loads neither a command's module nor heavy libraries."""
    code = "import sys; sys.argv = ['crossdock', '--help']\nfrom launcher import cli, commands\n"
    code += "from runtime.settings.command_line import invoke\n"
    code += "assert invoke(commands.build_app(), ['--help'], 'crossdock') == 0\n"
    code += "print(*[name for name in sys.modules], file=sys.stderr)"
    loaded = in_python(code).stderr.split()
    assert "launcher.commands" in loaded
    assert not {"torch", "numpy", "zmq", "aiohttp", "launcher.bench.settings", "launcher.local.serve"} & set(loaded)


def test_bare_group_shows_its_help() -> None:
    """A group without a command is recognised, so that its help is shown."""
    assert only_groups([]) and only_groups(["bench"]) and only_groups(["cluster"])
    assert not only_groups(["serve"]) and not only_groups(["bench", "isolation"])


def test_shell_completes_commands_and_options() -> None:
    """The shell completes groups, commands and options."""
    code = "from launcher import cli; cli.main()"

    def completed(words: str, number: int) -> list[str]:
        more = {"_CROSSDOCK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        return in_python(code, **more).stdout.split()

    assert "isolation" in completed("crossdock bench ", 2)
    assert completed("crossdock serve --mod", 2) == ["--model", "--model-id"]
    assert "--install-completion" in completed("crossdock --inst", 1)


def test_model_is_an_argument_or_option(capsys: pytest.CaptureFixture[str]) -> None:
    """The model can be an argument or --model; two different values are refused."""

    def said(*words: str) -> str:
        assert invoke(build_app(), ["serve", *words], "crossdock") == 2
        return capsys.readouterr().err

    assert said("./absent") == said("--model", "./absent") == "crossdock: --model: there is no folder ./absent\n"
    assert said("./absent", "--model", "./absent") == "crossdock: --model: there is no folder ./absent\n"
    assert said("a", "--model", "b") == "crossdock: --model: b, and MODEL is a; give one of the two\n"


def test_json_output_has_stdout_alone() -> None:
    """stdout holds nothing but JSON with --json; the report goes to stderr."""
    code = "import sys; sys.argv = 'crossdock simulate load docs/scenarios/overload.toml --json'.split()\n"
    done = in_python(code + "from launcher import cli; cli.main()")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seed"] == 1
    assert "TTFT" in done.stderr


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_during_imports_is_one_line(name: str, status: int) -> None:
    """A signal during imports ends the command with one line and the signal's status."""
    code = f"""
import os, signal, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, Stop())
sys.argv = ["crossdock", "serve"]
from launcher import cli
cli.main()
"""
    done = in_python(code)
    assert done.returncode == status
    assert (done.stdout, done.stderr) == ("", "crossdock: stopped before it was ready\n")


def test_queue_wait_options_are_in_seconds() -> None:
    """Every queue wait option of every command is in seconds."""
    named = {
        key for command in COMMANDS.values() for key in command.settings_class().model_fields if "queue_wait" in key
    }
    assert named == {"queue_wait_s_max"}


def test_value_is_named_by_its_unit() -> None:
    """The help shows the unit of a number; a rate is not taken for seconds."""
    fields = EstimateSettings.model_fields
    assert value_name("network_gbit_per_s", fields["network_gbit_per_s"]) == "GBIT/S"
    assert value_name("cost_per_hour", fields["cost_per_hour"]) == "NUMBER"
