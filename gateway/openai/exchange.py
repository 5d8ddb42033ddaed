"""Events of a request's streams → one JSON answer, or server-sent events."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.backend import ClientLeft, Subscription
from gateway.http.encoding import KEEP_ALIVE, encode
from gateway.http.errors import ApiError, of_failure
from gateway.http.request_log import RequestInfo
from gateway.openai.answers import Answer, ChoiceState
from gateway.streams.types import Admitted, Deliver, Ended, Finish
from proto.messages import RateState
from runtime.process import clock


class Exchange:
    """One generation request while it is answered: its streams, and what has been said of each choice."""

    def __init__(
        self,
        subscription: Subscription,
        stream_ids: list[str],
        answer: Answer,
        choices_each: int,
        *,
        continuous_usage: bool,
        no_output: bool,
        info: RequestInfo,
    ) -> None:
        """`no_output`: the one token that is drawn is not shown."""
        self.subscription = subscription
        self.answer = answer
        self.info = info
        self.completion_tokens = 0
        self.cached_tokens: dict[str, int] = {}
        """By stream: choices of one prompt share what was computed of it."""
        self.unadmitted = set(stream_ids)
        self.unended = set(stream_ids)
        self.failed: ApiError | None = None
        """Why a stream failed; the request fails with it."""
        self.rates: RateState | None = None
        """As the coordinator last told it."""
        self.continuous_usage = continuous_usage
        self.no_output = no_output
        self.choices = [
            ChoiceState(number * choices_each + index, number)
            for number in range(len(stream_ids))
            for index in range(choices_each)
        ]
        self._first_choice = {stream_id: number * choices_each for number, stream_id in enumerate(stream_ids)}

    def take(self, events: Iterable[Admitted | Deliver | Ended]) -> list[tuple[ChoiceState, Deliver]]:
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
            elif event.failure is not None:
                self.failed = of_failure(event.failure)
                break
            else:
                self.unended.discard(event.stream_id)
        return delivered

    async def whole(self) -> bytes:
        """The answer in one piece. Raises `ApiError` and `ClientLeft`."""
        while self.unended:
            for choice, part in self.take(await self.subscription.next()):
                self.answer.collect(choice, part)
            if self.failed is not None:
                raise self.failed
        return encode(self.answer.whole(self.choices, sum(self.cached_tokens.values())))

    async def accepted(self) -> list[tuple[ChoiceState, Deliver]]:
        """Wait until every stream is accepted; returns what was delivered until then. Raises `ClientLeft`, and `ApiError` if
        a stream failed before, or failed with nothing delivered: then the HTTP status can still say so."""
        delivered: list[tuple[ChoiceState, Deliver]] = []
        while self.unadmitted:
            delivered += self.take(await self.subscription.next())
            if self.failed is not None and (self.unadmitted or not delivered):
                raise self.failed
        return delivered

    def encode(self, delivered: Iterable[tuple[ChoiceState, Deliver]]) -> bytes:
        chunks = [chunk for choice, part in delivered for chunk in self.answer.chunks(choice, part)]
        if self.continuous_usage:
            usage = self.answer.usage(self.completion_tokens, sum(self.cached_tokens.values()))
            chunks = [chunk | {"usage": usage} for chunk in chunks]
        return b"".join(map(self.answer.event, chunks))

    def closing(self) -> bytes:
        return self.answer.closing(self.completion_tokens, sum(self.cached_tokens.values()))


class EventStream(Response):
    """Server-sent events of an exchange that was accepted. A failure ends it with an error event and without `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        begun: list[tuple[ChoiceState, Deliver]],
        *,
        headers: dict[str, str],
        client_timeout_s: float,
        keep_alive_s: float,
        ended: Callable[[str], None],
    ) -> None:
        """A client that reads nothing for `client_timeout_s` is cut off, and its request cancelled. After `keep_alive_s` of
        silence a comment is sent; 0: none is. `ended` is told the outcome, once."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self.exchange = exchange
        self.begun = begun
        self.client_timeout_s = client_timeout_s
        self.keep_alive_s = keep_alive_s
        self.outcome = "internal_error"
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(send)
        except ClientLeft:
            self.outcome = self.exchange.info.error = "disconnected"
        finally:
            self.ended(self.outcome)

    async def _answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        data = await self._until_the_end(send)
        if self.exchange.failed is None:
            data += self.exchange.closing()
            self.outcome = "ok"
        else:
            data += self.exchange.answer.failing(self.exchange.failed, self.exchange.info.request_id)
            self.outcome = self.exchange.info.error = self.exchange.failed.code
        await self._send(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_the_end(self, send: Send) -> bytes:
        """Send what comes until every choice has ended, or one has failed; returns what is still to be sent."""
        exchange = self.exchange
        data = exchange.answer.opening() + exchange.encode(self.begun)
        idle_timer = _IdleTimer(self.keep_alive_s, exchange.subscription.nudge)
        try:
            while exchange.unended and exchange.failed is None:
                if data:
                    await self._send(send, data)
                    idle_timer.ends()
                data = exchange.encode(exchange.take(await exchange.subscription.next()))
                if not data and idle_timer.is_long:
                    data = KEEP_ALIVE
        finally:
            idle_timer.close()
        return data

    async def _send(self, send: Send, data: bytes) -> None:
        if not data:
            return
        try:
            async with asyncio.timeout(self.client_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientLeft from None


class _IdleTimer:
    """Notices when nothing was sent for a while. One timer serves all of a stream, so that a token costs no timer."""

    def __init__(self, most_s: float, notice: Callable[[], None]) -> None:
        """`notice` is called once `most_s` seconds have passed; 0: never."""
        self._most_s = most_s
        self._notice = notice
        self._since = clock.now()
        self._timer = asyncio.get_running_loop().call_later(most_s, self._look) if most_s else None

    @property
    def is_long(self) -> bool:
        return bool(self._most_s) and clock.now() >= self._since + self._most_s

    def ends(self) -> None:
        self._since = clock.now()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left_s = self._since + self._most_s - clock.now()
        if left_s <= 0:
            self._notice()
            left_s = self._most_s
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
