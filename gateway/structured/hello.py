"""The first line for a process that compiles grammars. Apart, since that process imports as little as it can."""

import msgspec


class Hello(msgspec.Struct):
    tokenizer: str
    """tokenizer.json"""
    vocab_size: int
    eos_ids: list[int]
