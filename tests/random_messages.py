"""Random messages that are right on the wire, made from the types of their fields. Everything comes from a seed."""

import random
from collections.abc import Sequence
from typing import Any

from msgspec import inspect

from proto.codec import pack_tokens, to_frames
from proto.kv import Commit
from proto.messages import Message, Prefill, Submit

INTEGERS = (0, 1, 2, 3, 7, 16, 33, 100, 4096, 1 << 20, (1 << 31) - 1, (1 << 40) - 1, (1 << 63) - 1)
FLOATS = (0.0, 0.5, 1.0, 30.0, 1e3, 1e6, 1e12)
FEW = (0, 0, 1, 1, 2, 3, 5)


class RandomMessages:
    """`names`: texts that fields get by their name, so that messages meet what is there: `{"request_id": ("r1", "r2")}`."""

    def __init__(self, source: random.Random, names: dict[str, Sequence[Any]]) -> None:
        self._source = source
        self._names = names

    def make(self, kind: type[Any], **fixed: Any) -> Any:
        """An instance of a struct's type; fields not given are drawn, those with a default seldom."""
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        values = {
            field.name: self._value(field.type, field.name)
            for field in info.fields
            if field.name not in fixed and (field.required or self._source.random() < 0.4)
        }
        return kind(**fixed, **values)

    def frames(self, message: Message) -> list[bytes]:
        """With a blob that mostly fits it."""
        blob = b""
        if isinstance(message, Submit | Prefill):
            tokens = message.prompt_tokens if message.prompt_tokens <= 4096 else 1
            blob = pack_tokens([1] * tokens) if self._source.random() < 0.97 else b"\xff" * 8
        elif isinstance(message, Commit):
            blob = pack_tokens([1] * message.prompt_tokens) if message.prompt_tokens <= 4096 else b""
        return to_frames(message, blob)

    def _value(self, kind: inspect.Type, name: str) -> Any:
        if name in self._names and self._source.random() < 0.9:
            return self._source.choice(self._names[name])
        source = self._source
        match kind:
            case inspect.IntType(ge=ge, gt=gt, le=le, lt=lt):
                low = ge if ge is not None else gt + 1 if gt is not None else 0
                high = le if le is not None else lt - 1 if lt is not None else 1 << 62
                return min(max(source.choice((*INTEGERS, low, high)), low), high)
            case inspect.FloatType(ge=ge, gt=gt, le=le):
                value = min(max(source.choice(FLOATS), ge or 0.0), le if le is not None else 1e12)
                return 0.5 if gt is not None and value <= gt else value
            case inspect.StrType(min_length=least, max_length=most, pattern=pattern):
                text = source.choice(("", "x", "y1", "model failed", "ü" * 100, "\0" * 512))
                return "x1" if (least and not text) or pattern else text[:most]
            case inspect.BytesType(min_length=least, max_length=most):
                size = source.choice((least or 0, 16, 32, 160, 7))
                return source.randbytes(min(max(size, least or 0), most if most is not None else size))
            case inspect.BoolType():
                return source.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.EnumType(cls=members):
                return source.choice(list(members))
            case inspect.LiteralType(values=values):
                return source.choice(values)
            case inspect.UnionType(types=types):
                return self._value(source.choice(types), name)
            case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
                count = max(source.choice(FEW), least or 0)
                return tuple(self._value(item, name) for _ in range(min(count, most if most is not None else count)))
            case inspect.ListType(item_type=item):
                return [self._value(item, name) for _ in range(source.choice(FEW))]
            case inspect.TupleType(item_types=items):
                return tuple(self._value(item, name) for item in items)
            case inspect.DictType(key_type=key, value_type=value):
                return {self._value(key, name): self._value(value, name) for _ in range(source.choice(FEW))}
            case inspect.StructType(cls=struct):
                return self.make(struct)
            case inspect.Metadata(type=inner):
                return self._value(inner, name)
        raise NotImplementedError(f"{name}: {kind}")
