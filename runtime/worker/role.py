"""The part of its role and of its engine that the driver of a worker needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from proto.messages import Message
from proto.parts import Held
from proto.status import KvHeld
from runtime.link.peer import LinkCounters
from runtime.metrics.registry import MetricsRegistry

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ComputeStep(Generic[ResultT]):
    """One step of the model."""

    tokens: int
    compute: Callable[[], ResultT]  # called on the compute thread
    done: Callable[[ResultT], Callable[[], None]]  # takes the result; returns what can wait until the next step runs
    failed: Callable[[str], None]
    log_fields: Mapping[str, object] = field(default_factory=dict)


class WorkerRole(Protocol):
    """The differences between prefill and decode: `prefill_worker.worker.PrefillWorker`,
    `decode_worker.worker.DecodeWorker`."""

    @property
    def registry(self) -> MetricsRegistry: ...
    @property
    def ports(self) -> Mapping[str, LinkCounters]:
        """Counters of the ports that this role listens on, by name."""

    async def start(self) -> str:
        """Open those ports. Returns the address that others connect to; empty if there is none. Raises `CannotBind`."""

    def registered(self) -> None:
        """The coordinator knows this worker, for the first time or again."""

    def order(self, message: Message, blob: bytes) -> None:
        """Carry out an order of the coordinator. Raises `RemoteProtocolError`."""

    def held(self) -> tuple[Held, ...]: ...
    def kv_held(self) -> KvHeld: ...
    def coordinator_lost(self, reason: str) -> None: ...
    def gateway_lost(self, incarnation: int, reason: str) -> None: ...
    def gateway_said(self, incarnation: int, message: Message) -> None:
        """A gateway has sent this on the link that the worker has made to it. Raises `RemoteProtocolError`."""

    def next_step(self) -> ComputeStep[Any] | None:
        """The next step to run; None while there is none. `WorkerDriver.wake` says when that changes."""

    async def close_transfers(self) -> None:
        """Ends what is under way. May raise `TimeoutError`."""

    async def close(self) -> None:
        """Close the role's own links."""


class ServedModelInfo(Protocol):
    """`engine.engine.ServedModelInfo` is the real one."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def attention_tokens(self) -> int: ...


class LoadedEngine(Protocol):
    """`engine.engine.Engine` is the real one."""

    @property
    def info(self) -> ServedModelInfo: ...
    @property
    def blocks(self) -> int: ...
    @property
    def is_batch_invariant(self) -> bool: ...
    @property
    def backend(self) -> str: ...
    @property
    def numerics(self) -> str: ...
    @property
    def on_gpu(self) -> bool: ...
