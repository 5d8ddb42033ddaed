"""What a request leaves out: the model's own sampling defaults, how long a chat answer may be, and what is not served."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from gateway.http.errors import ApiError
from gateway.openai.prepare import ModelRules
from gateway.openai.request_types import NEUTRAL_ONLY, ChatRequest, CompletionRequest, validate
from gateway.text.model_files import ModelFilesError, load
from gateway.text.tokenizer import ModelTokenizer, SamplingDefaults, sampling_defaults
from runtime.settings.roles import GatewaySettings
from tests import tiny_models
from tests.gateway.fakes import CONTEXT_TOKENS, MODEL, Site
from tests.gateway.http_words import chat, completion, on_site
from tools.openapi import schemas

QWENS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "eos_token_id": [2],
}
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("models") / "tiny")


def with_config(model: Path, folder: Path, config: object) -> str:
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(config))
    return str(folder)


def test_model_sampling_defaults_are_loaded(model: Path, tmp_path: Path) -> None:
    """The sampling defaults in generation_config.json are loaded unless turned off."""
    path = with_config(model, tmp_path, QWENS)
    assert load(path).facts.sampling == SamplingDefaults(0.7, 0.8, 20, 0.0, 1.05)
    assert load(path, model_sampling=False).facts.sampling == SamplingDefaults()
    assert load(path, model_sampling=False).facts.eos_ids == {2}
    assert load(str(model)).facts.sampling == SamplingDefaults()
    assert GatewaySettings(model=path).generation_config == "auto"


@pytest.mark.parametrize(
    "config", [{"temperature": -1}, {"top_p": 0}, {"top_k": "20"}, {"min_p": True}, {"repetition_penalty": 0}]
)
def test_wrong_generation_config_is_named(model: Path, tmp_path: Path, config: Any) -> None:
    """A wrong value in generation_config.json is named, with the option that ignores the file."""
    path = with_config(model, tmp_path, config)
    with pytest.raises(
        ModelFilesError, match=rf"generation_config.json: {next(iter(config))} .*--generation-config none"
    ):
        load(path)
    load(path, model_sampling=False)


def test_missing_or_null_stays_openai_default() -> None:
    """OpenAI's default holds for values that are missing, null or off in the model's file."""
    assert (
        sampling_defaults({"temperature": None, "do_sample": False, "top_k": -1, "max_new_tokens": 5})
        == SamplingDefaults()
    )
    assert sampling_defaults({"temperature": 0}).temperature == 0.0


def test_request_takes_model_defaults() -> None:
    """A request gets the model's defaults for what it leaves out, and its own values otherwise."""

    async def test(site: Site) -> None:
        facts = replace(site.gateway.models[0].tokenizer.facts, sampling=sampling_defaults(QWENS | {"min_p": 0.1}))
        site.gateway.models[0].tokenizer = ModelTokenizer(tiny_models.tokenizer(), facts)
        await chat(site)
        await completion(site, temperature=None, top_p=None)
        await completion(site, temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
        found = [[getattr(submit.sampling, name) for name in FIELDS] for submit, _ in site.cluster.submits]
        assert found == [[0.7, 0.8, 20, 0.1, 1.05]] * 2 + [[0, 1, 0, 0, 1]]

    on_site(test)


def test_openapi_names_source_of_defaults() -> None:
    """The API's description names generation_config.json for each sampling field."""
    properties = schemas((ChatRequest,))["ChatRequest"]["properties"]
    assert all("generation_config.json" in json.dumps(properties[name]) for name in FIELDS)


@pytest.mark.parametrize(("default", "expected"), [(7, 7), (0, None), (1 << 20, None)])
def test_chat_length_follows_option_or_context(default: int, expected: int | None) -> None:
    """A chat answer without a limit may be as long as the option or the context allows."""

    async def test(site: Site) -> None:
        site.gateway.models[0].rules = ModelRules(MODEL, default)
        await chat(site)
        ((submit, ids),) = site.cluster.submits
        assert submit.sampling.max_tokens == (expected or CONTEXT_TOKENS - len(ids))

    on_site(test)


def test_default_length_setting_is_4096() -> None:
    """The default of default_max_tokens is 4096, and it may be set to 0."""
    assert GatewaySettings(model="m").default_max_tokens == 4096
    assert GatewaySettings(model="m", default_max_tokens=0).default_max_tokens == 0


@pytest.mark.parametrize(
    ("cls", "params"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_openai_parameters_are_all_decided(cls: Any, params: Any) -> None:
    """Every parameter of OpenAI's API is a field of the request or refused by name, never both."""
    names = set(params.__annotations__) | {"stream"}
    assert names <= set(cls.model_fields) | set(NEUTRAL_ONLY)
    assert not set(cls.model_fields) & set(NEUTRAL_ONLY)


def test_refusal_says_what_is_allowed() -> None:
    """The refusal of an unsupported parameter says which values are accepted."""
    body = {"model": "m", "messages": [{"role": "user", "content": ""}]}
    for name, allowed in NEUTRAL_ONLY.items():
        with pytest.raises(ApiError) as caught:
            validate(ChatRequest, body | {name: "something else"})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
        assert f"'{name}' is not supported here: leave it out, or send null" in caught.value.message
        for value in allowed:
            validate(ChatRequest, body | {name: value})
