"""POST /v1/completions and /v1/chat/completions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.backend import ClientLeft, Subscription
from gateway.http.body import owner_of, parse_json
from gateway.http.errors import ApiError, rate_headers
from gateway.http.request_log import RequestInfo, info_of
from gateway.openai.answers import Answer, ChatAnswer, CompletionAnswer
from gateway.openai.context import Gateway, gateway_of
from gateway.openai.prepare import Prepared, Rules, prepare_chat, prepare_completion
from gateway.openai.request_types import ChatRequest, CompletionRequest, GenerationRequest, validate
from gateway.openai.responses import EventStream, Exchange
from gateway.streams.types import StreamSpec
from gateway.tenancy import priority_class_of
from gateway.text.block_hashes import BlockNames
from gateway.text.tokenizer import ModelTokenizer
from proto.codec import pack_tokens
from runtime.process import clock
from runtime.process.driver import cancelled

router = APIRouter()
R = TypeVar("R", bound=GenerationRequest)
Prepare = Callable[[R, ModelTokenizer, Rules], Prepared]
CLIENT_LEFT = 499
"""For the access log only: nobody reads this response."""


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _generate(request, "completions", CompletionRequest, prepare_completion, CompletionAnswer, "cmpl")


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _generate(request, "chat", ChatRequest, prepare_chat, ChatAnswer, "chatcmpl")


async def _generate(
    request: Request, endpoint: str, cls: type[R], prepare: Prepare[R], answer_cls: type, prefix: str
) -> Response:
    gateway = gateway_of(request)
    info = info_of(request.scope)
    answer_id = info.internal_id = f"{prefix}-{info.token}"
    requests = gateway.metrics.requests
    try:
        async with AsyncExitStack() as stack:
            owner = _owner(gateway, request)
            slots = await stack.enter_async_context(gateway.intake.place(owner))
            async with gateway.intake.body(request, owner) as body:
                generation = validate(cls, parse_json(body))
                info.end_user = generation.end_user
                identity = _identity(gateway, request.state.tenant, generation)
                prepared, names = await gateway.threads.run(
                    owner,
                    len(body),
                    partial(
                        _prepare, prepare, generation, gateway, gateway.backend.hash_block_size, identity.cache_group
                    ),
                )
                del generation, body
                if prepared.form.grammar:
                    await gateway.grammars.check(owner, prepared.form.grammar, prepared.form.param)
            slots.hold(len(prepared.prompts))
            answer: Answer = answer_cls(
                prepared,
                gateway.tokenizer,
                answer_id=answer_id,
                created=int(clock.unix_time()),
                model=gateway.rules.model_id,
            )
            exchange = _submit(gateway, prepared, names, answer, info, identity)
            await stack.enter_async_context(_watched(request.receive, exchange.subscription))
            if not prepared.stream:
                content = await exchange.whole()
                requests.labels(endpoint, "ok").inc()
                return Response(content, media_type="application/json", headers=rate_headers(exchange.rates))
            begun = await exchange.accepted()
            stream = EventStream(
                exchange,
                begun,
                include_usage=prepared.include_usage,
                headers=rate_headers(exchange.rates),
                client_timeout_s=gateway.intake.client_timeout_s,
                keep_alive_s=gateway.keep_alive_s,
            )
            # From here on the response owns the exchange, its watcher and its place.
            return _Owning(stream, stack.pop_all(), lambda: requests.labels(endpoint, stream.outcome).inc())
    except ApiError as error:
        requests.labels(endpoint, error.code).inc()
        if error.retry_after_s:
            gateway.metrics.retry_after.labels(str(error.status)).observe(error.retry_after_s)
        raise
    except ClientLeft:
        requests.labels(endpoint, "disconnected").inc()
        info.error = "disconnected"
        return Response(status_code=CLIENT_LEFT)
    except Exception:
        requests.labels(endpoint, "internal_error").inc()
        raise


def _owner(gateway: Gateway, request: Request) -> str:
    tenant = request.state.tenant if gateway.keys.needed else ""
    return owner_of(tenant, request.client.host if request.client else None)


def _prepare(
    prepare: Prepare[R], generation: R, gateway: Gateway, block_size: int, cache_group: str
) -> tuple[Prepared, list[BlockNames | None]]:
    """A request's prompts and the names of their KV blocks. Runs on a thread of its own: both take time."""
    prepared = prepare(generation, gateway.tokenizer, gateway.rules)
    return prepared, [
        BlockNames.of(pack_tokens(prompt), block_size, cache_group) if block_size else None
        for prompt in prepared.prompts
    ]


@dataclass(frozen=True)
class _Identity:
    """Who asks, and with which urgency."""

    tenant: str
    priority_class: str
    deadline_ms: float
    cache_group: str


def _identity(gateway: Gateway, tenant: str, generation: GenerationRequest) -> _Identity:
    """Raises `ApiError`."""
    priority_class = priority_class_of(generation.priority, generation.service_tier, gateway.keys.tenants, tenant)
    policy = gateway.keys.tenants.policy(tenant)
    # None: taken out of the file since the key was looked at; the coordinator will say so.
    group = policy.cache_group if policy is not None else f"tenant:{tenant}"
    return _Identity(tenant, priority_class, generation.deadline_ms or 0.0, group)


def _submit(
    gateway: Gateway,
    prepared: Prepared,
    names: list[BlockNames | None],
    answer: Answer,
    info: RequestInfo,
    identity: _Identity,
) -> Exchange:
    several, answer_id = len(prepared.prompts) > 1, info.internal_id
    kept = prepared.form.reading.keep if prepared.form.reading is not None else frozenset[int]()
    info.prompt_tokens = sum(map(len, prepared.prompts))
    specs = [
        StreamSpec(
            stream_id=f"{answer_id}.p{number}" if several else answer_id,
            model=gateway.rules.model_id,
            prompt=prompt,
            sampling=prepared.sampling,
            choices=prepared.choices,
            make_text=gateway.tokenizer.text_sink(prepared.stops, kept),
            names=named,
            tenant=identity.tenant,
            priority_class=identity.priority_class,
            deadline_ms=identity.deadline_ms,
        )
        for number, (prompt, named) in enumerate(zip(prepared.prompts, names, strict=True))
    ]
    return Exchange(
        gateway.backend.open(specs),
        [spec.stream_id for spec in specs],
        answer,
        prepared.choices,
        continuous_usage=prepared.continuous_usage,
        info=info,
    )


@asynccontextmanager
async def _watched(receive: Receive, subscription: Subscription) -> AsyncIterator[None]:
    """Ends the subscription's streams as soon as the client disconnects, and in any case on leaving."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        subscription.leave()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        subscription.close()
        with contextlib.suppress(OSError):
            await cancelled(watcher)


class _Owning(Response):
    """A response which gives back what its request held once it has been sent, or could not be."""

    def __init__(self, stream: EventStream, held: AsyncExitStack, ended: Callable[[], None]) -> None:
        super().__init__()
        self.stream = stream
        self.held = held
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self.held:
                with contextlib.suppress(ClientLeft):
                    await self.stream(scope, receive, send)
        finally:
            self.ended()
