"""A virtual cluster of so many equal workers, for tests and benchmarks.

    cluster = UniformCluster(Limits(), Timing(prefill_tokens_per_s=2000), prefill=4)
    cluster.at(1.0, cluster.submit, "name", "tenant", 500)
    cluster.run(10.0)                           read cluster.requests, cluster.ttft_s, cluster.core

Unless it is `batched`, its decode workers only count: every stream gets a token each `decode_step_s`, independent of other
streams, and ends in one event. That is for long runs that do not depend on how decode works.
"""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import cast

import msgspec

from coordinator.core import Core
from coordinator.events import Limits
from decode_worker.progress import REPORT_S
from kvtransfer.session.session import OfferAccepted
from lab.cluster.cluster import FIRST_STARTED, VirtualCluster, hello
from lab.cluster.decode import ClusterDecodeWorker
from lab.cluster.surroundings import ClientRequest, ClusterEngine, ClusterRegistration, ClusterSurroundings, Timing
from lab.cluster.transfers import Key
from proto.kv import Commit, Offer
from proto.messages import Finished, Message, Release, Released, Reserve, Role
from proto.parts import Capacity
from proto.progress import DecodeProgress, Joined

FIRST_PREFILL, FIRST_DECODE = 100, 10_000
"""Incarnations: workers of each kind are numbered from theirs."""


class UniformCluster(VirtualCluster):
    def __init__(
        self,
        limits: Limits | None = None,
        timing: Timing | None = None,
        *,
        prefill: int = 1,
        decode: int = 1,
        prefill_blocks: int = 1 << 16,
        decode_blocks: int = 10**6,
        block_size: int = 16,
        max_seqs: int = 10**4,
        batched: bool = False,
        progress: bool = True,
        computes_suffixes: bool = False,
        fetches: bool = False,
        core: type[Core] = Core,
        seed: int = 0,
    ) -> None:
        """Makes the cluster. If `batched`, decode workers run the production batch, and may compute suffixes and be fetched
        from. Without `progress` the coordinator does not get their reports of it."""
        super().__init__(limits, timing or Timing(), block_size=block_size, core=core, seed=seed)
        self.start_flipped = self._start_flipped
        self._capacity = {
            Role.PREFILL: Capacity(prefill_blocks, block_size, max_seqs, 1 << 20, fetches=fetches),
            Role.DECODE: Capacity(
                decode_blocks,
                block_size,
                max_seqs,
                1 << 20,
                computes_suffixes=batched and computes_suffixes,
                fetches=batched and fetches,
            ),
        }
        self._batched, self._progress = batched, progress
        self._incarnations = count(FIRST_STARTED)
        for incarnation in range(FIRST_DECODE, FIRST_DECODE + decode):
            self.start(hello(Role.DECODE, incarnation, self._capacity[Role.DECODE]))
        for incarnation in range(FIRST_PREFILL, FIRST_PREFILL + prefill):
            self.start(hello(Role.PREFILL, incarnation, self._capacity[Role.PREFILL]))

    def decode_worker(self, incarnation: int, capacity: Capacity, engine: ClusterEngine) -> ClusterDecodeWorker:
        if self._batched:
            return super().decode_worker(incarnation, capacity, engine)
        return cast(ClusterDecodeWorker, PacedDecode(self, incarnation, self._progress))

    def _start_flipped(self, name: str, role: Role, before: int) -> None:
        following = hello(role, next(self._incarnations), self._capacity[role])
        self.start(msgspec.structs.replace(following, name=name, flipped_from=before))

    def receive(self, incarnation: int, message: Message, blob: bytes = b"") -> None:
        if self._progress or not isinstance(message, DecodeProgress):
            super().receive(incarnation, message, blob)


@dataclass(eq=False)
class _Stream:
    order: Reserve
    began_s: float | None = None  # None: its KV is not here


class PacedDecode:
    def __init__(self, cluster: ClusterSurroundings, incarnation: int, progress: bool) -> None:
        self.registration = ClusterRegistration(cluster, incarnation)
        self.gateways = SimpleNamespace(up=True)
        self._cluster = cluster
        self._streams: dict[Key, _Stream] = {}
        self._progress = progress and cluster.timing.decode_step_s > 0
        self._joined: list[Joined] = []
        self._reporting = False

    def order(self, message: Message, blob: bytes) -> None:
        if isinstance(message, Reserve):
            self._streams[(message.request_id, message.attempt)] = _Stream(message)
        elif isinstance(message, Release):
            key = (message.request_id, message.attempt)
            stream = self._streams.pop(key, None)
            # Prefill counts the first tokens.
            tokens = self._emitted(stream) - stream.order.choices if stream and stream.began_s is not None else 0
            self.registration.send(Released(*key, tokens))

    def offered(self, incarnation: int, offer: Offer) -> OfferAccepted | str | None:
        return OfferAccepted(())

    def not_received(self, request_id: str, attempt: int, blocks: list[int]) -> None:
        if self._streams.pop((request_id, attempt), None) is not None:
            self.registration.send(Released(request_id, attempt))

    def committed(self, incarnation: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None:
        key = (commit.request_id, commit.attempt)
        stream = self._streams.get(key)
        if stream is None:
            return
        cluster = self._cluster
        stream.began_s = cluster.now
        cluster.at(cluster.now + max(self._to_come(stream)) * cluster.timing.decode_step_s, self._ended, key, stream)
        if self._progress:
            self._joined.append(Joined(*key, self._steps))
            if not self._reporting:
                self._reporting = True
                cluster.at(cluster.now + REPORT_S, self._report)

    def name_answer(self, gateway_incarnation: int, request: ClientRequest) -> None:
        """Keeps nothing."""

    def _ended(self, key: Key, stream: _Stream) -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]
            self.registration.send(Finished(*key, self._emitted(stream), 0, stream.order.resumed_tokens))

    def _to_come(self, stream: _Stream) -> list[int]:
        """Returns the number of tokens of each choice in this attempt."""
        order = stream.order
        output_tokens = self._cluster.requests[order.request_id].output_tokens
        chosen = output_tokens[order.first_choice : order.first_choice + order.choices]
        return [tokens - order.resumed_tokens for tokens in chosen]

    def _emitted(self, stream: _Stream) -> int:
        """Sends the gateway all tokens of an attempt that ends now; returns their number, first tokens included."""
        assert stream.began_s is not None
        step_s, order, total = self._cluster.timing.decode_step_s, stream.order, 0
        for choice, tokens in enumerate(self._to_come(stream), order.first_choice):
            passed = max(round((self._cluster.now - stream.began_s) / step_s), 1) if step_s else tokens
            total += min(passed, tokens)
            self._cluster.emitted(order.request_id, order.attempt, choice, order.resumed_tokens + min(passed, tokens))
        return total

    # --- progress -------------------------------------------------------------------------------------------------------

    @property
    def _steps(self) -> int:
        return int(self._cluster.now / self._cluster.timing.decode_step_s)

    def _report(self) -> None:
        joined, self._joined = tuple(self._joined), []
        self.registration.send(DecodeProgress(self._steps, 0, 0, joined))
        self._reporting = bool(self._streams)
        if self._reporting:
            self._cluster.at(self._cluster.now + REPORT_S, self._report)
