"""One request of the load generator: sent, its stream read, every chunk with a token timed.

What counts is when bytes arrive: each read is stamped once, before it is taken apart. An answer is good only if it ended with
`[DONE]`; everything else has a kind of error. Nothing that a server sends raises here.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from launcher.load.plan import NEVER, Planned
from launcher.load.prompts import Prompt
from launcher.load.records import CANCELLED, OK, Record
from runtime.process import clock

LINE_BYTES_MAX: Final = 1 << 20
EVENTS_MAX: Final = 1 << 20
ERROR_BYTES_MAX: Final = 1 << 16
DRAIN_S: Final = 1.0
"""For the end of the connection's use behind [DONE], so that it can be used again."""
_DONE: Final = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_Event)


class StreamFailed(Exception):
    """`kind` is the outcome."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class StreamReader:
    """Bytes of a server-sent event stream → arrivals in a record. Pure."""

    def __init__(self, record: Record, origin: float) -> None:
        self.done = False
        self._record, self._origin = record, origin
        self._rest = b""
        self._events = 0
        self._last = 0.0
        self._chunks = self._ids = 0
        self._usage: _Usage | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Raises `StreamFailed` at an error event, or what is none."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_BYTES_MAX:
            raise StreamFailed("garbage", "a line without end")
        for line in lines:
            if line.startswith(b"data:") and not self.done:
                self._take(line[5:].strip(), now)
        self.settle()

    @property
    def carried(self) -> int:
        """Tokens so far, as far as chunks tell."""
        return max(self._ids, self._chunks)

    def settle(self) -> None:
        """Bring the counts in the record up to date."""
        record, usage = self._record, self._usage
        record.tokens = usage.completion_tokens if usage and usage.completion_tokens else self.carried
        if usage:
            record.prompt_tokens = usage.prompt_tokens
            record.cached_tokens = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0

    def _take(self, data: bytes, now: float) -> None:
        self._events += 1
        if data == _DONE:
            self.done = True
            return
        if self._events > EVENTS_MAX:
            raise StreamFailed("garbage", f"more than {EVENTS_MAX} events")
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise StreamFailed("garbage", f"an event that is none of OpenAI's: {error}") from None
        if event.error is not None:
            raise StreamFailed("error_event", _words(event.error))
        self._usage = event.usage or self._usage
        carries = False
        for choice in event.choices or ():
            text = choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content))
            self._ids += len(choice.token_ids or ())
            carries |= bool(text or choice.token_ids)
        if carries:
            self._arrived(now)
        elif self._chunks and any(choice.finish_reason for choice in event.choices or ()):
            self._record.tail_ms = round(1000 * (now - self._last), 3)

    def _arrived(self, now: float) -> None:
        self._chunks += 1
        if self._record.first_s is None:
            self._record.first_s = now - self._origin
        else:
            self._record.gaps_ms.append(round(1000 * (now - self._last), 3))
        self._last = now


@dataclass(frozen=True)
class Target:
    """The server, and what was learned of it."""

    url: str
    """Of the endpoint."""
    model: str
    chat: bool
    ignore_eos: bool
    token_ids: bool
    timeout_s: float
    context_tokens: int = 0

    def body(self, planned: Planned, prompt: Prompt) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.token_ids:
            fields["return_token_ids"] = True
        if planned.priority:
            fields["priority"] = planned.priority
        return msgspec.json.encode(fields)


def headers(key: str) -> dict[str, str]:
    common = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return common | ({"Authorization": f"Bearer {key}"} if key else {})


async def send(
    session: aiohttp.ClientSession, target: Target, planned: Planned, body: bytes, record: Record, origin: float
) -> None:
    """Fills the record in; its outcome is set when this returns, or is cancelled from outside."""
    leaves = planned.cancel_s != NEVER and planned.cancel_s < target.timeout_s
    reader = StreamReader(record, origin)
    record.sent_s = clock.now() - origin
    try:
        async with asyncio.timeout(planned.cancel_s if leaves else target.timeout_s):
            async with session.post(target.url, data=body, headers=headers(planned.tenant.key)) as response:
                await _answer(response, reader, planned, record, origin)
    except TimeoutError:
        record.outcome = CANCELLED if leaves else "timeout"
    except StreamFailed as error:
        record.outcome, record.detail = error.kind, str(error)
    except aiohttp.ClientConnectorError as error:
        record.outcome, record.detail = "connect", str(error)[:200]
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError) as error:
        record.outcome, record.detail = "disconnect", str(error)[:200]
    except (aiohttp.ClientError, ValueError) as error:
        record.outcome, record.detail = "garbage", f"{type(error).__name__}: {error}"[:200]
    record.ended_s = record.ended_s or clock.now() - origin
    reader.settle()


async def _answer(
    response: aiohttp.ClientResponse, reader: StreamReader, planned: Planned, record: Record, origin: float
) -> None:
    record.request_id = response.headers.get("X-Request-Id", "")[:200]
    if response.status != 200:
        record.outcome = f"http_{response.status}"
        record.retry_after_s = _seconds(response.headers.get("Retry-After", ""))
        record.detail = _reason(await read_whole(response, ERROR_BYTES_MAX))
        return
    if response.content_type != "text/event-stream":
        raise StreamFailed("garbage", f"an answer of type {response.content_type}"[:200])
    async for data in response.content.iter_any():
        reader.feed(data, clock.now())
        if planned.cancel_tokens != NEVER and reader.carried >= planned.cancel_tokens:
            record.outcome = CANCELLED
            response.close()
            return
        if reader.done:
            break
    record.ended_s = clock.now() - origin
    if not reader.done:
        raise StreamFailed("cut_short", "the stream ended without [DONE]")
    if record.first_s is None:
        raise StreamFailed("empty", "no token came")
    record.outcome = OK
    try:
        async with asyncio.timeout(DRAIN_S):
            async for _ in response.content.iter_any():
                pass
    except (TimeoutError, aiohttp.ClientError):
        response.close()


async def read_whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or its first `most` bytes and a little more."""
    found = b""
    async for data in response.content.iter_any():
        found += data
        if len(found) >= most:
            response.close()
            break
    return found


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _words(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


def _reason(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", "replace")
    return _words(found["error"]) if isinstance(found, dict) and "error" in found else str(found)[:200]
