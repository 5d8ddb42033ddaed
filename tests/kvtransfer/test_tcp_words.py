"""The parts of `tcp` that need no connection: the handshake's words, who may wait, how a segment is cut."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transports.tcp.handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    KEY_BYTES,
    HandshakeFailed,
    TcpHello,
    answer,
    hello,
    read_hello,
    record_key,
    verify_answer,
    verify_hello,
)
from kvtransfer.transports.tcp.listener import pending_limit
from kvtransfer.transports.tcp.segments import RECORD_BYTES, record_bytes_max, records_of

TOKEN, KEY, SENDER_NONCE, RECEIVER_NONCE = bytes(range(16)), bytes(range(32)), b"s" * 16, b"r" * 16


def test_handshake_proves_the_key() -> None:
    """Both ends prove that they know the key without sending it, and each connection has its own key."""
    said = hello(TOKEN, KEY, SENDER_NONCE)
    heard = read_hello(said)
    verify_hello(heard, KEY)
    answered = answer(heard, KEY, RECEIVER_NONCE)
    assert (len(said), len(answered)) == (HELLO_BYTES, ANSWER_BYTES)
    assert verify_answer(answered, TOKEN, KEY, SENDER_NONCE) == RECEIVER_NONCE
    assert KEY not in said + answered
    assert len({record_key(KEY, SENDER_NONCE, nonce) for nonce in (RECEIVER_NONCE, b"x" * 16)}) == 2


@given(st.integers(0, HELLO_BYTES - 1), st.integers(1, 255))
def test_changed_hello_is_refused(at: int, change: int) -> None:
    """A hello with one changed byte is refused, or bears another token."""
    changed = bytearray(hello(TOKEN, KEY, SENDER_NONCE))
    changed[at] ^= change
    try:
        heard = read_hello(bytes(changed))
    except HandshakeFailed:
        return
    if heard.token == TOKEN:
        with pytest.raises(HandshakeFailed):
            verify_hello(heard, KEY)


@given(st.integers(0, ANSWER_BYTES - 1), st.integers(1, 255))
def test_changed_answer_is_refused(at: int, change: int) -> None:
    """An answer with one changed byte is refused."""
    changed = bytearray(answer(TcpHello(TOKEN, SENDER_NONCE, b""), KEY, RECEIVER_NONCE))
    changed[at] ^= change
    with pytest.raises(HandshakeFailed):
        verify_answer(bytes(changed), TOKEN, KEY, SENDER_NONCE)


def test_reflected_proof_is_refused() -> None:
    """A sender refuses its own proof as an answer, and a receiver refuses a wrong key."""
    heard = read_hello(hello(TOKEN, KEY, SENDER_NONCE))
    with pytest.raises(HandshakeFailed):
        verify_answer(SENDER_NONCE + heard.proof, TOKEN, KEY, SENDER_NONCE)
    with pytest.raises(HandshakeFailed):
        verify_hello(heard, os.urandom(KEY_BYTES))


def test_strangers_get_few_descriptors() -> None:
    """Pending connections get about an eighth of the process's descriptors, from one to 64."""
    assert [pending_limit(descriptors) for descriptors in (4, 64, 512, 1 << 20)] == [1, 8, 64, 64]


@given(st.integers(1, 5_000), st.integers(1, 4 * RECORD_BYTES))
def test_records_cover_segment_once(blocks: int, sub_block_bytes: int) -> None:
    """The records of a segment cover its bytes once, in order, within the record limit."""
    blocks = min(blocks, max(1, (8 << 20) // sub_block_bytes))
    at = 0
    for record in records_of(blocks, sub_block_bytes):
        assert record.first * sub_block_bytes + record.offset == at
        assert 0 < record.size <= record_bytes_max(sub_block_bytes) <= RECORD_BYTES
        assert record.size == record.sub_blocks * sub_block_bytes or record.sub_blocks == 1
        at += record.size
    assert at == blocks * sub_block_bytes
