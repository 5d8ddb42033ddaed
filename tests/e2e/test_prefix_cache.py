"""The prefix cache on real processes: what is cached is not computed, and changes no token."""

import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from proto.messages import Role
from tests import tiny_models
from tests.e2e.live import READY_S, Live, live
from tests.e2e.test_exactness import generate

NEW_TOKENS, LONG_ANSWER = 20, 320
TOKEN_BYTES = 3 * 2 * 2 * tiny_models.HEAD_DIM * 4  # layers, K and V, heads, head size, float32


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("prefix") / "llama")


def prompts() -> dict[str, list[int]]:
    rng = random.Random(3)

    def text(length: int) -> list[int]:
        return [rng.randrange(6, 256) for _ in range(length)]

    shared = text(200)
    return {"first": shared + text(37), "other end": shared + text(50), "whole blocks": shared[:192]}


def ask(up: Live, prompt: list[int], **options: Any) -> tuple[list[list[int]], int]:
    """(tokens of each choice, cached prompt tokens)"""
    asked = {"max_tokens": NEW_TOKENS, **options}
    answer = up.complete(prompt, asked.pop("max_tokens"), return_token_ids=True, ignore_eos=True, **asked)
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [choice["token_ids"] for choice in answer["choices"]], cached


def whole(tokens: int, block: int) -> int:
    """The tokens of the blocks that are full."""
    return tokens // block * block


def forwarded(up: Live) -> int:
    return sum(w.tokens_forwarded for w in up.wait_idle().workers if w.role is Role.PREFILL)


def test_cached_prefix_changes_no_token(model_path: Path, tmp_path: Path) -> None:
    """Cached prompt tokens are not computed again, and answers stay the same."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    asked = prompts()
    expected = {name: generate(model, prompt, NEW_TOKENS) for name, prompt in asked.items()}
    seeded = {"temperature": 1.0, "seed": 5, "n": 2}
    with live(model_path, tmp_path / "on", STEP_TOKENS="64", STALL_SHARE="0") as up:
        before = forwarded(up)
        block = up.block_tokens()
        most = whole(191, block)  # the last token is computed
        assert ask(up, asked["first"]) == ([expected["first"]], 0)
        cold = forwarded(up)
        assert cold - before == 237
        assert ask(up, asked["first"]) == ([expected["first"]], 224)
        assert forwarded(up) - cold == 13
        moved = up.status().counters["kv_bytes_moved"]
        assert ask(up, asked["other end"]) == ([expected["other end"]], 192), "a beginning that another prompt left"
        assert ask(up, asked["whole blocks"]) == ([expected["whole blocks"]], most)
        drawn, cached = ask(up, asked["first"], **seeded)
        assert cached == 224
        status = up.wait_idle()
        assert status.counters["prompt_tokens_cached"] == 224 + 192 + most + 224
        warm_bytes = status.counters["kv_bytes_moved"] - moved
    with live(model_path, tmp_path / "off", STEP_TOKENS="64", PREFIX_CACHE="false") as up:
        for name in ("first", "first", "other end", "whole blocks"):
            assert ask(up, asked[name]) == ([expected[name]], 0)
        assert ask(up, asked["first"], **seeded) == (drawn, 0), "sampled as without a cache"
    with live(model_path, tmp_path / "turns", STEP_TOKENS="64") as up:
        for name, cached in (("first", 0), ("first", 224), ("other end", 192), ("whole blocks", most)):
            assert ask(up, asked[name]) == ([expected[name]], cached)
        assert ask(up, asked["first"], **seeded) == (drawn, 224)
        turn = [*asked["first"], *expected["first"], 7, 8, 9]
        answers, cached = ask(up, turn)
        assert answers == [generate(model, turn, NEW_TOKENS)]
        assert cached in (224, whole(237 + NEW_TOKENS - 1, block)), "the prefill worker may be the faster one"
        assert up.wait_idle().counters["suffixes_on_decode"] >= 1, "the second at least, when both workers are as fast"
    moved_blocks = -(-250 // block) - 192 // block + 1  # of the prompts with another end and drawn tokens
    assert warm_bytes == moved_blocks * block * TOKEN_BYTES, "decode gets only what it lacks"


def test_session_kv_is_kept_until_ended(model_path: Path, tmp_path: Path) -> None:
    """Each turn of a session finds the KV of the earlier ones until the client deletes the session."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    prompt = prompts()["first"]
    with live(model_path, tmp_path, STEP_TOKENS="64") as up:
        for turn in range(3):
            (answer,), cached = ask(up, prompt, session_id="mine")
            assert answer == generate(model, prompt, NEW_TOKENS)
            assert cached >= 224 if turn else cached == 0
            prompt = [*prompt, *answer, 7, 8, 9]
        [sessions] = up.wait_idle().sessions
        assert sessions.leases >= 1 and sessions.leased_tokens >= len(prompt) - 3
        assert up.status().counters["lease_found"] == 2
        answer = httpx.delete(f"{up.base_url}/v1/sessions/mine", timeout=10.0, trust_env=False)  # type: ignore[assignment]
        assert answer.json() == {"id": "mine", "object": "session", "deleted": True}  # type: ignore[attr-defined]
        up.wait_for("its lease ends", lambda: up.status().sessions[0].leases == sessions.leases - 1, READY_S)
        assert ask(up, prompt, session_id="mine") == ([generate(model, prompt, NEW_TOKENS)], 0)


def test_prefill_fetches_answer_from_decode(model_path: Path, tmp_path: Path) -> None:
    """A prefill worker fetches the KV of an earlier answer from the decode worker that computed it."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    prompt = prompts()["first"][:100]
    with live(model_path, tmp_path, STEP_TOKENS="16", STALL_SHARE="0") as up:
        (answer,), cached = ask(up, prompt, max_tokens=LONG_ANSWER)
        assert (answer, cached) == (generate(model, prompt, LONG_ANSWER), 0)
        turn = [*prompt, *answer, 7, 8, 9]
        before = forwarded(up)
        assert ask(up, turn) == ([generate(model, turn, NEW_TOKENS)], 416), "all but the last tokens"
        assert forwarded(up) - before == len(turn) - 416
        status = up.wait_idle()
        assert status.counters["prefixes_fetched"] == 1 and not status.counters.get("fetches_failed")


def test_evicted_kv_returns_from_tier(model_path: Path, tmp_path: Path) -> None:
    """Prompts that a small pool has evicted are found in the tier again."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rng = random.Random(4)
    asked = [[rng.randrange(6, 256) for _ in range(200)] for _ in range(5)]
    expected = [generate(model, prompt, NEW_TOKENS) for prompt in asked]
    pool = {"KV_GIB": str(640 * TOKEN_BYTES / (1 << 30)), "STALL_SHARE": "0"}
    with live(model_path, tmp_path, **pool, KV_TIER_GIB="0.01", KV_TIER_FOLDER=str(tmp_path)) as up:
        for round_ in range(3):
            for prompt, answer in zip(asked, expected, strict=True):
                assert ask(up, prompt) == ([answer], 192 if round_ else 0)
