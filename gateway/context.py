"""What the routes share: one gateway's parts, kept in the application's state."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fastapi import Request

from gateway.backend import Backend
from gateway.body import Intake
from gateway.metrics import GatewayMetrics
from gateway.prepare import Rules
from gateway.tenancy import KeyRing
from gateway.tokenizer import ModelTokenizer
from runtime import clock
from runtime.tenants import open_tenants

TOKENIZER_THREADS = 2


def _threads() -> ThreadPoolExecutor:
    # Its queue is bounded by the number of requests that the intake lets in.
    return ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")


@dataclass
class Gateway:
    tokenizer: ModelTokenizer
    backend: Backend
    metrics: GatewayMetrics
    intake: Intake
    rules: Rules
    keys: KeyRing = field(default_factory=lambda: KeyRing(open_tenants()))
    threads: ThreadPoolExecutor = field(default_factory=_threads)
    created: int = field(default_factory=lambda: int(clock.unix_time()))


def gateway_of(request: Request) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
