"""Settings merged from flags, environment, file and defaults. `runtime.settings.command_line` makes commands of them.

load(GatewaySettings, {"port": "8080"})          merge and check; raises SettingsError
to_arguments(settings)                           the flags which make these settings again
"""

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from proto.errors import CrossdockError
from runtime.settings import environment
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.serve import DECIDED, EveryServeOption
from runtime.settings.types import ENV_PREFIX, Options
from runtime.settings.workers import WorkerSettings

S = TypeVar("S", bound=Options)

SECTIONS: Final[dict[str, type[Options]]] = {
    cls.section: cls for cls in (CoordinatorSettings, GatewaySettings, WorkerSettings, EveryServeOption)
}
CONFIG_ENV: Final = ENV_PREFIX + "CONFIG"
_OF_VLLM: Final = {
    "kv-cache-memory": "--kv-gib, the size of each worker's KV cache in GiB",
    "kv-cache-memory-bytes": "--kv-gib, the size of each worker's KV cache in GiB",
    "gpu-memory-utilization": "--gpu-memory-share, each worker's share of its GPU's memory",
    "max-num-batched-tokens": "--step-tokens-max, the most tokens of one prefill step",
    "enable-prefix-caching": "--no-prefix-cache; the prefix cache is on without an option",
    "data-parallel-size": "--mixed, the number of workers that do both phases",
    "tensor-parallel-size": "--vllm-args, which --engine vllm hands to vLLM",
    "quantization": "--vllm-args, which --engine vllm hands to vLLM",
    "enforce-eager": "--vllm-args, which --engine vllm hands to vLLM",
    "ssl-certfile": "--tls-certificate",
    "ssl-keyfile": "--tls-key",
    "ssl-ca-certs": "--tls-client-ca",
}  # options of vLLM that are no aliases here → what there is instead
_COMPLAINT: Final = re.compile(r"^[\w .-]+: (--[a-z].*)\Z")


class SettingsError(CrossdockError):
    """A setting is missing or wrong; `str()` has one line for each, naming the option and where its value came from."""


def option_name(field_name: str, field: FieldInfo) -> str:
    """`kv_gib` → `--kv-gib`, unless the field names its own, or is an argument, which has a name for people only.

    A flag has one form, the one that changes its default: `--once`, and `--no-access-log`.
    """
    extra = field.json_schema_extra
    if isinstance(extra, dict) and ("option" in extra or "argument" in extra):
        return str(extra.get("option") or extra["argument"])
    return ("--no-" if field.default is True else "--") + field_name.replace("_", "-")


def aliases_of(field: FieldInfo) -> tuple[str, ...]:
    """Returns other names of an option on the command line: those that vLLM has for it."""
    extra: Any = field.json_schema_extra
    return tuple(extra.get("aliases", ())) if isinstance(extra, dict) else ()


def where_given(option: str) -> str:
    """Returns where an option that a command does not have can be given, or its name here; empty: nowhere."""
    if instead := _OF_VLLM.get(option.removeprefix("--")):
        return f"crossdock has {instead}."
    for section, cls in SECTIONS.items():
        for key, field in cls.model_fields.items():
            if option in (option_name(key, field), *aliases_of(field)):
                has = f"It is an option of crossdock {section}"
                if key in DECIDED:
                    return f"{has}; crossdock serve and up choose it themselves."
                table = f"; in cluster.toml, {key} in [{section}]" if cls is not EveryServeOption else ""
                return f"{has}{table}; in the environment, {ENV_PREFIX}{key.upper()}."
    return ""


def _option(cls: type[Options], field_name: str) -> str:
    return option_name(field_name, cls.model_fields[field_name])


def _read_section(cls: type[Options], path: str) -> dict[str, Any]:
    """This class's section of the file. Every section and key of the file must be known. Raises `SettingsError`."""
    try:
        content = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"--config: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
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
    return checked(cls, *merged_values(cls, flags, config))


def merged_values(cls: type[Options], flags: Mapping[str, Any], config: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values that are given, and where those come from that are no flags. Raises `SettingsError`."""
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
    return merged, sources


def checked(cls: type[S], values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> S:
    """Returns settings of these values; `sources` says where some came from. Raises `SettingsError`."""
    try:
        return cls(**values)
    except ValidationError as error:
        lines = [_explain(cls, details, sources or {}) for details in error.errors(include_url=False)]
        raise SettingsError("\n".join(lines)) from None


def _explain(cls: type[Options], details: ErrorDetails, sources: Mapping[str, str]) -> str:
    """Puts one of pydantic's errors into a line: option, value, what is wrong with it, source."""
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
    if key == "api_keys":
        return f"{option}: must be keys as text, separated by commas or in a list{source}"
    return f"{option}: {what_is_wrong(details, message)}{source}"


def what_is_wrong(details: ErrorDetails, message: str) -> str:
    value, context = details["input"], details.get("ctx", {})
    shown = str(value) if str(value) else "''"
    match details["type"]:
        case "less_than_equal":
            return f"{shown} is over {context['le']}"
        case "greater_than_equal":
            return f"{shown} is under {context['ge']}"
        case "less_than":
            return f"{shown} is not under {context['lt']}"
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
        field, value = type(settings).model_fields[key], getattr(settings, key)
        option = option_name(key, field)
        if isinstance(value, bool):
            arguments += [option] if value != field.default else []
        elif isinstance(value, list):
            arguments += [option, ",".join(value)]
        else:
            arguments += [option, str(value)]
    return arguments


def bounds(field: FieldInfo) -> str:
    """`1 to 64`, or which words may be; empty: no bounds."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(get_args(field.annotation))
    names = ("ge", "gt", "le", "lt")
    limits = {name: getattr(meta, name) for meta in field.metadata for name in names if hasattr(meta, name)}
    if not limits.keys() & {"le", "lt"}:
        return ""
    upper = f"to {limits['le']}" if "le" in limits else f"under {limits['lt']}"
    if "ge" in limits:
        return f"{limits['ge']} {upper}" if "le" in limits else f"{limits['ge']} or more, {upper}"
    return f"over {limits['gt']}, {upper}"


def complaints(lines: Iterable[str]) -> list[str]:
    """The complaints of `invoke` about options, without the name of the program, among the lines that a process wrote."""
    return [found[1] for line in lines if (found := _COMPLAINT.match(line))]
