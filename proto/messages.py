"""The messages of the control plane, by sender and receiver.

    gateway  ⇄ coordinator      Submit, Cancel, EndSession  →   ← Accepted, Rejected, WaitReport, Interrupted, AttemptTimes
    coordinator ⇄ workers       Prefill, Step, Reserve, Release →   ← StepDone, HandedOver, DecodeProgress, Finished, Released,
                                EndPrefix                   →       WorkFailed, CacheMiss, CacheEvents
                                Draining, Flip              →   ← Draining; Drained →
    worker   ⇄ gateway          Tokens, PromptLogprobs      →   ← AnswerNames
    anyone   ⇄ anyone           Hello → Welcome | Refused;  Ping → Pong;  Bye

Rules that hold for all of them:
- Everything that touches a request carries `(request_id, attempt)`; every token carries its absolute index in the answer.
  Receivers drop what belongs to an older attempt or incarnation, and repeating a message does no harm.
- `Submit` and `Prefill` are followed by one binary frame: the prompt's token ids, packed as little-endian int32.
- A link is one connection: `Hello` comes first and once; what follows carries no incarnation of its own, since the link has
  one.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from proto import limits
from proto.errors import CancelReason, Interrupt, Reject, WaitReason
from proto.fields import (
    AnswerTokens,
    Attempt,
    BlockHashes,
    BlockSize,
    CacheChanges,
    ChoiceIndex,
    Choices,
    Count,
    DurationMs,
    HandOverMs,
    HashKey,
    Incarnation,
    Name,
    NameOrEmpty,
    RequestId,
    Seconds,
    SessionName,
    Text,
    Tokens_,
)
from proto.parts import Capacity, Held, Returns, Room
from proto.parts import Chunk as Chunk
from proto.parts import Destination as Destination
from proto.parts import RateState as RateState
from proto.parts import Role as Role
from proto.parts import TokenItem as TokenItem
from proto.parts import Waits as Waits
from proto.sampling import Sampling


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all messages: one MessagePack array, its first element the type's name. None can be part of a cycle."""


# --- any link ---------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First on every link, from the connecting end. Its first four fields never change, so that every version can read them,
    and refuse what it cannot work with (`proto.versions.HelloPrefix`)."""

    version: int
    role: Role
    incarnation: Incarnation
    name: Name  # the name that people see, like `prefill-0`
    model: Text = ""  # model id, of a worker with a revision MODEL@REVISION; empty where a role has none
    fingerprint: Text = ""  # digest of model, revision, dtype and KV shape (`proto.compatible`)
    address: Text = ""  # where others reach this process: a gateway's token port, a decode worker's KV port
    capacity: Capacity | None = None
    host: Text = ""
    pid: Count = 0
    held: Annotated[tuple[Held, ...], Meta(max_length=1 << 16)] = ()
    """Streams that went on while the link was down; counted against the capacity until the worker lets go of them."""
    hand_over_ms: HandOverMs = None  # as in `drain.Draining`
    metrics: Text = ""  # HOST:PORT where this process is observed; empty: nowhere
    numerics: Text = ""  # `Runner.numerics` of a worker; empty: unknown. Streams resume exactly where it is equal.
    flipped_from: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0  # its incarnation in its last role; 0: it had none
    attention_tokens: Tokens_ = 0  # a worker's context at which attention costs as much as the weights; 0: unknown
    process: NameOrEmpty = ""  # the mixed worker that this is one role of; empty: the process has no other
    hash_key: HashKey = b""
    """A gateway's key for block hashes. A new coordinator continues to use it, so that cached prefixes are still found."""
    revision: NameOrEmpty = ""  # of the model that a worker serves

    @property
    def model_id(self) -> str:
        """The name of the model that clients use."""
        return self.model.removesuffix(f"@{self.revision}") if self.revision else self.model


class Welcome(Message, frozen=True):
    """Its three fields never change: a client reads them before it knows the server's version."""

    incarnation: Incarnation
    heartbeat_ms: Annotated[int, Meta(ge=10, le=60_000)]
    version: int


class Refused(Message, frozen=True):
    """The answer to a Hello that does not fit, or to a peer that is not known: start over. Its field never changes."""

    reason: Text


class Bye(Message, frozen=True):
    """An orderly end of the link, so that the other end need not wait for missed heartbeats."""

    reason: Text


class Ping(Message, frozen=True):
    pass


class Pong(Message, frozen=True):
    pass


# --- gateway → coordinator --------------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """One attempt at a request; a binary frame with `prompt_tokens` token ids follows.

    On a resume the ids are the prompt and the `resumed_tokens` tokens already sent, which count as output, not as prompt.
    """

    request_id: RequestId
    attempt: Attempt
    model: Text
    prompt_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    sampling: Sampling
    choices: Choices = 1
    first_choice: ChoiceIndex = 0  # choices are numbered from here; a resume goes choice by choice
    resumed_tokens: Tokens_ = 0
    tenant: Text = "default"  # `organisation/user` or `organisation`, from the authenticated key and nothing else
    priority_class: Text = ""  # the one the client asked for; empty: its tenant's own
    deadline_ms: DurationMs = 0.0  # until the first token, counted from now; 0: the priority class's default
    block_hashes: BlockHashes = b""  # of the ids that follow, for the prefix cache; empty: nothing is looked up or kept
    hash_block_size: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Tokens that each of them covers. A worker whose block size is a multiple uses the last hash of each; others use none."""
    drained_attempts: Annotated[int, Meta(ge=0, lt=1_000)] = 0
    """Earlier attempts that a drain, preemption or a lost coordinator link cut short. They do not count as tries."""
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] = 0
    """The lowest goes first among the requests of its tenant and priority class, whatever the deadlines."""
    session: SessionName = b""
    traced: bool = False  # its gateway wants `AttemptTimes`
    pool: Text = ""
    """`Hello.model` of the workers that its tokens so far come from: it goes on there. Empty: the coordinator chooses one of
    the model's revisions."""


class Cancel(Message, frozen=True):
    request_id: RequestId
    attempt: Attempt
    reason: CancelReason
    output_tokens: AnswerTokens = 0  # that the gateway has, over all choices; a lost worker can no longer report it


class StatusRequest(Message, frozen=True):
    """`crossdock status` asks, by way of the coordinator's control port."""


# --- coordinator → gateway --------------------------------------------------------------------------------------------


class Accepted(Message, frozen=True):
    """The request is queued and will end exactly once."""

    request_id: RequestId
    attempt: Attempt
    rates: RateState | None = None


class Rejected(Message, frozen=True):
    request_id: RequestId
    attempt: Attempt
    reason: Reject
    message: Text
    retry_after_s: Seconds = 0.0  # 0: trying again is pointless
    rates: RateState | None = None
    waits: Waits = Waits()
    because: WaitReason | None = None  # what it waited for most, or would have; None: `reason` says it


class WaitReport(Message, frozen=True):
    """The request waits no longer. It is sent if the wait was felt: a gateway that hears nothing counts none."""

    request_id: RequestId
    attempt: Attempt
    waits: Waits


class Interrupted(Message, frozen=True):
    """This attempt is over without an end; the gateway may submit the next one."""

    request_id: RequestId
    attempt: Attempt
    reason: Interrupt
    message: Text = ""


class ChunkTimes(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """When a chunk was ordered and reported, in milliseconds as in `AttemptTimes`."""

    start: Tokens_
    length: Tokens_
    sent_ms: DurationMs
    done_ms: DurationMs = 0.0


class AttemptTimes(Message, frozen=True):
    """How far an attempt got, and when, in milliseconds since its `Submit` was read; 0: it did not get there. It is sent at the
    attempt's end, if its `Submit` asked for it."""

    request_id: RequestId
    attempt: Attempt
    outcome: Text = ""
    ended_ms: DurationMs = 0.0
    computed_ms: DurationMs = 0.0  # its prompt was computed
    handed_over_ms: DurationMs = 0.0
    transfer_ms: DurationMs = 0.0  # what its prefill worker measured, between its last chunk and the acknowledgement
    target_ms: DurationMs = 0.0  # for its first token
    prefill: NameOrEmpty = ""  # workers
    decode: NameOrEmpty = ""
    cached_tokens: Tokens_ = 0
    waits: Waits = Waits()
    chunks: Annotated[tuple[ChunkTimes, ...], Meta(max_length=limits.MAX_CHUNKS_PER_STEP)] = ()


class ClusterState(Message, frozen=True):
    """The state of the cluster that a gateway needs to be ready: sent on every change."""

    servable_models: Annotated[tuple[Text, ...], Meta(max_length=limits.MAX_MODELS)]
    """Models with at least one prefill and one decode worker that take new work: neither is draining."""
    hash_block_sizes: Annotated[tuple[BlockSize, ...], Meta(max_length=limits.MAX_MODELS)] = ()
    """Tokens that each hash of a prompt is to cover: for each of them, its workers' smallest block size."""
    hash_key: HashKey = b""  # the key with which all gateways hash the blocks of prompts
    rooms: Annotated[tuple[Room, ...], Meta(max_length=limits.MAX_MODELS)] = ()


# --- coordinator → prefill worker, and a decode worker that computes a suffix -----------------------------------------


class Prefill(Message, frozen=True):
    """Take this prompt in; compute nothing until a `Step` says so. A binary frame with the token ids follows."""

    request_id: RequestId
    attempt: Attempt
    prompt_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    sampling: Sampling
    choices: Choices
    first_choice: ChoiceIndex
    resumed_tokens: Tokens_
    gateway: Destination
    decode: Destination
    decode_block_size: BlockSize
    block_hashes: BlockHashes = b""
    cached_tokens: Tokens_ = 0  # at the prompt's beginning, believed to be in this worker's cache; not computed
    fetches: bool = False  # what is missing here of `cached_tokens` is to be fetched from `decode`
    returns: Returns = Returns()


class Step(Message, frozen=True):
    """One forward pass; in a decode worker one chunk, computed in slices. Steps run in the order they arrive; chunks of a
    released request are skipped."""

    step_id: Count
    chunks: Annotated[tuple[Chunk, ...], Meta(min_length=1, max_length=limits.MAX_CHUNKS_PER_STEP)]


# --- coordinator → decode worker; `Release` to either --------------------------------------------------------------------


class Reserve(Message, frozen=True):
    """Expect this request, which will need `kv_blocks` at the most; its KV will be offered by the prefill worker named here."""

    request_id: RequestId
    attempt: Attempt
    prompt_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    sampling: Sampling
    choices: Choices
    first_choice: ChoiceIndex
    resumed_tokens: Tokens_
    kv_blocks: Count
    gateway: Destination
    prefill_incarnation: Incarnation  # the worker's own: it computes the prompt itself, as a `Prefill` and `Step`s say
    block_hashes: BlockHashes = b""
    tpot_ms: DurationMs = 0.0  # its target for the time per later token; 0: none
    returns: Returns = Returns()


class Release(Message, frozen=True):
    """Forget this attempt and everything held for it, in whatever state it is."""

    request_id: RequestId
    attempt: Attempt


# --- worker → coordinator --------------------------------------------------------------------------------------------------


class StepDone(Message, frozen=True):
    """`computed` names the chunks that were really forwarded; the others of the step were skipped."""

    step_id: Count
    computed: Annotated[tuple[Chunk, ...], Meta(max_length=limits.MAX_CHUNKS_PER_STEP)]
    step_ms: DurationMs
    tokens_forwarded: Count  # tokens that this process's model forwarded since it started


class CacheMiss(Message, frozen=True):
    """Fewer tokens of this prompt are cached than `Prefill` said. It is sent at once, and new chunks must start after
    `cached_tokens`. Chunks already on their way are skipped, like every chunk that does not continue the computed part."""

    request_id: RequestId
    attempt: Attempt
    cached_tokens: Tokens_
    fetch_failed: bool = False  # it was to be fetched, and the transfer has failed


class CacheEvents(Message, frozen=True):
    """Blocks that a prefix cache has gained and lost since the last message. A hint: `CacheMiss` mends what is wrong."""

    inserted: CacheChanges
    evicted: CacheChanges


class HandedOver(Message, frozen=True):
    """The decode worker has acknowledged the KV; the prefill worker holds nothing more for this request."""

    request_id: RequestId
    attempt: Attempt
    kv_bytes: Count
    transfer_ms: DurationMs
    fetched_tokens: Tokens_ = 0  # of its prompt, which came from the decode worker before, in ...
    fetch_ms: DurationMs = 0.0


class Finished(Message, frozen=True):
    """All choices of this attempt have ended on this worker, and their tokens were sent to the gateway."""

    request_id: RequestId
    attempt: Attempt
    output_tokens: Count  # summed over choices, this attempt's only
    tokens_forwarded: Count  # tokens that this process's model forwarded since it started
    resumed_tokens: Tokens_ = 0  # as in its order: a coordinator that has just started does not know the attempt


class Released(Message, frozen=True):
    """The answer to `Release`, once nothing is held any more; only then does the coordinator count the blocks as free."""

    request_id: RequestId
    attempt: Attempt
    output_tokens: Count = 0  # of this attempt, over choices; first tokens count in prefill or with `HandedOver`


class WorkFailed(Message, frozen=True):
    """This worker cannot go on with the attempt and has let go of everything it held for it."""

    request_id: RequestId
    attempt: Attempt
    reason: Interrupt
    message: Text
    output_tokens: Count = 0  # emitted here; first tokens count in prefill


# --- worker → gateway --------------------------------------------------------------------------------------------------------


class Tokens(Message, frozen=True):
    """All tokens that one step produced for one gateway."""

    items: Annotated[tuple[TokenItem, ...], Meta(max_length=limits.MAX_TOKEN_ITEMS)]
