"""Run in vLLM's Python: greedy tokens of some prompts, in `how` = `crossdock` (chunks that alternate between prompts, and
blocks out of order) or `stock` (vLLM's own scheduler, each prompt alone). Prints them as JSON.

    python rows.py HOW MODEL DTYPE [VLLM OPTIONS]
"""

import json
import os
import random
import sys
from pathlib import Path

NEW_TOKENS = 16
LENGTHS = (3, 70, 260)
CUTS = ((3,), (32, 1, 37), (100, 33, 64, 63))
CONTEXT = 512
BLOCK = 32


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(6, 256) for _ in range(length)] for length in LENGTHS]


def stock(model: str, dtype: str) -> list[list[int]]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype=dtype, max_model_len=CONTEXT, max_num_seqs=4, enforce_eager=True, block_size=BLOCK,
        kv_cache_memory_bytes=1 << 28, skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    asked = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    return [
        list(llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in prompts()
    ]


def crossdock(model: str, dtype: str, options: list[str]) -> list[list[int]]:
    from engine.attention.forward_batch import SeqChunk
    from engine.vllm.load import load_engine
    from worker.rank import map_pool

    engine = load_engine(
        model, device="cpu", dtype=dtype, context_tokens_max=CONTEXT, kv_bytes=1 << 28, gpu_share=0.9, step_tokens=128,
        rows=4, map_pool=map_pool, args=" ".join(["--enforce-eager", f"--block-size {BLOCK}", *options]),
        on_progress=lambda _: None, on_lost_rank=lambda why: sys.exit(why),
    )  # fmt: skip
    sequences, answers = prompts(), [list[int]() for _ in LENGTHS]
    each = -(-(max(LENGTHS) + NEW_TOKENS) // engine.info.block_size)
    tables = [list(range(first + each - 1, first - 1, -1)) for first in range(1, each * len(LENGTHS), each)]
    cuts, done = [list(cut) for cut in CUTS], [0] * len(LENGTHS)
    while unfinished := [at for at, answer in enumerate(answers) if len(answer) < NEW_TOKENS]:
        chunks = []
        for at in unfinished:
            count = cuts[at].pop(0) if cuts[at] else 1
            tokens = sequences[at][done[at] : done[at] + count]
            done[at] += count
            chunks.append(SeqChunk(tokens, done[at] - count, tables[at], not cuts[at]))
        logits = engine.forward(chunks)
        for row, at in enumerate(at for at, chunk in zip(unfinished, chunks, strict=True) if chunk.wants_logits):
            answers[at].append(int(logits[row].argmax()))
            sequences[at].append(answers[at][-1])
    return answers


if __name__ == "__main__":
    how, model, dtype, *options = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[2]))
    found = stock(model, dtype) if how == "stock" else crossdock(model, dtype, options)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's own threads need no goodbye
