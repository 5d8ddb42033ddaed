"""The cases of `python -m benchmarks engine`: decode through the real sampler and prefill, of the engine and of
transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engine.floor import ModelSize, Work
from benchmarks.engine.machine import timed
from engine.engine import Engine, SeqChunk
from engine.sampling.sampler import SamplerState, sample
from launcher.http.streams import BenchFailed
from proto.sampling import Sampling

BLOCK_SIZE = 16
_STEPS = 16  # decode steps in one measurement
_PROMPT_TOKENS, _LONG_CONTEXT = 200, 1900
_STREAMS = (1, 4, 8, 16)
_PREFILL_TOKENS = 1000
_CHUNKED_TOKENS, _CHUNK = 1400, 256
_TABLES = [_PROMPT_TOKENS + _STEPS] * max(_STREAMS) + [_LONG_CONTEXT + _STEPS, _CHUNKED_TOKENS]
"""Numbers of tokens for which there is KV: of each short stream, of the long one, and of the prompts."""


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int  # tokens of a decode step, or of the prompt
    work: Work  # the bytes and operations of one measurement
    measure: Callable[[], float]  # returns the seconds of one measurement
    is_transformers: bool = False  # true for a case of transformers; the engine has a case of the same name


def size_of(model: Any) -> ModelSize:
    """Returns the size of a causal language model of transformers. Experts of which a token uses a few are not counted."""
    config = model.config.get_text_config()
    weights = [
        getattr(module, "weight", None) for module in model.modules() if not isinstance(module, torch.nn.Embedding)
    ]
    every = sum(weight.numel() for weight in weights if weight is not None and weight.dim() == 2)
    head = model.get_output_embeddings().weight.numel()
    heads = config.num_attention_heads
    return ModelSize(
        body_weights=every - head,
        head_weights=head,
        number_bytes=model.dtype.itemsize,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def kv_bytes(size: ModelSize) -> int:
    """Returns the bytes of KV that the engine's cases need."""
    return sum(-(-tokens // BLOCK_SIZE) * BLOCK_SIZE for tokens in _TABLES) * size.kv_bytes_per_token


def cases(engine: Engine, plain: Any, size: ModelSize, device: str) -> list[Case]:
    """Returns the cases for which the model's context has room."""
    engine_cases, longest = _EngineCases(engine, size, device), engine.info.context_tokens
    found = []
    if longest >= _PROMPT_TOKENS + _STEPS:
        found += [engine_cases.decode(streams) for streams in _STREAMS]
        found.append(engine_cases.decode(max(_STREAMS), temperature=1.0, top_p=0.9))
        found.insert(1, _plain_decode(plain, size, device))
    if longest >= _LONG_CONTEXT + _STEPS:
        found.append(engine_cases.decode_long())
    if longest >= _PREFILL_TOKENS:
        found += [engine_cases.prefill(_PREFILL_TOKENS), _plain_prefill(plain, size, device)]
    if longest >= _CHUNKED_TOKENS:
        found.append(engine_cases.prefill(_CHUNKED_TOKENS, _CHUNK))
    if not found:
        raise BenchFailed(f"the model's context of {longest} tokens is too short to measure anything")
    return found


class _EngineCases:
    def __init__(self, engine: Engine, size: ModelSize, device: str) -> None:
        self._engine, self._size, self._device = engine, size, device
        self._tables: list[range] = []
        for tokens in _TABLES:
            first = self._tables[-1].stop if self._tables else 0
            self._tables.append(range(first, first - -tokens // BLOCK_SIZE))
        longest = engine.info.context_tokens
        for stream, (tokens, blocks) in enumerate(zip(_TABLES[:-1], self._tables[:-1], strict=True)):
            if (
                tokens <= longest
            ):  # decode writes only behind its prompt, so all rounds can use the same KV of the prompt
                self._compute(_tokens(tokens - _STEPS, stream), blocks, _CHUNK)

    def decode(self, streams: int, temperature: float = 0.0, top_p: float = 1.0) -> Case:
        drawn = f", temperature {temperature:g}, top_p {top_p:g}" if temperature else ""
        name = f"decode, {streams} stream{'s' if streams > 1 else ''}{drawn}"
        samplings = [
            Sampling(max_tokens=_STEPS, seed=stream, temperature=temperature, top_p=top_p) for stream in range(streams)
        ]
        return self._decode(name, self._tables[:streams], _PROMPT_TOKENS, samplings)

    def decode_long(self) -> Case:
        name = f"decode, 1 stream of {_LONG_CONTEXT:,} tokens"
        return self._decode(name, self._tables[-2:-1], _LONG_CONTEXT, [Sampling(max_tokens=_STEPS, temperature=0.0)])

    def _decode(self, name: str, tables: list[range], context: int, samplings: list[Sampling]) -> Case:
        def steps() -> None:
            states = [SamplerState(sampling, 0, self._engine.info.vocab_size, ()) for sampling in samplings]
            last = _tokens(len(tables))
            for position in range(context, context + _STEPS):
                rows = zip(last, tables, strict=True)
                logits = self._engine.forward([SeqChunk((token,), position, table, True) for token, table in rows])
                last = _accepted(logits, states)

        work = self._size.decode_step(len(tables), _mean_context(context))
        return Case(name, len(tables), work, lambda: timed(self._device, steps) / _STEPS)

    def prefill(self, tokens: int, chunk: int = 0) -> Case:
        name = f"prefill of {tokens:,}" + (f" in chunks of {chunk}" if chunk else "")
        prompt, blocks, chunk = _tokens(tokens), self._tables[-1], chunk or tokens
        work = self._size.prefill(tokens, -(-tokens // chunk))
        return Case(name, tokens, work, lambda: timed(self._device, lambda: self._compute(prompt, blocks, chunk)))

    def _compute(self, prompt: list[int], blocks: Sequence[int], chunk: int) -> None:
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            self._engine.forward([SeqChunk(part, start, blocks, start + len(part) == len(prompt))])


def _accepted(logits: torch.Tensor, states: list[SamplerState]) -> list[int]:
    """Draws the next tokens as `decode_worker.compute` does."""
    tokens = []
    for state, drawn in zip(states, sample(logits, states), strict=True):
        if drawn is None:
            raise BenchFailed("the model's logits are not finite")
        state.accept(drawn.token)
        tokens.append(drawn.token)
    return tokens


def _tokens(count: int, salt: int = 0) -> list[int]:
    return [100 + (salt * 31 + index * 7) % 150 for index in range(count)]


def _mean_context(prompt_tokens: int) -> float:
    """Returns the mean number of tokens to which a step attends, its own included."""
    return prompt_tokens + (_STEPS + 1) / 2


# --- transformers -------------------------------------------------------------------------------------------------------


def _plain_decode(model: Any, size: ModelSize, device: str) -> Case:
    """Makes a case of `generate` with its own cache. The time of a run with one token is subtracted, so the prompt does not
    count."""
    ids = torch.tensor([_tokens(_PROMPT_TOKENS)], device=device)

    @torch.inference_mode()
    def generate(new_tokens: int) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=new_tokens, max_new_tokens=new_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip

    def measure() -> float:
        one, more = timed(device, lambda: generate(1)), timed(device, lambda: generate(_STEPS + 1))
        return max(more - one, 1e-9) / _STEPS

    return Case("decode, 1 stream", 1, size.decode_step(1, _mean_context(_PROMPT_TOKENS)), measure, True)


def _plain_prefill(model: Any, size: ModelSize, device: str) -> Case:
    ids = torch.tensor([_tokens(_PREFILL_TOKENS)], device=device)

    @torch.inference_mode()
    def compute() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    name, work = f"prefill of {_PREFILL_TOKENS:,}", size.prefill(_PREFILL_TOKENS)
    return Case(name, _PREFILL_TOKENS, work, lambda: timed(device, compute), True)
