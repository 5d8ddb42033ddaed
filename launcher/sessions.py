"""Sessions of several turns, as `crossdock bench agents` sends them and the virtual cluster plays them. Pure.

Each prompt consists of the prompt and answer of the turn before, and new tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from proto.limits import HASH_BYTES


@dataclass(frozen=True, slots=True)
class SessionTurn:
    new_tokens: int  # in addition to the prompt and answer of the turn before
    output_tokens: int
    think_s: float = 0.0  # from the end of the last answer to this turn
    restarts: bool = False  # its prompt does not go on from the turn before


@dataclass(frozen=True, slots=True)
class LoadSession:
    turns: tuple[SessionTurn, ...]
    system_tokens: int = 0  # that begin the first prompts of all sessions


class NamedSession(NamedTuple):
    """A turn with the names of its blocks."""

    turn: SessionTurn
    prompt_tokens: int
    prompt_hashes: bytes
    answer_hashes: bytes  # of the full blocks after the prompt's


def synthetic(
    sessions: int, turns: int, system_tokens: int, new_tokens: int, output_tokens: int, think_s: float
) -> list[LoadSession]:
    made = [SessionTurn(new_tokens, output_tokens, think_s if turn else 0.0) for turn in range(turns)]
    return [LoadSession(tuple(made), system_tokens)] * sessions


def in_turn(sessions: Sequence[LoadSession], clients: int) -> list[list[LoadSession]]:
    """Deals the sessions to `clients` clients, each of which plays one after the other."""
    return [list(sessions[client::clients]) for client in range(min(clients, len(sessions)))]


def named(session: LoadSession, name: str, block_size: int, context_tokens: int) -> Iterator[NamedSession]:
    """Yields the turns up to the first that does not fit the context. Equal blocks have equal names: sessions share the names
    of the system prompt's blocks, and a turn has those of the turn before."""
    hashes, tokens, conversation = b"", 0, 0
    for number, turn in enumerate(session.turns):
        if not number or turn.restarts:
            conversation, tokens, hashes = number, session.system_tokens, b""
            hashes = _chained(hashes, "system", tokens // block_size)
        prompt = tokens + turn.new_tokens
        tokens = prompt + turn.output_tokens
        if tokens > context_tokens:
            return
        hashes = _chained(hashes, f"{name}/{conversation}", tokens // block_size)
        ends = prompt // block_size * HASH_BYTES
        yield NamedSession(turn, prompt, hashes[:ends], hashes[ends:])


def _chained(hashes: bytes, text: str, blocks: int) -> bytes:
    found, last = [hashes], hashes[-HASH_BYTES:]
    for number in range(len(hashes) // HASH_BYTES, blocks):
        last = blake2b(last + f"{text} {number}".encode(), digest_size=HASH_BYTES).digest()
        found.append(last)
    return b"".join(found)
