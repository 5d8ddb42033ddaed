"""The hand-over of finished KV blocks from a prefill worker (sender) to a decode worker (receiver).

Over the control link between the two (the sender connects to the receiver):

    PairOpen →  ← PairListen          once per pair of incarnations: choose a transport and meet
    Offer →     ← Accept | Decline    once per attempt
    Announce →  (segments on the data plane)    in order: lengths are agreed before a byte moves
    Commit →    ← Ack                 digests; the receiver decodes only after it has checked them
    Abort       from either side, at any point

A prefill worker may lack the beginning of a prompt that the decode worker has. It asks for that, and then all of the above goes
the other way on the same link, with the decode worker as the sender:

    Fetch →  ← FetchRefused | PairOpen, Offer …

Shapes and dtypes never travel: both sides take them from their own layout, whose fingerprint the handshake compared. All
counts of blocks are in blocks of the pair's size, `PairOpen.block_size`. If the block sizes of the two ends differ, this is
the smaller one.
"""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from proto import limits
from proto.fields import Attempt, BlockSize, ChoiceIndex, Count, RequestId, Text, Tokens_
from proto.messages import Message
from proto.sampling import TokenId

PairId = Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
"""It grows with every pair that a sender opens, so that messages of an older pair are recognised."""
TransportName = Annotated[str, Meta(min_length=1, max_length=16)]
SegmentIndex = Annotated[int, Meta(ge=0, lt=limits.MAX_SEGMENTS)]


class PairOpen(Message, frozen=True):
    """Asks the receiver to meet as pair `pair_id`. Repeated with fewer transports when meeting by another one failed."""

    pair_id: PairId
    transports: Annotated[tuple[TransportName, ...], Meta(min_length=1, max_length=8)]
    """The transports of the sender, best first; the receiver picks."""
    block_size: BlockSize  # Tokens of the blocks that will cross. It must divide the block size of either end.
    host_id: Text  # equal at both ends only if they run on one host, and can share memory there
    encrypt: bool = False  # KV must cross encrypted; for `tcp`


class PairListen(Message, frozen=True):
    """The receiver waits for the sender here."""

    pair_id: PairId
    transport: TransportName
    host: Text
    port: Annotated[int, Meta(ge=0, le=65535)]  # of the rendezvous; 0 if `secret` alone is enough to connect
    secret: Text  # prefix of every key of the store, or name of the socket
    why: Text  # the reason against better transports; empty: none
    token: Annotated[bytes, Meta(max_length=16)] = b""
    """The name of the pair for the receiver's listener, for `tcp`. It is good for one connection."""
    key: Annotated[bytes, Meta(max_length=32)] = b""  # secret of both ends of a `tcp` connection, for keys of records
    encrypted: bool = False  # records are encrypted; for `tcp`


class PairClosed(Message, frozen=True):
    """The group is gone on the side that says this; sessions on it have failed."""

    pair_id: PairId
    reason: Text
    fetch: bool = False  # it is a pair by which a decode worker sends what prefill workers fetch


class Offer(Message, frozen=True):
    request_id: RequestId
    attempt: Attempt
    pair_id: PairId
    blocks: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS_PER_REQUEST)]


class Accept(Message, frozen=True):
    request_id: RequestId
    attempt: Attempt
    segment_blocks: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS_PER_REQUEST)]  # most in one segment
    cached_blocks: Annotated[int, Meta(ge=0, le=limits.MAX_BLOCKS_PER_REQUEST)] = 0
    """The number of the prompt's first blocks that the receiver already has, and verified when it got them. They are not
    sent."""


class Decline(Message, frozen=True):
    request_id: RequestId
    attempt: Attempt
    reason: Text


class Announce(Message, frozen=True):
    """Segments `segment`, `segment + 1` … are about to be sent, of so many `blocks` each, the first being block `first_block`
    of the prompt.

    An announced segment is sent and received even if its session ends before. So an abort does not break the pair's order of
    segments.
    """

    request_id: RequestId
    attempt: Attempt
    pair_id: PairId
    sequence: Annotated[int, Meta(ge=0, lt=1 << 31)]
    """The number of the first of these segments among all segments of the pair, and its tag on the data plane. It reveals
    repeated and lost announcements."""
    segment: SegmentIndex
    first_block: Annotated[int, Meta(ge=0, lt=limits.MAX_BLOCKS_PER_REQUEST)]
    blocks: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS_PER_REQUEST)], ...],
        Meta(min_length=1, max_length=limits.MAX_SEGMENTS_ANNOUNCED),
    ]


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The token that prefill drew for one choice which goes on in decode."""

    choice: ChoiceIndex
    token: TokenId


class Commit(Message, frozen=True):
    """All segments are announced, and perhaps still on their way. A binary frame follows: the prompt's token ids (int32) if a
    penalty needs them, else empty."""

    request_id: RequestId
    attempt: Attempt
    digests: Annotated[
        tuple[Annotated[bytes, Meta(min_length=8, max_length=8)], ...], Meta(max_length=limits.MAX_SEGMENTS)
    ]
    """The digest of each segment, in order: xxh3-64 of its blocks' digests, xxh3-64 each; between GPUs a checksum
    (`kvtransfer`)."""
    prompt_tokens: Tokens_
    first_tokens: Annotated[tuple[FirstToken, ...], Meta(min_length=1, max_length=limits.MAX_CHOICES)]


class Ack(Message, frozen=True):
    """The receiver has verified and owns the KV."""

    request_id: RequestId
    attempt: Attempt
    kv_bytes: Count  # received, without the cached blocks


class Abort(Message, frozen=True):
    request_id: RequestId
    attempt: Attempt
    reason: Text
    fetch: bool = False  # the session is one of a fetch


class Fetch(Message, frozen=True):
    """A prefill worker asks for these blocks of the prompt, as many of them as there are. The attempt is reserved for the
    two."""

    request_id: RequestId
    attempt: Attempt
    first_block: Annotated[int, Meta(ge=0, lt=limits.MAX_BLOCKS_PER_REQUEST)]
    blocks: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS_PER_REQUEST)]


class FetchRefused(Message, frozen=True):
    """Nothing will be offered, or no more than was."""

    request_id: RequestId
    attempt: Attempt
    reason: Text


NO_FIRST_TOKENS = (FirstToken(0, 0),)  # for the `Commit` of a fetch: earlier versions want one in each
_FROM_SENDER = (PairOpen, Offer, Announce, Commit)
_FROM_RECEIVER = (PairListen, Accept, Decline, Ack)


def of_fetch(message: Message) -> Message:
    """Returns the message in the form that the two ends of a fetch send. Messages that either end of a hand-over may also send
    are marked."""
    return msgspec.structs.replace(message, fetch=True) if isinstance(message, Abort | PairClosed) else message


def is_of_fetch(message: Message, *, from_prefill: bool) -> bool:
    """Returns whether the message belongs to a fetch, not to a hand-over. `from_prefill`: the prefill worker has sent it."""
    if isinstance(message, Abort | PairClosed):
        return message.fetch
    return isinstance(message, _FROM_RECEIVER if from_prefill else _FROM_SENDER)


def kept_names(known: bytes, request_id: str, attempt: int, block_size: int, tokens: int) -> bytes:
    """The names of all full KV blocks of a stream that is about to be resumed, whose context has so many `tokens`: `known` are
    those of its first blocks, which the attempt was submitted with. `block_size` is in tokens.

    A prompt's blocks are named by the gateway: hashes of its tokens, under a key that no worker has. So a decode worker cannot
    name blocks that hold output. Names come from the attempt that computed the blocks, up to this token of its request. The
    gateway, which knows the attempts of its requests, names them alike when it submits the next one.

    An attempt runs once and in one place, so a name stands for one content. The ids of requests are the gateway's own: no
    client can choose one.
    """
    blocks = range(len(known) // limits.HASH_BYTES, tokens // block_size)
    ends = (f"{request_id} {attempt} {(block + 1) * block_size}" for block in blocks)
    return known + b"".join(
        blake2b(end.encode(), digest_size=limits.HASH_BYTES, person=b"crossdock-kept").digest() for end in ends
    )
