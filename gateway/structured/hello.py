"""The settings that a gateway and its processes that compile grammars share. They have their own module, because those
processes import as little as possible."""

from typing import Any, Final

import msgspec

COMPILE_CPU_S: Final = 0.8  # of one grammar; CPU time, so that a busy machine refuses no more than an idle one
OUT_OF_MEMORY: Final = 3  # Exit code of the process where a grammar needs too much memory


class CompilerSetup(msgspec.Struct):
    """The first line."""

    tokenizer: str  # tokenizer.json
    vocab_size: int
    eos_ids: list[int]


class CompileJob(msgspec.Struct, omit_defaults=True):
    """Each of the others: a grammar to compile, or the text of a JSON value to check against a schema."""

    grammar: str = ""
    text: str = ""
    schema: Any = None
