"""Request types that are cheap to validate, even for a large and invalid request. Plain pydantic checks every entry of a list
or dict, and makes an error for each bad entry, which costs 10 µs and 3 KiB."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

from annotated_types import GroupedMetadata, MaxLen
from pydantic import BaseModel, BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

TEXT_CHARS_MAX: Final = 32 << 20  # Characters in one string. `--body-bytes-max` is less, as a rule.
FIELDS_MAX: Final = 64  # The most fields of an object from which the code reads only some


@dataclass(frozen=True)
class MaxKeys(GroupedMetadata):
    """Limits the entries of a dict. They are counted before any of them is checked."""

    most: int

    def __iter__(self) -> Iterator[object]:
        yield MaxLen(self.most)
        yield BeforeValidator(self._count)

    def _count(self, value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > self.most:
            raise PydanticCustomError("too_long", "it may have at most {most} entries", {"most": self.most})
        return value


class MaxItems(MaxKeys):
    """The most entries of a list. They are counted first, and the first bad one ends the check."""

    def __iter__(self) -> Iterator[object]:
        yield FailFast()
        yield from super().__iter__()


Text = Annotated[str, Field(max_length=TEXT_CHARS_MAX)]
Ignored = Annotated[Any, BeforeValidator(lambda _: None)]  # A field whose value is not needed, so it is not kept
AnyObject = Annotated[dict[str, Any], MaxKeys(FIELDS_MAX)]  # An object that code looks at


class BoundedModel(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, fields: Any) -> Any:
        """Keep only one unknown field, which is enough for an error. Pydantic would make an error for each."""
        if not isinstance(fields, dict) or len(fields) <= len(cls.model_fields):
            return fields
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in fields if name not in names)
        return {name: fields[name] for name in names if name in fields} | {unknown: fields[unknown]}
