"""The handshake of a `tcp` pair: both ends prove that they know the pair's key. Pure; nonces are arguments.

    sender → receiver   hello:   magic, token, nonce, proof
    receiver → sender   answer:  nonce, proof

The receiver makes the token and the key for one pair and tells them to the sender over the control link. The token only
names the pair, and is good for one connection. A proof is an HMAC-SHA256 with the key over both tokens and nonces known so
far, with a label for each direction, so neither end can be answered with its own words. Nothing else of the key is sent.
"""

import hmac
import struct
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

TOKEN_BYTES: Final = 16
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 16
_MAGIC: Final = b"cdkvtcp1"
_HELLO = struct.Struct(f"<8s{TOKEN_BYTES}s{NONCE_BYTES}s32s")
_ANSWER = struct.Struct(f"<{NONCE_BYTES}s32s")
HELLO_BYTES: Final = _HELLO.size
ANSWER_BYTES: Final = _ANSWER.size


class HandshakeFailed(Exception):
    """The other end does not know the key, or does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class TcpHello:
    """A hello that was read but not verified."""

    token: bytes
    nonce: bytes
    proof: bytes


def _proof(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"crossdock kv tcp 1 " + label + b"".join(parts), "sha256")


def hello(token: bytes, key: bytes, nonce: bytes) -> bytes:
    """The sender's first and only message of the handshake."""
    return _HELLO.pack(_MAGIC, token, nonce, _proof(key, b"sender", token, nonce))


def read_hello(message: bytes) -> TcpHello:
    """Raises `HandshakeFailed` if this is no hello."""
    magic, token, nonce, proof = _HELLO.unpack(message)
    if magic != _MAGIC:
        raise HandshakeFailed("the first bytes are not those of a KV sender")
    return TcpHello(token, nonce, proof)


def verify_hello(hello: TcpHello, key: bytes) -> None:
    """Raises `HandshakeFailed` unless the sender knows the key."""
    if not hmac.compare_digest(hello.proof, _proof(key, b"sender", hello.token, hello.nonce)):
        raise HandshakeFailed("the sender does not know the key")


def answer(hello: TcpHello, key: bytes, nonce: bytes) -> bytes:
    """The receiver's answer to a hello that was verified."""
    return _ANSWER.pack(nonce, _proof(key, b"receiver", hello.token, hello.nonce, nonce))


def verify_answer(message: bytes, token: bytes, key: bytes, sender_nonce: bytes) -> bytes:
    """The receiver's nonce. Raises `HandshakeFailed` unless the receiver knows the key."""
    nonce, proof = _ANSWER.unpack(message)
    if not hmac.compare_digest(proof, _proof(key, b"receiver", token, sender_nonce, nonce)):
        raise HandshakeFailed("the receiver does not know the key")
    return bytes(nonce)


def record_key(key: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    """The AES-256 key of the records that this connection's sender sends (HKDF-SHA256, RFC 5869). Fresh nonces of both ends
    make it another one for each connection; nothing but the answer travels the other way."""
    info = b"crossdock kv tcp 1 records sender to receiver"
    return HKDF(algorithm=SHA256(), length=32, salt=sender_nonce + receiver_nonce, info=info).derive(key)
