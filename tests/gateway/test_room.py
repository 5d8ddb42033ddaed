"""Context and room follow the workers: what requests leave out, what they may ask for, and what /v1/models says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.admission import cannot_serve
from coordinator.events import Limits
from coordinator.state import cluster_state
from gateway.text.tokenizer import ModelFacts, ModelTokenizer
from proto.messages import ClusterState, Role
from proto.parts import Room
from scheduler.workers.pool import Pool
from scheduler.workers.worker import worker_of
from tests import tiny_models
from tests.coordinator.world import submit, worker_hello
from tests.gateway.fakes import BLOCK_SIZE, CONTEXT_TOKENS, MODEL, Site
from tests.gateway.http_words import chat, completion, on_site, post


def told(site: Site, *rooms: Room) -> None:
    """The coordinator says what the workers can hold, as one worker after the other comes or goes."""
    facts = ModelFacts(CONTEXT_TOKENS, tiny_models.VOCAB, frozenset({tiny_models.EOS}))
    site.gateway.models[0].tokenizer = ModelTokenizer(tiny_models.tokenizer(), facts)
    for room in rooms:
        state = ClusterState((MODEL,), (BLOCK_SIZE,), rooms=(room,))
        site.cluster.backend.coordinator_message(site.cluster, state, b"")


async def max_model_len(site: Site) -> tuple[int, int, int]:
    async with site.client() as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
    counted = (await post(site, "/tokenize", prompt="a")).json()
    return model["max_model_len"], model["max_input_tokens"], counted["max_model_len"]


@pytest.mark.parametrize(
    ("room", "context", "prompt"),
    [
        (Room(CONTEXT_TOKENS, 400, 1000, 16), CONTEXT_TOKENS, 400),
        (Room(128, 400, 1000, 16), 128, 127),
        (Room(4 * CONTEXT_TOKENS, 10_000, 1000, 16), 4 * CONTEXT_TOKENS, 4 * CONTEXT_TOKENS - 1),
        (Room(CONTEXT_TOKENS, 300, 6, 16), 96, 95),
    ],
)
def test_context_follows_the_workers(room: Room, context: int, prompt: int) -> None:
    """What is left out, and what the API says of the model, are what the workers take, which need not be what the model's
    configuration says."""

    async def test(site: Site) -> None:
        told(site)
        assert await max_model_len(site) == (CONTEXT_TOKENS, CONTEXT_TOKENS - 1, CONTEXT_TOKENS)
        told(site, room)
        assert await max_model_len(site) == (context, prompt, context)
        site.gateway.models[0].rules = replace(site.gateway.models[0].rules, default_max_tokens=0)
        await chat(site)
        asked = site.cluster.submits[-1][0]
        assert asked.prompt_tokens + asked.sampling.max_tokens == context
        fields = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000}
        assert (await post(site, "/v1/messages", **fields)).status_code == 200
        assert site.cluster.submits[-1][0].sampling.max_tokens == asked.sampling.max_tokens
        refused = await post(site, "/v1/completions", prompt=[5] * 40, max_tokens=context)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert str(context) in refused.json()["error"]["message"]
        await completion(site, prompt=[5] * 40, max_tokens=context - 40)

    on_site(test)


def test_largest_worker_counts() -> None:
    """The room grows and shrinks as workers come and go, and stays as it was when none is left."""

    async def test(site: Site) -> None:
        small, large = Room(CONTEXT_TOKENS, 64, 4, 16), Room(CONTEXT_TOKENS, CONTEXT_TOKENS, 1000, 16)
        told(site, small, large)
        assert await max_model_len(site) == (CONTEXT_TOKENS, CONTEXT_TOKENS - 1, CONTEXT_TOKENS)
        told(site, small, large, small)
        assert await max_model_len(site) == (64, 63, 64)
        site.cluster.backend.coordinator_message(site.cluster, ClusterState(()), b"")
        assert await max_model_len(site) == (64, 63, 64)
        refused = await post(site, "/v1/completions", prompt=[5] * 65, max_tokens=1)
        assert refused.json()["error"]["code"] == "context_length_exceeded"

    on_site(test)


def test_prompts_are_bounded_by_prefill() -> None:
    """A prompt that no prefill worker can hold is refused, though a decode worker could."""

    async def test(site: Site) -> None:
        told(site, Room(CONTEXT_TOKENS, 64, 1000, 16))
        await completion(site, prompt=[5] * 64, max_tokens=300)
        refused = await post(site, "/v1/completions", prompt=[5] * 65, max_tokens=1)
        assert (
            refused.json()["error"]["code"] == "context_length_exceeded" and "64" in refused.json()["error"]["message"]
        )

    on_site(test)


@given(st.data())
def test_defaults_are_always_admitted(data: st.DataObject) -> None:
    """The coordinator takes every request whose answers have the length that the gateway fills in."""
    draw, sizes = data.draw, st.sampled_from([1, 4, 16])
    pool = Pool("m")
    for number in range(draw(st.integers(2, 5))):
        role = Role.PREFILL if number == 0 or (number > 1 and draw(st.booleans())) else Role.DECODE
        blocks, context = draw(st.integers(1, 60)), draw(st.integers(20, 200))
        hello = worker_hello(role, number + 1, kv_blocks=blocks, block_size=draw(sizes), context_tokens=context)
        pool.add(worker_of(hello))
    facts = ModelFacts(512, 320, frozenset({2})).within(cluster_state({"m": pool}).rooms[0])
    prompt, choices = draw(st.integers(1, 200)), draw(st.integers(1, 4))
    most = facts.answer_tokens_max(prompt, choices)
    if most < 1 or prompt > facts.prompt_tokens_max:
        return
    asked = submit("a", prompt, max_tokens=most, choices=choices)
    assert cannot_serve(asked, pool, Limits(), 0.0) is None
