"""The HTTP API on the real cluster: through the `openai` client, and against every kind of bad input."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests import tiny_models
from tests.e2e.live import Live
from tests.gateway.bad_requests import BadRequest, table

PROMPT = "The quick brown fox"
CHAT: Any = [{"role": "user", "content": "Hello, wörld 🌍"}]


@pytest.fixture(scope="module")
def client(cluster: Live) -> Iterator[openai.OpenAI]:
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{cluster.base_url}/v1", api_key="none", max_retries=0, http_client=http) as one:  # type: ignore[arg-type]
        yield one


def test_models_are_listed_and_retrieved(client: openai.OpenAI, cluster: Live) -> None:
    assert [model.id for model in client.models.list()] == [cluster.model_id]
    assert client.models.retrieve(cluster.model_id).id == cluster.model_id


def test_streamed_chat_equals_whole_chat(client: openai.OpenAI, cluster: Live) -> None:
    """A streamed chat answer has the text, usage and finish reason of the answer in one piece."""
    common: dict[str, Any] = {"model": cluster.model_id, "messages": CHAT, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**common)
    chunks = list(client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == 20 or whole.choices[0].finish_reason == "stop"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_seeded_choices_repeat_with_logprobs(client: openai.OpenAI, cluster: Live) -> None:
    """Several choices with one seed repeat exactly and have log probabilities."""

    def ask() -> Any:
        return client.chat.completions.create(
            model=cluster.model_id, messages=CHAT, max_completion_tokens=8, n=3, seed=11, temperature=1.0, logprobs=True,
            top_logprobs=4, extra_body={"ignore_eos": True},
        )  # fmt: skip

    first, again = ask(), ask()
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert [choice.message.content for choice in first.choices] == [choice.message.content for choice in again.choices]
    for choice in first.choices:
        entries = choice.logprobs.content
        assert len(entries) == 8
        for entry in entries:
            values = [top.logprob for top in entry.top_logprobs]
            assert len(values) == 4 and values == sorted(values, reverse=True) and entry.logprob <= 0


def test_completion_options_work_together(client: openai.OpenAI, cluster: Live) -> None:
    """Lists of prompts, token ids, echo and stop tokens work with completions."""
    common: dict[str, Any] = {"model": cluster.model_id, "max_tokens": 12, "temperature": 0}
    ids = {"return_token_ids": True, "ignore_eos": True}
    plain = client.completions.create(**common, prompt=PROMPT, extra_body=ids)
    tokens: list[int] = plain.choices[0].model_extra["token_ids"]  # type: ignore[index]
    assert len(tokens) == 12
    encoded = tiny_models.tokenizer().encode(PROMPT, add_special_tokens=False)
    several = client.completions.create(**common, prompt=[PROMPT, "another one"], n=1, extra_body=ids)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == plain.choices[0].text
    by_ids = client.completions.create(**common, prompt=encoded, extra_body=ids)
    assert by_ids.choices[0].model_extra["token_ids"] == tokens  # type: ignore[index]
    echoed = client.completions.create(**common, prompt=PROMPT, echo=True, extra_body=ids)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    stopped = client.completions.create(**common, prompt=PROMPT, extra_body={**ids, "stop_token_ids": [tokens[4]]})
    cut_at = tokens.index(tokens[4])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_extra["token_ids"][:cut_at] == tokens[:cut_at]  # type: ignore[index]
    text = plain.choices[0].text
    stop = next(text[i : i + 2] for i in range(2, len(text) - 1) if "\ufffd" not in text[i : i + 2])
    by_text = client.completions.create(**common, prompt=PROMPT, stop=stop, extra_body=ids)
    assert by_text.choices[0].text == text[: text.index(stop)] and by_text.choices[0].finish_reason == "stop"


def test_penalties_and_bias_reach_both_roles(client: openai.OpenAI, cluster: Live) -> None:
    """Penalties and logit bias apply to the first token of prefill and to those of decode."""

    def ids(**options: Any) -> list[int]:
        return cluster.token_ids([40, 41, 42], 16, ignore_eos=True, **options)

    plain = ids()
    forced = ids(logit_bias={"77": 100})
    assert forced == [77] * 16
    assert ids(logit_bias={str(plain[0]): -100})[0] != plain[0]
    once_each = ids(repetition_penalty=50.0)
    assert len(set(once_each)) >= len(set(plain)) and not set(once_each) & {40, 41, 42}


def test_errors_become_client_exceptions(client: openai.OpenAI, cluster: Live) -> None:
    """Errors reach the OpenAI client as its own exceptions."""
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=cluster.model_id, prompt="x" * 600, max_tokens=10)


def test_bad_input_stops_at_the_gateway(cluster: Live) -> None:
    """Each bad input is answered with its error and never gets past the gateway."""
    before = cluster.wait_idle()
    rows = table(model=cluster.model_id, context_tokens=512, vocab_size=tiny_models.VOCAB, body_bytes_max=8 << 20)
    wrong: list[tuple[str, int, Any]] = []
    with httpx.Client(base_url=cluster.base_url, timeout=60.0, trust_env=False) as http:
        for row in rows:
            answer = http.request(row.method, row.path, content=row.body, headers=row.headers)
            if not as_promised(row, answer):
                wrong.append((row.name, answer.status_code, answer.text[:300]))
    assert not wrong
    after = cluster.wait_idle()
    assert len(rows) >= 40
    assert (after.finished, after.counters) == (before.finished, before.counters), "nothing of it went past the gateway"


def as_promised(row: BadRequest, answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    shape = set(error) == {"message", "type", "param", "code", "request_id"}
    return shape and (answer.status_code, error["param"], error["code"]) == (row.status, row.param, row.code)
