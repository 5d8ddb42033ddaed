"""What the routes share: one gateway's parts, kept in the application's state."""

from dataclasses import dataclass, field

from fastapi import Request

from gateway.backend import Backend
from gateway.http.body import Intake
from gateway.metrics import GatewayMetrics
from gateway.openai.prepare import Rules
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
    created: int = field(default_factory=lambda: int(clock.unix_time()))


def gateway_of(request: Request) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
