"""Compiles grammars before they are submitted, in processes that end when one takes too long.

llguidance's limits and those of `gateway.structured` keep compiling short. What they overlook costs its sender a refusal, and
nobody else more than the time until another process is free: a tenant never has more than one of them.
"""

import asyncio
import signal
import sys
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

import msgspec

from gateway.http.errors import ApiError
from gateway.structured.hello import COMPILE_CPU_S

PROCESSES: Final = 2
ANSWER_S: Final = 4.0
"""For a process that is ready, on a machine that is busy."""
START_S: Final = 60.0
"""Of a process: it loads the tokenizer."""
WAIT_S: Final = 10.0
"""For one's turn."""
KEPT: Final = 2048
"""Verdicts. Each has 32 bytes of a digest, and 300 characters at the most."""
TOO_LARGE: Final = f"it takes more than {COMPILE_CPU_S} s, or too much memory, to compile"
_BY_OTHERS: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""Ends of a process that say nothing of its grammar."""
_LINE_BYTES_MAX: Final = 1 << 20
_COMMAND: Final = (sys.executable, "-m", "gateway.structured.compile_process")


class _Process:
    """One process, started when it is first needed, and anew when it was killed."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._running: asyncio.subprocess.Process | None = None

    async def verdict(self, grammar: str) -> str:
        """Why the grammar is refused; empty: it is good. Raises `TimeoutError`, and `OSError` if the process cannot start or
        was ended by others."""
        try:
            running = self._running
            if running is None or running.returncode is not None:
                running = await self._start()
            async with asyncio.timeout(ANSWER_S):
                answer = await _asked(running, msgspec.json.encode(grammar))
                if answer is None and await running.wait() in _BY_OTHERS:
                    raise OSError("the process was ended")
                return TOO_LARGE if answer is None else answer
        except BaseException:  # whatever it is doing now, its next answer would be to this question
            await self.end()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        running = await asyncio.create_subprocess_exec(*_COMMAND, stdin=pipe, stdout=pipe, limit=_LINE_BYTES_MAX)
        self._running = running
        async with asyncio.timeout(START_S):
            fault = await _asked(running, self._hello)
        if fault != "":
            raise OSError(fault or "the process ended")
        return running

    async def end(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        if running.returncode is None:
            running.kill()
        assert running.stdin is not None
        running.stdin.close()
        await running.wait()


async def _asked(running: asyncio.subprocess.Process, line: bytes) -> str | None:
    """Its answer; None: it has ended."""
    assert running.stdin is not None and running.stdout is not None
    running.stdin.write(line + b"\n")
    await running.stdin.drain()
    answer = await running.stdout.readline()
    return msgspec.json.decode(answer, type=str) if answer else None


class GrammarChecker:
    """Used on the event loop's thread only. The requests that wait are bounded by those that the intake lets in."""

    def __init__(self, hello: bytes) -> None:
        """`hello`: the first line for a process, a `Hello`."""
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
            message = f"'{param}' could not be compiled in {ANSWER_S:.0f} s: this machine is too busy."
            raise ApiError(503, message, code="gateway_overloaded", retry_after_s=1.0) from None
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
