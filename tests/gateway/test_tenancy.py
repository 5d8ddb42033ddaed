"""Keys, priority classes, deadlines and rate headers, over a fake cluster."""

import asyncio
import dataclasses
import hashlib
import logging
from types import SimpleNamespace

import pytest

from gateway.http.errors import duration_text
from gateway.main import say_where
from gateway.streams.types import LinkDown, LinkUp, Open, SendSubmit
from gateway.tenancy import KeyRing
from proto.errors import CancelReason, Reject
from proto.messages import Accepted, Interrupted, RateState, Rejected, Submit
from runtime.tenancy.tenants import parse
from tests.gateway.fakes import Site, make_site
from tests.gateway.http_words import completion, on_site, post
from tests.gateway.keeper_world import Bench, work

KEY, BOBS = "sk-" + "1" * 64, "sk-" + "2" * 64
FILE = f"""
[tenants.acme]
priority_class = "standard"
[tenants.acme.users.ann]
priority_class = "interactive"
keys = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
[tenants.acme.users.bob]
keys = ["{hashlib.sha256(BOBS.encode()).hexdigest()}"]
"""
RATES = RateState(60, 59, 1.0, 10_000, 9_000, 360.0)
RATE_HEADERS = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "1s",
    "x-ratelimit-limit-tokens": "10000",
    "x-ratelimit-remaining-tokens": "9000",
    "x-ratelimit-reset-tokens": "6m0s",
}


async def ask(site: Site, key: str = KEY, **fields: object):
    body = {"model": "tiny/llama", "prompt": "Hi", "max_tokens": 4, **fields}
    async with site.client() as client:
        return await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=20)


def resumed(bench: Bench) -> list[object]:
    """What the keeper does when it submits again, at one of its next deadlines."""
    for _ in range(5):
        actions = bench.wait()
        if any(isinstance(action, SendSubmit) for action in actions):
            return actions  # type: ignore[return-value]
    raise AssertionError("nothing was submitted")


def last_submit(site: Site) -> Submit:
    return site.cluster.submits[-1][0]


def test_keys_follow_the_tenants_file() -> None:
    """A key belongs to the tenant that the file names, and is refused once the file drops it."""

    async def test(site: Site) -> None:
        for key, tenant in ((KEY, "acme/ann"), (BOBS, "acme/bob"), ("own", "default")):
            assert (await ask(site, key)).status_code == 200
            assert last_submit(site).tenant == tenant
        refused = await ask(site, "sk-unknown")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["x-should-retry"] == "false"
        site.gateway.keys.replace(parse("[tenants.acme]"))
        assert (await ask(site)).status_code == 401
        assert (await ask(site, "own")).status_code == 200

    on_site(test, tenants=FILE, api_keys=("own",))


def test_file_without_keys_admits_everyone() -> None:
    """Requests need no key if the tenants file has none."""

    async def test(site: Site) -> None:
        await completion(site)
        assert last_submit(site).tenant == "default"

    on_site(test, tenants="[tenants.acme]")


def test_key_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    """A key is neither in the answer nor in the log."""
    secret = "sk-do-not-tell"

    async def test(site: Site) -> None:
        answer = await ask(site, secret)
        assert secret not in answer.text + str(answer.headers)

    with caplog.at_level(logging.DEBUG):
        on_site(test, tenants=FILE)
    assert secret not in caplog.text


@pytest.mark.parametrize(
    ("fields", "priority_class"),
    [
        ({}, ""),
        ({"priority": "batch"}, "batch"),
        ({"priority": 0}, ""),
        ({"priority": -3}, ""),
        ({"priority": None, "service_tier": "flex"}, "batch"),
        ({"service_tier": "auto"}, ""),
        ({"service_tier": "default"}, ""),
        ({"service_tier": "priority"}, "interactive"),
        ({"service_tier": "flex", "priority": "standard"}, "standard"),
    ],
)
def test_request_chooses_its_priority_class(fields: dict[str, object], priority_class: str) -> None:
    """A request's priority or service_tier chooses its priority class."""

    async def test(site: Site) -> None:
        assert (await ask(site, **fields)).status_code == 200  # type: ignore[arg-type]
        assert last_submit(site).priority_class == priority_class

    on_site(test, tenants=FILE)


def test_forbidden_tier_falls_back() -> None:
    """A service_tier that a tenant may not use is ignored; a priority is refused by the coordinator."""

    async def test(site: Site) -> None:
        await ask(site, BOBS, service_tier="priority")
        assert last_submit(site).priority_class == ""
        site.cluster.reject = lambda s: (
            Rejected(s.request_id, 1, Reject.PRIORITY_CLASS, "no") if s.priority_class else None
        )
        answer = await ask(site, BOBS, priority="interactive")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "priority_class_not_allowed")
        assert answer.headers["x-should-retry"] == "false"

    on_site(test, tenants=FILE)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": "gold"}, "priority"),
        ({"priority": 1_000_001}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": False}, "priority"),
        ({"priority": ["batch"]}, "priority"),
        ({"service_tier": "best"}, "service_tier"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": -5.0}, "deadline_ms"),
        ({"deadline_ms": "soon"}, "deadline_ms"),
        ({"deadline_ms": 1e12}, "deadline_ms"),
    ],
)
def test_invalid_priority_or_deadline_is_refused(fields: dict[str, object], param: str) -> None:
    """An invalid priority, tier or deadline is refused with status 400, and nothing is submitted."""

    async def test(site: Site) -> None:
        answer = await ask(site, **fields)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert answer.headers["x-should-retry"] == "false"
        assert not site.cluster.submits

    on_site(test, tenants=FILE)


def test_deadline_runs_to_the_first_token() -> None:
    """A deadline runs from the first submission to the first token."""
    bench = Bench()

    def deadlines(actions: list[object]) -> list[float]:
        return [action.submit.deadline_ms for action in actions if isinstance(action, SendSubmit)]

    assert deadlines(bench.do(Open(work(deadline_ms=5_000.0)))) == [5_000.0]  # type: ignore[arg-type]
    bench.now += 2.0
    bench.do(LinkDown())
    assert deadlines(bench.do(LinkUp(8))) == [3_000.0]  # type: ignore[arg-type]
    bench.now += 60.0
    bench.interrupt(attempt=2)
    assert deadlines(resumed(bench)) == [1.0]  # too late, which is the coordinator's to say
    bench.tokens(0, 7, attempt=3)
    bench.interrupt(attempt=3)
    assert deadlines(resumed(bench)) == [0.0]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_rate_headers(stream: bool) -> None:
    """Answers and refusals have the rate headers of the tenant, streamed or not."""

    async def test(site: Site) -> None:
        site.cluster.rates = RATES
        answer = await post(site, "/v1/completions", prompt="Hi", max_tokens=4, stream=stream)
        assert answer.status_code == 200
        assert {name: answer.headers.get(name) for name in RATE_HEADERS} == RATE_HEADERS
        site.cluster.reject = lambda s: Rejected(s.request_id, 1, Reject.QUOTA, "too much", 0.2, RATES)
        refused = await post(site, "/v1/completions", prompt="Hi", stream=stream)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert {name: refused.headers.get(name) for name in RATE_HEADERS} == RATE_HEADERS
        assert refused.headers["retry-after"] == "1" and "x-should-retry" not in refused.headers

    on_site(test)


def test_no_rates_means_no_rate_headers() -> None:
    """An answer has no rate headers if its tenant has no rates."""

    async def test(site: Site) -> None:
        site.cluster.rates = RateState(0, 0, 0.0, 0, 0, 0.0)
        answer = await post(site, "/v1/completions", prompt="Hi", max_tokens=4)
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]

    on_site(test)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reject.QUOTA, "rate_limit_exceeded"),
        (Reject.DEADLINE, "deadline_infeasible"),
        (Reject.SHED, "overloaded"),
        (Reject.QUEUE_FULL, "queue_full"),
    ],
)
def test_429_without_time_forbids_retry(reason: Reject, code: str) -> None:
    """A 429 without a time has x-should-retry false and no Retry-After header."""

    async def test(site: Site) -> None:
        site.cluster.reject = lambda s: Rejected(s.request_id, 1, reason, "no", 0.0)
        answer = await post(site, "/v1/completions", prompt="Hi")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, code)
        assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers

    on_site(test)


def test_shed_request_fails_but_resume_retries() -> None:
    """A new request shed from the queue fails; a resumed stream that is shed tries again."""
    bench = Bench()
    bench.open("new")
    bench.do(Accepted("new", 1))
    # It had been accepted: its last word goes to whichever coordinator may hold a row of it.
    cancelled, ended = bench.do(Rejected("new", 1, Reject.SHED, "room was needed", 3.0))
    assert cancelled.cancel.reason is CancelReason.ABANDONED and ended.failure.reject.reason is Reject.SHED
    bench.open("old")
    bench.do(Accepted("old", 1))
    bench.tokens(0, 7, name="old")
    bench.interrupt("old")
    resumed(bench)
    bench.do(Accepted("old", 2))
    assert bench.do(Rejected("old", 2, Reject.SHED, "room was needed", 1.0)) == []
    again = [action.submit for action in resumed(bench) if isinstance(action, SendSubmit)]
    # A number once accepted is spent: the coordinator would take the same again for a repetition.
    assert [(submit.attempt, submit.resumed_tokens) for submit in again] == [(3, 1)]
    assert bench.do(Interrupted("old", 2, "prefill_lost")) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0201, "21ms"),
        (1.0, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (3661.25, "1h1m1.25s"),
        (86_400.0, "24h0m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    """Durations are written in OpenAI's format."""
    assert duration_text(seconds) == text


def test_openai_client_obeys_should_retry() -> None:
    """Against a real server: one try where retrying is pointless, another where it is not."""
    import openai

    from tests.gateway.fakes import make_site, served

    async def body() -> None:
        site = make_site()
        tries = 0

        def reject(retry_after_s: float) -> None:
            def answer(submit: Submit) -> Rejected | None:
                nonlocal tries
                tries += 1
                return Rejected(submit.request_id, 1, Reject.QUOTA, "no", retry_after_s) if tries == 1 else None

            site.cluster.reject = answer

        async with served(site) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1)
            reject(0.0)
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="tiny/llama", prompt="Hi", max_tokens=2)
            assert tries == 1
            tries = 0
            reject(0.01)
            await client.completions.create(model="tiny/llama", prompt="Hi", max_tokens=2)
            assert tries == 2
            await client.close()

    asyncio.run(body())


def test_removing_all_keys_stays_closed():
    """A gateway that had keys goes on to need one if a new tenants file has none."""
    ring = KeyRing(parse(FILE))
    ring.replace(parse(""))
    assert ring.needed and ring.tenant_of(KEY.encode()) is None
    ring.replace(parse(FILE))
    assert ring.tenant_of(KEY.encode()) == "acme/ann"
    assert not KeyRing(parse("")).needed


@pytest.mark.parametrize(
    ("bound", "file", "api_keys", "warned"),
    [
        (("0.0.0.0", 8000), "", [], True),
        (("10.0.0.5", 8000), "[tenants.acme]", [], True),
        (("::", 8000, 0, 0), "", [], True),
        (("fe80::1%eth0", 8000, 0, 2), "", [], True),
        (("127.0.0.1", 8000), "", [], False),
        (("::1", 8000, 0, 0), "", [], False),
        (("0.0.0.0", 8000), FILE, [], False),
        (("0.0.0.0", 8000), "", ["own"], False),
    ],
)
def test_open_keyless_port_is_warned_about(bound: tuple, file: str, api_keys: list[str], warned: bool):  # type: ignore[type-arg]
    """A warning about missing API keys is logged if the port is open to everyone."""
    said = []
    logger = SimpleNamespace(info=lambda *_, **__: None, warning=lambda text, **_: said.append(text))
    site = make_site()
    say_where(logger, bound, dataclasses.replace(site.gateway, keys=KeyRing(parse(file), api_keys)))  # type: ignore[arg-type]
    assert len(said) == warned and all("no API keys" in text for text in said)


def test_keys_are_never_compared_directly():
    """Two rings of the same keys look them up by different bytes, none of them the hash that the file has."""
    rings = [KeyRing(parse(FILE), ["own"]) for _ in range(2)]
    assert all(ring.tenant_of(b"own") == "default" and ring.tenant_of(KEY.encode()) == "acme/ann" for ring in rings)
    looked_up = [set(ring._tenants) for ring in rings]
    assert not looked_up[0] & looked_up[1]
    assert not (looked_up[0] | looked_up[1]) & {*parse(FILE).keys, hashlib.sha256(b"own").digest(), b"own"}
