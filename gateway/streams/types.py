"""The inputs of the stream keeper, its actions, and its options. Times are monotonic seconds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from msgspec import structs

from gateway.streams.prompt_scores import PromptScores
from gateway.text.block_hashes import BlockNames
from proto.messages import Accepted, Cancel, Interrupted, RateState, Rejected, Submit, TokenItem, Waits
from proto.progress import AnswerNames
from proto.sampling import TokenLogprobs


@dataclass(frozen=True)
class StreamLimits:
    """Bounds of the keeper. `GatewaySettings` explains to users those that can be set."""

    streams_max: int = 4096  # live answers, those waiting for the coordinator's link included; one more gets 503
    link_wait_s: float = 10.0
    settle_s: float = 10.0  # after a coordinator's start, new requests wait for workers to come back to it
    idle_s: float = 120.0
    attempts_max: int = 5  # Attempts at one choice in a row that fail before they have brought `progress_tokens`
    progress_tokens: int = 16
    steady_s: float = 5.0  # between interruptions, after which tries count anew: hosts lost in a row end no stream
    uncounted_max: int = 100  # attempts ended by a drain, a preemption or a lost link, and restarts by `steady_s`
    resume_delay_s: float = 0.05  # before the first resume; it doubles with each
    resume_delay_s_max: float = 1.0
    resume_wait_s: float = 30.0  # How long a resume that meets a full queue is tried again
    stall_s: float = 5.0  # silence after which a stream whose connection was lost is lost, and others are asked about
    first_token_wait_s: float = 1.0  # how long a decode worker's tokens wait for the first, which they overtook
    gone_s: float = 0.5  # silence after a worker's connection ended, in which a live worker reconnects
    last_words_max: int = 4096  # ended requests remembered for a coordinator that missed their end


class Piece(Protocol):
    """The text that one token added."""

    @property
    def text(self) -> str: ...
    @property
    def stop(self) -> str:
        """The stop string that it completed; empty: none."""
        ...


class TextSink(Protocol):
    """Turns one choice's tokens into text; `gateway.text.detokenize.Assembler` is the real one."""

    def push(self, token: int) -> Piece: ...
    def finish(self) -> Piece: ...


@dataclass(frozen=True, eq=False)
class Work:
    """One prompt to answer, and the message that submits it."""

    submit: Submit  # The first attempt's. Its deadline runs from the opening of the stream.
    prompt: bytes  # Packed token ids
    make_text: Callable[[], TextSink]
    names: BlockNames | None = None  # of the prompt's KV blocks; without them, no prefix cache is used
    prompt_scores: PromptScores | None = None  # takes the log-probabilities of the prompt's tokens
    is_offline: bool = False  # a batch job's: not measured against the tenant's SLO

    @property
    def stream_id(self) -> str:
        return self.submit.request_id

    def changed(self, **fields: Any) -> "Work":
        """The same prompt with other fields of the message."""
        return replace(self, submit=structs.replace(self.submit, **fields))


# --- events; Accepted, Rejected and Interrupted come as the coordinator sent them -------------------------------------


@dataclass(frozen=True)
class Open:
    work: Work


@dataclass(frozen=True)
class ClientGone:
    stream_id: str


@dataclass(frozen=True)
class LinkUp:
    incarnation: int  # the coordinator's; a new one knows none of our requests


@dataclass(frozen=True)
class LinkDown:
    pass


@dataclass(frozen=True)
class TokensReceived:
    """Tokens, from a worker."""

    items: tuple[TokenItem, ...]
    decoder: int  # The decode worker's incarnation; 0: they are first tokens, from a prefill worker
    pool: str = ""  # `Hello.model` of the worker; empty: not known


@dataclass(frozen=True)
class WorkerDown:
    """The connection on which a worker delivered tokens has ended, or the worker has reconnected. Messages that it sent on the
    old connection in between are lost too."""

    incarnation: int


@dataclass(frozen=True)
class Tick:
    """A deadline has come."""


@dataclass(frozen=True)
class Drain:
    """This gateway is to stop: no stream begins any more, and those that run go on."""


@dataclass(frozen=True)
class Shutdown:
    """It stops, after a `Drain`: every stream ends now, with an error."""


Event = (
    Open
    | ClientGone
    | LinkUp
    | LinkDown
    | WorkerDown
    | Tick
    | Drain
    | Shutdown
    | Accepted
    | Rejected
    | Interrupted
    | TokensReceived
)

# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SendSubmit:
    submit: Submit
    blob: bytes


@dataclass(frozen=True)
class SendCancel:
    cancel: Cancel


@dataclass(frozen=True)
class SendNames:
    """The names of an answer's blocks, to the decode worker that has computed it last."""

    decoder: int
    names: AnswerNames


@dataclass(frozen=True)
class Admitted:
    """The stream will be served: the coordinator has accepted it, or tokens have come."""

    stream_id: str
    rates: RateState | None = None  # Rates of the stream's tenant; None if tokens came before the coordinator's answer
    cold_start_s: float = 0.0  # the time until the coordinator was there and had workers


@dataclass(frozen=True)
class StreamPlaced:
    """The stream has got a place on workers, after a wait."""

    stream_id: str
    waits: Waits


class Finish(StrEnum):
    """Why a choice ended, in the API's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # Said in place of `stop` where the model called functions


@dataclass(frozen=True)
class Deliver:
    """New tokens of one choice. Their text may come later, while it may be the start of a stop string."""

    stream_id: str
    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: Finish | None = None
    stop: str = ""  # The stop string that ended it, if one did
    cached_tokens: int = 0  # Prompt tokens that were not computed for a choice; with its first token

    def ended_by(self, tokens: frozenset[int]) -> bool:
        """Whether one of these tokens ends the choice, and no stop string."""
        return self.finish is Finish.STOP and not self.stop and bool(self.tokens) and self.tokens[-1] in tokens


class FailKind(StrEnum):
    REJECTED = "rejected"
    UNREACHABLE = "coordinator_unreachable"
    OVERLOADED = "gateway_overloaded"
    INTERRUPTED = "interrupted"
    GRAMMAR = "grammar_failed"
    IDLE = "stream_idle_timeout"
    SHUTTING_DOWN = "shutting_down"


@dataclass(frozen=True)
class Failure:
    kind: FailKind
    message: str
    reject: Rejected | None = None


@dataclass(frozen=True)
class Ended:
    """The last action of a stream. `failure` is None where every choice has its finish reason."""

    stream_id: str
    failure: Failure | None = None


class Why(StrEnum):
    """The keeper's reasons, for metrics."""

    RESUMED = "resumed"
    DUPLICATE_TOKENS = "duplicate_tokens"
    STALE_TOKENS = "stale_tokens"
    BROKEN_STREAM = "broken_stream"


@dataclass(frozen=True)
class Noticed:
    why: Why
    stream_id: str = ""
    detail: str = ""


Action = SendSubmit | SendCancel | SendNames | Admitted | Deliver | Ended | Noticed
