"""Commands made from settings classes.

add_command(app, "gateway", GatewaySettings, run)   a command whose options, help and checks are the class's fields
new_app(help, table)                                a group of commands, each loaded when it runs
run_role("gateway", GatewaySettings, run)           what `python -m gateway` calls
parse(GatewaySettings, ["--port", "8080"])          settings from arguments
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar, Final, TypeVar

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from proto.errors import CrossdockError
from runtime.process import interrupts, output
from runtime.process.exits import INTERRUPTED_EXIT, USAGE_EXIT, ConfigError
from runtime.settings import environment
from runtime.settings.option_help import (
    ARGUMENTS_PANEL,
    OTHER_PANEL,
    help_text,
    in_panel_order,
    literal,
    panels_of,
    value_name,
)
from runtime.settings.options import CONFIG_ENV, SettingsError, aliases_of, load, option_name, where_given
from runtime.settings.types import ENV_PREFIX, Options

S = TypeVar("S", bound=Options)

_CONFIG_HELP = f"TOML file with settings; environment {CONFIG_ENV}."
_EPILOG = (
    f"Each option can also be set in the environment, as {ENV_PREFIX}<OPTION> with underscores"
    "{section}. Flags come before the environment, and that before the file."
)
_CONTEXT: Final = {"help_option_names": ["-h", "--help"]}
# typer has click inside it in some versions and beside it in others; the base of its usage errors has the same name.
_ClickError: Final[type[Exception]] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


@dataclass(frozen=True)
class Command:
    """A command that is imported when it runs."""

    help: str  # one line: how the description of its settings class begins
    settings: str  # `module:Class`
    run: str  # `module:function`, which takes the settings and returns the exit status
    takes: str = ""  # a subclass of `settings` with options that `--help` does not list; empty: there are none

    def settings_class(self) -> type[Options]:
        return _named(self.settings)  # type: ignore[no-any-return]

    def add_to(self, app: typer.Typer, name: str, load_all: Callable[[], object]) -> None:
        listed = self.settings_class()
        add_command(app, name, _named(self.takes or self.settings), _named(self.run), load_all=load_all, listed=listed)


@dataclass(frozen=True)
class CommandGroup:
    """Commands under one name."""

    help: str
    commands: "Table"


Table = Mapping[str, Command | CommandGroup]


def commands_in(table: Table, prefix: str = "") -> Iterator[tuple[str, Command]]:
    """Every command with its full name, like `bench isolation`."""
    for name, row in table.items():
        if isinstance(row, CommandGroup):
            yield from commands_in(row.commands, f"{prefix}{name} ")
        else:
            yield prefix + name, row


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _parameters(key: str, field: FieldInfo, panel: str, *, hidden: bool) -> Iterator[inspect.Parameter]:
    """The option of a field, and before it the argument that says the same, where there is one."""

    def parameter(name: str, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    option, text = option_name(key, field), help_text(field)
    shown: dict[str, Any] = {"help": text, "show_default": False, "rich_help_panel": panel, "hidden": hidden}
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "also_argument" in extra:
        argument = typer.Argument(metavar=str(extra["also_argument"]), **shown | {"rich_help_panel": ARGUMENTS_PANEL})
        yield parameter(_argument_name(key), Annotated[str | None, argument])
        shown["help"] = f"The same as {extra['also_argument']}."
    if field.annotation is bool:
        forms = f"--{key.replace('_', '-')}/{option}" if field.default else option
        yield parameter(key, Annotated[bool | None, typer.Option(forms, **shown)])
    elif not option.startswith("-"):
        shown["rich_help_panel"] = ARGUMENTS_PANEL
        yield parameter(key, Annotated[str | None, typer.Argument(metavar=option, **shown)])
    else:
        # Text as it comes: the settings class is the one place that converts and checks, whatever the source.
        kind: Any = list[str] | None if field.annotation == list[str] else str | None
        names = (option, *aliases_of(field))
        yield parameter(key, Annotated[kind, typer.Option(*names, metavar=value_name(key, field), **shown)])


def _argument_name(key: str) -> str:
    return key + "_argument"


def _flags(cls: type[Options], values: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, by field. Raises `SettingsError` where an argument and its option differ."""
    # An option that is repeated is the same as one with commas.
    texts = {key: ",".join(value) if isinstance(value, list) and value else value for key, value in values.items()}
    flags = {key: value for key, value in texts.items() if value is not None and value != []}
    for key, field in cls.model_fields.items():
        given = flags.pop(_argument_name(key), None)
        if given is None:
            continue
        if flags.get(key, given) != given:
            extra: Any = field.json_schema_extra
            name, option = extra["also_argument"], option_name(key, field)
            raise SettingsError(f"{option}: {flags[key]}, and {name} is {given}; give one of the two")
        flags[key] = given
    return flags


def _paragraphs(text: str) -> str:
    """Paragraphs without the line breaks of the source, so that the terminal's width decides."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def add_command(
    app: typer.Typer,
    name: str,
    cls: type[S],
    run: Callable[[S], int],
    fixed: Mapping[str, str] | None = None,
    load_all: Callable[[], object] | None = None,
    listed: type[Options] | None = None,
) -> None:
    """A command whose options, help and checks are the fields of `cls`, without those that are `fixed`; `run` returns the
    exit status. `load_all` imports every settings class whose options the environment may hold. If `listed` is given, the
    help shows its fields alone."""
    fixed, shown = fixed or {}, (listed or cls).model_fields

    def command(**values: Any) -> int:
        if load_all is not None and environment.notes(os.environ, environment.known_names()):
            load_all()
        for line in environment.notes(os.environ, environment.known_names()):
            print(f"crossdock: {line}", file=sys.stderr)  # noqa: T201
        if config := values.pop("config", None) or "":
            os.environ[CONFIG_ENV] = os.path.abspath(
                os.path.expanduser(config)
            )  # processes that it starts read it, too
        settings = load(cls, {**_flags(cls, values), **fixed}, config)
        interrupts.release()
        return run(settings)

    panels = panels_of(cls)
    fields = in_panel_order(cls, [(key, field) for key, field in cls.model_fields.items() if key not in fixed])
    parameters = [
        one
        for key, field in fields
        for one in _parameters(key, field, panels.get(key, OTHER_PANEL), hidden=key not in shown)
    ]
    if cls.section:
        option = typer.Option("--config", help=_CONFIG_HELP, metavar="FILE", rich_help_panel=OTHER_PANEL)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("config", keyword, default=None, annotation=Annotated[str | None, option]))
    epilog = _EPILOG.format(section=f", or in section [{cls.section}] of the file" if cls.section else "")
    command.settings_class = cls  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    about = literal(_paragraphs(inspect.getdoc(cls) or ""))
    app.command(name, cls=_Command, help=about, epilog=literal(epilog), context_settings=dict(_CONTEXT))(command)


def _without_types(params: list[Any]) -> list[Any]:
    """Flags take no value and arguments have a name of their own: typer would show their Python types, as `<bool>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _LazyGroup(TyperGroup):
    """Lists commands from their table, and imports the one that is called."""

    table: ClassVar[Table]
    load_all: ClassVar[Callable[[], object]]

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        row = self.table.get(name or "")
        if isinstance(row, Command):
            app = typer.Typer(**_HABITS)
            row.add_to(app, name or "", type(self).load_all)
            command = get_command(app)
        return name, command, rest


_HABITS: Final[dict[str, Any]] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "pretty_exceptions_show_locals": False,
    "context_settings": _CONTEXT,
}


def new_app(
    help_text: str = "",
    table: Table | None = None,
    *,
    completion: bool = False,
    version: str = "",
    load_all: Callable[[], object] | None = None,
) -> typer.Typer:
    """An app with the commands of `table`, or one for `add_command`. With `completion` a shell can complete its words;
    `version` is what `--version` prints."""
    habits = _HABITS | {"help": _paragraphs(help_text), "add_completion": completion}
    if table is None:
        return typer.Typer(**habits)

    def all_settings() -> list[type[Options]]:
        return [command.settings_class() for _, command in commands_in(table)]

    load_all = load_all or all_settings
    group = type("_Group", (_LazyGroup,), {"table": table, "load_all": staticmethod(load_all)})
    app = typer.Typer(cls=group, **habits)
    app.callback()(_version_option(version) if version else lambda: None)
    for name, row in table.items():
        if isinstance(row, CommandGroup):
            app.add_typer(new_app(row.help, row.commands, load_all=load_all), name=name)
        else:
            app.command(name, help=literal(row.help))(lambda: None)  # only listed; `_LazyGroup` puts the real one in
    return app


def _version_option(text: str) -> Callable[..., None]:
    def show(asked: bool) -> None:
        if asked:
            typer.echo(text)
            raise typer.Exit

    option = typer.Option("--version", callback=show, is_eager=True, help="Print the version and exit.")

    def root(version: Annotated[bool, option] = False) -> None:
        pass

    return root


def invoke(app: typer.Typer, arguments: Sequence[str], prog: str) -> int:
    """Run the command line and return its exit status; a user's errors are one line each on stderr, with status 2, or 78
    where only this machine or the model makes them errors; failures of peers and resources (`CrossdockError`) are a
    message there, with status 1."""
    try:
        status = app(list(arguments), prog_name=prog, standalone_mode=False)
    except (SettingsError, ConfigError) as error:
        for line in str(error).splitlines():
            print(f"{prog}: {line}", file=sys.stderr)  # noqa: T201
        return error.exit_status if isinstance(error, ConfigError) else USAGE_EXIT
    except CrossdockError as error:
        print(f"{prog}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED_EXIT
    except _ClickError as error:
        text = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        more = where_given(getattr(error, "option_name", "")) or "See --help."
        print(f"{prog}: {text}{'' if text[-1:] in '.?)' else '.'} {more}", file=sys.stderr)  # noqa: T201
        return USAGE_EXIT
    return status if isinstance(status, int) else 0


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
    output.secure()
    app = new_app()
    add_command(app, prog, cls, run, fixed)
    return invoke(app, sys.argv[1:], f"python -m {prog}")
