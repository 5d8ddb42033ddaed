"""A load that comes through a load balancer: streams that never stop coming, each sent to a gateway that is ready, and compared
with what it was without a fault.

As load balancers do, a request that got no answer at all, or was told that the gateway shuts down, goes to the next one; one
that has begun fails if it does not end well.
"""

import json
import threading
import time
from collections import Counter
from typing import Any

import httpx

PATIENCE_S = 30.0
"""For a gateway: while the coordinator is being started again, none says that it is ready, and all let requests wait."""
WANTED = ({}, {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5}, {"temperature": 0.7, "seed": 9, "n": 2})
Answer = dict[int, tuple[str, tuple[int, ...], str]]  # by choice: text, tokens and finish reason


class Turned(Exception):
    """This gateway does not take it."""


class Balancer:
    def __init__(self, model: str, urls: list[str]) -> None:
        self.model = model
        self.urls = urls
        self._client = httpx.Client(trust_env=False, timeout=httpx.Timeout(60.0, connect=2.0))
        self._next = 0

    def answer(self, number: int, tokens: int) -> Answer:
        """One stream, whole. Raises AssertionError where it fails for its client."""
        prompt = [20 + number % 200, *range(30, 90)]
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True} | WANTED[number % len(WANTED)]
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self._next += 1
            order = [self.urls[(self._next + offset) % len(self.urls)] for offset in range(len(self.urls))]
            for url in sorted(order, key=lambda url: not self._ready(url)):
                try:
                    return self._stream(url, body)
                except Turned:
                    continue
            time.sleep(0.02)
        raise AssertionError("no gateway takes it")

    def _ready(self, url: str) -> bool:
        try:
            return self._client.get(f"{url}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def _stream(self, url: str, body: dict[str, Any]) -> Answer:
        text: Counter[int] = Counter()
        parts: dict[int, tuple[list[str], list[int], list[str]]] = {}
        begun = False
        try:
            with self._client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                if answer.status_code == 503 and "shutting_down" in answer.read().decode():
                    assert "retry-after" in answer.headers and answer.headers["connection"] == "close"
                    raise Turned
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    begun = True
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        texts, ids, ends = parts.setdefault(choice["index"], ([], [], []))
                        texts.append(choice["text"])
                        ids += choice["token_ids"]
                        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                        text[choice["index"]] += 1
        except httpx.TransportError as error:
            raise (AssertionError(f"cut off after {text}: {error!r}") if begun else Turned) from error
        return {index: ("".join(texts), tuple(ids), ",".join(ends)) for index, (texts, ids, ends) in parts.items()}


class Load(threading.Thread):
    """One client after the other, until told to stop."""

    def __init__(self, balancer: Balancer, number: int, expected: list[Answer], tokens: int) -> None:
        super().__init__(daemon=True)
        self.done = 0
        self.wrong: list[str] = []
        self._balancer, self._number, self._expected, self._tokens = balancer, number, expected, tokens
        self._enough = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._enough.is_set():
            number = self._number % len(self._expected)
            self._number += 1
            try:
                answer = self._balancer.answer(number, self._tokens)
            except Exception as error:
                self.wrong.append(f"stream {number}: {type(error).__name__}: {error}")
                continue
            self.done += 1
            if answer != self._expected[number]:
                self.wrong.append(f"stream {number} is another: {answer} where {self._expected[number]} is right")

    def stop(self) -> None:
        self._enough.set()
        self.join(120)
        assert not self.is_alive()
