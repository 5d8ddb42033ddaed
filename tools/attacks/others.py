"""Other tenants while a cluster is attacked: streams that never stop coming, and small requests with a grammar each."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import aiohttp

from tools.attacks.cluster import Target, api_key
from tools.chaos.client import ask
from tools.chaos.orders import Order

STREAMS, TOKENS = 3, 1_500
EVERY_S = 0.5


@dataclass
class Noticed:
    """The effects on other tenants since `begin_window`."""

    gaps_ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    answers: int = 0
    slowest_s: float = 0.0  # the time of the slowest small request

    def gap_ms(self, share: float) -> float:
        gaps = sorted(self.gaps_ms)
        return round(gaps[min(len(gaps) - 1, int(share * len(gaps)))], 1) if gaps else 0.0


class Others:
    """`streams` and `requests` are to run as tasks."""

    def __init__(self, target: Target) -> None:
        self.noticed = Noticed()
        self._target = target
        self._since = time.monotonic()
        self._last: dict[int, float] = {}
        self._expected: list[list[int]] = []
        self._asked_at = 0.0

    def begin_window(self) -> None:
        self.noticed, self._since = Noticed(), time.monotonic()

    def end_window(self) -> Noticed:
        """Gaps and requests that still last count as well."""
        now = time.monotonic()
        self.noticed.gaps_ms += [1000 * (now - max(last, self._since)) for last in self._last.values()]
        if self._asked_at:
            self.noticed.slowest_s = max(self.noticed.slowest_s, now - max(self._asked_at, self._since))
        return self.noticed

    async def learn(self) -> None:
        """Measure the streams without an attack."""
        async with self._session("victim") as session:
            for number in range(STREAMS):
                seen = await self._stream(session, number)
                assert not seen[0], seen
                self._expected.append(seen[1])

    async def streams(self) -> None:
        async with self._session("victim") as session:
            await asyncio.gather(*(self._one_after_the_other(session, number) for number in range(STREAMS)))

    async def _one_after_the_other(self, session: aiohttp.ClientSession, number: int) -> None:
        while True:
            error, token_ids = await self._stream(session, number)
            self._last.pop(number, None)
            if not error and token_ids != self._expected[number]:
                error = "other tokens than without an attack"
            await self._ended(f"stream: {error}" if error else "")

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> tuple[str, list[int]]:
        def on_gap(begun: float, ended: float) -> None:
            self._last[number] = ended
            if ended > self._since:
                self.noticed.gaps_ms.append(1000 * (ended - max(begun, self._since)))

        prompt = [20 + number, *range(30, 90)]
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        order = Order(number, "greedy", prompt, {**body, "stream": True, "return_token_ids": True})
        seen = await ask(session, self._target.base_url, self._target.model, order, on_gap)
        return seen.error, [token for choice in seen.answer.values() for token in choice.token_ids]

    async def requests(self) -> None:
        url = f"{self._target.base_url}/v1/completions"
        async with self._session("honest") as session:
            for number in itertools.count():
                self._asked_at, error = time.monotonic(), ""
                grammar = f"[a-d]{{4}}{number}"
                body = {"model": self._target.model, "prompt": "x", "max_tokens": 4, "guided_regex": grammar}
                try:
                    async with asyncio.timeout(60), session.post(url, json=body) as answer:
                        if answer.status != 200:
                            error = f"request: HTTP {answer.status}: {(await answer.text())[:200]}"
                except (aiohttp.ClientError, TimeoutError) as failed:
                    error = f"request: {type(failed).__name__}: {failed}"
                took_s = time.monotonic() - max(self._asked_at, self._since)
                self.noticed.slowest_s, self._asked_at = max(self.noticed.slowest_s, took_s), 0.0
                await self._ended(error)
                await asyncio.sleep(EVERY_S)

    async def _ended(self, error: str) -> None:
        if error:
            self.noticed.failed.append(error)
            await asyncio.sleep(0.5)  # a server that is gone refuses at once
        else:
            self.noticed.answers += 1

    @staticmethod
    def _session(tenant: str) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key(tenant)}"})
