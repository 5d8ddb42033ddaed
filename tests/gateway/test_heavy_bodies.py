"""Bodies of some megabytes, made to take long, hold nobody else up and leave nothing behind."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from gateway.http.bounds import MaxItems, MaxKeys
from gateway.http.errors import ApiError
from gateway.http.json_text import VALUES_BYTES_MAX, parse_inner, parse_json, values_bytes
from gateway.openai.answers import ChatAnswer, CompletionAnswer
from gateway.openai.request_types import ChatRequest, RequestType, validate
from gateway.text.tokenizer import TextTooLong
from runtime.process.garbage_collector import NEVER
from tests.gateway.fakes import ANSWER, MODEL, Site, make_site, tokenizer
from tests.gateway.heavy_bodies import BODY_BYTES_MAX, SHAPES, bodies
from tests.helpers import until
from tools.openapi import models

JSON = {"content-type": "application/json"}
HOLD_S_MAX = 0.1
"""CPU time. 50 ms is the aim."""


@pytest.fixture
def as_in_a_gateway() -> Iterator[None]:
    """Full garbage collections would look through all that the tests have loaded."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(*thresholds[:2], NEVER)
    yield
    gc.set_threshold(*thresholds)


class Probe:
    """How much CPU time this process has spent at most between two turns of its loop."""

    longest_s = 0.0

    async def run(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            self.longest_s, last = max(self.longest_s, now - last), now


async def _stream_others(site: Site) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with site.client() as client:
        while True:
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


def test_heavy_body_never_blocks_the_loop(as_in_a_gateway: None) -> None:
    """No heavy body keeps the event loop from its other work for long."""

    async def test() -> None:
        site, probe = make_site(), Probe()
        site.gateway.intake.body_bytes_max = BODY_BYTES_MAX
        site.cluster.gap_s = 0.005
        others = [asyncio.create_task(_stream_others(site)), asyncio.create_task(probe.run())]
        slow, statuses = [], set()
        async with site.client() as client:
            for name, path, body in bodies():
                await asyncio.sleep(0.005)
                probe.longest_s = 0.0
                answer = await client.post(path, content=body, headers=JSON)
                statuses.add(answer.status_code)
                assert answer.status_code in (200, 400, 413), (name, path, answer.text[:300])
                assert answer.status_code == 200 or len(answer.content) < 1000, (name, path)
                if probe.longest_s > HOLD_S_MAX:
                    slow.append(f"{path}: {name}: {probe.longest_s:.3f} s, then {answer.text[:100]}")
        assert not any(one.done() for one in others), "somebody else's streams go on"
        for one in others:
            one.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert not slow, "\n".join(slow)
        assert statuses == {200, 400, 413}
        await until(lambda: site.gateway.intake.idle)
        await site.gateway.models[0].grammars.close()

    asyncio.run(test())


# --- bounds of every type ---------------------------------------------------------------------------------------------

CHECKED_BY_CODE = {
    "stop": "stop_strings",
    "priority": "gateway.tenancy",
    "prompt": "gateway.openai.prepare",
    "file": "gateway.batches.upload",
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json"), "gateway.structured.request"),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar"), "gateway.structured.request"),
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "gateway.tools.request"),
}
"""Fields of type `Any`, with what bounds them. Those of type `Ignored` are dropped."""
IGNORED = {"parsed", "parsed_arguments"}


def _subclasses(cls: type[RequestType]) -> Iterator[type[RequestType]]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


def _faults(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[str]:
    """What of a type is without a bound."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _faults(arguments[0], (*metadata, *arguments[1:]))
    elif origin in (Union, UnionType):
        for one in arguments:
            yield from _faults(one, ())
    elif origin in (list, dict):
        wanted = MaxItems if origin is list else MaxKeys
        if not any(type(one) is wanted for one in metadata):
            yield f"{annotation} has no {wanted.__name__}"
        for one in arguments:
            if one is not Any and one is not str:
                yield from _faults(one, ())
    elif annotation is str:
        if not any(getattr(one, "max_length", None) for one in _flat(metadata)):
            yield "a string has no max_length"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not issubclass(annotation, RequestType):
            yield f"{annotation} is no RequestType"
    elif origin is not Literal and annotation not in (int, float, bool, type(None), Any):
        yield f"{annotation} is not known to this test"


def _flat(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for one in metadata:
        yield from getattr(one, "metadata", ())
        yield one


def _unbounded(cls: type[RequestType]) -> list[str]:
    found = []
    for name, field in cls.model_fields.items():
        if field.annotation is Any and not (name in CHECKED_BY_CODE or (name in IGNORED and field.metadata)):
            found.append(f"{cls.__name__}.{name} may be anything")
        found += [f"{cls.__name__}.{name}: {fault}" for fault in _faults(field.annotation, tuple(field.metadata))]
    return found


def test_every_request_field_is_bounded() -> None:
    """Every field of every request type has a bound."""
    types = list(_subclasses(RequestType))
    assert {one for one in models() if issubclass(one, RequestType)} < set(types) and len(types) >= 15
    assert not [fault for one in types for fault in _unbounded(one)]


def test_unbounded_field_is_found() -> None:
    """The check for bounds finds lists, dictionaries and values of any type without one."""

    class Open(RequestType):
        a: list[int] | None = None
        b: dict[str, Any]
        c: str | Annotated[list[str], MaxItems(3)]
        d: Any = None
        e: Annotated[list[dict[str, int]], MaxItems(3)]

    try:
        assert [fault.partition(":")[0][-1] for fault in _unbounded(Open) if ":" in fault] == ["a", "b", "c", "e"]
        assert "Open.d may be anything" in _unbounded(Open)
    finally:
        del Open
        gc.collect()


# --- what a body becomes ----------------------------------------------------------------------------------------------


def test_marks_in_strings_are_not_values() -> None:
    """Marks inside of strings do not count as values, and the estimate grows with the values."""
    for text in (b"{[,:", b'\\"', b"\\\\", b'\\\\\\"', b"a"):
        for size in range(65_500, 65_560):  # around the end of a slice
            assert values_bytes(b'["' + text * (size // len(text)) + b'x"]') == values_bytes(b'["x"]')
    few, many = (values_bytes(SHAPES["objects"](size)) for size in (1 << 17, 1 << 20))
    assert 7.5 < many / few < 8.5


def test_million_token_ids_are_accepted() -> None:
    """A prompt of a million token ids is accepted, and a body of as many objects is refused."""
    body = b'{"model":"m","prompt":[' + b"127999," * ((1 << 20) - 1) + b"1]}"
    assert len(parse_json(body)["prompt"]) == 1 << 20
    with pytest.raises(ApiError, match="too many values"):
        parse_json(SHAPES["empty objects"](BODY_BYTES_MAX))
    assert values_bytes(SHAPES["empty objects"](1 << 19)) < VALUES_BYTES_MAX


@pytest.mark.parametrize("shape", ["great floats", "subnormal floats", "long floats", "long fractions"])
def test_slow_numbers_are_limited(shape: str) -> None:
    """Each takes some µs, and a small text holds a million."""
    with pytest.raises(ApiError, match="numbers with exponents"):
        parse_json(SHAPES[shape](2 << 20))
    assert parse_json(SHAPES[shape](1 << 13))
    with pytest.raises(ValueError, match="numbers with exponents"):
        parse_inner(SHAPES[shape](2 << 20).decode())


def test_json_words_are_not_numbers() -> None:
    """The words true, false and null do not count as numbers."""
    assert len(parse_json(b"[" + b"true,false," * 100_000 + b"null]")) == 200_001


def test_only_first_fault_is_reported() -> None:
    """Validation makes only the first fault of a body with very many, and so takes little time."""
    wrong = {f"k{number}": 1 for number in range(100_000)}
    spent = []
    for bad in (
        {"content": [1] * 4096},
        {"content": "x"} | wrong,
        {"content": [{"type": "text", "text": "x"} | wrong]},
    ):
        begun = time.process_time()
        with pytest.raises(ApiError) as caught:
            validate(ChatRequest, {"model": "m", "messages": [{"role": "user"} | bad] * 100})
        spent.append(time.process_time() - begun)
        assert len(caught.value.message) < 200
    assert max(spent) < 0.5
    with pytest.raises(ApiError, match="'logit_bias': it may have at most 300"):
        validate(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}], "logit_bias": wrong})


def test_waiting_body_is_kept_as_bytes() -> None:
    """A body that waits is kept as bytes, and a refused one leaves no objects behind."""

    async def test() -> None:
        site, go_on = make_site(), threading.Event()
        site.gateway.intake.body_bytes_max = BODY_BYTES_MAX
        body = b'{"model":"%b","messages":[{"role":"assistant","content":"x","parsed":[%b]}]}'
        body %= MODEL.encode(), b",".join([b'{"a":{}}'] * 50_000)
        async with site.client() as client:
            await client.post("/v1/chat/completions", content=body, headers=JSON)
            gc.collect()
            gc.disable()
            before = len(gc.get_objects())
            threads = [asyncio.create_task(site.gateway.threads.run("t", 1, lambda: go_on.wait(30))) for _ in range(3)]
            asked = [
                asyncio.create_task(client.post("/v1/chat/completions", content=one, headers=JSON))
                for one in (body, body.replace(b'"x"', b"[1]"), body.replace(b'"role"', b'"rule"'))
            ]
            await until(lambda: site.gateway.intake._bytes.held >= 3 * len(body) - 10)
            assert len(gc.get_objects()) < before + 20_000
            go_on.set()
            assert [(await one).status_code for one in asked] == [200, 400, 400]
            await asyncio.gather(*threads)
            await until(lambda: site.gateway.intake.idle)
            assert len(gc.get_objects()) < before + 20_000, "nothing waits for a full garbage collection"
        await site.gateway.models[0].grammars.close()

    try:
        asyncio.run(test())
    finally:
        gc.enable()


def test_tokenizing_lets_other_threads_run() -> None:
    """Other threads run while a text is tokenized."""
    tok, turns, done = tokenizer(), [0], threading.Event()

    def take_turns() -> None:
        while not done.is_set():
            turns[0] += 1
            done.wait(0.0005)

    thread = threading.Thread(target=take_turns)
    thread.start()
    begun = turns[0]
    ids = tok.encode(ANSWER * 5_000, add_special_tokens=False)
    taken = turns[0] - begun
    done.set()
    thread.join()
    assert len(ids) > 100_000 and taken > 20
    assert tok.decode_all(ids) == ANSWER * 5_000


def test_overlong_text_is_tokenized_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing stops early if a text has more tokens than any context."""
    tok, seen = tokenizer(), []
    encode = tok._encoding
    monkeypatch.setattr(tok, "_encoding", lambda text, **options: seen.append(len(text)) or encode(text, **options))
    with pytest.raises(TextTooLong):
        tok.encode("🌍" * (1 << 21), add_special_tokens=False)
    assert max(seen) < 1 << 20 and sum(seen) < 1 << 20


def test_long_logprob_answers_use_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long answers with log-probabilities are written on a thread, short ones on the loop."""

    async def test() -> None:
        site, writers = make_site(), []
        for cls in (CompletionAnswer, ChatAnswer):
            whole = cls.whole
            monkeypatch.setattr(
                cls, "whole", lambda *args, w=whole: writers.append(threading.current_thread()) or w(*args)
            )
        async with site.client() as client:
            long = {"model": MODEL, "prompt": [5] * 300, "max_tokens": 0, "prompt_logprobs": 2}
            short = {"model": MODEL, "prompt": [5] * 3, "max_tokens": 2, "logprobs": 2}
            for body in (long, short):
                assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert [one is threading.main_thread() for one in writers] == [False, True]

    asyncio.run(test())
