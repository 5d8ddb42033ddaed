"""The `--help` of an option: its value's name, its text, and its panel."""

import re
from typing import Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from rich.markup import escape

from runtime.settings.options import bounds
from runtime.settings.types import Options

ARGUMENTS_PANEL: Final = "Arguments"
OTHER_PANEL: Final = "Options"
EXPERT_PANEL: Final = "Expert options"
_CHOICES_WIDTH_MAX: Final = 16  # longer ones stand in the help text: their column would cut options' names short
_VALUES: Final = {
    "FILE": "tenants admin_key_file usage_db batch_db ledger trace plot file first second config db output",
    "DIR": "keys folder dest",
    "PATH": "tokenizer",
    "MODEL": "model",
    "NAME": "name model_id tenant_name on_host story request resume",
    "ADDRESS": "host bind coordinator metrics advertise tokens_bind kv_bind transfer_host",
    "PORT": "port",
    "URL": "url database jwt_issuer",
    "KEY": "api_key",
    "KEY,…": "api_keys",
    "CORES": "cpu_cores",
    "NAME,…": "faults names organisations transports",
    "KIB,…": "segment_kib block_kib",
    "RATIO,…": "ratios",
    "LENGTHS": "prompt_tokens output_tokens",
    "NAME:KEY:SHARE": "tenant",
    "NAME:KEY:FACTOR": "abuser",
    "NAME:SHARE": "priority",
    "TEXT": "question",
}
_NAMED: Final = {field: value for value, fields in _VALUES.items() for field in fields.split()}
_UNITS: Final = {
    "_ms": "MS",
    "_s": "SECONDS",
    "_gib": "GIB",
    "_mib": "MIB",
    "_mib_per_s": "MIB/S",
    "_gbit_per_s": "GBIT/S",
    "_days": "DAYS",
    "_h": "HOURS",
}


def value_name(key: str, field: FieldInfo) -> str:
    """The word for the option's value: its unit, its choices, or its kind."""
    if get_origin(field.annotation) is Literal:
        choices = "|".join(get_args(field.annotation))
        return choices if len(choices) <= _CHOICES_WIDTH_MAX else "NAME"
    if field.annotation in (int, float):
        stem = key.removesuffix("_max").removesuffix("_min")
        unit = max((suffix for suffix in _UNITS if stem.endswith(suffix)), key=len, default="")
        return _UNITS.get(unit, _NAMED.get(key, "NUMBER") if key == "port" else "NUMBER")
    return _NAMED.get(key, "TEXT")


def literal(text: str) -> str:
    """`text` as it is written: rich would take `[word]` for a style and `:word:` for an emoji."""
    return re.sub(r":(?=[\w-]+:)", ":[bold][/bold]", escape(text))


def help_text(field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        default = "" if value in ("", False) else "default on" if value is True else f"default {value}"
    facts = "; ".join(text for text in (default, bounds(field)) if text)
    text = field.description or ""
    return literal(text + (f" ({facts})" if facts else ""))


def panels_of(cls: type[Options]) -> dict[str, str]:
    """The panel of each field that has one, in the order in which panels are shown: a class's own come before its bases'."""
    found: dict[str, str] = {}
    for part in cls.__mro__:
        for title, fields in vars(part).get("panels", {}).items():
            found |= {field: title for field in fields.split() if field not in found}
    return found


def in_panel_order(cls: type[Options], fields: list[tuple[str, FieldInfo]]) -> list[tuple[str, FieldInfo]]:
    """Sort the fields by panel, since a panel is shown at the place of its first option. Required options come first in a
    panel."""
    panels = panels_of(cls)
    order, titles = list(panels), sorted(dict.fromkeys(panels.values()), key=EXPERT_PANEL.__eq__)

    def place(item: tuple[str, FieldInfo]) -> tuple[int, bool, int]:
        key, field = item
        if key not in panels:
            return (titles.index(EXPERT_PANEL) if EXPERT_PANEL in titles else len(titles), not field.is_required(), 0)
        return (titles.index(panels[key]), not field.is_required(), order.index(key))

    return sorted(fields, key=place)
