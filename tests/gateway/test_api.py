"""What the endpoints answer, over a fake cluster: shapes and options."""

from typing import Any

import pytest

from proto.errors import CancelReason
from proto.messages import Submit
from tests.gateway.fakes import ANSWER, CONTEXT_TOKENS, MODEL, Site
from tests.gateway.http_words import ANSWER_TOKENS, chat, completion, events, flat, on_site
from tests.tiny_models import BOS, EOS, SPECIAL


def test_completion_has_openais_shape() -> None:
    """A completion has the id, object, choices and usage of OpenAI's API."""

    async def test(site: Site) -> None:
        answer = await completion(site)
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == MODEL
        assert answer["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
        assert answer["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": ANSWER_TOKENS,
            "total_tokens": 2 + ANSWER_TOKENS,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    on_site(test)


def test_chat_goes_through_the_template() -> None:
    """Chat messages are put into the chat template before they reach a worker."""

    async def test(site: Site) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "S"}, {"role": "user", "content": parts}]
        answer = await chat(site, messages=messages)
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert choice["finish_reason"] == "stop"
        ((submit, ids),) = site.cluster.submits
        names = {name: index for index, name in enumerate(SPECIAL)}
        expected = [BOS, names["<|system|>"], "S", names["<|user|>"], "a\nb", names["<|assistant|>"]]
        encode = site.gateway.models[0].tokenizer.encode
        assert ids == flat(
            encode(part, add_special_tokens=False) if isinstance(part, str) else [part] for part in expected
        )
        assert submit.sampling.max_tokens == CONTEXT_TOKENS - len(ids)
        assert submit.sampling.stop_token_ids == (EOS,)
        assert submit.sampling.temperature == 1.0

    on_site(test)


def test_sampling_parameters_reach_workers() -> None:
    """Workers get each sampling parameter of a request, and OpenAI's defaults for those left out."""

    async def test(site: Site) -> None:
        await completion(site, max_tokens=None)
        await completion(
            site, seed=-5, temperature=0, top_k=-1, top_p=0.5, min_p=0.1, repetition_penalty=1.5, presence_penalty=-1,
            frequency_penalty=1, logit_bias={"7": -3, "5": 100}, stop_token_ids=[9, 9], ignore_eos=True, max_tokens=3,
            user="me", metadata={}, store=False, prompt_cache_key="k",
            response_format={"type": "text"}, stop=None,
            length_penalty=1,
        )  # fmt: skip
        first, second = (submit.sampling for submit, _ in site.cluster.submits)
        assert first.max_tokens == 16
        assert first.logprobs == -1
        assert second.seed == (1 << 63) - 5
        assert (second.temperature, second.top_k, second.top_p, second.min_p) == (0, 0, 0.5, 0.1)
        assert (second.repetition_penalty, second.presence_penalty, second.frequency_penalty) == (1.5, -1, 1)
        assert second.logit_bias == ((5, 100), (7, -3))
        assert second.stop_token_ids == (9,)

    on_site(test)


def test_seeds_differ_when_none_is_given() -> None:
    """Requests without a seed get different ones."""

    async def test(site: Site) -> None:
        for _ in range(3):
            await completion(site, max_tokens=1)
        assert len({submit.sampling.seed for submit, _ in site.cluster.submits}) == 3

    on_site(test)


def test_max_tokens_ends_with_length() -> None:
    """An answer cut by max_tokens has the finish reason length."""

    async def test(site: Site) -> None:
        (choice,) = (await completion(site, max_tokens=3))["choices"]
        assert (choice["text"], choice["finish_reason"]) == (ANSWER[:3], "length")
        assert (await chat(site, max_completion_tokens=3))["usage"]["completion_tokens"] == 3

    on_site(test)


@pytest.mark.parametrize("stop", ["END", ["zzz", "END", "done\nEND"], "🌍"])
def test_stop_string_cuts_the_answer(stop: Any) -> None:
    """The answer ends before the first stop string, and the rest of the work is cancelled."""

    async def test(site: Site) -> None:
        cut = min(ANSWER.index(s) for s in ([stop] if isinstance(stop, str) else stop) if s in ANSWER)
        (choice,) = (await completion(site, stop=stop))["choices"]
        assert (choice["text"], choice["finish_reason"]) == (ANSWER[:cut], "stop")
        chunks, done = await events(site, "/v1/chat/completions", stop=stop)
        assert done
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER[:cut]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert [cancel.reason for cancel in site.cluster.cancels] == [CancelReason.STOP_STRING] * 2

    on_site(test)


def test_streams_hold_no_broken_characters() -> None:
    """No streamed text has a replacement character when each token comes by itself."""

    async def test(site: Site) -> None:
        site.cluster.batch = 1
        chunks, done = await events(site, "/v1/completions")
        assert done
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(texts) == ANSWER
        assert not any("�" in text for text in texts)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert len({chunk["id"] for chunk in chunks}) == 1

    on_site(test)


def test_chat_stream_begins_with_the_role() -> None:
    """A chat stream begins with the assistant's role and ends with the usage if it was asked for."""

    async def test(site: Site) -> None:
        chunks, done = await events(site, "/v1/chat/completions", stream_options={"include_usage": True})
        assert done
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == ANSWER_TOKENS
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == ANSWER

    on_site(test)


def test_continuous_usage_is_on_every_chunk() -> None:
    """Every chunk has the usage so far if continuous_usage_stats and include_usage are set."""

    async def test(site: Site) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks, done = await events(site, "/v1/completions", prompt=[9, 8, 7], stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert done and counts == sorted(counts) and len(set(counts)) > 2
        assert counts[-1] == ANSWER_TOKENS
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
        alone = {"continuous_usage_stats": True}
        chunks, _ = await events(site, "/v1/completions", prompt=[9, 8, 7], stream_options=alone)
        assert all("usage" not in chunk for chunk in chunks)

    on_site(test)


def test_choices_follow_prompt_order() -> None:
    """Choices of several prompts are numbered prompt by prompt."""

    async def test(site: Site) -> None:
        encode = site.gateway.models[0].tokenizer.encode

        def answer(submit: Submit, choice: int) -> list[int]:
            return [*encode(f"{submit.prompt_tokens}/{choice} {'x' * choice}", add_special_tokens=False), EOS]

        site.cluster.answer = answer
        expected = ["1/0 ", "1/1 x", "2/0 ", "2/1 x", "3/0 ", "3/1 x"]
        whole = await completion(site, prompt=["a", "bb", "ccc"], n=2)
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        assert [choice["text"] for choice in whole["choices"]] == expected
        assert whole["usage"]["prompt_tokens"] == 6
        assert whole["usage"]["completion_tokens"] == sum(len(text) + 1 for text in expected)
        by_ids = await completion(site, prompt=[[7], [8, 9], [8, 9, 10]], n=2)
        assert [choice["text"] for choice in by_ids["choices"]] == expected
        chunks, done = await events(site, "/v1/completions", prompt=["a", "bb", "ccc"], n=2)
        assert done
        texts = [""] * 6
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == expected

    on_site(test)


def test_echo_puts_prompt_before_answer() -> None:
    """An echoed prompt, text or token ids, comes before the answer, streamed or not."""

    async def test(site: Site) -> None:
        (choice,) = (await completion(site, prompt="Hé 🌍: ", echo=True))["choices"]
        assert choice["text"] == "Hé 🌍: " + ANSWER
        ids = site.gateway.models[0].tokenizer.encode("abc", add_special_tokens=False)
        (choice,) = (await completion(site, prompt=ids, echo=True))["choices"]
        assert choice["text"] == "abc" + ANSWER
        chunks, _ = await events(site, "/v1/completions", prompt="Q", echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Q" + ANSWER

    on_site(test)


def test_completion_logprobs_have_openais_shape() -> None:
    """Completions give tokens, log-probabilities, top candidates and text offsets."""

    async def test(site: Site) -> None:
        (choice,) = (await completion(site, logprobs=2, max_tokens=3))["choices"]
        assert choice["logprobs"] == {
            "tokens": ["T", "h", "e"],
            "token_logprobs": [-0.5] * 3,
            "top_logprobs": [{"T": -0.5, "U": -1.5}, {"h": -0.5, "i": -1.5}, {"e": -0.5, "f": -1.5}],
            "text_offset": [0, 1, 2],
        }
        chunks, _ = await events(site, "/v1/completions", logprobs=0, max_tokens=3)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert flat(part["tokens"] for part in parts) == ["T", "h", "e"]
        assert flat(part["text_offset"] for part in parts) == [0, 1, 2]

    on_site(test)


def test_chat_logprobs_give_token_bytes() -> None:
    """Log-probabilities of a chat give each token's bytes, even for a part of a character."""

    async def test(site: Site) -> None:
        (choice,) = (await chat(site, logprobs=True, top_logprobs=1))["choices"]
        content = choice["logprobs"]["content"]
        assert len(content) == ANSWER_TOKENS
        assert bytes(flat(entry["bytes"] for entry in content[:-1])).decode() == ANSWER
        assert content[0] == {
            "token": "T",
            "logprob": -0.5,
            "bytes": [84],
            "top_logprobs": [{"token": "T", "logprob": -0.5, "bytes": [84]}],
        }
        chunks, _ = await events(site, "/v1/chat/completions", logprobs=True, stop="END")
        streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
        assert bytes(flat(entry["bytes"] for entry in streamed)).decode() == ANSWER[: ANSWER.index("END") + 3]

    on_site(test)


def test_token_ids_are_returned_on_request() -> None:
    """Answers have the token ids of the prompt and the answer if return_token_ids is set."""

    async def test(site: Site) -> None:
        prompt = site.gateway.models[0].tokenizer.encode("Hi", add_special_tokens=False)
        ids = [*site.gateway.models[0].tokenizer.encode(ANSWER, add_special_tokens=False), EOS]
        (choice,) = (await completion(site, return_token_ids=True))["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, ids)
        chunks, _ = await events(site, "/v1/completions", return_token_ids=True)
        assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
        assert flat(chunk["choices"][0]["token_ids"] for chunk in chunks) == ids
        whole = await chat(site, return_token_ids=True)
        assert whole["choices"][0]["token_ids"] == ids
        assert whole["prompt_token_ids"] == site.cluster.submits[-1][1]
        chunks, _ = await events(site, "/v1/chat/completions", return_token_ids=True)
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert flat(chunk["choices"][0].get("token_ids", []) for chunk in chunks) == ids

    on_site(test)


def test_stop_token_text_is_not_shown() -> None:
    """The text of a stop token is left out of the answer."""

    async def test(site: Site) -> None:
        (dot,) = site.gateway.models[0].tokenizer.encode(".", add_special_tokens=False)
        ids = site.gateway.models[0].tokenizer.encode("Paris.", add_special_tokens=False)
        site.cluster.answer = lambda _submit, _choice: ids
        (choice,) = (await completion(site, stop_token_ids=[dot]))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Paris", "stop")

    on_site(test)
