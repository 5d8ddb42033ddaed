"""One request of the load generator: sent, its stream read, every chunk with a token timed.

All times are those at which bytes arrive: each read gets one time stamp, before it is parsed. An answer is good
only if it ended with `[DONE]`; everything else has a kind of error. Nothing that a server sends raises here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from launcher.http.client import (
    ERROR_BYTES_MAX,
    ClientUsage,
    Event,
    RequestFailed,
    SseReader,
    drain,
    headers,
    read_whole,
    reason,
    retry_after_s,
)
from launcher.load.plan import NEVER, PlannedRequest
from launcher.load.prompts import Prompt
from launcher.load.records import CANCELLED, OK, RequestRecord
from runtime.process import clock

OnTokens = Callable[[str, list[int]], None]


class StreamReader:
    """Notes the arrivals of a server-sent event stream in a record. Pure."""

    def __init__(self, record: RequestRecord, origin: float, on_tokens: OnTokens | None = None) -> None:
        self._record, self._origin, self._on_tokens = record, origin, on_tokens
        self._sse = SseReader()
        self._last = 0.0
        self._chunks = self._ids = 0
        self._usage: ClientUsage | None = None

    @property
    def done(self) -> bool:
        return self._sse.done

    def feed(self, data: bytes, now: float) -> None:
        """Adds bytes that came at `now`. Raises `RequestFailed` at an error event, or at data that is no event."""
        for event in self._sse.feed(data):
            self._take(event, now)
        self.settle()

    @property
    def carried(self) -> int:
        """Returns the number of tokens so far, as the chunks show it."""
        return max(self._ids, self._chunks)

    def settle(self) -> None:
        """Bring the counts in the record up to date."""
        record, usage = self._record, self._usage
        record.tokens = usage.completion_tokens if usage and usage.completion_tokens else self.carried
        if usage:
            record.prompt_tokens = usage.prompt_tokens
            record.cached_tokens = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0

    def _take(self, event: Event, now: float) -> None:
        self._usage = event.usage or self._usage
        carries = False
        for choice in event.choices or ():
            text = choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content))
            ids = choice.token_ids or []
            self._ids += len(ids)
            carries |= bool(text or ids)
            if self._on_tokens is not None:
                self._on_tokens(text or "", ids)
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
class LoadTarget:
    """The server, and what was learned of it."""

    url: str
    model: str
    chat: bool
    ignore_eos: bool
    token_ids: bool
    timeout_s: float
    context_tokens: int = 0

    def body(self, planned: PlannedRequest, prompt: Prompt) -> bytes:
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


async def send(
    session: aiohttp.ClientSession,
    target: LoadTarget,
    planned: PlannedRequest,
    body: bytes,
    record: RequestRecord,
    origin: float,
    on_tokens: OnTokens | None = None,
) -> None:
    """Sends a request and fills the record in. The outcome is set when this returns, or is cancelled from outside.
    `on_tokens` gets the answer piece by piece: text, and token ids if the server sends them."""
    leaves = planned.cancel_s != NEVER and planned.cancel_s < target.timeout_s
    reader = StreamReader(record, origin, on_tokens)
    record.sent_s = clock.now() - origin
    try:
        async with asyncio.timeout(planned.cancel_s if leaves else target.timeout_s):
            async with session.post(target.url, data=body, headers=headers(planned.tenant.key)) as response:
                await _answer(response, reader, planned, record, origin)
    except TimeoutError:
        record.outcome = CANCELLED if leaves else "timeout"
    except RequestFailed as error:
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
    response: aiohttp.ClientResponse,
    reader: StreamReader,
    planned: PlannedRequest,
    record: RequestRecord,
    origin: float,
) -> None:
    record.request_id = response.headers.get("X-Request-Id", "")[:200]
    if response.status != 200:
        record.outcome = f"http_{response.status}"
        record.retry_after_s = retry_after_s(response)
        record.detail = reason(await read_whole(response, ERROR_BYTES_MAX))
        return
    if response.content_type != "text/event-stream":
        raise RequestFailed("garbage", f"an answer of type {response.content_type}"[:200])
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
        raise RequestFailed("cut_short", "the stream ended without [DONE]")
    if record.first_s is None:
        raise RequestFailed("empty", "no token came")
    record.outcome = OK
    await drain(response)
