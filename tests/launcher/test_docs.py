"""Every command in the docs has options that exist; names, messages and links are those of the product. Commands that can run
here do so in `tests/e2e/test_docs.py`."""

import argparse
import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from benchmarks import __main__ as benchmarks
from gateway.http.errors import _OF_KIND, _OF_REJECT
from lab.scenarios.scenario import parse as parse_scenario
from launcher import commands as crossdock
from launcher.cluster.file import parse as parse_cluster
from proto.codec import ALL_MESSAGES, WITH_BLOB
from proto.limits import PROTOCOL_VERSION
from runtime.settings import command_line, options
from runtime.settings.command_line import commands_in, new_app
from runtime.settings.serve import DECIDED, EveryServeOption
from runtime.tenancy.file import read as read_tenants
from tests.documents import PAGES, ROOT, Command, blocks, commands
from tests.test_layout import sources
from tools import configuration as configuration_reference

COMMANDS = commands()
NOT_OURS = {
    "curl",
    "docker",
    "journalctl",
    "kubectl",
    "pip",
    "pipx",
    "python",
    "python3",
    "sbatch",
    "systemctl",
    "uv",
    "vllm",
}
"""Of them, and of what is in a `.venv`, only what they name of ours is checked."""
HTTP_CODES = (
    "missing_api_key invalid_api_key model_not_found request_timeout request_too_large not_ready gateway_overloaded"
    " unsupported_parameter too_many_open_requests storage_quota_exceeded batches_not_enabled batch_store_failed"
    " unsupported_content_encoding"
).split()


class Understood(BaseException):
    """The command line is right; nothing is executed."""


def _stop(real: Callable[..., Any]) -> Callable[..., Any]:
    def understood(*arguments: Any, **more: Any) -> Any:
        real(*arguments, **more)
        raise Understood

    return understood


def _understands(app: typer.Typer, words: tuple[str, ...]) -> None:
    if words in ((), ("--help",)):
        return
    with pytest.raises(Understood):
        app(list(words), prog_name="x", standalone_mode=False)


def check(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises where something in it does not exist, or no rule covers it."""
    program, words = command.words[0].removeprefix("./"), command.words[1:]
    if program.startswith("scripts/") and words[-2:] == ("--torch", "cpu"):  # scripts/_env.sh takes it
        words = words[:-2]
    for word in words:
        if word.startswith("scripts/") or word == "constraints.txt":
            assert (ROOT / word).is_file(), word
    name = program.rpartition("/")[2]
    if program == "crossdock":
        _understands(crossdock.build_app(), tuple(crossdock.as_listed(list(words))))
    elif program == "scripts/launch_ssh":
        _understands(crossdock.build_app(), ("cluster", "launch", *words) if words != ("--help",) else words)
    elif program == "scripts/install_units":
        _understands(crossdock.build_app(), ("cluster", "units", *words))
    elif program == ".venv/bin/python" and words[:2] == ("-m", "benchmarks"):
        _understands(new_app(benchmarks.HELP, benchmarks.TABLE), words[2:])
    elif program == ".venv/bin/python" and words[:1] == ("-m",):
        assert importlib.util.find_spec(words[1]) is not None
        assert all((ROOT / word).exists() for word in words[2:])
    elif program.startswith("scripts/"):
        _check_script(ROOT / program, words, monkeypatch)
    elif name in ("systemctl", "journalctl"):
        units = {"crossdock.target", "crossdock-*", "crossdock-coordinator.service", "crossdock-decode@0.service"}
        assert {word for word in words if "crossdock" in word} <= units
    elif name == "helm":
        values = (ROOT / "deploy/chart/values.yaml").read_text("utf-8")
        for pair in (word for option, word in pairwise(words) if option == "--set"):
            first, last = pair.partition("=")[0].split(".")
            assert f"\n{first}:" in values and (first == "env" or f"\n  {last}:" in values), pair
    else:
        assert name in NOT_OURS or command.words == (".", ".venv/bin/activate"), "no rule covers it"


def _check_script(script: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    last = script.read_text(encoding="utf-8").splitlines()[-1]
    if found := re.search(r"bin/crossdock (\w+)", last):
        _understands(crossdock.build_app(), (found[1], *words))
    elif script.name == "test":
        tier = next((tier for tier in (("unit",), ("lint",), ("-m", "long")) if words[: len(tier)] == tier), ())
        assert all(_is_test(word) for word in words[len(tier) :])
    else:
        found = re.search(r"-m ((?:tools|launcher|benchmarks|tests)\.[\w.]+) ", last)
        assert found is not None, "what does it run?"
        name = f"{found[1]}.__main__" if (ROOT / found[1].replace(".", "/")).is_dir() else found[1]
        monkeypatch.setattr(sys, "argv", [script.name, *words])
        with pytest.raises(Understood):
            importlib.import_module(name).main()


def _is_test(word: str) -> bool:
    """A file of tests, or one test of it."""
    name, _, test = word.partition("::")
    return (ROOT / name).is_file() and (not test or f"\ndef {test}(" in (ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture
def understanding(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in options.os.environ if name.startswith("CROSSDOCK_")]:  # type: ignore[attr-defined]
        monkeypatch.delenv(name)
    monkeypatch.setattr(command_line, "load", _stop(options.load))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", _stop(argparse.ArgumentParser.parse_args))
    return monkeypatch


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_documented_commands_have_real_options(command: Command, understanding: pytest.MonkeyPatch) -> None:
    """Every command shown in the pages has options that exist."""
    check(command, understanding)


@pytest.mark.parametrize(
    "words",
    [
        "crossdock serve --fast",
        "crossdock serv",
        "crossdock serve --prefill 0",
        "./scripts/serve --fast",
        "./scripts/serve --torch cuda",
        "./scripts/none",
        "./scripts/test tests/none.py",
        "./scripts/test tests/test_tiers.py::test_none",
        ".venv/bin/python -m tools.none",
        "./scripts/chaos --fault 3x",
        "scripts/launch_ssh left cluster.toml",
        "kubectl apply -f scripts/nothing.yaml",
        "systemctl restart crossdock-worker@0.service",
        "make install",
    ],
)
def test_wrong_documented_command_is_detected(words: str, understanding: pytest.MonkeyPatch) -> None:
    """The check fails for a command with a wrong name, option or file."""
    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        check(Command("x.md", 1, "", words, tuple(words.split())), understanding)


def test_configuration_reference_is_up_to_date() -> None:
    """The configuration pages equal what the generator writes."""
    written = {
        path.name: path.read_text(encoding="utf-8") for path in (ROOT / configuration_reference.FOLDER).iterdir()
    }
    assert written == configuration_reference.pages(), f"run: {configuration_reference.COMMAND}"


def test_options_in_prose_exist() -> None:
    """Every option named in the prose of the pages exists."""
    known = {
        option
        for _, command in (*commands_in(crossdock.TABLE), *commands_in(benchmarks.TABLE))
        for key, field in command.settings_class().model_fields.items()  # type: ignore[union-attr]
        for option in (options.option_name(key, field), *options.aliases_of(field))
    }
    known |= {"--config", "--help", "--install-completion", "--no-standby", "--aiperf", "--aiperf-tokenizer"}
    known |= {"--torch-backend", "--extra-index-url", "--upgrade-package", "--torch"}  # of uv, pip and scripts/
    known |= {"--" + one.removeprefix("--no-") for one in known if one.startswith("--no-")}
    for path in PAGES:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        if path.name.startswith("from-"):  # the first column is another program's
            prose = re.sub(r"^\|[^|]*\|", "", prose, flags=re.MULTILINE)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", prose)) - {
            "--roles",
            "--disable-hybrid-kv-cache-manager",  # of vLLM, as are the next three
            "--gpu-memory-utilization",
            "--tensor-parallel-size",
            "--max-num-batched-tokens",
            "--faults",  # of scripts/chaos and scripts/simulate, as are the next two
            "--hosts",
            "--seeds",
            "--constrained-share",
            "--answers",
            "--flips",
            "--kill-share",
            "--session-share",
            "--phase-s",
            "--decode-heavy",
            "--quantization",  # of vLLM
            "--router-mode",  # of Dynamo, as is the next
            "--is-prefill-worker",
        }
        assert not {one for one in named if one not in known}, path


MESSAGES_OF_ROLES = (
    "coordinator",
    "gateway",
    "prefill_worker",
    "decode_worker",
    "engine",
    "kvtransfer",
    "runtime",
    "worker",
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
ABOUT_FLIP = {"--force", "--undo"}  # options of `crossdock flip` in answers that the coordinator gives to it


def _named_in_messages(path: Path) -> set[str]:
    """Options in the texts of a module, docstrings apart."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    ]
    return {option for text in texts for option in OPTION.findall(text)}


def test_serve_has_options_of_messages() -> None:
    """Every option that a message of a role names is one of `crossdock serve`, or one that it decides."""
    taken = {options.option_name(key, field) for key, field in EveryServeOption.model_fields.items()}
    for field in EveryServeOption.model_fields.values():
        if isinstance(field.json_schema_extra, dict):
            taken |= set(cast("list[str]", field.json_schema_extra.get("aliases", [])))
    taken |= (
        {"--" + key.replace("_", "-") for key in DECIDED}
        | {"--config", "--help", "--version", "--no", "--json"}
        | ABOUT_FLIP
    )
    for path in [path for name, path in sources().items() if name.startswith(MESSAGES_OF_ROLES)]:
        assert not _named_in_messages(path) - taken, path


def test_toml_blocks_in_pages_parse(tmp_path: Path) -> None:
    """Every TOML block in the pages parses as the kind of file it shows."""
    seen = set()
    for block in blocks("toml"):
        if block.page == "docs/scenarios/README.md" and "[[traffic]]" in block.text:
            whole_scenario = block.text
            assert parse_scenario(whole_scenario.encode()).traffic
        elif block.page == "docs/scenarios/README.md":
            assert parse_scenario((whole_scenario + block.text).encode()).require
        elif "[tenants." in block.text:
            (tmp_path / "tenants.toml").write_text(block.text)
            assert read_tenants(tmp_path / "tenants.toml").policies
        elif "[hosts." in block.text:
            named = set(re.findall(r"\[hosts\.(\w+)", block.text))
            assert parse_cluster(block.text, tmp_path).hosts.keys() == named
        else:
            (tmp_path / "settings.toml").write_text(block.text)
            for cls in options.SECTIONS.values():
                options._read_section(cls, str(tmp_path / "settings.toml"))
        seen.add(block.page)
    assert seen >= {"docs/tenants.md", "docs/multi-node.md", "docs/configuration/README.md"}


def test_page_links_resolve() -> None:
    """Every relative link of the pages leads to a file and a heading that exist."""
    for path in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", path.read_text(encoding="utf-8")):
            there = path.parent / target if target else path
            assert there.exists(), f"{path.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor[1:] in {
                    re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
                }, anchor


def test_protocol_page_names_every_message() -> None:
    """The protocol page names every message, the version and the messages with a blob."""
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(named) == sorted(message.__name__ for message in ALL_MESSAGES)
    assert f"protocol version {PROTOCOL_VERSION}." in text
    blob = re.search(r"^2\. for (.+), a binary frame", text, re.MULTILINE)
    assert blob is not None
    assert set(re.findall(r"`(\w+)`", blob[1])) == {message.__name__ for message in WITH_BLOB}


def _texts() -> str:
    """Every text of the source, with … where something is put in, and the scripts."""
    found = []
    for path in sources().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
    return "\n".join([*found, (ROOT / "scripts" / "_env.sh").read_text(encoding="utf-8")])


def test_troubleshooting_messages_are_real() -> None:
    """Every message in the troubleshooting page occurs in the source."""
    texts = _texts()
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = page.split("| message | cause | what to do |")[1:]
    messages = [one for table in tables for one in re.findall(r"^\| `(.+?)` \|", table.split("\n\n")[0], re.MULTILINE)]
    assert len(messages) > 20
    for message in messages:
        assert all(part in texts for part in message.split("…")), message


def test_troubleshooting_codes_match_the_api() -> None:
    """Every status and code in the troubleshooting page is one that the API gives."""
    known = {f"{status} {code}" for status, code in _OF_REJECT.values()}
    known |= {f"{status} {kind.value}" for kind, status in _OF_KIND.items()}
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "gateway").rglob("*.py"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    assert len(rows) > 10
    for status, codes in rows:
        for code in re.findall(r"`(\w+)`", codes):
            assert f"{status} {code}" in known or (code in HTTP_CODES and f'"{code}"' in source), code
