"""The HTTP client of `serve`, the load generator and the benchmarks, and the one reader of server-sent events.

It is aiohttp: a third of the CPU time of httpx for each event of a stream.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import aiohttp
import msgspec

from proto.errors import CrossdockError
from runtime.process import clock

LINE_BYTES_MAX: Final = 1 << 20
EVENTS_MAX: Final = 1 << 20
ERROR_BYTES_MAX: Final = 1 << 16
KEEPALIVE_S: Final = 3.0  # shorter than servers keep idle connections, so that none is used while it closes
SILENCE_S: Final = 300.0  # a server that sends nothing for so long has failed
READY_S: Final = 2.0
DRAIN_S: Final = 1.0  # to wait for the answer's end behind [DONE], so that the connection can be used again
_DONE: Final = b"[DONE]"


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class ClientChoice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class ClientUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class Event(msgspec.Struct):
    """The fields of an event that are read, for completions and chat alike."""

    choices: list[ClientChoice] | None = None
    usage: ClientUsage | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(Event)


class RequestFailed(CrossdockError):
    """A request failed. `kind` is a word for statistics."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


class SseReader:
    """Turns the bytes of a server-sent event stream into events. Pure."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        self._events = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yields the events that end in `data`. Raises `RequestFailed` at an error event, or at data that is no event."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_BYTES_MAX:
            raise RequestFailed("garbage", "a line without end")
        for line in lines:
            if line.startswith(b"data:") and not self.done:
                payload = line[5:].strip()
                if payload == _DONE:
                    self.done = True
                else:
                    yield self._event(payload)

    def _event(self, payload: bytes) -> Event:
        self._events += 1
        if self._events > EVENTS_MAX:
            raise RequestFailed("garbage", f"more than {EVENTS_MAX} events")
        try:
            event = _DECODER.decode(payload)
        except msgspec.DecodeError as error:
            raise RequestFailed("garbage", f"an event that is none of OpenAI's: {error}") from None
        if event.error is not None:
            raise RequestFailed("error_event", _words(event.error))
        return event


def new_session(
    base_url: str = "", key: str = "", silence_s: float | None = SILENCE_S, trusts: str = ""
) -> aiohttp.ClientSession:
    """Makes a session that may open any number of connections at once. `trusts`: a PEM file with the server's own certificate,
    which may have any name; otherwise a certificate must be one that the system trusts."""
    context: ssl.SSLContext | bool = True
    if trusts:
        context = ssl.create_default_context(cafile=trusts)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return aiohttp.ClientSession(
        base_url or None,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=context),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=silence_s),
        headers=headers(key),
        auto_decompress=False,
        trust_env=False,
    )


def headers(key: str) -> dict[str, str]:
    common = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return common | ({"Authorization": f"Bearer {key}"} if key else {})


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[Event, float]]:
    """Yields the events of an answer, each with the time of the read that brought it. Raises `RequestFailed` unless the answer
    is a stream that ends with [DONE]."""
    if response.status != 200:
        why = reason(await read_whole(response, ERROR_BYTES_MAX))
        raise RequestFailed(f"http_{response.status}", f"HTTP {response.status}: {why}")
    reader = SseReader()
    async for data in response.content.iter_any():
        now = clock.now()
        for event in reader.feed(data):
            yield event, now
        if reader.done:
            await drain(response)
            return
    raise RequestFailed("cut_short", "the stream ended without [DONE]")


async def drain(response: aiohttp.ClientResponse) -> None:
    """Reads what follows [DONE]; closes the connection if the server does not end the answer in time."""
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


async def answers_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=READY_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def reason(body: bytes) -> str:
    """The reason in an error's answer."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", "replace")
    return _words(found["error"]) if isinstance(found, dict) and "error" in found else str(found)[:200]


def _words(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
