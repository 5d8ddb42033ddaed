"""From settings classes to command lines: one list of options, merged from flags, environment, file and defaults.

load(GatewaySettings, {"port": "8080"})          merge and check; raises SettingsError
parse(GatewaySettings, ["--port", "8080"])       the same from arguments
add_command(app, "gateway", GatewaySettings, run)  a typer command with help made from the fields
run_role(GatewaySettings, run)                   what `python -m gateway` calls
to_arguments(settings)                           the flags which make these settings again
"""

import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource
from rich.markup import escape

from proto.errors import CrossdockError
from runtime.process.exits import CONFIG_EXIT, INTERRUPTED_EXIT, USAGE_EXIT, ConfigError
from runtime.settings import environment
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.serve import ServeSettings
from runtime.settings.types import ENV_PREFIX, Options
from runtime.settings.workers import WorkerSettings

S = TypeVar("S", bound=Options)

SECTIONS: Final[dict[str, type[Options]]] = {
    cls.section: cls for cls in (CoordinatorSettings, GatewaySettings, WorkerSettings, ServeSettings)
}
CONFIG_ENV: Final = ENV_PREFIX + "CONFIG"
_COMPLAINT: Final = re.compile(r"^[\w .-]+: (--[a-z].*)$")
_CONFIG_HELP = f"TOML file with settings; environment {CONFIG_ENV}."
_EPILOG = (
    f"Each option can also be set in the environment, as {ENV_PREFIX}<OPTION> with underscores"
    "{section}. Flags come before the environment, and that before the file."
)
# typer has click inside it in some versions and beside it in others; the base of its usage errors has the same name.
_ClickError: Final[type[Exception]] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


class SettingsError(CrossdockError):
    """A setting is missing or wrong; `str()` has one line for each, naming the option and where its value came from."""


def option_name(field_name: str, field: FieldInfo) -> str:
    """`kv_gib` → `--kv-gib`, unless the field names its own, or is an argument, which has a name for people only."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and ("option" in extra or "argument" in extra):
        return str(extra.get("option") or extra["argument"])
    return "--" + field_name.replace("_", "-")


def _option(cls: type[Options], field_name: str) -> str:
    return option_name(field_name, cls.model_fields[field_name])


# --- merging ----------------------------------------------------------------------------------------------------------


def _read_section(cls: type[Options], path: str) -> dict[str, Any]:
    """This class's section of the file. Every section and key of the file must be known. Raises `SettingsError`."""
    try:
        content = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}") from None
    problems = []
    for section, values in content.items():
        known = SECTIONS.get(section)
        if known is None or not isinstance(values, dict):
            sections = ", ".join(f"[{name}]" for name in SECTIONS)
            problems.append(f"--config: {path} has {section!r} at its top, where only {sections} may be")
            continue
        unknown = [key for key in values if key not in known.model_fields]
        problems += [f"--config: {path} has an unknown key {key!r} in [{section}]" for key in unknown]
    if problems:
        raise SettingsError("\n".join(problems))
    return dict(content.get(cls.section, {}))


def load(cls: type[S], flags: Mapping[str, Any], config: str = "") -> S:
    """Merge `flags` (values may be text), the environment, the TOML file `config` and the defaults, and check all once.

    Raises `SettingsError`.
    """
    path = config or os.environ.get(CONFIG_ENV, "")
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path and cls.section:
        for key, value in _read_section(cls, path).items():
            merged[key], sources[key] = value, f"from [{cls.section}] in {path}"
    for key, value in EnvSettingsSource(cls, env_ignore_empty=True)().items():
        if not environment.is_service_link(ENV_PREFIX + key, value):
            merged[key], sources[key] = value, f"from environment {ENV_PREFIX}{key.upper()}"
    for key, value in flags.items():
        merged[key] = value
        sources.pop(key, None)
    try:
        return cls(**merged)
    except ValidationError as error:
        lines = [_explain(cls, details, sources) for details in error.errors(include_url=False)]
        raise SettingsError("\n".join(lines)) from None


def _explain(cls: type[Options], details: ErrorDetails, sources: Mapping[str, str]) -> str:
    """One line for one of pydantic's errors: option, value, what is wrong with it, source."""
    message = details["msg"].removeprefix("Value error, ")
    if not details["loc"]:
        return message
    key = str(details["loc"][0])
    source = f" ({sources[key]})" if key in sources else ""
    option = _option(cls, key)
    if details["type"] == "missing":
        if not option.startswith("-"):
            return f"{option}: needed"
        file = f" or {key} in [{cls.section}] of the file" if cls.section else ""
        return f"{option}: needed (or environment {ENV_PREFIX}{key.upper()}{file})"
    return f"{option}: {what_is_wrong(details, message)}{source}"


def what_is_wrong(details: ErrorDetails, message: str) -> str:
    value, context = details["input"], details.get("ctx", {})
    shown = str(value) if str(value) else "''"
    match details["type"]:
        case "less_than_equal":
            return f"{shown} is over {context['le']}"
        case "greater_than_equal":
            return f"{shown} is under {context['ge']}"
        case "greater_than":
            return f"{shown} is not over {context['gt']}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{shown} is not a whole number"
        case "float_parsing" | "float_type":
            return f"{shown} is not a number"
        case "bool_parsing" | "bool_type":
            return f"{shown} is not true or false"
        case "literal_error":
            return f"{shown} is not one of {context['expected']}"
        case "value_error":
            return f"{shown} {message}"
        case _:
            return f"{shown}: {message[0].lower()}{message[1:]}"


def to_arguments(settings: Options, fixed: Collection[str] = ()) -> list[str]:
    """The flags that make these settings again in another process; fields left at their defaults are left out, so that
    the environment and the file can still speak there, and so are those that the process decides itself."""
    arguments: list[str] = []
    for key in settings.model_fields_set.difference(fixed):
        value, option = getattr(settings, key), _option(type(settings), key)
        if isinstance(value, bool):
            arguments.append(option if value else "--no-" + option.removeprefix("--"))
        elif isinstance(value, list):
            arguments += [option, ",".join(value)]
        else:
            arguments += [option, str(value)]
    return arguments


# --- command lines ----------------------------------------------------------------------------------------------------


def _metavar(annotation: Any) -> str:
    # The choices of a literal stand in its help: in a column of their own they would cut the options' names short.
    return {int: "NUMBER", float: "NUMBER"}.get(annotation, "TEXT")


def bounds(field: FieldInfo) -> str:
    """`1 to 64`, or which words may be; empty: no bounds."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(get_args(field.annotation))
    names = ("ge", "gt", "le")
    limits = {name: getattr(meta, name) for meta in field.metadata for name in names if hasattr(meta, name)}
    if "le" not in limits:
        return ""
    if "ge" in limits:
        return f"{limits['ge']} to {limits['le']}"
    return f"over {limits['gt']}, to {limits['le']}"


def _help_text(field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = f"default {value}" if value not in ("", [], False) else ""
    facts = "; ".join(text for text in (default, bounds(field)) if text)
    return escape((field.description or "") + (f" ({facts})" if facts else ""))


def _parameter(key: str, field: FieldInfo) -> inspect.Parameter:
    option = option_name(key, field)
    if field.annotation is bool:
        off = "--no-" + option.removeprefix("--")
        annotation: Any = Annotated[
            bool | None, typer.Option(f"{option}/{off}", help=_help_text(field), show_default=False)
        ]
    elif not option.startswith("-"):
        annotation = Annotated[str | None, typer.Argument(help=_help_text(field), metavar=option, show_default=False)]
    elif field.annotation == list[str]:
        annotation = Annotated[
            list[str] | None, typer.Option(option, help=_help_text(field), metavar="TEXT", show_default=False)
        ]
    else:
        # Text as it comes: the settings class is the one place that converts and checks, whatever the source.
        annotation = Annotated[
            str | None,
            typer.Option(option, help=_help_text(field), metavar=_metavar(field.annotation), show_default=False),
        ]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _paragraphs(text: str) -> str:
    """Without the line breaks of the source, so that the terminal's width decides."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def add_command(
    app: typer.Typer, name: str, cls: type[S], run: Callable[[S], int], fixed: Mapping[str, str] | None = None
) -> None:
    """A command whose options, help and checks are the fields of `cls`, without those that are `fixed`; `run` returns the
    exit status."""
    fixed = fixed or {}

    def command(**values: Any) -> int:
        for line in environment.notes(os.environ, environment.known_names()):
            print(f"crossdock: {line}", file=sys.stderr)  # noqa: T201
        config = values.pop("config", None) or ""
        # An option that is repeated is the same as one with commas.
        texts = {key: ",".join(value) if isinstance(value, list) and value else value for key, value in values.items()}
        flags = {key: value for key, value in texts.items() if value is not None and value != []}
        return run(load(cls, {**flags, **fixed}, config))

    fields = [(key, field) for key, field in cls.model_fields.items() if key not in fixed]
    fields.sort(key=lambda item: not item[1].is_required())
    parameters = [_parameter(key, field) for key, field in fields]
    if cls.section:
        annotation = Annotated[str | None, typer.Option("--config", help=_CONFIG_HELP, metavar="PATH")]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("config", keyword, default=None, annotation=annotation))
    help_text = _paragraphs(inspect.getdoc(cls) or "")
    epilog = escape(_EPILOG.format(section=f", or in section [{cls.section}] of the file" if cls.section else ""))
    command.settings_class = cls  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=help_text, epilog=epilog)(command)


def new_app(help_text: str | None = None) -> typer.Typer:
    text = _paragraphs(help_text or "")
    return typer.Typer(help=text, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def invoke(app: typer.Typer, arguments: Sequence[str], prog: str) -> int:
    """Run the command line and return its exit status; a user's errors are one line each on stderr, with status 2, or 78
    where only this machine or the model makes them errors; failures of peers and resources (`CrossdockError`) are a
    message there, with status 1."""
    try:
        status = app(list(arguments), prog_name=prog, standalone_mode=False)
    except (SettingsError, ConfigError) as error:
        for line in str(error).splitlines():
            print(f"{prog}: {line}", file=sys.stderr)  # noqa: T201
        return CONFIG_EXIT if isinstance(error, ConfigError) else USAGE_EXIT
    except CrossdockError as error:
        print(f"{prog}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except typer.Abort:
        return INTERRUPTED_EXIT
    except _ClickError as error:
        text = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        print(f"{prog}: {text} See --help.", file=sys.stderr)  # noqa: T201
        return USAGE_EXIT
    return status if isinstance(status, int) else 0


def complaints(lines: Iterable[str]) -> list[str]:
    """What `invoke` has said of options, without the name of the program, among the lines that a process wrote."""
    return [found[1] for line in lines if (found := _COMPLAINT.match(line))]


def parse(cls: type[S], arguments: Sequence[str]) -> S:
    """Settings from a command line. Raises `SettingsError`; `--help` prints and raises `SystemExit`."""
    found: list[S] = []

    def keep(settings: S) -> int:
        found.append(settings)
        return 0

    app = new_app()
    add_command(app, cls.section, cls, keep)
    try:
        app(list(arguments), prog_name=cls.section, standalone_mode=False)
    except _ClickError as error:
        raise SettingsError(" ".join(error.format_message().split())) from None  # type: ignore[attr-defined]
    if not found:
        raise SystemExit(0)
    return found[0]


def run_role(prog: str, cls: type[S], run: Callable[[S], int], fixed: Mapping[str, str] | None = None) -> int:
    """`python -m <role>`: parse the process's arguments and run. `fixed` are options which the role itself decides."""
    app = new_app()
    add_command(app, prog, cls, run, fixed)
    return invoke(app, sys.argv[1:], f"python -m {prog}")
