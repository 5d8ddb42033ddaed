"""One client's request: sent, its stream read token by token, and what became of it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec

from tools.chaos.orders import Answer, Choice, Order

TIMEOUT_S = 150.0


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = []

    def flat(self) -> list[float]:
        """Returns the log-probability of each token, and of the likeliest ones at its place. The first token of a prompt has
        none."""
        found = zip(self.token_logprobs, self.top_logprobs, strict=True)
        return [value for own, top in found if own is not None for value in (own, *(top or {}).values())]


class _Function(msgspec.Struct):
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] = []

    @property
    def text(self) -> str:
        return (self.content or "") + "".join(call.function.arguments for call in self.tool_calls)


class _Choice(msgspec.Struct):
    index: int
    text: str = ""
    delta: _Delta | None = None  # the part of a chat's message; calls count as text
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None  # comes with the first event of a chat
    error: dict[str, object] | None = None


_DECODER = msgspec.json.Decoder(_Event)
Gap = Callable[[float, float], None]


@dataclass
class Seen:
    answer: Answer = field(default_factory=dict)
    request_id: str = ""
    prompt_tokens: int = 0  # prompt tokens of a chat, as its first event gives them
    cached_tokens: int = 0
    began_at: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0
    ended_at: float = 0.0
    error: str = ""  # empty: a whole answer
    longest_gap_s: float = 0.0  # the longest time between two tokens of one choice
    broken: bool = False  # the connection broke, or was refused


async def ask(
    session: aiohttp.ClientSession, base_url: str, model: str, order: Order, on_gap: Gap, *, leave_after: int | None = None,
    leave_at: float | None = None,
) -> Seen:  # fmt: skip
    """Sends a request and reads its stream; never raises for what a server does. `on_gap(from, to)` is called with the times
    at which tokens of a choice came. The client leaves after `leave_after` tokens, or `leave_at` seconds after it began."""
    seen, last = Seen(), dict[int, float]()
    try:
        async with asyncio.timeout(TIMEOUT_S if leave_at is None else leave_at):
            body = {"model": model, **order.body}
            async with session.post(f"{base_url}{order.path}", json=body) as response:
                seen.request_id = response.headers.get("X-Request-Id", "")
                if response.status != 200:
                    seen.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                    return seen
                await _read(response, seen, last, on_gap, leave_after)
    except TimeoutError:
        seen.error = "left" if leave_at is not None else f"no end in {TIMEOUT_S:.0f} s"
    except (aiohttp.ClientError, ConnectionError) as error:
        seen.error, seen.broken = f"{type(error).__name__}: {error}"[:200], True
    finally:
        seen.ended_at = time.monotonic()
    return seen


async def _read(
    response: aiohttp.ClientResponse, seen: Seen, last: dict[int, float], on_gap: Gap, leave_after: int | None
) -> None:
    count = 0
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event, now = _DECODER.decode(data), time.monotonic()
        if event.error is not None:
            seen.error = f"error event: {event.error}"
            return
        seen.prompt_tokens = seen.prompt_tokens or len(event.prompt_token_ids or ())
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            seen.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        for part in event.choices:
            choice = seen.answer.setdefault(part.index, Choice())
            choice.text += part.text if part.delta is None else part.delta.text
            choice.token_ids += part.token_ids
            choice.finish = part.finish_reason or choice.finish
            if part.logprobs is not None:
                choice.logprobs += part.logprobs.flat()
            if part.token_ids:
                count += len(part.token_ids)
                seen.first_token_at = seen.first_token_at or now
                if part.index in last:
                    seen.longest_gap_s = max(seen.longest_gap_s, now - last[part.index])
                    on_gap(last[part.index], now)
                last[part.index] = now
        if leave_after is not None and count >= leave_after:
            seen.error = "left"
            response.close()
            return
    seen.error, seen.broken = "ended without [DONE]", True
