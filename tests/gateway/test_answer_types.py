"""Answers are what /openapi.json says they are: every kind of answer, whole and in events, fits its type."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.gateway.fakes import MODEL, Site
from tests.gateway.http_words import on_site
from tools import answer_types as answers
from tools.answer_types import ChatCompletion, ChatCompletionChunk, Completion

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"return_token_ids": True, "n": 2},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "token_ids", "usage"])
@pytest.mark.parametrize(
    ("path", "ask", "whole", "event"),
    [
        ("/v1/completions", {"prompt": "Hi", "logprobs": 2}, Completion, Completion),
        ("/v1/completions", {"prompt": ["Hi", "Ho"], "echo": True}, Completion, Completion),
        ("/v1/chat/completions", CHAT, ChatCompletion, ChatCompletionChunk),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}, ChatCompletion, ChatCompletionChunk),
    ],
)
def test_generated_answers_fit_their_types(
    path: str, ask: dict[str, Any], whole: type[BaseModel], event: type[BaseModel], options: dict[str, Any]
) -> None:
    """Every generated answer fits the described type, whole and in each event of a stream."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            if "stream_options" not in options:
                answer = await client.post(path, json={"model": MODEL, **ask, **options})
                assert answer.status_code == 200, answer.text
                whole.model_validate_json(answer.content)
            streamed = await client.post(path, json={"model": MODEL, **ask, **options, "stream": True})
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert len(events) > 3
        for one in events:
            event.model_validate_json(one)

    on_site(test)


def test_other_answers_fit_their_types() -> None:
    """Model lists, models, versions and errors fit the described types."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            for path, kind in (
                ("/v1/models", answers.ModelList),
                (f"/v1/models/{MODEL}", answers.Model),
                ("/version", answers.Version),
                ("/health", answers.Status),
                ("/ready", answers.Ready),
                ("/tokenizer_info", answers.TokenizerInfo),
            ):
                kind.model_validate_json((await client.get(path)).content)
            for path, body, posted in (
                ("/tokenize", {"prompt": "Hi"}, answers.TokenizeAnswer),
                ("/tokenize", {"prompt": "Hi", "return_token_strs": True}, answers.TokenizeAnswer),
                ("/detokenize", {"tokens": [1, 2]}, answers.DetokenizeAnswer),
            ):
                posted.model_validate_json((await client.post(path, json=body)).content)
            refused = await client.post("/v1/completions", json={"model": MODEL, "promt": "Hi"})
        error = answers.Error.model_validate_json(refused.content).error
        assert refused.status_code == 400 and error.param == "promt", json.dumps(refused.json())

    on_site(test)
