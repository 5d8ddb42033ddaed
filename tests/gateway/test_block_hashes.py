"""Names of KV blocks: equal exactly where prompts of one cache group begin alike; and what users read of cached prompts."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.block_hashes import block_hashes
from proto.codec import pack_tokens
from proto.limits import HASH_BYTES, MAX_BLOCK_HASHES, MAX_FRAME_BYTES
from proto.messages import ClusterState
from tests.gateway.fakes import BLOCK_SIZE, MODEL, Site
from tests.gateway.http_words import completion, events, on_site

PROMPTS = st.lists(st.integers(0, 3), max_size=40)


def hashes(prompt: list[int], block_size: int = 4, group: str = "org/a", known: bytes = b"") -> list[bytes]:
    joined = block_hashes(pack_tokens(prompt), block_size, group, known)
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


@given(PROMPTS, PROMPTS, st.integers(1, 9))
def test_hashes_are_equal_as_far_as_prompts_are(one: list[int], other: list[int], block_size: int) -> None:
    ours, theirs = hashes(one, block_size), hashes(other, block_size)
    assert len(ours) == len(one) // block_size and all(len(h) == HASH_BYTES for h in ours)
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (a == b) == (one[: at * block_size] == other[: at * block_size])


@given(PROMPTS.filter(lambda p: len(p) >= 8), PROMPTS, st.integers(1, 4))
def test_groups_and_block_sizes_are_name_spaces_of_their_own(prompt: list[int], other: list[int], size: int) -> None:
    ours = set(hashes(prompt, size))
    for group in ("org/b", "org", "", "org/a "):
        assert not ours & set(hashes(prompt, size, group)) and not ours & set(hashes(other, size, group))
    assert not ours & set(hashes(prompt, size + 1))


@given(PROMPTS, PROMPTS, st.integers(1, 9))
def test_a_longer_prompt_goes_on_from_what_is_known(prompt: list[int], more: list[int], block_size: int) -> None:
    known = b"".join(hashes(prompt, block_size))
    assert hashes(prompt + more, block_size, known=known) == hashes(prompt + more, block_size)


def test_the_longest_prompts_get_as_many_as_a_message_holds() -> None:
    assert len(hashes([1] * (MAX_BLOCK_HASHES + 5), 1)) == MAX_BLOCK_HASHES
    assert MAX_BLOCK_HASHES * HASH_BYTES < MAX_FRAME_BYTES


def test_what_is_submitted_has_names_and_a_resume_goes_on_from_them() -> None:
    async def test(site: Site) -> None:
        site.cluster.interrupt_at = {1: 10}
        await completion(site, prompt=[9, 8, 7, 6, 5], max_tokens=30)
        (first, _), (second, ids) = site.cluster.submits
        group = "tenant:default"
        assert first.hash_block_size == BLOCK_SIZE and len(first.block_hashes) == 2 * HASH_BYTES
        assert second.block_hashes == block_hashes(pack_tokens(ids), BLOCK_SIZE, group)
        assert second.block_hashes.startswith(first.block_hashes) and second.resumed_tokens == 10

    on_site(test)


def test_where_the_block_size_is_not_known_nothing_has_a_name() -> None:
    async def test(site: Site) -> None:
        site.cluster.backend.coordinator_message(site.cluster, ClusterState((MODEL,)), b"")
        await completion(site, max_tokens=3)
        assert site.cluster.submits[0][0].block_hashes == b"" and site.cluster.submits[0][0].hash_block_size == 0

    on_site(test)


def test_usage_says_how_much_of_the_prompts_was_cached() -> None:
    async def test(site: Site) -> None:
        site.cluster.cached = lambda submit: submit.prompt_tokens - 1
        answer = await completion(site, prompt=[[9, 8, 7], [6, 5]], n=2, max_tokens=3)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}, "once for each prompt, not each choice"
        chunks, _ = await events(site, "/v1/completions", prompt=[9, 8, 7], stream_options={"include_usage": True})
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}

    on_site(test)


def test_what_an_interrupted_attempt_left_behind_does_not_count_as_cached() -> None:
    async def test(site: Site) -> None:
        site.cluster.cached = lambda submit: submit.prompt_tokens - 1 if submit.attempt > 1 else 0
        site.cluster.interrupt_at = {1: 0, 2: 10}
        answer = await completion(site, prompt=[9, 8, 7])
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    on_site(test)
