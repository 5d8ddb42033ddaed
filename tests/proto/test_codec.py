"""Every message survives the wire, plain msgpack can read it, and nothing but a message gets through."""

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import drain, kv, limits, messages, parts, policy, progress, status
from proto.codec import ALL_MESSAGES, WITH_BLOB, decode, encode, pack_tokens, split_hashes, to_frames, unpack_tokens
from proto.errors import UNKNOWN_AS, CancelReason, FinishReason, Interrupt, Reject, RemoteProtocolError, WaitReason
from proto.messages import Chunk, Destination, Message, Role, TokenItem
from proto.parts import Capacity, Held, Waits
from proto.sampling import Sampling, TokenLogprobs

SAMPLING = Sampling(
    max_tokens=7, seed=(1 << 63) - 1, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
    presence_penalty=-2.0, frequency_penalty=2.0, logit_bias=((5, -100.0), (6, 1.5)), logprobs=2, stop_token_ids=(1, 2),
)  # fmt: skip
RATES = messages.RateState(10, 9, 6.0, 1000, 900, 60.0)
ID = ("chat-1.c2", 3)
WORK = (*ID, 9, SAMPLING, 2, 1, 4)
HASHES = bytes(range(32))
GATEWAY, DECODE = Destination("tcp://127.0.0.1:5", 77), Destination("tcp://[::1]:6", 78)
ITEM = TokenItem(
    *ID, 1, 4, (9, 10), FinishReason.STOP, (TokenLogprobs(-0.5, ((9, -0.5), (8, -1.0))), TokenLogprobs(-1.0)), 32
)

WORKER = status.WorkerStatus("decode-0", Role.DECODE, "m", "h", 1, 10, 2, 1, 0, 99, draining=True)
SAMPLES: list[Message] = [
    messages.Hello(
        1, Role.DECODE, 5, "decode-0", "m", "f", "tcp://h:1", Capacity(10, 16, 4, 100), "host", 12, (Held(*ID, 3, 1),)
    ),
    messages.Welcome(6, 500, 1),
    messages.Refused("no"),
    messages.Bye("done"),
    messages.Ping(),
    messages.Pong(),
    messages.Submit(*ID, "m", 3, SAMPLING, 2, 1, 1, "org/user", "batch", 250.0, HASHES, 16),
    messages.Cancel(*ID, CancelReason.STOP_STRING),
    messages.StatusRequest(),
    messages.Accepted(*ID, RATES),
    messages.Rejected(*ID, Reject.QUEUE_FULL, "full", 1.5, RATES, Waits(1.0), WaitReason.OWN_QUEUE),
    messages.WaitReport(*ID, Waits(1.0, 2.0, 3.0, 4.0)),
    messages.AttemptTimes(*ID, "finished: done", 9.0, chunks=(messages.ChunkTimes(0, 4, 1.0, 2.0),)),
    messages.Interrupted(*ID, Interrupt.DECODE_LOST, "gone"),
    messages.ClusterState(("a", "b"), (16, 32)),
    status.StatusReport(
        (status.WorkerStatus("w", Role.PREFILL, "m", "h", 1, 2, 1, 1, 0, 5),),
        ("g",),
        1,
        {"queued": 1},
        {},
        {"x": 2},
        (status.PairStatus("p", "d", "shm", ""),),
    ),
    messages.Prefill(*WORK, GATEWAY, DECODE, 16, HASHES, 16),
    messages.Step(4, (Chunk(*ID, 0, 16),)),
    messages.Reserve(*WORK, 12, GATEWAY, 79, HASHES),
    messages.Release(*ID),
    messages.StepDone(4, (Chunk(*ID, 0, 16),), 12.5, 0),
    messages.CacheMiss(*ID, 32),
    messages.CacheEvents(HASHES, b""),
    messages.HandedOver(*ID, 1 << 30, 2.5),
    progress.DecodeProgress(
        900,
        40,
        0,
        (progress.Joined(*ID, 890),),
        (progress.SharedPrefix(*ID, (parts.PrefixPart(3, 128),)),),
        4,
        101.5,
        12,
        60,
    ),
    progress.Hung(31_000.0),
    messages.Finished(*ID, 9, 8),
    messages.Released(*ID, 7),
    messages.WorkFailed(*ID, Interrupt.TRANSFER_FAILED, "broke"),
    messages.Tokens((ITEM,)),
    progress.AnswerNames("r", 1, 0, 16, 3, bytes(16)),
    progress.EndSession("org/user", bytes(16)),
    progress.EndPrefix(bytes(48)),
    progress.PromptLogprobs("r", 1, 1, 1, bytes(8), bytes(8), bytes(8), bytes(8)),
    status.KvHeld(17, 3, 2),
    status.KvPairs((status.KvPair(9, "gloo", "shm: another host"),)),
    drain.Draining(1500.0),
    drain.Drained(),
    drain.DrainRequest("decode-0", True, 0.0),
    drain.DrainAnswer("no such worker", (WORKER,)),
    drain.Flip(messages.Role.PREFILL, 1500.0),
    drain.FlipFailed("no port"),
    drain.FlipRequest("decode-0", messages.Role.PREFILL, 0.0, True, "more prompts"),
    drain.FlipAnswer("no such worker", (WORKER,)),
    policy.PolicyRequest(policy.PolicyAction.TRY, 0, "{}", 0.1, ("acme",)),
    policy.PolicyAnswer(
        "",
        1,
        2,
        0.1,
        ("acme",),
        (policy.PolicyVersion(1, "8087b533678c", "tenants file", 5.0, 2),),
        (policy.ArmStatus("active", 3, 2, 1, 10.0, 5.0),),
        "{}",
        True,
    ),
    policy.RolloutRequest(policy.RolloutAction.START, "m", "v2", 0.1, True, ("acme",)),
    policy.RolloutAnswer(
        "", (policy.RevisionStatus("m", "v2", 1, 2, False, True, 0.1, True, ("acme",), 3, 4, 5, 6, 7, 8.0),)
    ),
    status.AutopilotReport(
        status.AutopilotStatus(
            "m", "on", "1P3D", "2P2D", "long prompts", status.PredictionError(3, 0.1, None, 0.2, 0.05)
        )
    ),
    kv.PairOpen(3, ("shm", "gloo"), 16, "host"),
    kv.PairListen(3, "gloo", "127.0.0.1", 5, "secret", "shm: another host"),
    kv.PairClosed(3, "why"),
    kv.Offer(*ID, 3, 9),
    kv.Accept(*ID, 4, 2),
    kv.Decline(*ID, "no"),
    kv.Commit(*ID, (b"12345678",), 2, (kv.FirstToken(0, 5),)),
    kv.Ack(*ID, 100),
    kv.Abort(*ID, "why"),
    kv.Fetch(*ID, 2, 3),
    kv.FetchRefused(*ID, "why"),
]


def samples() -> list[Message]:
    return [*SAMPLES, kv.Announce(*ID, pair_id=3, sequence=3, segment=3, first_block=3, blocks=(8, 8, 3))]


def blob_for(message: Message) -> bytes:
    return pack_tokens((1, 2, 3)) if isinstance(message, WITH_BLOB) else b""


def test_every_message_has_a_sample() -> None:
    assert {type(sample) for sample in samples()} == set(ALL_MESSAGES)


@pytest.mark.parametrize("message", samples(), ids=lambda m: type(m).__name__)
def test_message_survives_round_trip(message: Message) -> None:
    """A message and its blob are decoded as they were encoded."""
    assert decode(to_frames(message, blob_for(message))) == (message, blob_for(message))


def test_plain_msgpack_reads_all_messages() -> None:
    """The plain msgpack unpacker reads a stream of all messages."""
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(b"".join(encode(sample) for sample in samples()))
    for sample, record in zip(samples(), unpacker, strict=True):
        assert record[0] == type(sample).__name__
        assert msgspec.convert(record, type(sample)) == sample


@pytest.mark.parametrize("message", samples(), ids=lambda m: type(m).__name__)
def test_malformed_frames_are_refused(message: Message) -> None:
    """Truncated frames, extra bytes and a wrong number of frames are refused."""
    frame, blob = encode(message), blob_for(message)
    tail = [blob] if isinstance(message, WITH_BLOB) else []
    bad = [[frame[:-1], *tail], [frame + b"\0", *tail], [frame, *tail, b""], [], [b"", *tail], [*tail, frame][1:]]
    for frames in bad:
        with pytest.raises(RemoteProtocolError):
            decode(frames)


@pytest.mark.parametrize("message", samples(), ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("wrong", [None, -1, 1 << 64, "x" * 5000, b"\xff", [], {}, 1.5, [[[[]]]]], ids=repr)
def test_wrong_field_types_are_refused(message: Message, wrong: object) -> None:
    """Each field in turn is replaced; what a field may hold is told apart by encoding what was decoded again."""
    fields = msgspec.to_builtins(message)
    for index in range(1, len(fields)):
        mutated = msgpack.packb([*fields[:index], wrong, *fields[index + 1 :]]) if wrong != 1 << 64 else None
        if mutated is None:
            continue
        frames = [mutated, b""] if isinstance(message, WITH_BLOB) else [mutated]
        try:
            decoded, _ = decode(frames)
        except RemoteProtocolError:
            continue
        assert type(decoded) is type(message)
        value = getattr(decoded, decoded.__struct_fields__[index - 1])
        if wrong == [] and isinstance(value, msgspec.Struct) and value == type(value)():
            continue  # a structure whose fields all have defaults
        unknown_word = isinstance(wrong, str) and value in UNKNOWN_AS.values()
        assert unknown_word or value in (None, wrong, ()) or list(value) == wrong or float(value) == wrong


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    """Random bytes are refused with a protocol error unless they form a message."""
    try:
        message, _ = decode(frames)
    except RemoteProtocolError:
        return
    assert isinstance(message, Message)


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_flipped_bytes_raise_protocol_errors(data: st.DataObject) -> None:
    """A message with changed bytes raises nothing but a protocol error."""
    message = data.draw(st.sampled_from(samples()))
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames = [bytes(frame), b""] if isinstance(message, WITH_BLOB) else [bytes(frame)]
    try:
        decode(frames)
    except RemoteProtocolError:
        pass


def test_deep_or_oversized_frames_are_refused() -> None:
    """Deeply nested frames and frames above the size limit are refused."""
    for frame in (
        b"\x91" * 1_000_000,
        b"\x92\xa4Ping" + b"\x91" * 100_000 + b"\x01",
        b"\0" * (limits.MAX_FRAME_BYTES + 1),
    ):
        with pytest.raises(RemoteProtocolError):
            decode([frame])


@given(st.lists(st.integers(0, limits.MAX_VOCAB - 1), max_size=50))
def test_tokens_round_trip(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens), len(tokens)) == tokens


@pytest.mark.parametrize(
    ("blob", "expected"), [(b"\0" * 5, 1), (b"\0" * 4, 2), (b"\xff" * 4, 1), (pack_tokens([limits.MAX_VOCAB]), 1)]
)
def test_bad_token_blobs_are_refused(blob: bytes, expected: int) -> None:
    """A token blob of the wrong length or with a token outside the vocabulary is refused."""
    with pytest.raises(RemoteProtocolError):
        unpack_tokens(blob, expected)


def test_joined_hashes_are_split_in_order() -> None:
    """Joined hashes are split in order, and a hash cut short is refused."""
    assert split_hashes(HASHES) == [HASHES[:16], HASHES[16:]] and split_hashes(b"") == []
    with pytest.raises(RemoteProtocolError):
        split_hashes(HASHES[:-1])
