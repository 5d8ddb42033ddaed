"""What the endpoints answer, over a fake cluster, when something is refused or fails; keys, readiness, metrics."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from gateway.streams.types import StreamLimits
from gateway.text.tokenizer import ModelTokenizer
from proto.errors import Reject
from proto.messages import ClusterState
from tests import tiny_models
from tests.gateway.fakes import ANSWER, CONTEXT_TOKENS, MODEL, Site, rejecting
from tests.gateway.http_words import ANSWER_TOKENS, completion, events, on_site, post
from tests.helpers import until


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (Reject.QUEUE_FULL, 429, "queue_full"),
        (Reject.NO_CAPACITY, 503, "no_capacity"),
        (Reject.UNKNOWN_MODEL, 503, "no_capacity"),
        (Reject.SHUTTING_DOWN, 503, "shutting_down"),
        (Reject.EXPIRED, 503, "queue_timeout"),
        (Reject.RETRY_BUDGET, 503, "recovering"),
        (Reject.STORAGE, 503, "storage_unavailable"),
        (Reject.TOO_LONG, 400, "context_length_exceeded"),
        (Reject.TOO_LARGE, 400, "context_length_exceeded"),
        (Reject.LOSES_WORKERS, 500, "loses_workers"),
        (Reject.UNKNOWN_TENANT, 503, "unknown_tenant"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_rejections_have_their_status(reason: Reject, status: int, code: str, stream: bool) -> None:
    """Each reason of rejection has its HTTP status, error code and Retry-After header."""

    async def test(site: Site) -> None:
        site.cluster.reject = rejecting(reason, 6.2)
        answer = await post(site, "/v1/completions", prompt="Hi", stream=stream)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert answer.headers.get("retry-after") == ("7" if status in (429, 503) else None)

    on_site(test, limits=StreamLimits(settle_s=0))


def test_rejected_prompt_rejects_whole_request() -> None:
    """A request of several prompts is rejected if one prompt is, and the others are cancelled."""

    async def test(site: Site) -> None:
        site.cluster.gap_s = 0.05
        full = rejecting(Reject.QUEUE_FULL)
        site.cluster.reject = lambda submit: full(submit) if submit.prompt_tokens == 2 else None
        answer = await post(site, "/v1/completions", prompt=["a", "bb"], stream=True)
        assert answer.status_code == 429
        await until(lambda: bool(site.cluster.cancels))
        assert [cancel.request_id.rpartition(".")[2] for cancel in site.cluster.cancels] == ["p0"]

    on_site(test)


def test_interruption_is_invisible_to_clients() -> None:
    """A client gets the whole answer although several attempts are interrupted."""

    async def test(site: Site) -> None:
        site.cluster.interrupt_at = {1: 10, 2: 20, 3: 20, 4: 30}
        chunks, done = await events(site, "/v1/completions", return_token_ids=True)
        assert done
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
        assert [submit.resumed_tokens for submit, _ in site.cluster.submits] == [0, 10, 20, 20, 30]
        metrics = generate_latest(site.gateway.metrics.registry).decode()
        assert 'crossdock_gateway_stream_events_total{kind="resumed"} 4.0' in metrics

    on_site(test)


def test_failed_stream_ends_with_an_error() -> None:
    """A failed stream ends with an error event instead of [DONE]; an unstreamed answer has status 500."""

    async def test(site: Site) -> None:
        site.cluster.interrupt_at = dict.fromkeys(range(1, 9), 4)
        chunks, done = await events(site, "/v1/chat/completions")
        assert not done
        assert chunks[-1]["error"]["code"] == "interrupted"
        assert chunks[-1]["error"]["type"] == "server_error"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        answer = await post(site, "/v1/completions", prompt="Hi", max_tokens=9)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "interrupted"

    on_site(test)


def test_silent_cluster_fails_the_request() -> None:
    """A request fails with stream_idle_timeout if no tokens come for too long."""

    async def test(site: Site) -> None:
        site.cluster.hold = True
        answer = await post(site, "/v1/completions", prompt="Hi")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "stream_idle_timeout"
        answer = await post(site, "/v1/completions", prompt="Hi", stream=True)
        assert answer.status_code == 503, "its headers wait for the first token"
        assert answer.headers["x-crossdock-wait"].endswith("reason=stream_idle_timeout")

    on_site(test, limits=StreamLimits(idle_s=0.05))


def test_request_waits_for_coordinator() -> None:
    """Requests wait a while for a coordinator and then fail with status 503."""

    async def test(site: Site) -> None:
        answer = await post(site, "/v1/completions", prompt="Hi")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "coordinator_unreachable"
        assert int(answer.headers["retry-after"]) >= 1
        asyncio.get_running_loop().call_later(0.02, site.cluster.connect)
        assert (await completion(site))["choices"][0]["text"] == ANSWER

    on_site(test, connected=False, limits=StreamLimits(link_wait_s=0.2))


def test_health_ready_models_and_metrics() -> None:
    """Health, readiness, the models and the metrics follow the state of the cluster."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503
            site.cluster.connect()
            assert (await client.get("/ready")).status_code == 200
            site.gateway.backend.coordinator_down(site.cluster, "gone")
            assert (await client.get("/ready")).json()["error"]["code"] == "not_ready"
            site.cluster.connect()
            site.gateway.backend.coordinator_message(site.cluster, ClusterState(()), b"")
            drained = await client.get("/ready")
            assert drained.status_code == 503 and drained.headers["retry-after"] == "1"
            assert "one decode worker that is up and not draining" in drained.json()["error"]["message"]
            site.cluster.connect()
            (entry,) = (await client.get("/v1/models")).json()["data"]
            assert entry["id"] == MODEL
            assert (await client.get(f"/v1/models/{MODEL}")).json() == entry
            for answer in (
                await client.get("/v1/models/gpt-4"),
                await post(site, "/v1/completions", model="gpt-4", prompt="x"),
            ):
                message = answer.json()["error"]["message"]
                assert message == f"The model 'gpt-4' is not served here; served is '{MODEL}'."
        await completion(site)
        async with site.client() as client:
            assert (await client.get("/metrics")).status_code == 404, "they have a port of their own"
        text = generate_latest(site.gateway.metrics.registry).decode()
        assert 'crossdock_gateway_requests_total{endpoint="completions",outcome="ok"} 1.0' in text
        assert f'crossdock_gateway_output_tokens_total{{model="{MODEL}"}} {ANSWER_TOKENS}.0' in text
        assert f'crossdock_gateway_time_to_first_token_seconds_count{{model="{MODEL}"}} 1.0' in text
        assert "crossdock_gateway_active_streams 0.0" in text

    on_site(test, connected=False)


def test_postponed_resume_is_tried_again() -> None:
    """A resume rejected by the retry budget is sent again later, and the client sees no gap."""

    async def test(site: Site) -> None:
        site.cluster.interrupt_at = {1: 10}
        put_off, refusals = rejecting(Reject.RETRY_BUDGET, 0.01), [True, True]
        site.cluster.reject = lambda submit: (
            put_off(submit) if submit.attempt == 2 and refusals and refusals.pop() else None
        )
        chunks, done = await events(site, "/v1/completions")
        assert done and "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
        assert [(submit.attempt, submit.resumed_tokens) for submit, _ in site.cluster.submits] == [
            (1, 0),
            *[(2, 10)] * 3,
        ]

    on_site(test)


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Basic secret-1", "missing_api_key"),
        ("Bearer wrong", "invalid_api_key"),
        ("Bearer secret-", "invalid_api_key"),
        ("Bearer s\xe9cret", "invalid_api_key"),
    ],
)
def test_wrong_or_missing_key_is_401(header: str | None, code: str) -> None:
    """A missing or wrong key gets status 401; /health needs no key, and every configured key works."""

    async def test(site: Site) -> None:
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        async with site.client() as client:
            for path in ("/v1/models", "/v1/models/x"):
                answer = await client.get(path, headers=headers)  # type: ignore[arg-type]
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == code
                assert answer.json()["error"]["type"] == "authentication_error"
            assert (await client.get("/health", headers=headers)).status_code == 200  # type: ignore[arg-type]
            for key in ("secret-1", "secret-2"):
                assert (await client.get("/v1/models", headers={"Authorization": f"bearer {key}"})).status_code == 200

    on_site(test, api_keys=("secret-1", "secret-2"))


def test_internal_error_has_usual_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception gives status 500 in the usual error shape."""

    async def test(site: Site) -> None:
        monkeypatch.setattr(site.gateway.backend, "open", lambda _specs: 1 / 0)
        answer = await post(site, "/v1/completions", prompt="Hi")
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "The gateway failed.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
            "request_id": answer.headers["x-request-id"],
        }
        labels = {"endpoint": "completions", "outcome": "internal_error"}
        assert site.gateway.metrics.registry.get_sample_value("crossdock_gateway_requests_total", labels) == 1

    on_site(test)


def test_token_outside_vocabulary_is_a_400() -> None:
    """A prompt with a token outside the model's vocabulary is refused, and later requests work."""

    async def test(site: Site) -> None:
        facts = site.gateway.models[0].tokenizer.facts
        too_high = max(site.gateway.models[0].tokenizer.encode("\u00ad", add_special_tokens=False))
        site.gateway.models[0].tokenizer = ModelTokenizer(tiny_models.tokenizer(), replace(facts, vocab_size=too_high))
        answer = await post(site, "/v1/completions", prompt=["Hi", "\u00ad"])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        assert not site.cluster.submits
        assert (await post(site, "/v1/completions", prompt="Hi")).status_code == 200

    on_site(test)


def test_oversized_text_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text too long for the context, whatever its tokens, is refused before it is tokenized."""

    async def test(site: Site) -> None:
        tokenizer = site.gateway.models[0].tokenizer
        assert tokenizer.bytes_per_token_max == len("<|assistant|>")
        monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        text = "a" * (CONTEXT_TOKENS * len("<|assistant|>") + 1)
        for path, fields in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            answer = await post(site, path, **fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"

    on_site(test)
