"""What the routes share: one gateway's parts, kept in the application's state."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from fastapi import Request

from gateway.backend import Backend
from gateway.http.body import Intake
from gateway.metrics import GatewayMetrics
from gateway.openai.prepare import Rules
from gateway.response_store import ResponseStore
from gateway.structured.checker import GrammarChecker
from gateway.structured.hello import Hello
from gateway.tenancy import KeyRing
from gateway.text.tokenizer import ModelTokenizer
from gateway.text.tokenizer_threads import TokenizerThreads
from runtime.process import clock
from runtime.tenancy.tenants import open_tenants


@dataclass
class Gateway:
    tokenizer: ModelTokenizer
    backend: Backend
    metrics: GatewayMetrics
    intake: Intake
    rules: Rules
    keys: KeyRing = field(default_factory=lambda: KeyRing(open_tenants()))
    threads: TokenizerThreads = field(default_factory=TokenizerThreads)
    keep_alive_s: float = 10.0
    """Silence of a stream after which a comment is sent, so that load balancers keep the connection open; 0: none is."""
    access_log: bool = True
    cors_origins: Sequence[str] = ()
    """Origins of web pages that may call this API; `*`: all."""
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(keep_s=3600.0))
    grammars: GrammarChecker = field(init=False)
    created: int = field(default_factory=lambda: int(clock.unix_time()))

    def __post_init__(self) -> None:
        self.grammars = GrammarChecker(self._to_compile_with)

    def _to_compile_with(self) -> bytes:
        facts = self.tokenizer.facts
        return msgspec.json.encode(Hello(self.tokenizer.serialized(), facts.vocab_size, sorted(facts.eos_ids)))


def gateway_of(request: Request) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
