"""Messages change only in ways that processes of the previous version can follow."""

import copy
from typing import Any

import pytest

from proto.limits import PROTOCOL_VERSION
from tests.proto.schema import COMMAND, HOW, current, file_of, problems, recorded


def test_recorded_versions_can_follow() -> None:
    """Processes of every recorded version can follow the present messages."""
    found = [problem for old in recorded() for problem in problems(old, current())]
    assert not found, "\n".join([f"a process of a recorded version cannot follow these changes; {HOW}:", *found])


def test_present_schema_is_recorded() -> None:
    """The messages of this version are recorded in a schema file."""
    new = [old for old in recorded() if old == current()]
    assert new, f"{file_of(PROTOCOL_VERSION).name} is not up to date: run `{COMMAND}` and commit the file; {HOW}"


def _reorder(schema: dict[str, Any]) -> None:
    fields = schema["structs"]["Submit"]
    fields[3], fields[4] = fields[4], fields[3]


def _remove(schema: dict[str, Any]) -> None:
    del schema["structs"]["TokenItem"][-1]


def _append_without_default(schema: dict[str, Any]) -> None:
    schema["structs"]["Sampling"].append("new: int")


def _change_a_bound(schema: dict[str, Any]) -> None:
    schema["structs"]["Welcome"][1] = "heartbeat_ms: int"


def _remove_a_value(schema: dict[str, Any]) -> None:
    schema["enums"]["Interrupt"].remove("drained")


def _remove_a_message(schema: dict[str, Any]) -> None:
    schema["messages"].remove("Bye")


def _lose_a_blob(schema: dict[str, Any]) -> None:
    schema["with_blob"].remove("Commit")


BREAKING = (
    _reorder, _remove, _append_without_default, _change_a_bound, _remove_a_value, _remove_a_message, _lose_a_blob,
)  # fmt: skip


@pytest.mark.parametrize("change", BREAKING, ids=lambda change: change.__name__)
def test_breaking_change_is_detected(change: Any) -> None:
    """A change of messages that breaks the previous version is detected."""
    new = copy.deepcopy(current())
    change(new)
    assert problems(current(), new)


def test_allowed_additions_are_no_problem() -> None:
    """Appended fields with defaults, new messages and new enumeration values are allowed."""
    new = copy.deepcopy(current())
    new["structs"]["Submit"].append("new: int = 0")
    new["structs"]["Novel"] = ["text: str"]
    new["messages"].append("Novel")
    new["with_blob"].append("Novel")
    new["enums"]["Reject"].append("new_reason")
    assert not problems(current(), new)
