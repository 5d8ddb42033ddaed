"""`crossdock bench dev engine`: the engine of one worker against plain transformers, same weights, dtype and threads.

What a CPU core allows, for a model of P parameters in its linear layers (float32) and b streams of n tokens each:
- a decode step reads every weight and every stream's KV once: at least `(4 P + b n kv_bytes_per_token) / bandwidth`;
- and computes `2 P b` floating-point operations, so at least `2 P b / rate`; the larger of the two is the floor;
- prefill of T tokens computes `2 P T` and, for attention, `2 heads head_dim T²` per layer, causality halving it.
For the default model (P = 135 M, 46 kB of KV per token) on a core that reads 11-20 GB/s and computes 87 GFLOP/s: 27-49 ms a
step for one stream, 50 ms at 16 streams for the products alone, 3.1 ms per prompt token.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from engine.engine import Engine, SeqChunk
from engine.model.loader import load_engine
from launcher import tables

_PROMPT_TOKENS, _STEPS, _ROUNDS = 200, 16, 3
_LONG_TOKENS, _LONG_CHUNKS = 1400, 256
_PREFILL_TOKENS = 1000
_STREAMS = (4, 8, 16)


def run(model_path: str, threads: int, console: Console) -> dict[str, float]:
    """Measures and prints a table; returns its figures in tokens/s by name. About two minutes for the default model.

    Rounds of the engine and of transformers alternate, so that both see the same machine; each figure is the median round.
    """
    torch.set_num_threads(threads)
    engine = load_engine(model_path, kv_bytes=1 << 30)
    plain: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    plain.eval()
    cases: list[tuple[str, Callable[[], float]]] = [
        ("decode, 1 stream", lambda: _decode(engine, 1)),
        ("decode, 1 stream, transformers", lambda: _plain_decode(plain)),
        *((f"decode, {streams} streams", _decode_case(engine, streams)) for streams in _STREAMS),
        (f"prefill of {_PREFILL_TOKENS}", lambda: _prefill(engine, _PREFILL_TOKENS, _PREFILL_TOKENS)),
        (f"prefill of {_PREFILL_TOKENS}, transformers", lambda: _plain_prefill(plain, _PREFILL_TOKENS)),
        (
            f"prefill of {_LONG_TOKENS} in chunks of {_LONG_CHUNKS}",
            lambda: _prefill(engine, _LONG_TOKENS, _LONG_CHUNKS),
        ),
    ]
    rounds: dict[str, list[float]] = {name: [] for name, _ in cases}
    for number in range(_ROUNDS + 1):
        for name, measure in cases:
            rate = measure()
            if number:  # the first round warms up
                rounds[name].append(rate)
    of = f"{engine.info.model_type}, {engine.info.dtype}, {threads} thread(s)"
    _show(of, rounds, tables.console())
    return {name: statistics.median(rates) for name, rates in rounds.items()}


def _tokens(count: int, salt: int = 0) -> list[int]:
    return [100 + (salt * 31 + index * 7) % 150 for index in range(count)]


def _table(engine: Engine, stream: int, tokens: int) -> Sequence[int]:
    blocks = -(-tokens // engine.info.block_size)
    return range(stream * blocks, (stream + 1) * blocks)


def _decode_case(engine: Engine, streams: int) -> Callable[[], float]:
    return lambda: _decode(engine, streams)


def _decode(engine: Engine, streams: int) -> float:
    """Greedy decoding after a prompt each; tokens/s of all streams together, prompts not counted."""
    tables = [_table(engine, stream, _PROMPT_TOKENS + _STEPS) for stream in range(streams)]
    last = []
    for stream, blocks in enumerate(tables):
        logits = engine.forward([SeqChunk(_tokens(_PROMPT_TOKENS, stream), 0, blocks, True)])
        last.append(int(logits.argmax()))
    began = time.perf_counter()
    for position in range(_PROMPT_TOKENS, _PROMPT_TOKENS + _STEPS):
        logits = engine.forward([SeqChunk([last[i]], position, tables[i], True) for i in range(streams)])
        last = logits.argmax(dim=-1).tolist()
    return streams * _STEPS / (time.perf_counter() - began)


def _prefill(engine: Engine, tokens: int, chunk: int) -> float:
    prompt, blocks = _tokens(tokens), _table(engine, 0, tokens)
    began = time.perf_counter()
    for start in range(0, tokens, chunk):
        part = prompt[start : start + chunk]
        engine.forward([SeqChunk(part, start, blocks, start + len(part) == tokens)])
    return tokens / (time.perf_counter() - began)


@torch.inference_mode()
def _plain_decode(model: Any) -> float:
    """`generate` with its own cache; the time of a run without decoding is taken off, so prompts are not counted."""
    ids = torch.tensor([_tokens(_PROMPT_TOKENS)])
    times = []
    for new_tokens in (1, _STEPS + 1):
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=new_tokens, max_new_tokens=new_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        times.append(time.perf_counter() - began)
    return _STEPS / max(times[1] - times[0], 1e-9)


@torch.inference_mode()
def _plain_prefill(model: Any, tokens: int) -> float:
    ids = torch.tensor([_tokens(tokens)])
    began = time.perf_counter()
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return tokens / (time.perf_counter() - began)


def _show(of: str, rounds: dict[str, list[float]], console: Console) -> None:
    title = f"{of}: tokens/s over {_ROUNDS} rounds"
    table = tables.Table(title, "", "median", "lowest", "highest", "against transformers")
    for name, rates in rounds.items():
        reference = rounds.get(f"{name}, transformers")
        ratio = f"{statistics.median(rates) / statistics.median(reference):.2f}" if reference else ""
        table.row(name, f"{statistics.median(rates):.1f}", f"{min(rates):.1f}", f"{max(rates):.1f}", ratio)
    table.show(console)
