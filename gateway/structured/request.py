"""The form of an answer by its request: `response_format`, vLLM's `structured_outputs` and the older `guided_*`. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gateway.http.errors import ApiError, bad_value
from gateway.http.json_text import parse_inner
from gateway.structured.lark import Grammar, TooLarge
from gateway.structured.schema import SchemaError
from gateway.structured.tags import TagError, tag
from gateway.structured.user_grammar import UserGrammarError, as_lark

CHOICES_MAX: Final = 1000
_ANY_OBJECT: Final = {"type": "object"}
_FORMAT_FIELDS: Final = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "format", "structures", "triggers"},
}
_SCHEMA_FIELDS: Final = {"name", "description", "schema", "strict"}
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


@dataclass(frozen=True)
class WantedForm:
    """The form of an answer."""

    param: str  # The field that says so
    write: Callable[[Grammar], str]  # adds its rules; returns the answer's expression

    def expression(self, grammar: Grammar) -> str:
        """Raises `ApiError`."""
        try:
            return self.write(grammar)
        except (SchemaError, TagError, UserGrammarError, TooLarge) as error:
            raise bad_value(self.param, f"Invalid value for '{self.param}': {error}.") from None


def wanted(fields: dict[str, Any]) -> WantedForm | None:
    """None: any text will do. `fields` has the request's, without those that are None. Raises `ApiError`."""
    found = [
        *([_of_format(fields["response_format"])] if "response_format" in fields else []),
        *([_of_structured(fields["structured_outputs"])] if "structured_outputs" in fields else []),
        *(_of_kind(name, name.removeprefix("guided_"), fields[name]) for name in _GUIDED if name in fields),
    ]
    asked = [one for one in found if one is not None]
    if len(asked) > 1:
        first, second = asked[0].param.partition(".")[0], asked[1].param.partition(".")[0]
        raise bad_value(second, f"'{first}' and '{second}' both say what the answer looks like; send one of them.")
    return asked[0] if asked else None


def _of_format(value: Any) -> WantedForm | None:
    name = "response_format"
    kind = _object(value, name).get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        allowed = ", ".join(_FORMAT_FIELDS)
        raise bad_value(f"{name}.type", f"'{name}.type' must be one of {allowed}.", "unsupported_value")
    _only(value, _FORMAT_FIELDS[kind], name)
    if kind == "text":
        return None
    if kind == "json_object":
        return WantedForm(name, lambda grammar: grammar.json(_ANY_OBJECT, strict=True))
    if kind == "structural_tag":
        return WantedForm(name, lambda grammar: tag(value, grammar))
    param = f"{name}.json_schema"
    described = _object(value.get("json_schema"), param)
    _only(described, _SCHEMA_FIELDS, param)
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_value(f"{param}.strict", f"'{param}.strict' must be true or false.", "invalid_type")
    label = described.get("name")
    if not isinstance(label, str) or not 1 <= len(label) <= 64:
        raise bad_value(f"{param}.name", f"'{param}.name' must be a string of 1 to 64 characters.")
    schema = described.get("schema")
    if schema is None:
        schema = _ANY_OBJECT
    return WantedForm(f"{param}.schema", lambda grammar: grammar.json(schema, strict=bool(strict)))


def _of_structured(value: Any) -> WantedForm:
    name = "structured_outputs"
    content = {key: one for key, one in _object(value, name).items() if one is not None}
    _only(content, set(_KINDS), name)
    if len(content) != 1:
        raise bad_value(name, f"'{name}' must have exactly one of {', '.join(_KINDS)}.")
    ((kind, asked),) = content.items()
    return _of_kind(f"{name}.{kind}", kind, asked)


def _of_kind(param: str, kind: str, value: Any) -> WantedForm:
    match kind:
        case "json":
            schema = _parsed(param, value)
            return WantedForm(param, lambda grammar: grammar.json(schema, strict=True))
        case "json_object":
            if value is not True:
                raise bad_value(param, f"'{param}' must be true, or left out.", "invalid_type")
            return WantedForm(param, lambda grammar: grammar.json(_ANY_OBJECT, strict=True))
        case "structural_tag":
            content = _object(_parsed(param, value), param)
            return WantedForm(param, lambda grammar: tag(content, grammar))
        case "choice":
            options = _choices(param, value)
            return WantedForm(param, lambda grammar: grammar.either([grammar.plain(option) for option in options]))
    if not isinstance(value, str) or not value:
        raise bad_value(param, f"'{param}' must be a string, and not empty.", "invalid_type")
    if kind == "regex":
        return WantedForm(param, lambda grammar: grammar.regex(value))
    return WantedForm(param, lambda grammar: grammar.sub_grammar(as_lark(value)))


def _choices(param: str, value: Any) -> list[str]:
    if isinstance(value, list) and not 1 <= len(value) <= CHOICES_MAX:
        raise bad_value(param, f"'{param}' must have 1 to {CHOICES_MAX} strings.")
    if not isinstance(value, list) or not all(isinstance(option, str) and option for option in value):
        raise bad_value(param, f"'{param}' must be a list of strings, none of them empty.", "invalid_type")
    return list(dict.fromkeys(value))


def _parsed(param: str, value: Any) -> Any:
    """vLLM takes JSON as text too."""
    if not isinstance(value, str):
        return value
    try:
        return parse_inner(value)
    except ValueError:
        raise bad_value(param, f"'{param}' is a string, and no JSON.") from None


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_value(param, f"'{param}' must be an object.", "invalid_type")
    return value


def _only(value: dict[str, Any], known: set[str], param: str) -> None:
    for key in value.keys() - known:
        raise _unknown(f"{param}.{key[:100]}")


def _unknown(param: str) -> ApiError:
    return bad_value(param, f"Unknown parameter: '{param}'.", "unknown_parameter")
