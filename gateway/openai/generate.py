"""Handles one generation request of any API: reads, checks and submits it, and answers it in one piece or as a stream."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec import structs
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from gateway.http.body import Slots
from gateway.http.errors import ApiError, Names, bad_value, bare_errors, renamed
from gateway.http.json_text import parse_json
from gateway.http.request_log import RequestInfo, client_request_id, info_of
from gateway.openai.answering import AnswerChecker, Answering, EventStream
from gateway.openai.answers import Answer, Head
from gateway.openai.call import Call
from gateway.openai.context import Gateway, ServedModel
from gateway.openai.prepare import ModelRules, Prepared, in_form
from gateway.openai.request_types import GenerationRequest
from gateway.streams.prompt_scores import PromptScores
from gateway.streams.types import Work
from gateway.structured.checker import GrammarChecker
from gateway.tenancy import own_priority, priority_class_of
from gateway.text.block_hashes import BlockNames, session_name
from gateway.text.tokenizer import ModelTokenizer
from proto.codec import pack_tokens
from proto.messages import Submit
from runtime.process import clock
from runtime.process.driver import cancelled

R = TypeVar("R", bound=GenerationRequest)


class NotFetched(Exception):
    """`parse` needs what `fetch` gets."""


class Api(ABC, Generic[R]):
    """How one API asks and answers. `parse` and `prepare` run on a thread."""

    name: str  # The name in metrics
    id_prefix: str
    operation = "chat"  # as traces call it
    field_names: Names = {}  # noqa: RUF012 - nobody changes it
    keeps_body = False  # the answer keeps as much memory as the body, which therefore counts until its end

    @abstractmethod
    def parse(self, content: Any) -> R:
        """A parsed JSON body → a request. Raises `ApiError`; also `NotFetched`, after which it is called again once `fetch` has
        ended."""

    async def fetch(self) -> int:
        """Returns the bytes that the request now holds beside its body. Raises `ApiError`."""
        return 0

    @abstractmethod
    def prepare(self, request: R, tokenizer: ModelTokenizer, rules: ModelRules) -> Prepared:
        """Raises `ApiError`."""

    @abstractmethod
    def answer(self, prepared: Prepared, tokenizer: ModelTokenizer, head: Head) -> Answer:
        """Writes the answer to one request."""


async def generate(call: Call, api: Api[R]) -> Response:
    """Raises `ApiError`."""
    info, metrics = info_of(call.request.scope), call.gateway.metrics

    def count(outcome: str) -> None:
        metrics.requests.labels(api.name, outcome).inc()

    try:
        answering, prepared = await _begin(call, api, info)
        if not prepared.stream:
            content = await answering.whole(partial(call.gateway.threads.run, call.owner))
            count("ok")
            return Response(content, media_type="application/json", headers=answering.headers())
        begun = await answering.begun(call.gateway.keep_alive_s)
    except ApiError as error:
        count(error.code)
        if error.retry_after_s:
            metrics.retry_after.labels(str(error.status)).observe(error.retry_after_s)
        raise
    except ClientDisconnect:
        count("disconnected")
        raise
    except Exception:
        count("internal_error")
        raise
    return EventStream(answering, begun, call.gateway.keep_alive_s, count)


async def answer_offline(
    gateway: Gateway,
    tenant: str,
    api: Api[R],
    body: bytes,
    info: RequestInfo,
    *,
    priority_class: str,
    deadline_ms: float,
) -> bytes:
    """Answer a request of a batch in one piece, without a client connection. `priority_class` and `deadline_ms` replace those
    that the body may name. Raises `ApiError`."""
    info.internal_id = f"{api.id_prefix}-{info.token}"
    async with gateway.intake.place(tenant) as slots:
        with contextlib.ExitStack() as held:
            held.enter_context(gateway.intake.bytes_held(tenant, len(body)))
            read = await _read_on_thread(gateway, tenant, tenant, api, body, info, held)
        if read.prepared.stream:
            raise bad_value("stream", "'stream' is not possible in a batch.", "unsupported_parameter")
        changes = {"priority_class": priority_class, "deadline_ms": deadline_ms}
        works = [replace(one.changed(**changes), is_offline=True) for one in read.works]
        answering = await _open(gateway, tenant, api, replace(read, works=works), slots, info)
        try:
            return await answering.whole(partial(gateway.threads.run, tenant))
        finally:
            answering.close()


async def _begin(call: Call, api: Api[R], info: RequestInfo) -> tuple[Answering, Prepared]:
    """Read the request and submit it. Raises `ApiError` and `ClientDisconnect`."""
    gateway = call.gateway
    info.internal_id = f"{api.id_prefix}-{info.token}"
    tracer, trace = gateway.backend.tracer, None
    if tracer is not None:
        trace = tracer.begin(info, call.request.headers.getlist("traceparent"), api.operation)
    slots = await call.slots()
    async with AsyncExitStack() as reading:
        held = call.held if api.keeps_body else reading
        body = await held.enter_async_context(gateway.intake.body(call.request, call.owner))
        if trace is not None:
            trace.tokenize_at = clock.now()
        read = await _read_on_thread(gateway, call.tenant, call.owner, api, body, info, held)
    del body
    answering = await _open(gateway, call.owner, api, read, slots, info)
    await call.held.enter_async_context(_watched(call.request.receive, answering))
    return answering, read.prepared


async def _read_on_thread(
    gateway: Gateway,
    tenant: str,
    owner: str,
    api: Api[R],
    body: bytes,
    info: RequestInfo,
    held: contextlib.ExitStack | AsyncExitStack,
) -> "_Read":
    """`_read`, again with what it needs from a database; `held` accounts for that. Raises `ApiError`."""
    work = partial(_read, gateway, tenant, api, body, info)
    with contextlib.suppress(NotFetched):
        return await gateway.threads.run(owner, len(body), work)
    size = await api.fetch()
    held.enter_context(gateway.intake.bytes_held(owner, size))
    return await gateway.threads.run(owner, len(body) + size, work)


async def _open(gateway: Gateway, owner: str, api: Api[R], read: "_Read", slots: Slots, info: RequestInfo) -> Answering:
    """Submit a request. Raises `ApiError`."""
    served, works = read.served, read.works
    with renamed(api.field_names):
        prepared = await _compiled(read.prepared, served.grammars, owner, read.cache_group)
    if prepared.sampling.grammar != read.prepared.sampling.grammar:
        works = [work.changed(sampling=prepared.sampling) for work in works]
    slots.hold(len(prepared.prompts))
    model, created = served.rules.model_id, int(clock.unix_time())
    fingerprint = partial(gateway.backend.system_fingerprint, model)
    answer = api.answer(prepared, served.tokenizer, Head(info.internal_id, created, model, fingerprint))
    info.prompt_tokens = sum(map(len, prepared.prompts))
    answer.prompt_scores = [work.prompt_scores for work in works]
    answering = Answering(gateway.backend, works, answer, info)
    if prepared.form.checks:
        mismatch = partial(served.grammars.mismatch, owner)
        answering.checker = AnswerChecker(prepared.form, served.tokenizer.facts.eos_ids, mismatch)
    return answering


async def _compiled(prepared: Prepared, grammars: GrammarChecker, owner: str, cache_group: str) -> Prepared:
    """Returns the request with a grammar that compiles. If a schema without `strict` has parts that the library cannot
    express, these parts are left out. Raises `ApiError`."""
    form = prepared.form
    while form.grammar:
        verdict = await grammars.verdict(owner, cache_group, form.grammar, form.param)
        if not verdict:
            break
        form = form.after(verdict)
    return in_form(prepared, replace(form, write=None))


@dataclass(frozen=True)
class _Read:
    """A request that can be submitted."""

    served: ServedModel
    prepared: Prepared
    works: list[Work]
    cache_group: str


@bare_errors
def _read(gateway: Gateway, tenant: str, api: Api[R], body: bytes, info: RequestInfo) -> _Read:
    """Do all the work that takes long for a large body. It runs on a thread, so the parsed JSON exists only while a thread
    works on it. A waiting body is kept only as bytes. Raises `ApiError`."""
    generation = api.parse(parse_json(body))
    info.end_user = generation.end_user
    info.client_id = info.client_id or client_request_id(generation.request_id or "")
    served = gateway.model(generation.model)
    policy = gateway.keys.tenants.policy(tenant)
    # The policy is None if the tenant was removed from the file after its key was checked. The coordinator will then reject
    # the request.
    group = policy.cache_group if policy is not None else f"tenant:{tenant}"
    priority_class = priority_class_of(generation.priority, generation.service_tier, gateway.keys.tenants, tenant)
    session = generation.session_id or info.session_id or generation.prompt_cache_key
    priority = own_priority(generation.priority)
    with renamed(api.field_names):
        prepared = api.prepare(generation, served.tokenizer, served.rules)
    submit = Submit(
        request_id=info.internal_id,
        attempt=1,
        model=served.rules.model_id,
        prompt_tokens=1,
        sampling=prepared.sampling,
        choices=prepared.choices,
        tenant=tenant,
        priority_class=priority_class,
        deadline_ms=generation.deadline_ms or 0.0,
        priority=priority,
        session=session_name(session) if session else b"",
        traced=bool(info.trace_id),
    )
    works = [_work(gateway, served, prepared, submit, group, number) for number in range(len(prepared.prompts))]
    return _Read(served, prepared, works, group)


def _work(
    gateway: Gateway, served: ServedModel, prepared: Prepared, submit: Submit, cache_group: str, number: int
) -> Work:
    """The work on one prompt of a request, whose other fields `submit` has."""
    prompt, wanted = prepared.prompts[number], prepared.sampling.prompt_logprobs
    if len(prepared.prompts) > 1:
        submit = structs.replace(submit, request_id=f"{submit.request_id}.p{number}")
    submit, packed, names = structs.replace(submit, prompt_tokens=len(prompt)), pack_tokens(prompt), None
    # Log-probabilities of a prompt need all of it computed, so that none of it is looked up.
    if wanted < 0 and (block_size := gateway.backend.hash_block_size(submit.model)):
        group = f"{cache_group}\0{prepared.cache_salt}" if prepared.cache_salt else cache_group
        names = BlockNames.of(packed, block_size, group, gateway.backend.hash_key)
        submit = structs.replace(submit, block_hashes=names.hashes, hash_block_size=block_size)
    make_text = served.tokenizer.text_sink(
        prepared.stops,
        keeps_stop=prepared.keeps_stop,
        min_tokens=prepared.sampling.min_tokens,
        keeps_special=prepared.keeps_special,
        keep=prepared.form.kept_tokens,
        regions=prepared.form.regions,
        behind=prepared.behind(number, served.tokenizer),
    )
    return Work(submit, packed, make_text, names, PromptScores(len(prompt), wanted) if wanted >= 0 else None)


@asynccontextmanager
async def _watched(receive: Receive, answering: Answering) -> AsyncIterator[None]:
    """Ends the answer's streams as soon as the client disconnects, and in any case on leaving."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answering.leave()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        answering.close()
        with contextlib.suppress(OSError):
            await cancelled(watcher)
