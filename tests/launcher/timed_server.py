"""A server of known timing, in a process of its own: `python -m tests.launcher.timed_server` prints its port.

An answer's first token comes after 100 ms and 2.5 ms for each prompt token, about as from the small model on one core; the
others with gaps of 20 to 60 ms, one token to a chunk. Requests of one length get the same times, whatever their words.
GET /times tells when it really wrote them, in seconds of its own clock.
"""

import asyncio
import json
import random
from typing import Any

from runtime.process import clock
from tests.launcher.scripted_server import DONE, STREAM, event

HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "timed"}
TOKEN = event({**HEAD, "choices": [{"index": 0, "text": " a", "logprobs": None, "finish_reason": None}]})
FIRST_S, PROMPT_TOKEN_S = 0.1, 0.0025
TIMES: list[list[float]] = []  # of each answer: when its request was read, and when its tokens were written


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
            if b" /times" in head:
                _json(writer, TIMES)
            elif head.startswith(b"GET"):
                _json(writer, {"object": "list", "data": [{"id": "timed", "max_model_len": 4096}]})
            else:
                await _generate(json.loads(body), writer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _generate(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    came = clock.now()
    prompt = body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split()
    count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    if not body.get("stream"):
        counts = {"prompt_tokens": len(prompt), "completion_tokens": count}
        ids = list(range(1, 101)) if body.get("return_token_ids") else None
        _json(writer, {"choices": [{"text": "a", "prompt_token_ids": ids}], "usage": counts})
        return
    source = random.Random(len(prompt))
    due = came + FIRST_S + PROMPT_TOKEN_S * len(prompt)
    times = [came]
    writer.write(STREAM)
    for _ in range(count):
        await asyncio.sleep(max(0.0, due - clock.now()))
        _chunk(writer, TOKEN)
        times.append(clock.now())
        due += source.uniform(0.02, 0.06)
    TIMES.append(times)
    counts = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    _chunk(writer, event({**HEAD, "choices": [], "usage": counts}) + DONE)
    writer.write(b"0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _json(writer: asyncio.StreamWriter, content: Any) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
