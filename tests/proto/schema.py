"""The messages of this protocol version as a file, with which `test_schema.py` compares them.

    python -m tests.proto.schema        records the version that `proto/limits.py` names

Recording refuses a change that a process of a recorded version could not read. Then `PROTOCOL_VERSION` has to grow.
"""

import json
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from proto.codec import ALL_MESSAGES, WITH_BLOB
from proto.limits import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION

FOLDER = Path(__file__).parent
COMMAND = "python -m tests.proto.schema"
HOW = "docs/protocol.md, 'Changing a message', says how to change the protocol"


def file_of(version: int) -> Path:
    return FOLDER / f"schema-v{version}.json"


def current() -> dict[str, Any]:
    """Structures with their fields in order, as `name: type = default`, and values of enumerations."""
    structs: dict[str, Any] = {}
    enums: dict[str, list[str]] = {}
    for message in ALL_MESSAGES:
        _collect(message, structs, enums)
    return {
        "version": PROTOCOL_VERSION,
        "messages": sorted(message.__name__ for message in ALL_MESSAGES),
        "with_blob": sorted(message.__name__ for message in WITH_BLOB),
        "structs": dict(sorted(structs.items())),
        "enums": dict(sorted(enums.items())),
    }


def _collect(hint: Any, structs: dict[str, Any], enums: dict[str, list[str]]) -> None:
    if isinstance(hint, type) and issubclass(hint, Enum):
        enums[hint.__name__] = [member.value for member in hint]
    elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = get_type_hints(hint, include_extras=True)
        fields = msgspec.structs.fields(hint)
        structs[hint.__name__] = [f"{field.name}: {_type_text(hints[field.name])}{_default(field)}" for field in fields]
        for one in hints.values():
            _collect(one, structs, enums)
    else:
        for part in get_args(hint):
            _collect(part, structs, enums)


def _type_text(hint: Any) -> str:
    """A type with its bounds, the same in every version of Python."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        # `$`, as recorded of older versions, also let a last line break through, which no process sends.
        return " ".join([_type_text(parts[0]), *(repr(part).replace(r"\\Z", "$") for part in parts[1:])])
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type_text, parts))
    if parts:
        return f"{origin.__name__}[{', '.join(map(_type_text, parts))}]"
    return "..." if hint is ... else str(hint.__name__)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    return f" = {field.default_factory() if field.default is msgspec.NODEFAULT else field.default!r}"


def problems(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Why a process that speaks `new` and one that speaks `old` would not understand each other."""
    found = [f"message {name} is gone" for name in old["messages"] if name not in new["messages"]]
    if [name for name in old["messages"] if name in new["with_blob"]] != old["with_blob"]:
        found.append("a message has gained or lost its binary frame")
    for name, fields in old["structs"].items():
        theirs = new["structs"].get(name)
        if theirs is None:
            found.append(f"{name} is gone")
            continue
        for index, field in enumerate(fields):
            now = theirs[index] if index < len(theirs) else "gone"
            if now != field:
                found.append(f"{name}, field {index}: was '{field}', is '{now}'")
        found += [f"{name}: no default: '{field}'" for field in theirs[len(fields) :] if " = " not in field]
    for name, values in old["enums"].items():
        found += [f"{name}: {value!r} is gone" for value in values if value not in new["enums"].get(name, [])]
    return found


def recorded() -> list[dict[str, Any]]:
    """Of the versions that this one has to work with, those that have a file."""
    versions = range(max(MIN_PROTOCOL_VERSION, PROTOCOL_VERSION - 1), PROTOCOL_VERSION + 1)
    return [json.loads(file_of(version).read_text("utf-8")) for version in versions if file_of(version).exists()]


def main() -> int:
    new = current()
    found = [problem for old in recorded() for problem in problems(old, new)]
    if found:
        sys.stderr.write("\n".join(["not recorded:", *found, f"{HOW}.\n"]))
        return 1
    file_of(PROTOCOL_VERSION).write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
