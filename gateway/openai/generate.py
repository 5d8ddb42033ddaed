"""Handles one generation request of any API: reads, checks and submits it, and answers it in one piece or as a stream."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive

from gateway.backend import ClientLeft
from gateway.http.body import Slots
from gateway.http.errors import ApiError, bad_value, bare_errors, rate_headers
from gateway.http.json_text import parse_json
from gateway.http.renamed import Names, renamed
from gateway.http.request_log import RequestInfo, client_request_id, info_of
from gateway.openai.answering import AnswerChecker, Answering, EventStream
from gateway.openai.answers import Answer, Head
from gateway.openai.call import Call
from gateway.openai.context import Gateway, ServedModel
from gateway.openai.prepare import ModelRules, Prepared, in_form
from gateway.openai.request_types import GenerationRequest
from gateway.streams.prompt_scores import PromptScores
from gateway.streams.types import StreamSpec
from gateway.structured.checker import GrammarChecker
from gateway.tenancy import own_priority, priority_class_of
from gateway.text.block_hashes import BlockNames, session_name
from gateway.text.tokenizer import ModelTokenizer
from proto.codec import pack_tokens
from runtime.process import clock
from runtime.process.driver import cancelled

R = TypeVar("R", bound=GenerationRequest)
CLIENT_LEFT = 499
"""The status in the access log of a response that nobody reads."""


class Api(ABC, Generic[R]):
    """How one API asks and answers. `parse` and `prepare` run on a thread."""

    name: str
    """The name in metrics."""
    id_prefix: str
    field_names: Names = {}  # noqa: RUF012 - nobody changes it
    """Maps fields of the chat core to the API's own fields, for errors."""
    keeps_body = False
    """Whether the answer keeps about as much memory as the body until it ends. If so, the body counts against the bound on
    bodies until then."""

    @abstractmethod
    def parse(self, content: Any) -> R:
        """A parsed JSON body → a request. Raises `ApiError`."""

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
            return Response(content, media_type="application/json", headers=rate_headers(answering.rates))
        begun = await answering.accepted()
    except ApiError as error:
        count(error.code)
        if error.retry_after_s:
            metrics.retry_after.labels(str(error.status)).observe(error.retry_after_s)
        raise
    except ClientLeft:
        count("disconnected")
        info.error = "disconnected"
        return Response(status_code=CLIENT_LEFT)
    except Exception:
        count("internal_error")
        raise
    return EventStream(
        answering,
        begun,
        headers=rate_headers(answering.rates),
        client_timeout_s=call.gateway.intake.client_timeout_s,
        keep_alive_s=call.gateway.keep_alive_s,
        ended=count,
    )


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
        with gateway.intake.bytes_held(tenant, len(body)):
            work = partial(_read, gateway, tenant, api, body, info)
            read = await gateway.threads.run(tenant, len(body), work)
        if read.prepared.stream:
            raise bad_value("stream", "'stream' is not possible in a batch.", "unsupported_parameter")
        identity = replace(read.identity, priority_class=priority_class, deadline_ms=deadline_ms, is_offline=True)
        answering = await _open(gateway, tenant, api, replace(read, identity=identity), slots, info)
        try:
            return await answering.whole(partial(gateway.threads.run, tenant))
        finally:
            answering.close()


async def _begin(call: Call, api: Api[R], info: RequestInfo) -> tuple[Answering, Prepared]:
    """Read the request and submit it. Raises `ApiError` and `ClientLeft`."""
    gateway = call.gateway
    info.internal_id = f"{api.id_prefix}-{info.token}"
    slots = await call.slots()
    async with AsyncExitStack() as reading:
        held = call.held if api.keeps_body else reading
        body = await held.enter_async_context(gateway.intake.body(call.request, call.owner))
        work = partial(_read, gateway, call.tenant, api, body, info)
        read = await gateway.threads.run(call.owner, len(body), work)
    del body, work
    answering = await _open(gateway, call.owner, api, read, slots, info)
    await call.held.enter_async_context(_watched(call.request.receive, answering))
    return answering, read.prepared


async def _open(gateway: Gateway, owner: str, api: Api[R], read: "_Read", slots: Slots, info: RequestInfo) -> Answering:
    """Submit a request. Raises `ApiError`."""
    served, identity = read.served, read.identity
    with renamed(api.field_names):
        prepared = await _compiled(read.prepared, served.grammars, owner, identity.cache_group)
    slots.hold(len(prepared.prompts))
    answer = api.answer(
        prepared, served.tokenizer, Head(info.internal_id, int(clock.unix_time()), served.rules.model_id)
    )
    answering = _submit(gateway, served, prepared, read.block_names, answer, info, identity)
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
    identity: "_Identity"
    prepared: Prepared
    block_names: list[BlockNames | None]


@bare_errors
def _read(gateway: Gateway, tenant: str, api: Api[R], body: bytes, info: RequestInfo) -> _Read:
    """Do all the work that takes long for a large body. It runs on a thread, so the parsed JSON exists only while a thread
    works on it. A waiting body is kept only as bytes. Raises `ApiError`."""
    generation = api.parse(parse_json(body))
    info.end_user = generation.end_user
    info.client_id = info.client_id or client_request_id(generation.request_id or "")
    served = gateway.model(generation.model)
    identity = _identity(gateway, tenant, generation, info.session_id)
    with renamed(api.field_names):
        prepared, block_names = _prepare(api, generation, gateway, served, identity.cache_group)
    return _Read(served, identity, prepared, block_names)


def _prepare(
    api: Api[R],
    generation: R,
    gateway: Gateway,
    served: ServedModel,
    cache_group: str,
) -> tuple[Prepared, list[BlockNames | None]]:
    """A request's prompts and the names of their KV blocks."""
    prepared = api.prepare(generation, served.tokenizer, served.rules)
    # Log-probabilities of a prompt need all of it computed, so that none of it is looked up.
    block_size = gateway.backend.hash_block_size(served.rules.model_id) if prepared.sampling.prompt_logprobs < 0 else 0
    if prepared.cache_salt:
        cache_group = f"{cache_group}\0{prepared.cache_salt}"
    return prepared, [
        BlockNames.of(pack_tokens(prompt), block_size, cache_group, gateway.backend.hash_key) if block_size else None
        for prompt in prepared.prompts
    ]


@dataclass(frozen=True)
class _Identity:
    """The sender of a request, and its urgency."""

    tenant: str
    priority_class: str
    deadline_ms: float
    cache_group: str
    priority: int
    session: bytes = b""
    is_offline: bool = False


def _identity(gateway: Gateway, tenant: str, generation: GenerationRequest, header: str) -> _Identity:
    """Returns a request's sender and urgency. `header`: the conversation's name in the session header. Raises `ApiError`."""
    priority_class = priority_class_of(generation.priority, generation.service_tier, gateway.keys.tenants, tenant)
    policy = gateway.keys.tenants.policy(tenant)
    # The policy is None if the tenant was removed from the file after its key was checked. The coordinator will then reject
    # the request.
    group = policy.cache_group if policy is not None else f"tenant:{tenant}"
    name = generation.session_id or header or generation.prompt_cache_key
    own = own_priority(generation.priority)
    return _Identity(
        tenant, priority_class, generation.deadline_ms or 0.0, group, own, session_name(name) if name else b""
    )


def _submit(
    gateway: Gateway,
    served: ServedModel,
    prepared: Prepared,
    block_names: list[BlockNames | None],
    answer: Answer,
    info: RequestInfo,
    identity: _Identity,
) -> Answering:
    several, answer_id = len(prepared.prompts) > 1, info.internal_id
    info.prompt_tokens = sum(map(len, prepared.prompts))
    wanted = prepared.sampling.prompt_logprobs
    specs = [
        StreamSpec(
            stream_id=f"{answer_id}.p{number}" if several else answer_id,
            model=served.rules.model_id,
            prompt=prompt,
            sampling=prepared.sampling,
            choices=prepared.choices,
            make_text=served.tokenizer.text_sink(
                prepared.stops,
                keeps_stop=prepared.keeps_stop,
                min_tokens=prepared.sampling.min_tokens,
                keeps_special=prepared.keeps_special,
                keep=prepared.form.kept_tokens,
                regions=prepared.form.regions,
                behind=prepared.behind(number, served.tokenizer),
            ),
            names=named,
            tenant=identity.tenant,
            priority_class=identity.priority_class,
            deadline_ms=identity.deadline_ms,
            priority=identity.priority,
            session=identity.session,
            is_offline=identity.is_offline,
            prompt_scores=PromptScores(len(prompt), wanted) if wanted >= 0 else None,
        )
        for number, (prompt, named) in enumerate(zip(prepared.prompts, block_names, strict=True))
    ]
    answer.system_fingerprint = lambda: gateway.backend.system_fingerprint(served.rules.model_id)
    answer.prompt_scores = [spec.prompt_scores for spec in specs]
    return Answering(
        gateway.backend,
        specs,
        answer,
        prepared.choices,
        continuous_usage=prepared.continuous_usage,
        no_output=prepared.no_output,
        info=info,
    )


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
