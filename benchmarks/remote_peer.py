"""The second process of a benchmark, which sends KV as a prefill worker does. It reads orders as lines of JSON from its
standard input, and answers each with a line on its standard output. It ends when its input ends, so also when the first
process is killed."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from launcher.http.streams import BenchFailed
from launcher.process import ROOT, child_environment, python_command

ANSWER_TIMEOUT_S = 120.0
_LINE_BYTES_MAX = 1 << 24


class Far:
    """The other process, seen from here."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = python_command(module, *arguments)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        # It has a session of its own: Ctrl-C is meant for this process only, and its input then ends.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(1, sends_kv=True),
            cwd=ROOT,
            start_new_session=True,
        )

    async def order(self, what: str, **fields: Any) -> Any:
        """Sends the other process an order, and returns its answer. Raises `BenchFailed` if the order fails."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write((json.dumps({"do": what, **fields}) + "\n").encode())
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise BenchFailed("the other process has failed; what it said is above")
        return json.loads(line)

    async def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def serve(orders: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
    """Serves in the other process: carries out the named orders on standard input until it ends."""
    lines = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        order = json.loads(line)
        answer = await orders[order.pop("do")](**order)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
