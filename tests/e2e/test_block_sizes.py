"""Prefill and decode workers whose KV blocks differ in size, on real processes: the same tokens, and a cache that works."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from proto.messages import Role
from tests.e2e.live import READY_S, at_once
from tests.e2e.parts import parts
from tests.e2e.test_exactness import generate
from tests.e2e.test_prefix_cache import prompts

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head size, float32


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 32), pytest.param(32, 16, marks=pytest.mark.long)])
def test_mixed_block_sizes_keep_tokens(tiny: Path, prefill_size: int, decode_size: int) -> None:
    """A pair of workers with different block sizes gives the same tokens as the model alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    asked = prompts() | {"odd": list(range(20, 69)), "one": [7]}
    expected = {name: generate(model, prompt, 30) for name, prompt in asked.items()}
    with parts(tiny) as up:
        up.start("coordinator", "--step-tokens", "64")
        up.start("gateway")
        up.start("prefill_worker", "--block-size", str(prefill_size))
        up.start("decode_worker", "--block-size", str(decode_size), "--kv-gib", "0.1", "--stall-share", "0")
        up.wait_registered(2)
        up.start("decode_worker", "--block-size", "24", "--dtype", "bfloat16", name="decode-other")
        capacities = {w.role: w.kv_blocks for w in up.status().workers}
        assert capacities[Role.PREFILL] != capacities[Role.DECODE]
        order = list(asked) * 2
        answers = at_once(lambda name: up.token_ids(asked[name], 30, ignore_eos=True), order)
        for name, answer in zip(order, answers, strict=True):
            assert answer == expected[name], name
        moved = up.wait_idle().counters["kv_bytes_moved"]
        first = up.complete(asked["first"], 30, return_token_ids=True, ignore_eos=True)
        assert first["choices"][0]["token_ids"] == expected["first"]
        cached = first["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 236 // prefill_size * prefill_size, "found by the hashes of larger blocks too"
        missing = -(-237 // 16) * 16 - 237 // decode_size * decode_size
        assert up.wait_idle().counters["kv_bytes_moved"] - moved == missing * TOKEN_BYTES, "decode gets what it lacks"
        names = {
            f"dtype is float32 at {name} and bfloat16 at decode-other" for name in ("prefill_worker", "decode_worker")
        }

        def told() -> bool:
            said = {
                end: [line for line in up.output if line.startswith(end)] for end in ("coordinator", "decode-other")
            }
            return all(
                any(name in line and "block_size is" in line for name in names for line in said[end]) for end in said
            )

        up.wait_for("both ends say of a worker that does not fit which fields differ", told, READY_S)
        assert len(up.status().workers) == 2
