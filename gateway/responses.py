"""Events of a request's streams → one JSON answer, or server-sent events."""

import asyncio
from collections.abc import Iterable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers import Answer, ChoiceState
from gateway.backend import ClientLeft, Subscription
from gateway.errors import ApiError, of_failure
from gateway.stream_types import Admitted, Deliver, Ended
from proto.messages import RateState

_DONE = b"data: [DONE]\n\n"


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


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
    ) -> None:
        self.subscription = subscription
        self.answer = answer
        self.completion_tokens = 0
        self.cached_tokens: dict[str, int] = {}
        """By stream: choices of one prompt share what was computed of it."""
        self.unadmitted = set(stream_ids)
        self.unended = set(stream_ids)
        self.rates: RateState | None = None
        """As the coordinator last told it."""
        self.continuous_usage = continuous_usage
        self.choices = [
            ChoiceState(number * choices_each + index, number)
            for number in range(len(stream_ids))
            for index in range(choices_each)
        ]
        self._first_choice = {stream_id: number * choices_each for number, stream_id in enumerate(stream_ids)}

    def take(self, events: Iterable[Admitted | Deliver | Ended]) -> list[tuple[ChoiceState, Deliver]]:
        """Account for events; returns the deliveries among them. Raises `ApiError` where a stream failed."""
        delivered = []
        for event in events:
            if isinstance(event, Deliver):
                self.completion_tokens += len(event.tokens)
                if event.cached_tokens:
                    self.cached_tokens[event.stream_id] = event.cached_tokens
                delivered.append((self.choices[self._first_choice[event.stream_id] + event.choice], event))
                continue
            self.unadmitted.discard(event.stream_id)
            if isinstance(event, Admitted):
                self.rates = event.rates or self.rates
            else:
                self.unended.discard(event.stream_id)
                if event.failure is not None:
                    raise of_failure(event.failure)
        return delivered

    async def whole(self) -> bytes:
        """The answer in one piece. Raises `ApiError` and `ClientLeft`."""
        while self.unended:
            for choice, part in self.take(await self.subscription.next()):
                choice.texts.append(part.text)
                choice.tokens.extend(part.tokens)
                choice.logprobs.extend(part.logprobs)
                choice.finish = part.finish.value if part.finish else choice.finish
        return msgspec.json.encode(self.answer.whole(self.choices, sum(self.cached_tokens.values())))

    async def beginning(self) -> list[tuple[ChoiceState, Deliver]]:
        """Wait until every stream is admitted and something can be said. Raises `ApiError` and `ClientLeft`."""
        delivered: list[tuple[ChoiceState, Deliver]] = []
        while self.unadmitted or not delivered:
            delivered += self.take(await self.subscription.next())
        return delivered

    def encode(self, delivered: Iterable[tuple[ChoiceState, Deliver]]) -> bytes:
        chunks = [chunk for choice, part in delivered for chunk in self.answer.chunks(choice, part)]
        if self.continuous_usage:
            usage = self.answer.usage_chunk(self.completion_tokens, sum(self.cached_tokens.values()))["usage"]
            chunks = [chunk | {"usage": usage} for chunk in chunks]
        return b"".join(map(_event, chunks))

    def closing(self, include_usage: bool) -> bytes:
        if not include_usage:
            return _DONE
        return _event(self.answer.usage_chunk(self.completion_tokens, sum(self.cached_tokens.values()))) + _DONE


class EventStream(Response):
    """Server-sent events of an exchange that has begun. A failure ends it with an error event and without `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        begun: list[tuple[ChoiceState, Deliver]],
        *,
        include_usage: bool,
        headers: dict[str, str],
        client_timeout_s: float,
    ) -> None:
        """A client that reads nothing for `client_timeout_s` is cut off, and its request cancelled."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self.exchange = exchange
        self.begun = begun
        self.include_usage = include_usage
        self.client_timeout_s = client_timeout_s
        self.outcome = "internal_error"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        exchange, data = self.exchange, self.exchange.encode(self.begun)
        try:
            while exchange.unended:
                await self._send(send, data)
                data = b""
                data = exchange.encode(exchange.take(await exchange.subscription.next()))
            data += exchange.closing(self.include_usage)
            self.outcome = "ok"
        except ClientLeft:
            self.outcome = "disconnected"
            return
        except ApiError as error:
            data += _event(error.body())
            self.outcome = error.code
        await self._send(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not data:
            return
        try:
            async with asyncio.timeout(self.client_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientLeft from None
