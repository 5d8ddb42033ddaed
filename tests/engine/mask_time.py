"""`python -m tests.engine.mask_time`: what grammars cost. Compile time of typical and of large grammars, and the time that
masks take in a decode step of 16 streams with the default model, each in the middle of an answer."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from engine.engine import SeqChunk
from engine.model.loader import load_engine
from engine.sampling.sampler import SamplerState, sample
from gateway.structured.lark import Grammar
from gateway.structured.schema import SchemaError
from launcher.models import resolve
from proto.sampling import Sampling
from runtime.grammar.compiler import Compiler, GrammarError, Matcher, make_tokenizer

STREAMS, CONTEXT, STEPS, ROUNDS = 16, 200, 60, 5
OUT = Console(highlight=False, markup=False, soft_wrap=True)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street"],
        },
    },
    "required": ["name", "age", "address"],
}


def wide(count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"key{number}": {"type": "string", "maxLength": 100} for number in range(count)},
    }


def deep(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for level in range(levels):
        made = (
            {"type": "object", "properties": {"a": made, "b": made}} if level < 10 else {"type": "array", "items": made}
        )
    return made


COMPILED: dict[str, Callable[[Grammar], str]] = {
    "a schema of seven properties": lambda g: g.json(SCHEMA, strict=True),
    "any JSON object": lambda g: g.json({"type": "object"}, strict=True),
    "a string of at most 1,000 characters": lambda g: g.json({"type": "string", "maxLength": 1000}, strict=True),
    "a schema of 100 optional strings": lambda g: g.json(wide(100), strict=True),
    "an enum of 3,000 values": lambda g: g.json({"enum": [f"value {n}" for n in range(3000)]}, strict=True),
    "the regex (a+)+b": lambda g: g.regex("(a+)+b"),
    "the regex [a-z]{1,5000}": lambda g: g.regex("[a-z]{1,5000}"),
    "2,047 objects in 10 levels": lambda g: g.json(deep(10), strict=True),
    "multipleOf 9,973": lambda g: g.json({"type": "integer", "multipleOf": 9973}, strict=True),
}


def main() -> int:
    path = resolve.ready("", "", Console(quiet=True)).path
    torch.set_num_threads(1)
    engine = load_engine(str(path), kv_bytes=1 << 29)
    tokenizer = AutoTokenizer.from_pretrained(path)
    vocab = engine.info.vocab_size
    compiled_with = make_tokenizer(tokenizer.backend_tokenizer.to_str(), vocab, engine.info.eos_token_ids)
    for name, write in COMPILED.items():
        OUT.print(f"compile {name}: {_compile_ms(write, compiled_with, vocab)}")
    grammar = Grammar(lambda text: [text])
    text = grammar.text(COMPILED["a schema of seven properties"](grammar))
    compiler = Compiler(compiled_with, vocab)
    started = tokenizer.encode('{"name": "Ann of the hills', add_special_tokens=False)
    matchers = [compiler.matcher(text, started) for _ in range(STREAMS)]
    plain, masked, alone = [], [], list[float]()
    for _ in range(ROUNDS):
        plain.append(_steps(engine, [None] * STREAMS)[0])
        step_ms, mask_ms = _steps(engine, matchers)  # type: ignore[arg-type]
        masked.append(step_ms)
        alone.append(mask_ms)
    for label, values in (("a step", plain), ("a step with grammars", masked), ("its masks and accepts", alone)):
        OUT.print(f"{label}, {STREAMS} streams: {_said(values)} ms")
    OUT.print(f"share of masks: {statistics.median(alone) / statistics.median(plain):.1%}")
    return 0


def _compile_ms(write: Callable[[Grammar], str], tokenizer: Any, vocab: int) -> str:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        try:
            grammar = Grammar(lambda text: [text])
            Compiler(tokenizer, vocab).compile(grammar.text(write(grammar)))
        except (GrammarError, SchemaError) as error:
            return f"refused after {(time.perf_counter() - began) * 1000:.1f} ms: {str(error)[:60]}"
        times.append((time.perf_counter() - began) * 1000)
    return f"{_said(times)} ms"


def _steps(engine: Any, matchers: list[Matcher | None]) -> tuple[float, float]:
    """(median ms of a step, median ms of its masks and accepts): sampled, at a context of `CONTEXT` and more."""
    states = [
        SamplerState(Sampling(max_tokens=1 << 16, seed=number, grammar="x" if one else ""), 0, engine.info.vocab_size, (),
                     constraint=_Timed(one) if one else None)
        for number, one in enumerate(matchers)
    ]  # fmt: skip
    each = -(-(CONTEXT + STEPS) // engine.info.block_size)
    tables = [list(range(number * each, (number + 1) * each)) for number in range(STREAMS)]
    for table in tables:
        engine.forward([SeqChunk([5] * CONTEXT, 0, table, False)])
    steps, masks = [], []
    for step in range(STEPS):
        _Timed.spent = 0.0
        began = time.perf_counter()
        logits = engine.forward([SeqChunk([5], CONTEXT + step, table, True) for table in tables])
        for state, sampled in zip(states, sample(logits, states), strict=True):
            assert sampled is not None
            state.accept(sampled.token)
        steps.append((time.perf_counter() - began) * 1000)
        masks.append(_Timed.spent * 1000)
    return statistics.median(steps), statistics.median(masks)


class _Timed:
    """A matcher that adds up the time that it takes. A stream that has come to its end begins anew."""

    spent = 0.0

    def __init__(self, matcher: Matcher) -> None:
        self._first, self._matcher = matcher, Matcher(matcher._matcher.deep_copy(), matcher._vocab_size)  # type: ignore[call-arg]

    def mask(self, row: Any) -> Any:
        began = time.perf_counter()
        masked = self._matcher.mask(row)
        _Timed.spent += time.perf_counter() - began
        return masked

    def accept(self, token: int) -> None:
        began = time.perf_counter()
        self._matcher.accept(token)
        _Timed.spent += time.perf_counter() - began
        if self._matcher._matcher.is_stopped():
            self._matcher = Matcher(self._first._matcher.deep_copy(), self._first._vocab_size)  # type: ignore[call-arg]


def _said(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
