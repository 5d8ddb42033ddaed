"""The names that a module's forward reads: attributes, globals and methods, with those of the functions that it calls.

A forward that applies a factor, a limit or a position of its own must name it. So code whose names are all known computes what
the known names stand for, in any version of transformers.
"""

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final

from torch import nn

_NOT_SERVED: Final = frozenset({"eager_attention_forward", "load_balancing_loss_func", "loss_function"})
"""Functions that models name and that the engine never has them call."""
_PLAIN_NUMBERS: Final = frozenset({-2, -1, 0, 1, 2, 3})  # numbers that select a dimension or are neutral


def names_read(module: nn.Module) -> set[str]:
    """The names that the forward of this module's class reads, its arguments, and the numbers in it that are not small, as
    text. Functions of transformers' models that it calls, and methods of its class, are read, too."""
    return set(_names(type(module), type(module).forward, set()))


def _names(owner: type, function: Any, seen: set[Any]) -> Iterator[str]:
    function = inspect.unwrap(getattr(function, "__func__", function))
    if function in seen:
        return
    seen.add(function)
    for code in _codes(function.__code__):
        yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        yield from (str(one) for one in code.co_consts if type(one) in (int, float) and one not in _PLAIN_NUMBERS)
        for name in code.co_names:
            yield name
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__.startswith("transformers.models."):
                yield from () if name in _NOT_SERVED else _names(owner, called, seen)
            method = None if hasattr(nn.Module, name) else inspect.getattr_static(owner, name, None)
            if isinstance(method, FunctionType | staticmethod | classmethod) and name not in _NOT_SERVED:
                yield from _names(owner, method, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
