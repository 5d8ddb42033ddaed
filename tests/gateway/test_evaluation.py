"""What evaluation harnesses ask for: log-probabilities of prompts, limits on tokens, the best of several answers."""

from typing import Any

import pytest

from gateway.streams.prompt_scores import PromptScores
from gateway.streams.types import StreamLimits
from gateway.text.detokenize import Assembler, Detokenizer
from proto.errors import RemoteProtocolError
from proto.progress import PromptLogprobs
from tests.gateway.fakes import ANSWER, BLOCK_SIZE, CONTEXT_TOKENS, Site
from tests.gateway.http_words import chat, completion, events, on_site, post
from tests.tiny_models import EOS

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


def test_echo_logprobs_cover_every_prompt_token() -> None:
    """The request of lm-eval gets a log-probability for each prompt token but the first."""

    async def test(site: Site) -> None:
        answer = await completion(
            site, prompt=[PROMPT, PROMPT[:2]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
        )
        long, short = (choice["logprobs"] for choice in answer["choices"])
        assert long["token_logprobs"] == [None, -1, -2, -3, -4, -5, -6, -7, -0.5]
        assert short["token_logprobs"] == [None, -1, -0.5]
        assert long["top_logprobs"][0] is None and max(long["top_logprobs"][3].values()) == -0.5
        assert all(
            own in top.values() for own, top in zip(long["token_logprobs"][1:], long["top_logprobs"][1:], strict=True)
        )
        assert "".join(long["tokens"]) == answer["choices"][0]["text"]
        assert [len("".join(long["tokens"][:n])) for n in range(9)] == long["text_offset"]
        (submit, _), _ = site.cluster.submits
        assert submit.sampling.prompt_logprobs == 1
        assert not submit.block_hashes, "the prompt is computed anew, cached or not"

    on_site(test)


def test_echo_with_logprobs_streams() -> None:
    """A stream with echo gives the prompt's log-probabilities in its first event."""

    async def test(site: Site) -> None:
        found, _ = await events(site, "/v1/completions", prompt=PROMPT, echo=True, logprobs=0, max_tokens=3)
        lists = [event["choices"][0]["logprobs"]["token_logprobs"] for event in found]
        assert lists[0] == [None, -1, -2, -3, -4, -5, -6, -7, -0.5, -0.5]
        assert sum(map(len, lists)) == len(PROMPT) + 3

    on_site(test)


def test_zero_max_tokens_gives_prompt_only() -> None:
    """A completion with max_tokens 0 has no answer, only the prompt if it is echoed."""

    async def test(site: Site) -> None:
        answer = await completion(site, prompt="Hi there", max_tokens=0, echo=True, logprobs=1)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hi there", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in range(1, 8))]
        assert answer["usage"]["completion_tokens"] == 0
        assert (await completion(site, max_tokens=0))["choices"][0]["text"] == ""
        (found,), _ = await events(site, "/v1/completions", prompt="Hi", max_tokens=0, echo=True)
        assert found["choices"][0]["text"] == "Hi"

    on_site(test)


def test_full_context_prompt_without_output_fits() -> None:
    """A prompt may fill the context if max_tokens is 0, and not otherwise."""

    async def test(site: Site) -> None:
        full = [5] * CONTEXT_TOKENS
        answer = await completion(site, prompt=full, max_tokens=0, echo=True, logprobs=0)
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == CONTEXT_TOKENS
        for fields in ({"max_tokens": 1}, {}, {"max_tokens": 0, "prompt": [*full, 5]}):
            refused = await post(site, "/v1/completions", **{"prompt": full, **fields})
            assert refused.json()["error"]["code"] == "context_length_exceeded"

    on_site(test)


def test_token_limits_combine_with_a_grammar() -> None:
    """Limits on tokens and a response format may be set in one request."""

    async def test(site: Site) -> None:
        form = {"type": "json_object"}
        await chat(site, response_format=form, min_tokens=2, bad_words=["no"], allowed_token_ids=[9], max_tokens=5)
        sampling = site.cluster.submits[-1][0].sampling
        assert sampling.grammar and sampling.min_tokens == 2 and sampling.bad_words and sampling.allowed_token_ids

    on_site(test)


def test_prompt_logprobs_have_vllms_shape() -> None:
    """The field prompt_logprobs gives vLLM's shape for completions and chats."""

    async def test(site: Site) -> None:
        first, second, *_ = (await completion(site, prompt=PROMPT, prompt_logprobs=1))["choices"][0]["prompt_logprobs"]
        assert first is None
        assert second == {
            "41": {"logprob": -1.0, "rank": 1, "decoded_token": site.gateway.models[0].tokenizer.decode_all([41])},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": site.gateway.models[0].tokenizer.decode_all([7])},
        }
        answer = await chat(site, prompt_logprobs=0)
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert "prompt_logprobs" not in (await chat(site))
        refused = await post(site, "/v1/completions", prompt="Hi", prompt_logprobs=1, stream=True)
        assert refused.json()["error"]["param"] == "prompt_logprobs"

    on_site(test)


@pytest.mark.parametrize("at", [0, 4])
def test_resume_keeps_prompt_logprobs(at: int) -> None:
    """An interrupted attempt changes no log-probability of the prompt or the answer."""

    async def test(site: Site) -> None:
        site.cluster.interrupt_at = {1: at}
        answer = await completion(site, prompt=PROMPT, echo=True, logprobs=0, max_tokens=6)
        found = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert found == [None, *(-float(i) for i in range(1, 8)), *[-0.5] * 6]
        resumed = site.cluster.submits[1][0].sampling.prompt_logprobs
        assert resumed == (0 if at == 0 else -1), "once its tokens are there, the prompt's are complete"

    on_site(test)


def test_missing_prompt_logprobs_break_attempt() -> None:
    """The attempt is broken if its worker sends no log-probabilities of the prompt."""

    async def test(site: Site) -> None:
        site.cluster.forgets_prompt_logprobs = True
        answer = await post(site, "/v1/completions", prompt=PROMPT, echo=True, logprobs=0)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "interrupted"

    on_site(test, limits=StreamLimits(resume_delay_s=0.001, attempts_max=2))


def test_token_limits_reach_the_workers() -> None:
    """Workers get min_tokens, allowed_token_ids and the token ids of bad_words."""

    async def test(site: Site) -> None:
        await completion(site, min_tokens=2, allowed_token_ids=[9, 8, 9], bad_words=["no"], max_tokens=3)
        ((submit, _),) = site.cluster.submits
        encode = site.gateway.models[0].tokenizer.encode
        assert submit.sampling.min_tokens == 2 and submit.sampling.allowed_token_ids == (8, 9)
        expected = (tuple(encode(text, add_special_tokens=False)) for text in ("no", " no"))
        assert submit.sampling.bad_words == tuple(dict.fromkeys(expected))

    on_site(test)


def test_best_of_is_likeliest_per_token() -> None:
    """The choices returned with best_of have the highest mean log-probability per token."""

    async def test(site: Site) -> None:
        encode = site.gateway.models[0].tokenizer.encode
        texts = ["aaa", "b", "cc"]
        site.cluster.answer = lambda _, choice: [*encode(texts[choice], add_special_tokens=False), EOS]
        plain = site.cluster._logprobs
        site.cluster._logprobs = lambda submit, tokens: tuple(  # type: ignore[method-assign]
            replace_logprob(entry, -float(tokens[0] % 3)) for entry in plain(submit, tokens)
        )
        answer = await completion(site, best_of=3, n=2)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        means = {text: mean(site, text) for text in texts}
        best = sorted(texts, key=lambda text: -means[text])[:2]
        assert [choice["text"] for choice in answer["choices"]] == best
        assert answer["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)

    def replace_logprob(entry: Any, logprob: float) -> Any:
        import msgspec

        return msgspec.structs.replace(entry, logprob=logprob)

    def mean(site: Site, text: str) -> float:
        ids = [*site.gateway.models[0].tokenizer.encode(text, add_special_tokens=False), EOS]
        pairs = [ids[at : at + 2] for at in range(0, len(ids), 2)]
        return sum(-float(pair[0] % 3) * len(pair) for pair in pairs) / len(ids)

    on_site(test)


def test_special_and_stop_text_are_kept() -> None:
    """Special tokens and stop strings stay in the answer if the request asks for them."""

    async def test(site: Site) -> None:
        encode = site.gateway.models[0].tokenizer.encode
        site.cluster.answer = lambda _s, _c: [
            *encode("one", add_special_tokens=False),
            3,
            *encode("two", add_special_tokens=False),
            EOS,
        ]
        special = site.gateway.models[0].tokenizer.decode_all([3])
        assert (await completion(site))["choices"][0]["text"] == "onetwo"
        assert (await completion(site, skip_special_tokens=False))["choices"][0]["text"] == f"one{special}two"
        stopped = await completion(site, stop="et", include_stop_str_in_output=True)
        assert stopped["choices"][0]["text"] == "onet"
        assert (await completion(site, stop="et"))["choices"][0]["text"] == "on"

    on_site(test)


def test_stop_string_waits_for_min_tokens() -> None:
    """A stop string ends the answer only once min_tokens tokens have come."""
    ids = list(b"abab")
    sink = Assembler(Detokenizer(lambda some: bytes(some).decode(), frozenset()), ["a"], min_tokens=2)
    pieces = [sink.push(token) for token in ids[:3]]
    assert "".join(piece.text for piece in pieces) == "ab" and pieces[-1].stop == "a"


def test_cache_salt_separates_prompts() -> None:
    """Equal prompts share block hashes only if their cache_salt is equal."""

    async def test(site: Site) -> None:
        for salt in (None, "a", "b", "a"):
            await completion(site, prompt="long enough", cache_salt=salt)
        none, one, two, again = (submit.block_hashes for submit, _ in site.cluster.submits)
        assert len({none, one, two}) == 3 and one == again and len(none) == 16 * (11 // BLOCK_SIZE)

    on_site(test)


def test_odd_worker_logprobs_are_refused() -> None:
    """Malformed log-probabilities of a prompt are refused, and those behind a gap are left out."""
    scores = PromptScores(5, top=0)
    good = PromptLogprobs("r", 1, 1, 0, bytes(8), bytes(8))
    scores.take(good)
    scores.take(PromptLogprobs("r", 1, 4, 0, bytes(4), bytes(4)))  # a gap
    assert not scores.complete
    for bad in (
        PromptLogprobs("r", 1, 1, 0, bytes(8), bytes(4)),
        PromptLogprobs("r", 1, 1, 1, bytes(4), bytes(4), bytes(4), bytes(4)),
        PromptLogprobs("r", 1, 4, 0, bytes(8), bytes(8)),
        PromptLogprobs("r", 1, 1, 0, bytes(5), bytes(5)),
    ):
        with pytest.raises(RemoteProtocolError):
            scores.take(bad)
    scores.take(PromptLogprobs("r", 2, 1, 0, bytes(16), bytes(16)))  # the next attempt's, from the start
    assert scores.complete and len(list(scores)) == 4


def test_prompt_logprobs_leave_answer_unchanged() -> None:
    """The answer is the same if prompt_logprobs are asked for."""

    async def test(site: Site) -> None:
        assert (await completion(site, prompt_logprobs=2))["choices"][0]["text"] == ANSWER

    on_site(test)


def test_numeric_priority_reaches_coordinator() -> None:
    """The coordinator gets vLLM's numeric priority, and 0 if there is none."""

    async def test(site: Site) -> None:
        for priority in (None, 0, -3, 7):
            await completion(site, priority=priority)
        assert [submit.priority for submit, _ in site.cluster.submits] == [0, 0, -3, 7]

    on_site(test)
