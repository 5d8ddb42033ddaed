"""Compiles grammars before they are submitted, and checks answers against schemas, in processes that end if one takes too long.

llguidance's limits and those of `gateway.structured` keep compiling short. Organisations take turns, and none has more than
one process. If a job took too long, its organisation waits ten times as long before its next job. All such organisations share
one process.
"""

import asyncio
import contextlib
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import msgspec

from gateway.http.errors import ApiError, bad_value
from gateway.shares import QUANTUM_BYTES, FairQueue, organisation_of
from gateway.structured.compile_process import COMPILE_CPU_S, OUT_OF_MEMORY, CompileJob
from runtime.process import clock, log
from runtime.process.driver import cancelled

PROCESSES: Final = 2
ANSWER_S: Final = 4.0  # Time that a ready process has to answer, on a machine that is busy
START_S: Final = 60.0  # Time that a process has to start: it loads the tokenizer
WAIT_S: Final = 10.0  # Time for which a request waits for its turn
KEPT: Final = 2048  # Verdicts. Each has 32 bytes of a digest, and 300 characters at the most.
TOO_LARGE: Final = f"it takes more than {COMPILE_CPU_S} s, or too much memory, to compile"
PENALTY: Final = 10.0  # times the CPU time of a job that took too long, its organisation waits before its next
FORGIVEN_S: Final = 600.0  # until then, its organisation has fewer processes to choose from
SLOW_MAX: Final = 1024  # The most organisations with a job that took too long to remember
_AT_A_LIMIT: Final = (-signal.SIGPROF, -signal.SIGABRT, OUT_OF_MEMORY)  # Rust aborts without memory
_BY_OTHERS: Final = (-signal.SIGKILL, -signal.SIGTERM)  # Exit codes of a process that something else has ended
_LINE_BYTES_MAX: Final = 1 << 20
_COMMAND: Final = (sys.executable, "-m", "gateway.structured.compile_process")


_log = log.get("crossdock.gateway.grammars")


class _Unsuited(Exception):
    """No process can compile grammars for this tokenizer; `str()` says why."""


class _Crash(Exception):
    """The process ended by a fault of its own; `str()` says how."""


class _Process:
    """One process, started when it is first needed, and anew when it was killed."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._running: asyncio.subprocess.Process | None = None

    @property
    def is_ready(self) -> bool:
        return self._running is not None and self._running.returncode is None

    async def start(self) -> None:
        """Raises `TimeoutError`, `OSError` and `_Unsuited`."""
        try:
            await self._start()
        except BaseException:
            await self.end()
            raise

    async def verdict(self, job: bytes) -> str:
        """The answer to a `CompileJob`. Raises `TimeoutError`, `OSError` if the process cannot start or was ended, and
        `_Crash`."""
        try:
            running = self._running
            if running is None or running.returncode is not None:
                running = await self._start()
            async with asyncio.timeout(ANSWER_S):
                answer = await _asked(running, job)
                if answer is not None:
                    return answer
                status = await running.wait()
            if status in _AT_A_LIMIT:
                return TOO_LARGE
            raise OSError("the process was ended") if status in _BY_OTHERS else _Crash(f"exit status {status}")
        except BaseException:  # whatever it is doing now, its next answer would be to this question
            await self.end()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        running = await asyncio.create_subprocess_exec(*_COMMAND, stdin=pipe, stdout=pipe, limit=_LINE_BYTES_MAX)
        self._running = running
        async with asyncio.timeout(START_S):
            fault = await _asked(running, self._hello)
        if fault is None:
            raise OSError("the process ended")
        if fault:
            raise _Unsuited(fault)
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


@dataclass
class _Organisation:
    """An organisation with a job that took too long."""

    waits_until: float  # Monotonic seconds
    normal_again_at: float


class GrammarChecker:
    """Used on the event loop's thread only. The jobs that wait are bounded by the requests that the intake lets in."""

    def __init__(self, hello: bytes) -> None:
        """`hello`: the first line for a process, a `CompilerSetup` as JSON."""
        self._processes = [_Process(hello) for _ in range(PROCESSES)]
        self._free = list(self._processes)
        self._queue: FairQueue[asyncio.Future[_Process]] = FairQueue()
        self._busy: set[str] = set()  # Organisations that have a process
        self._slow: OrderedDict[str, _Organisation] = OrderedDict()
        self._verdicts: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._starts: set[asyncio.Task[None]] = set()
        self.fault = ""  # Why the model cannot have grammars; empty: it can, as far as is known

    async def begin(self) -> None:
        """Start a process before the first grammar comes, so that a tokenizer that does not suit is known at the start."""
        if self._free:
            await self._start(self._free.pop())

    async def verdict(self, owner: str, cache_group: str, grammar: str, param: str) -> str:
        """Why the grammar is refused; empty: it is good. Verdicts are kept for each cache group: whether another tenant has
        used a grammar shows nowhere. Raises `ApiError` if it cannot be compiled now."""
        key = (cache_group, blake2b(grammar.encode(), digest_size=32).digest())
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._done(owner, CompileJob(grammar=grammar), param)
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)
        return verdict

    async def mismatch(self, owner: str, text: str, schema: Any) -> str:
        """Returns the part of the schema that the JSON text does not match. Returns an empty string if it matches, or if it
        cannot be checked now, since that is no reason to drop an answer."""
        try:
            verdict = await self._done(owner, CompileJob(text=text, schema=schema), "")
        except ApiError:
            return ""
        return "" if verdict == TOO_LARGE else verdict

    async def _done(self, owner: str, job: CompileJob, param: str) -> str:
        organisation = organisation_of(owner)
        if self.fault:
            raise self._refused(param)
        process = await self._turn(owner, param)
        try:
            verdict = await process.verdict(msgspec.json.encode(job))
            if verdict == TOO_LARGE:
                self._took_too_long(organisation)
            return verdict
        except TimeoutError:
            message = f"'{param}' could not be compiled in {ANSWER_S:.0f} s: this machine is too busy."
            raise ApiError(503, message, code="gateway_overloaded", retry_after_s=1.0) from None
        except _Unsuited as error:
            self.fault = str(error)
            raise self._refused(param) from None
        except _Crash as error:
            # Neither the client's fault nor its organisation's: the cause is in what the process wrote to stderr.
            _log.error("the process that compiles grammars crashed", field=param, error=str(error))
            message = f"The gateway failed to compile '{param}'."
            raise ApiError(500, message, code="internal_error") from None
        except OSError as error:
            message = f"'{param}' cannot be served here: {str(error)[:300]}."
            raise ApiError(503, message, code="grammars_unavailable", retry_after_s=5.0) from None
        finally:
            self._busy.discard(organisation)
            self._give_back(process)

    def _refused(self, param: str) -> ApiError:
        return bad_value(param, f"'{param}' is not supported with this model: {self.fault}.", "unsupported_value")

    async def _turn(self, owner: str, param: str) -> _Process:
        """Raises `ApiError`."""
        granted: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
        job = self._queue.push(owner, QUANTUM_BYTES, granted)  # one in each round
        self._grant()
        try:
            async with asyncio.timeout(WAIT_S):
                return await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._busy.discard(organisation_of(owner))
                self._give_back(granted.result())
            if not isinstance(error, TimeoutError):
                raise
            message = f"'{param}' cannot be compiled now: too many others are, or one of yours took too long."
            raise ApiError(503, message, code="gateway_overloaded", retry_after_s=1.0) from None
        finally:
            job.dropped = True

    def _grant(self) -> None:
        """Give free processes to those whose turn it is."""
        now = clock.now()
        while self._free and (job := self._queue.pop(passing=lambda name: self._must_wait(name, now))) is not None:
            if not job.work.cancelled():
                self._busy.add(organisation_of(job.tenant))
                job.work.set_result(self._free.pop())
        waits = [one.waits_until for one in self._slow.values() if one.waits_until > now]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(min(waits) - now, self._grant) if waits else None

    def _must_wait(self, organisation: str, now: float) -> bool:
        if organisation in self._busy:
            return True
        slow = self._slow.get(organisation)
        if slow is None or now >= slow.normal_again_at:
            return False
        # Organisations with a job that took too long may never occupy all processes together.
        return now < slow.waits_until or len(self._busy & self._slow.keys()) >= PROCESSES - 1

    def _took_too_long(self, organisation: str) -> None:
        now = clock.now()
        self._slow[organisation] = _Organisation(now + PENALTY * COMPILE_CPU_S, now + FORGIVEN_S)
        self._slow.move_to_end(organisation)
        while len(self._slow) > SLOW_MAX or next(iter(self._slow.values())).normal_again_at <= now:
            self._slow.popitem(last=False)

    def _give_back(self, process: _Process) -> None:
        """Return a process to the free ones. If it has ended, start it again first, unless that is of no use."""
        if process.is_ready or self.fault:
            self._free.append(process)
            self._grant()
            return
        start = asyncio.get_running_loop().create_task(self._start(process))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    async def _start(self, process: _Process) -> None:
        try:
            await process.start()
        except _Unsuited as error:
            self.fault = str(error)
        except (OSError, TimeoutError):  # the next job tries again, and says why
            pass
        self._free.append(process)
        self._grant()

    async def close(self) -> None:
        for start in list(self._starts):
            with contextlib.suppress(OSError):
                await cancelled(start)
        if self._timer is not None:
            self._timer.cancel()
        for process in self._processes:
            await process.end()
