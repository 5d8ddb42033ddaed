"""The process that compiles clients' grammars for a gateway, and checks answers against their schemas: a line in, a line out.
`gateway.structured.checker` starts it.

The first line is a `CompilerSetup`; each of the others a `CompileJob`. Each answer is a JSON string, empty if all is well.
SIGPROF ends the process where a job takes too long, whether or not its gateway lives.
"""

import json
import os
import resource
import signal
import sys
from typing import Any, Final

import msgspec

from runtime.grammar.compiler import GrammarError, can_begin, make_matcher, make_tokenizer

COMPILE_CPU_S: Final = 0.8  # of one grammar; CPU time, so that a busy machine refuses no more than an idle one
OUT_OF_MEMORY: Final = 3  # Exit code of the process where a grammar needs too much memory
MEMORY_BYTES_MAX: Final = 2 << 30  # Address space: a grammar that needs more ends the process, not the machine
NO_ANSWER: Final = "no answer matches it"
_BACKTRACKS_MAX: Final = 100_000
_DIGITS_MAX: Final = 4_300
_PATTERN_BYTES_MAX: Final = 10 << 20
_NICE: Final = 5


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


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, whose end closes our input
    os.nice(_NICE)
    lines = iter(sys.stdin.buffer.readline, b"")
    hello = msgspec.json.decode(next(lines), type=CompilerSetup)
    try:
        tokenizer = make_tokenizer(hello.tokenizer, hello.vocab_size, hello.eos_ids)
    except GrammarError as error:
        _say(str(error))
        return 1
    _say("")
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
        job = msgspec.json.decode(line, type=CompileJob)
        try:
            answer = (
                compiled(job.grammar, tokenizer, hello.vocab_size) if job.grammar else checked(job.text, job.schema)
            )
        except MemoryError:
            return OUT_OF_MEMORY
        _say(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
    return 0


def compiled(grammar: str, tokenizer: Any, vocab_size: int = 0) -> str:
    """Why the grammar is refused; empty: it is good. `vocab_size` is the model's; 0: the tokenizer's."""
    try:
        matcher = make_matcher(grammar, tokenizer)
        if not can_begin(matcher, tokenizer, vocab_size or tokenizer.vocab_size):
            return NO_ANSWER
    except GrammarError as error:
        return str(error) or "it cannot be compiled"
    except RecursionError:
        return "it is nested too deeply"
    return ""


def checked(text: str, schema: Any) -> str:
    """The part of the schema that the JSON text does not match; empty: it matches, or the schema cannot be used."""
    import jsonschema_rs

    try:
        value = json.loads(text, parse_float=_number, parse_int=_number)
    except (ValueError, RecursionError):
        return "it is not JSON"
    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACKS_MAX, size_limit=_PATTERN_BYTES_MAX)
    try:
        validator = jsonschema_rs.validator_for(schema, pattern_options=patterns, offline=True)
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError):  # no schema, or one that refers to others
        return ""
    try:
        validator.validate(value)
    except jsonschema_rs.ValidationError as error:
        if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.BacktrackLimitExceeded):
            return ""
        keyword = next((part for part in reversed(error.schema_path) if isinstance(part, str)), "")
        place = ".".join(["$", *map(str, error.instance_path)])
        return f"{place[:200]} does not match '{keyword[:60] or 'false'}'"
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON's escapes can write
        return ""
    return ""


def _number(text: str) -> int | float:
    """Returns a number of a JSON text. JSON does not bound numbers, so one that Python cannot read, or reads as infinite,
    becomes the largest float."""
    if text.lstrip("-").isdecimal() and len(text) <= _DIGITS_MAX:
        return int(text)
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def _say(text: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(text) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
