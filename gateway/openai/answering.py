"""Events of a request's streams → one JSON answer, or server-sent events."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.backend import Backend
from gateway.http.encoding import KEEP_ALIVE, encode
from gateway.http.errors import WAIT_HEADER, ApiError, of_failure, rate_headers, wait_text
from gateway.http.request_log import RequestInfo
from gateway.openai.answers import Answer, ChoiceState
from gateway.openai.forms import Form
from gateway.streams.types import Admitted, Deliver, Ended, Finish, StreamPlaced, Work
from gateway.tools.reader import AnswerReader
from proto.errors import WaitReason
from proto.messages import RateState, Waits
from runtime.process import clock

Mismatch = Callable[[str, Any], Coroutine[Any, Any, str]]  # (JSON text, schema) → why they do not match
_SCORED_TOKENS = 64
_SCORED_BYTES = 512
"""`_SCORED_BYTES` is about the size of one token's log-probabilities. An answer with those of more than `_SCORED_TOKENS`
tokens is encoded on a thread, since each takes up to 0.1 ms."""


class AnswerChecker:
    """Checks the finished choices of one request against schemas that the grammar library could not express as a whole. Choices
    that the model did not end itself need not be complete."""

    def __init__(self, form: Form, eos_ids: frozenset[int], mismatch: Mismatch) -> None:
        self._form = form
        self._eos_ids = eos_ids
        self._mismatch = mismatch
        self._texts: dict[int, list[str]] = {}

    async def check(self, choice: int, part: Deliver) -> None:
        """`part` is the next of the choice. Raises `ApiError` if it is the last, and the choice does not match."""
        self._texts.setdefault(choice, []).append(part.text)
        if part.finish is None:
            return
        text = "".join(self._texts.pop(choice))
        if not part.ended_by(self._eos_ids):
            return
        for about, value in self._values(text):
            schema = self._form.checks.get(about)
            if schema is not None and (fault := await self._mismatch(value, schema)):
                what = f"the call of '{about}'" if about else "the answer"
                message = f"The model wrote what its schema does not allow: in {what}, {fault}."
                raise ApiError(500, message, code="answer_does_not_match")

    def _values(self, text: str) -> list[tuple[str, str]]:
        """JSON texts, each with the name of the function that it is for; empty: the answer itself."""
        if self._form.reading is None:
            return [("", text)]
        parts = AnswerReader(self._form.reading, "").feed(text, ended=True)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in parts.calls]
        return calls if calls or not parts.content else [("", parts.content)]


class Answering:
    """One generation request while it is answered: its streams, their unread events, and the state of each choice. The
    answers' own lengths bound what a slow client has not read yet."""

    def __init__(self, backend: Backend, works: Sequence[Work], answer: Answer, info: RequestInfo) -> None:
        prepared = answer.prepared
        self.answer = answer
        self.info = info
        self.completion_tokens = 0
        self.cached_tokens: dict[str, int] = {}  # by stream: choices of one prompt share what was computed of it
        self.unadmitted = {work.stream_id for work in works}
        self.unended = set(self.unadmitted)
        self.failed: ApiError | None = None
        self.rates: RateState | None = None  # The tenant's rates, as the coordinator last reported them
        self.waits = Waits()  # of the stream that waited longest
        self._cold_start_ms = 0.0
        self._opened_at = clock.now()
        self.continuous_usage = prepared.continuous_usage
        self.no_output = prepared.no_output
        self.checker: AnswerChecker | None = None
        self.choices = [
            ChoiceState(number * prepared.choices + index, number)
            for number in range(len(works))
            for index in range(prepared.choices)
        ]
        self._first_choice = {work.stream_id: number * prepared.choices for number, work in enumerate(works)}
        self._backend = backend
        self._open = set(self.unadmitted)  # Streams that the backend has not ended
        self._events: list[Admitted | StreamPlaced | Deliver | Ended] = []
        self._wake = asyncio.Event()
        self._left = False
        backend.open(works, self._put)

    # --- the backend and the connection -------------------------------------------------------------------------------

    def _put(self, event: Admitted | StreamPlaced | Deliver | Ended) -> None:
        if isinstance(event, Ended):
            self._open.discard(event.stream_id)
        self._events.append(event)
        self._wake.set()

    def leave(self) -> None:
        """The client is gone: end what is not ended, and wake the reader."""
        self._left = True
        self._wake.set()
        self.close()

    def close(self) -> None:
        """Abandon the streams that have not ended. Calling it again has no effect."""
        self._backend.abandon(sorted(self._open))
        self._open.clear()

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _take(self, events: Iterable[Admitted | StreamPlaced | Deliver | Ended]) -> list[tuple[ChoiceState, Deliver]]:
        """Account for events up to the first failure, which sets `failed`; returns the deliveries among them."""
        delivered = []
        for event in events:
            if isinstance(event, Deliver):
                if self.no_output:
                    event = replace(event, text="", tokens=(), logprobs=(), finish=Finish.LENGTH)
                self.completion_tokens += len(event.tokens)
                self.info.delivered(len(event.tokens), clock.now())
                if event.cached_tokens:
                    self.cached_tokens[event.stream_id] = event.cached_tokens
                delivered.append((self.choices[self._first_choice[event.stream_id] + event.choice], event))
            elif isinstance(event, Admitted):
                self.unadmitted.discard(event.stream_id)
                self.rates = event.rates or self.rates
                self._cold_start_ms = max(self._cold_start_ms, 1000 * event.cold_start_s)
            elif isinstance(event, StreamPlaced):
                self.waits = max(self.waits, event.waits, key=lambda waits: waits.total)
            elif event.failure is not None:
                self.failed = of_failure(event.failure)
                if self.failed.because is WaitReason.COLD_START:
                    self.failed.waits = Waits(cold_start=1000 * (clock.now() - self._opened_at))
                break
            else:
                self.unended.discard(event.stream_id)
        return delivered

    async def next(self, most_s: float | None = None) -> list[tuple[ChoiceState, Deliver]]:
        """Returns the deliveries since the last call, up to the first failure, which sets `failed`. After a wait of `most_s`
        seconds there may be none. Raises `ClientDisconnect`. The backend's core bounds the wait."""
        if not self._events and not self._left:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await self._wake.wait()
        if self._left:
            raise ClientDisconnect
        events, self._events = self._events, []
        delivered = self._take(events)
        if self.checker is None:
            return delivered
        for number, (choice, part) in enumerate(delivered):
            try:
                await self.checker.check(choice.index, part)
            except ApiError as error:
                self.failed = error
                return delivered[:number]
        return delivered

    async def whole(self, on_thread: Callable[[int, Callable[[], bytes]], Awaitable[bytes]]) -> bytes:
        """The answer in one piece. `on_thread`: makes a long one, given about how many bytes it has. Raises `ApiError` and
        `ClientDisconnect`."""
        while self.unended:
            for choice, part in await self.next():
                self.answer.collect(choice, part)
            if self.failed is not None:
                raise self.failed
        scored = sum(len(choice.logprobs) for choice in self.choices)
        scored += sum(len(scores) for scores in self.answer.prompt_scores if scores is not None)
        if scored <= _SCORED_TOKENS:
            content = self._whole()
        else:
            content = await on_thread(scored * _SCORED_BYTES, self._whole)
        await self.answer.settle()
        return content

    def _whole(self) -> bytes:
        return encode(self.answer.whole(self.choices, sum(self.cached_tokens.values())))

    async def begun(self, most_s: float) -> list[tuple[ChoiceState, Deliver]]:
        """Wait until every stream is accepted, and then up to `most_s` seconds (0: without limit) for the first token, so that
        the headers can say how long the request waited. Returns what was delivered until then. Raises `ClientDisconnect`, and
        `ApiError` if a stream failed before, or failed with nothing delivered: then the HTTP status can still say so."""
        delivered: list[tuple[ChoiceState, Deliver]] = []
        until = clock.now() + most_s if most_s else None
        while self.unadmitted or (self.unended and not delivered):
            left_s = None if until is None or self.unadmitted else until - clock.now()
            if left_s is not None and left_s <= 0:
                break
            delivered += await self.next(left_s)
            if self.failed is not None:
                if self.unadmitted or not delivered:
                    raise self.failed
                break
        return delivered

    def headers(self) -> dict[str, str]:
        """The headers about the tenant's rates, and about what the request waited for."""
        waits = msgspec.structs.replace(self.waits, cold_start=self.waits.cold_start + self._cold_start_ms)
        return {**rate_headers(self.rates), WAIT_HEADER: wait_text(waits)}

    def encode(self, delivered: Iterable[tuple[ChoiceState, Deliver]]) -> bytes:
        chunks = [chunk for choice, part in delivered for chunk in self.answer.chunks(choice, part)]
        if self.continuous_usage:
            usage = self.answer.usage(self.completion_tokens, sum(self.cached_tokens.values()))
            chunks = [chunk | {"usage": usage} for chunk in chunks]
        return b"".join(map(self.answer.event, chunks))

    def closing(self) -> bytes:
        return self.answer.closing(self.completion_tokens, sum(self.cached_tokens.values()))


class EventStream(Response):
    """Server-sent events of an accepted answer. A failure ends it with an error event and without `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answering: Answering,
        begun: list[tuple[ChoiceState, Deliver]],
        keep_alive_s: float,
        ended: Callable[[str], None],
    ) -> None:
        """After `keep_alive_s` of silence a comment is sent; 0: none is. `ended` is told the outcome, once."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **answering.headers()}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self.answering = answering
        self.begun = begun
        self.keep_alive_s = keep_alive_s
        self.outcome = "internal_error"
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(send)
        except ClientDisconnect:
            self.outcome = self.answering.info.error = "disconnected"
        finally:
            self.ended(self.outcome)

    async def _answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        data = await self._until_the_end(send)
        if self.answering.failed is None:
            data += self.answering.closing()
            await self.answering.answer.settle()
            self.outcome = "ok"
        else:
            data += self.answering.answer.failing(self.answering.failed, self.answering.info.request_id)
            self.outcome = self.answering.info.error = self.answering.failed.code
        await self._send(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_the_end(self, send: Send) -> bytes:
        """Send chunks until every stream has ended or one has failed. Returns the data that is still to be sent."""
        answering = self.answering
        data = answering.answer.opening() + answering.encode(self.begun)
        sent_at = clock.now()
        while answering.unended and answering.failed is None:
            if data:
                await self._send(send, data)
                sent_at = clock.now()
            left_s = max(sent_at + self.keep_alive_s - clock.now(), 0.001) if self.keep_alive_s else None
            data = answering.encode(await answering.next(left_s))
            if not data and self.keep_alive_s and clock.now() >= sent_at + self.keep_alive_s:
                data = KEEP_ALIVE
        return data

    async def _send(self, send: Send, data: bytes) -> None:
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            info = self.answering.info
            if info.on_sent is not None:
                info.on_sent(clock.now())
