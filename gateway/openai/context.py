"""The parts of one gateway that the routes share, kept in the application's state."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from gateway.backend import Backend
from gateway.http.body import Intake
from gateway.http.errors import model_not_found
from gateway.metrics import GatewayMetrics
from gateway.openai.prepare import ModelRules
from gateway.response_store import ResponseStore
from gateway.structured.checker import GrammarChecker
from gateway.structured.compile_process import CompilerSetup
from gateway.tenancy import KeyRing
from gateway.text.tokenizer import ModelTokenizer
from gateway.text.tokenizer_threads import TokenizerThreads
from proto.parts import Room
from runtime.metrics.server import Reply
from runtime.process import clock
from runtime.tenancy.tenants import open_tenants

if TYPE_CHECKING:
    from gateway.jwt_tenants import JwtTenants
    from gateway.response_table import ResponseTable


@dataclass
class ServedModel:
    tokenizer: ModelTokenizer
    rules: ModelRules
    grammars: GrammarChecker = field(init=False)

    def __post_init__(self) -> None:
        # Serialize the tokenizer now, not with the first grammar. A large vocabulary takes a third of a second, and would
        # block all streams.
        facts = self.tokenizer.facts
        hello = CompilerSetup(self.tokenizer.serialized(), facts.vocab_size, sorted(facts.eos_ids))
        self.grammars = GrammarChecker(msgspec.json.encode(hello))

    @property
    def warnings(self) -> list[str]:
        """The parts of the API that the model cannot serve, and why, as far as is known."""
        model, found = self.rules.model_id, []
        if not self.tokenizer.has_chat_template:
            found.append(f"{model} has no chat template, so it serves completions only: add its chat_template.jinja")
        elif fault := self.tokenizer.template.fault:
            found.append(f"{model} serves completions only: {fault}")
        elif hidden := sorted(self.tokenizer.template.hidden_roles):
            found.append(f"{model} refuses chats with text of {', '.join(hidden)}: its chat template does not show it")
        if self.grammars.fault:
            found.append(f"{model} cannot have tools, structured output or grammars: {self.grammars.fault}")
        return found


@dataclass
class Gateway:
    models: Sequence[ServedModel]  # The models. The first serves requests that do not name a model.
    backend: Backend
    metrics: GatewayMetrics
    intake: Intake
    keys: KeyRing = field(default_factory=lambda: KeyRing(open_tenants()))
    token_tenants: "JwtTenants | None" = None  # None: API keys alone are taken
    threads: TokenizerThreads = field(default_factory=TokenizerThreads)
    keep_alive_s: float = 10.0  # silence of a stream after which a comment is sent, for load balancers; 0: none is
    access_log: bool = True
    cors_origins: Sequence[str] = ()  # Origins of web pages that may call this API; `*`: all
    allowed_hosts: Collection[str] = ()  # Host headers answered without keys, besides addresses and localhost; `*`: all
    trusted_proxies: Sequence[str] = ()  # Addresses and networks whose X-Forwarded-For counts
    metrics_page: Callable[[], Reply] | None = None
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(keep_s=3600.0))
    response_table: "ResponseTable | None" = None  # used in place of `responses` where there is one
    created: int = field(default_factory=lambda: int(clock.unix_time()))

    def model(self, name: str | None) -> ServedModel:
        """Raises `ApiError` (404)."""
        if name is None:
            return self.models[0]
        for served in self.models:
            if name in served.rules.names:
                return served
        raise model_not_found(name, [served.rules.model_id for served in self.models])

    def __post_init__(self) -> None:
        self.backend.on_room = self._learn

    def _learn(self, model: str, room: Room) -> None:
        for served in self.models:
            if served.rules.model_id == model:
                served.tokenizer.facts = served.tokenizer.facts.within(room)

    async def close(self) -> None:
        self.threads.shutdown()
        if self.response_table is not None:
            self.response_table.close()
        for served in self.models:
            await served.grammars.close()
