"""The virtual cluster: production code decides, and time, clients and models are played.

    cluster = VirtualCluster(Limits())
    cluster.start(hello(Role.PREFILL, 1000, capacity)), and one of each role at least
    cluster.at(1.0, cluster.submit, "name", "tenant", 500)
    cluster.run(10.0)                           read cluster.requests, cluster.ttft_s, cluster.core

| production code                                              | played                                             |
|--------------------------------------------------------------|----------------------------------------------------|
| the coordinator's `Core`                                     | its links: in order, never lost, delayed by Timing |
| `PrefillCore`, `PromptTable`, prefix cache, block allocator  | what a prefill step computes; Timing says how long |
| `DecodeCore`, `AttemptTable`, `RunningBatch`, allocator       | what it draws, and how long a step takes           |
|                                                              | KV hand-overs, the one gateway and its clients     |

Workers can be slow, failing or lost here (`start`, `lose`); `tests.world.faults` is for the rest.
"""

from collections.abc import Callable
from math import inf

import msgspec

from coordinator.core import Core
from coordinator.events import Event, Limits, PeerDown, PeerUp, Received, Send, StateChanged, Tick
from lab.cluster.decode import ClusterDecodeWorker
from lab.cluster.prefill import ClusterPrefillWorker
from lab.cluster.surroundings import STOP, ClientRequest, ClusterEngine, ClusterSurroundings, Timing
from lab.cluster.transfers import Transfers
from proto.drain import Drained, Draining, Flip, FlipRequest
from proto.errors import CancelReason, Interrupt, Reject
from proto.kv import Fetch, FetchRefused
from proto.limits import PROTOCOL_VERSION
from proto.messages import Cancel, Hello, Interrupted, Message, Rejected, Reserve, Role, Submit
from proto.parts import Capacity
from proto.sampling import Sampling
from scheduler.lifecycle import TERMINAL, RequestState

MODEL = "m"
GATEWAY, OBSERVER, FIRST_STARTED = 1, 2, 1_000_000  # incarnations; workers that are started are numbered from the last


def hello(role: Role, incarnation: int, capacity: Capacity | None = None) -> Hello:
    """The message with which each process of the cluster registers."""
    name, model, fingerprint = f"{role}-{incarnation}", MODEL if capacity else "", "f" if capacity else ""
    return Hello(PROTOCOL_VERSION, role, incarnation, name, model, fingerprint, "tcp://w:1", capacity)


class VirtualCluster(ClusterSurroundings):
    def __init__(
        self,
        limits: Limits | None = None,
        timing: Timing | None = None,
        *,
        block_size: int = 16,
        core: type[Core] = Core,
        seed: int = 0,
    ) -> None:
        """Makes a cluster without workers."""
        super().__init__(timing or Timing(), seed)
        self.core = core(limits)
        self._deadline: float | None = None
        self._deadline_known = False
        self.block_size = block_size
        self.on_end: Callable[[ClientRequest], None] = lambda request: None
        self.on_death = self.lose
        self.start_flipped: Callable[[str, Role, int], object] = lambda name, role, before: None
        """Called with the name, the new role and the incarnation before of a worker that has left its role."""
        self.rejected: list[Rejected] = []
        self.transfers = Transfers(self)
        self.fetches = Transfers(self)  # in the opposite direction: prefill workers receive
        self.resume_delay_s = 0.0  # before an interrupted request's first resume; doubles up to 16 times
        self.commit_s = 0.05  # from the end of a worker's old role to its registration in the new one
        self._flipping: dict[int, Role] = {}  # workers about to change, with the new role
        self.prefill: dict[int, ClusterPrefillWorker] = {}
        self.decode: dict[int, ClusterDecodeWorker] = {}
        self.post(PeerUp(GATEWAY, hello(Role.GATEWAY, GATEWAY)))

    def start(self, worker: Hello, engine: ClusterEngine | None = None) -> None:
        """Registers a worker. `engine`: set if it differs from that of the others, or is shared by two roles."""
        incarnation, capacity = worker.incarnation, worker.capacity
        assert capacity is not None
        engine = engine or ClusterEngine(self, self.timing)
        if worker.role is Role.PREFILL:
            self.prefill[incarnation] = prefill = ClusterPrefillWorker(
                self, self.transfers, self.fetches, incarnation, capacity, engine
            )
            self.fetches.receivers[incarnation] = prefill
        else:
            self.decode[incarnation] = decode = self.decode_worker(incarnation, capacity, engine)
            self.transfers.receivers[incarnation] = decode
        self.post(PeerUp(incarnation, worker))

    def decode_worker(self, incarnation: int, capacity: Capacity, engine: ClusterEngine) -> ClusterDecodeWorker:
        return ClusterDecodeWorker(self, self.transfers, self.fetches, incarnation, capacity, engine)

    def fetch(self, prefill_incarnation: int, decode_incarnation: int, message: Fetch) -> None:
        decode = self.decode.get(decode_incarnation)
        if decode is not None:
            self.at(self.now, decode.core.lending.asked, prefill_incarnation, message)

    def refuse_fetch(self, decode_incarnation: int, prefill_incarnation: int, message: FetchRefused) -> None:
        prefill = self.prefill.get(prefill_incarnation)
        if prefill is not None:
            self.at(self.now, prefill.refused, decode_incarnation, message)

    def lose(self, incarnation: int) -> None:
        """The worker's process dies."""
        worker = self.prefill.pop(incarnation, None) or self.decode.pop(incarnation)
        worker.registration.up = worker.gateways.up = False
        self.transfers.lose(incarnation)
        self.fetches.lose(incarnation)
        self.post(PeerDown(incarnation, "killed"))

    # --- clients --------------------------------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        tenant: str,
        prompt_tokens: int,
        max_tokens: int = 2,
        *,
        output_tokens: tuple[int, ...] = (),
        prompt: bytes = b"",
        block_hashes: bytes = b"",
        answer_hashes: bytes = b"",
        deadline_ms: float = 0.0,
        priority_class: str = "",
        deadly_at: int | None = None,
    ) -> None:
        """Submits a request now. `output_tokens`: where each choice stops; if empty, one choice that goes on to max_tokens.
        `prompt`: packed token ids; zeros if empty. `answer_hashes`: of the full blocks behind the prompt's."""
        output_tokens = output_tokens or (max_tokens,)
        submit = Submit(
            name,
            1,
            MODEL,
            prompt_tokens,
            Sampling(max_tokens=max_tokens, stop_token_ids=(STOP,)),
            len(output_tokens),
            tenant=tenant,
            priority_class=priority_class,
            deadline_ms=deadline_ms,
            block_hashes=block_hashes,
            hash_block_size=self.block_size if block_hashes else 0,
        )
        prompt = prompt or bytes(4 * prompt_tokens)
        self.requests[name] = ClientRequest(
            submit, prompt, output_tokens, self.now, [0] * len(output_tokens), answer_hashes, deadly_at=deadly_at
        )
        self.receive(GATEWAY, submit, prompt)

    def cancel(self, name: str) -> None:
        """Lets the client leave, if the request has not ended. A request that was never submitted is cancelled as well."""
        request = self.requests.get(name)
        if request is None or request.state is None:
            attempt = request.submit.attempt if request else 1
            self.receive(GATEWAY, Cancel(name, attempt, CancelReason.DISCONNECTED))

    def _gateway(self, message: Message) -> None:
        if isinstance(message, Rejected):
            request = self.requests[message.request_id]
            if message.reason is Reject.RETRY_BUDGET:
                self.at(self.now + min(max(message.retry_after_s, 0.25), 2.0), self._submit_again, request)
                return
            request.rejected = message
            self.rejected.append(message)
            self._ended(request, request.state or RequestState.REJECTED)
        elif isinstance(message, Interrupted):
            drained = message.reason is Interrupt.DRAINED
            request = self.requests[message.request_id]
            request.interruptions += 1
            delay_s = 0.0 if drained else self.resume_delay_s * 2 ** min(request.interruptions - 1, 4)
            self.at(self.now + delay_s, self._resubmit, request, drained)

    def _submit_again(self, request: ClientRequest) -> None:
        if request.state is None:
            self.receive(GATEWAY, request.submit, request.prompt + bytes(4 * request.submit.resumed_tokens))

    def _resubmit(self, request: ClientRequest, drained: bool) -> None:
        if request.state is not None:
            return
        submit = request.submit
        assert submit.choices == 1, "several choices come back one by one: not modelled"
        [emitted] = request.emitted_tokens
        request.submit = msgspec.structs.replace(
            submit,
            attempt=submit.attempt + 1,
            prompt_tokens=submit.prompt_tokens - submit.resumed_tokens + emitted,
            resumed_tokens=emitted,
            drained_attempts=submit.drained_attempts + drained,
        )
        request.recomputed_tokens += request.submit.prompt_tokens
        self.receive(GATEWAY, request.submit, request.prompt + bytes(4 * emitted))

    def _ended(self, request: ClientRequest, state: RequestState) -> None:
        if request.state is None:
            self.at(self.now, self.on_end, request)
        request.state, request.prompt = state, b""
        decode = self.decode.get(request.decoder)
        if request.answer_hashes and decode is not None:
            self.at(self.now, decode.name_answer, GATEWAY, request)

    # --- changes of role ------------------------------------------------------------------------------------------------

    def flip(self, name: str, role: Role, hand_over_ms: float = 0.0, why: str = "") -> None:
        """Changes a worker's role, as `crossdock flip` does. The worker loses its cached KV."""
        self.post(PeerUp(OBSERVER, hello(Role.OBSERVER, OBSERVER)))
        self.receive(OBSERVER, FlipRequest(name, role, hand_over_ms, False, why))
        self.post(PeerDown(OBSERVER, "said goodbye"))

    def _role_order(self, incarnation: int, message: Message) -> None:
        if isinstance(message, Flip):
            self._flipping[incarnation] = message.role
        elif isinstance(message, Drained) and incarnation in self._flipping:
            self.at(self.now, self._leave_role, incarnation, self._flipping.pop(incarnation))
        else:
            self._flipping.pop(incarnation, None)

    def _leave_role(self, incarnation: int, role: Role) -> None:
        name = self.core.members.peers[incarnation].name
        self.post(PeerDown(incarnation, "said goodbye"))
        self.prefill.pop(incarnation, None)
        self.decode.pop(incarnation, None)
        self.transfers.receivers.pop(incarnation, None)
        self.fetches.receivers.pop(incarnation, None)
        self.at(self.now + self.commit_s, self.start_flipped, name, role, incarnation)

    # --- the coordinator ------------------------------------------------------------------------------------------------

    def receive(self, incarnation: int, message: Message, blob: bytes = b"") -> None:
        self.post(Received(incarnation, message, blob))

    def post(self, event: Event) -> None:
        self._deadline_known = False
        for action in self.core.handle(event, self.now):
            match action:
                case Send(incarnation, message, blob):
                    if isinstance(message, Reserve):
                        self.requests[message.request_id].decoder = incarnation
                    worker = self.prefill.get(incarnation) or self.decode.get(incarnation)
                    if worker is not None and isinstance(message, Flip | Drained | Draining):
                        self._role_order(incarnation, message)
                    elif worker is not None:
                        worker.order(message, blob)
                    elif incarnation == GATEWAY:
                        self._gateway(message)
                case StateChanged(request_id, _, state, _) if state in TERMINAL:
                    self._ended(self.requests[request_id], state)

    def run(self, until_s: float) -> None:
        while self.next_s <= until_s:
            self.step()
        self.advance(until_s)

    @property
    def due_s(self) -> float:
        """When the next event is due, or the next deadline of the coordinator if there is none."""
        deadline = self._next_deadline() if self.next_s == inf else None
        return self.next_s if deadline is None else deadline

    def _next_deadline(self) -> float | None:
        """The coordinator's next deadline, which only an event changes."""
        if not self._deadline_known:
            self._deadline, self._deadline_known = self.core.next_deadline(), True
        return self._deadline

    def step(self) -> None:
        """Handles the next due event. A deadline of the coordinator that is earlier comes first."""
        deadline = self._next_deadline() if self.next_s > self.now else None
        if deadline is not None and deadline < self.next_s:
            self.advance(deadline)
            self.post(Tick())
        else:
            self.take_next()
