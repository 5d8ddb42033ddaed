"""Greedy decoding through the engine and through plain transformers, for comparing them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine, SeqChunk
from engine.kv.allocator import BlockAllocator
from engine.kv.sequence import SequenceBlocks
from engine.model.loader import load_engine

KV_BYTES = 32 << 20


def load(path: Path, block_size: int = 16, kv_bytes: int = KV_BYTES) -> Engine:
    return load_engine(str(path), block_size=block_size, kv_bytes=kv_bytes)


def plain_greedy(path: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What `generate` of transformers says, one prompt at a time, with its own KV cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


class Stream:
    """One sequence being prefilled chunk by chunk, then decoded token by token."""

    def __init__(self, engine: Engine, allocator: BlockAllocator, prompt: Sequence[int]) -> None:
        self.known = list(prompt)
        self.prompt_tokens = len(prompt)
        self.computed = 0
        self.blocks = SequenceBlocks(allocator, engine.info.block_size)
        self.engine = engine

    @property
    def output(self) -> list[int]:
        return self.known[self.prompt_tokens :]

    def next_chunk(self, most: int) -> SeqChunk:
        chunk = self.known[self.computed : self.computed + most]
        for _ in chunk:
            copy = self.blocks.append_slot()
            if copy is not None:
                self.engine.copy_block(*copy)
        start, self.computed = self.computed, self.computed + len(chunk)
        return SeqChunk(chunk, start, list(self.blocks.table), self.computed == len(self.known))


def engine_greedy(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int, chunk: int, *, join_every: int = 0
) -> list[list[int]]:
    """Greedy tokens of all prompts at once; prompt i joins at step i * join_every. Blocks are handed out scattered."""
    allocator = BlockAllocator(engine.blocks)
    allocator.free(allocator.allocate(engine.blocks)[::-1])
    streams = [Stream(engine, allocator, prompt) for prompt in prompts]
    step = 0
    while any(len(stream.output) < count for stream in streams):
        going = [s for i, s in enumerate(streams) if len(s.output) < count and step >= i * join_every]
        step += 1
        chunks = [stream.next_chunk(chunk) for stream in going]
        if not chunks:
            continue
        logits = engine.forward(chunks)
        wanting = [stream for stream, part in zip(going, chunks, strict=True) if part.wants_logits]
        for stream, token in zip(wanting, logits.argmax(dim=-1).tolist(), strict=True):
            stream.known.append(token)
    for stream in streams:
        stream.blocks.release()
    allocator.check_invariants()
    assert allocator.free_count == allocator.total
    return [stream.output for stream in streams]
