"""An HTTP server that does exactly what a script says, and notes when it wrote each piece."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from runtime.process import clock

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Request-Id: cmpl-1\r\nTransfer-Encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"
HANG = b"<hang>"
RESET = b"<reset>"


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(text: str = " a", **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, **more}]})


def chat(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event({"choices": [], "usage": counts})


def refusal(status: int, *headers: str, body: bytes = b'{"error": {"message": "busy"}}') -> bytes:
    lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Scripted:
    """`script`: (seconds to wait, bytes) one after the other. What comes behind `STREAM` is sent in HTTP chunks."""

    script: list[tuple[float, bytes]]
    url: str = ""
    came: list[float] = field(default_factory=list)
    wrote: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0  # connections that the client closed in the middle

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
                length = next((int(value) for name, value in fields.items() if name.lower() == b"content-length"), 0)
                self.bodies.append(json.loads(await reader.readexactly(length) or b"{}"))
                self.came.append(clock.now())
                if not await self._play(reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        streaming = False
        for wait_s, data in self.script:
            await asyncio.sleep(wait_s)
            if data == HANG:
                self.left += not await reader.read(1)
                return False
            if data == RESET:
                writer.transport.abort()
                return False
            if reader.at_eof():
                self.left += 1
                return False
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if streaming else data)
            self.wrote.append(clock.now())
            streaming = streaming or data == STREAM
        if streaming:
            writer.write(b"0\r\n\r\n")
        return True


@asynccontextmanager
async def serving(script: list[tuple[float, bytes]]) -> AsyncIterator[Scripted]:
    scripted = Scripted(script)
    server = await asyncio.start_server(scripted.answer, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()
