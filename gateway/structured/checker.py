"""Compiles grammars before they are submitted, in processes that are killed when they take too long.

llguidance's limits and those of `gateway.structured` keep compiling short. What they overlook costs its sender a refusal, and
nobody else more than the time until another process is free: a tenant never has more than one of them.
"""

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

import msgspec

from gateway.http.errors import ApiError

PROCESSES: Final = 2
COMPILE_S: Final = 0.8
"""Of one grammar, in a process that is ready."""
START_S: Final = 60.0
"""Of a process: it loads the tokenizer."""
WAIT_S: Final = 10.0
"""For one's turn."""
KEPT: Final = 2048
"""Verdicts. Each has 32 bytes of a digest, and 300 characters at the most."""
TOO_SLOW: Final = f"it takes longer than {COMPILE_S} s to compile"
_LINE_BYTES_MAX: Final = 1 << 20
_COMMAND: Final = (sys.executable, "-m", "gateway.structured.compile_process")


class _Process:
    """One process, started when it is first needed, and anew when it was killed."""

    def __init__(self, hello: Callable[[], bytes]) -> None:
        self._hello = hello
        self._running: asyncio.subprocess.Process | None = None

    async def verdict(self, grammar: str) -> str:
        """Why the grammar is refused; empty: it is good. Raises `TimeoutError`, and `OSError` if the process cannot start."""
        try:
            if self._running is None or self._running.returncode is not None:
                await self._start()
            async with asyncio.timeout(COMPILE_S):
                return await self._ask(msgspec.json.encode(grammar))
        except BaseException:  # whatever it is doing now, its next answer would be to this question
            await self.end()
            raise

    async def _start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._running = await asyncio.create_subprocess_exec(*_COMMAND, stdin=pipe, stdout=pipe, limit=_LINE_BYTES_MAX)
        async with asyncio.timeout(START_S):
            fault = await self._ask(self._hello())
        if fault:
            raise OSError(fault)

    async def _ask(self, line: bytes) -> str:
        running = self._running
        assert running is not None and running.stdin is not None and running.stdout is not None
        running.stdin.write(line + b"\n")
        await running.stdin.drain()
        answer = await running.stdout.readline()
        if not answer:
            raise OSError("the process ended")
        return msgspec.json.decode(answer, type=str)

    async def end(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        if running.returncode is None:
            running.kill()
        assert running.stdin is not None
        running.stdin.close()
        await running.wait()


class GrammarChecker:
    """Used on the event loop's thread only. The requests that wait are bounded by those that the intake lets in."""

    def __init__(self, hello: Callable[[], bytes]) -> None:
        """`hello` makes the first line for a process: the tokenizer and what else it has to know."""
        self._processes = [_Process(hello) for _ in range(PROCESSES)]
        self._free = list(self._processes)
        self._turn = asyncio.Condition()
        self._owners: set[str] = set()
        """Those for whom a grammar is being compiled."""
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, owner: str, grammar: str, param: str) -> None:
        """Raises `ApiError`."""
        digest = blake2b(grammar.encode(), digest_size=32).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = await self._compiled(owner, grammar, param)
            self._verdicts[digest] = verdict
            while len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(digest)
        if verdict:
            raise ApiError(400, f"Invalid value for '{param}': {verdict}.", code="invalid_value", param=param)

    async def _compiled(self, owner: str, grammar: str, param: str) -> str:
        try:
            async with asyncio.timeout(WAIT_S), self._turn:
                await self._turn.wait_for(lambda: self._free and owner not in self._owners)
                process = self._free.pop()
                self._owners.add(owner)
        except TimeoutError:
            message = f"'{param}' cannot be compiled now: too many others are."
            raise ApiError(503, message, code="gateway_overloaded", retry_after_s=1.0) from None
        try:
            return await process.verdict(grammar)
        except TimeoutError:
            return TOO_SLOW
        except OSError as error:
            message = f"'{param}' cannot be served here: {str(error)[:300]}."
            raise ApiError(503, message, code="grammars_unavailable", retry_after_s=5.0) from None
        finally:
            self._free.append(process)
            self._owners.discard(owner)
            async with self._turn:
                self._turn.notify_all()

    async def close(self) -> None:
        for process in self._processes:
            await process.end()
