"""A coordinator and workers in the test's own process, on the other side of the gateway's real backend."""

import asyncio
from array import array
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httpx

from gateway.app import create_app
from gateway.backend import Backend
from gateway.http.body import Intake
from gateway.http.server import make_server
from gateway.main import _listen
from gateway.metrics import GatewayMetrics
from gateway.openai.context import Gateway, ServedModel
from gateway.openai.prepare import ModelRules
from gateway.streams.types import StreamLimits
from gateway.tenancy import KeyRing
from gateway.text.tokenizer import ModelFacts, ModelTokenizer
from proto.codec import unpack_tokens
from proto.errors import FinishReason, Interrupt, Reject
from proto.limits import PROTOCOL_VERSION
from proto.messages import (
    Accepted,
    Cancel,
    ClusterState,
    Hello,
    Interrupted,
    Message,
    RateState,
    Rejected,
    Role,
    Submit,
    TokenItem,
    Tokens,
)
from proto.progress import EndSession, PromptLogprobs
from proto.sampling import TokenLogprobs
from runtime.link.peer import Peer
from runtime.tenancy.tenants import parse
from tests import tiny_models

MODEL = "tiny/llama"
CONTEXT_TOKENS = 512
BLOCK_SIZE = 2
BODY_BYTES_MAX = 64 << 10
DECODER = Peer(2, Hello(PROTOCOL_VERSION, Role.DECODE, 2, "decode"), lambda peer, frames: True)
PREFILLER = Peer(3, Hello(PROTOCOL_VERSION, Role.PREFILL, 3, "prefill"), lambda peer, frames: True)
ANSWER = "The capital is Paris. 日本語 🌍🚀 done\nEND of it."


@lru_cache(maxsize=1)
def tokenizer() -> ModelTokenizer:
    facts = ModelFacts(CONTEXT_TOKENS, tiny_models.VOCAB, frozenset({tiny_models.EOS}))
    return ModelTokenizer(tiny_models.tokenizer(), facts)


@dataclass
class FakeCluster:
    """Answers every submission with the tokens that `answer(submit, choice)` gives, end-of-sequence included."""

    backend: Backend
    answer: Callable[[Submit, int], list[int]]
    incarnation: int = 1
    batch: int = 2
    """Tokens of one message."""
    gap_s: float = 0.0
    reject: Callable[[Submit], Rejected | None] = lambda submit: None
    interrupt_at: dict[int, int] = field(default_factory=dict)
    """Attempt → answer index at which it is interrupted."""
    cached: Callable[[Submit], int] = lambda submit: 0
    """Prompt tokens that its prefill worker had."""
    rates: RateState | None = None
    forgets_prompt_logprobs: bool = False
    hold: bool = False
    """Accept, and answer nothing until `release`."""
    submits: list[tuple[Submit, list[int]]] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    ended_sessions: list[EndSession] = field(default_factory=list)
    cancelled: set[tuple[str, int]] = field(default_factory=set)

    def connect(self) -> None:
        self.backend.coordinator_up(self, self.incarnation)
        self.backend.coordinator_message(self, ClusterState((self.backend.model,), (BLOCK_SIZE,)), b"")

    def send(self, message: Message, blob: bytes = b"") -> bool:
        asyncio.get_running_loop().call_soon(self._receive, message, blob)
        return True

    def _receive(self, message: Message, blob: bytes) -> None:
        if isinstance(message, Cancel):
            self.cancels.append(message)
            self.cancelled.add((message.request_id, message.attempt))
            return
        if isinstance(message, EndSession):
            self.ended_sessions.append(message)
            return
        assert isinstance(message, Submit)
        self.submits.append((message, unpack_tokens(blob, message.prompt_tokens)))
        rejection = self.reject(message)
        if rejection is not None:
            self.backend.coordinator_message(self, rejection, b"")
            return
        self.backend.coordinator_message(self, Accepted(message.request_id, message.attempt, self.rates), b"")
        if not self.hold:
            self._go_on(message, message.resumed_tokens)

    def release(self) -> None:
        for submit, _ in self.submits:
            self._go_on(submit, submit.resumed_tokens)

    def _go_on(self, submit: Submit, index: int) -> None:
        """Send one step's tokens of all choices that have not ended, and plan the next."""
        key = (submit.request_id, submit.attempt)
        if key in self.cancelled:
            return
        if self.interrupt_at.get(submit.attempt, 1 << 30) <= index:
            lost = Interrupted(*key, Interrupt.DECODE_LOST, "worker gone")
            self.backend.coordinator_message(self, lost, b"")
            return
        if index == submit.resumed_tokens and not self.forgets_prompt_logprobs:
            for scores in prompt_logprobs(submit):
                self.backend.worker_message(PREFILLER, scores, b"")
        items = []
        for choice in range(submit.first_choice, submit.first_choice + submit.choices):
            tokens = self.answer(submit, choice)[: submit.sampling.max_tokens]
            part = tuple(tokens[index : index + self.batch])
            if not part:
                continue
            finish = None
            if index + len(part) == len(tokens):
                stopped = part[-1] in submit.sampling.stop_token_ids
                finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            cached = self.cached(submit) if index == submit.resumed_tokens else 0
            items.append(TokenItem(*key, choice, index, part, finish, self._logprobs(submit, part), cached))
        if items:
            self.backend.worker_message(DECODER, Tokens(tuple(items)), b"")
            asyncio.get_running_loop().call_later(self.gap_s, self._go_on, submit, index + self.batch)

    def _logprobs(self, submit: Submit, tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        count = submit.sampling.logprobs
        if count < 0:
            return ()
        return tuple(TokenLogprobs(-0.5, tuple((token + k, -0.5 - k) for k in range(count))) for token in tokens)


def prompt_logprobs(submit: Submit) -> list[PromptLogprobs]:
    """Token number i has the log-probability -i and rank i; likelier ones are the tokens 7, 8, … with -0.5, -1.5, …"""
    top, end = submit.sampling.prompt_logprobs, submit.prompt_tokens - submit.resumed_tokens
    if top < 0:
        return []
    found = []
    for start in range(1, end, 3):
        numbers = range(start, min(start + 3, end))
        parts = [[-float(i) for i in numbers], list(numbers)]
        parts += [[7 + k for _ in numbers for k in range(top)], [-0.5 - k for _ in numbers for k in range(top)]]
        packed = [array(code, part).tobytes() for code, part in zip("fiif", parts, strict=True)]  # type: ignore[call-overload]
        found.append(PromptLogprobs(submit.request_id, submit.attempt, start, top, *packed))
    return found


def rejecting(reason: Reject, retry_after_s: float = 0.0) -> Callable[[Submit], Rejected]:
    return lambda submit: Rejected(submit.request_id, submit.attempt, reason, "so it is", retry_after_s)


@dataclass
class Site:
    gateway: Gateway
    cluster: FakeCluster
    app: Any

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60)


def make_site(
    *,
    limits: StreamLimits | None = None,
    api_keys: tuple[str, ...] = (),
    tenants: str = "",
    connected: bool = True,
    client_timeout_s: float = 30.0,
    keep_alive_s: float = 10.0,
    access_log: bool = False,
    allowed_hosts: tuple[str, ...] = ("*",),
    **more: Any,
) -> Site:
    """An application on a fake cluster; to be made on a running event loop."""
    metrics = GatewayMetrics(MODEL)
    backend = Backend(model=MODEL, limits=limits or StreamLimits(resume_delay_s=0.001), metrics=metrics)
    tok = tokenizer()
    ids = [*tok.encode(ANSWER, add_special_tokens=False), tiny_models.EOS]
    cluster = FakeCluster(backend, lambda _submit, _choice: ids)
    if connected:
        cluster.connect()
    gateway = Gateway(
        [ServedModel(tok, ModelRules(MODEL, 1024))],
        backend,
        metrics,
        Intake(body_bytes_max=BODY_BYTES_MAX, client_timeout_s=client_timeout_s),
        KeyRing(parse(tenants), api_keys),
        keep_alive_s=keep_alive_s,
        access_log=access_log,
        allowed_hosts=allowed_hosts,
        **more,
    )
    return Site(gateway, cluster, create_app(gateway))


@asynccontextmanager
async def served(site: Site):
    """The site on a real port; yields the base URL."""
    listener = _listen("127.0.0.1", 0)
    server = make_server(site.app, site.gateway.intake.client_timeout_s, close_timeout_s=30)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    for _ in range(10_000):
        if server.started or task.done():
            break
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        site.gateway.backend.drain()
        site.gateway.backend.shut_down()
        server.should_exit = True
        await task
        site.gateway.threads.shutdown()
        await site.gateway.models[0].grammars.close()
