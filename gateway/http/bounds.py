"""Types of requests whose check costs little however large and wrong a request is: pydantic looks at every entry of a list or
dict, and makes an error of each bad one, at 10 µs and 3 KiB."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

from annotated_types import GroupedMetadata, MaxLen
from pydantic import BaseModel, BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

TEXT_CHARS_MAX: Final = 32 << 20
"""Characters in one string. `--body-bytes-max` is less, as a rule."""
FIELDS_MAX: Final = 64
"""Fields of an object of which code looks at some only."""


@dataclass(frozen=True)
class MaxKeys(GroupedMetadata):
    """The most entries of a dict. They are counted before one is looked at."""

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
Ignored = Annotated[Any, BeforeValidator(lambda _: None)]
"""A field whose value nobody needs, and so is not kept."""
AnyObject = Annotated[dict[str, Any], MaxKeys(FIELDS_MAX)]
"""An object that code looks at."""


class BoundedModel(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, fields: Any) -> Any:
        """One is enough for an error: pydantic would make one of each."""
        if not isinstance(fields, dict) or len(fields) <= len(cls.model_fields):
            return fields
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in fields if name not in names)
        return {name: fields[name] for name in names if name in fields} | {unknown: fields[unknown]}
