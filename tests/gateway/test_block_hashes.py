"""Names of KV blocks: equal exactly where prompts of one cache group begin alike; and what users read of cached prompts."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.block_hashes import BlockNames, block_hashes
from proto.codec import pack_tokens
from proto.kv import kept_names
from proto.limits import HASH_BYTES, MAX_BLOCK_HASHES, MAX_FRAME_BYTES
from tests.gateway.fakes import BLOCK_SIZE, Site
from tests.gateway.http_words import completion, events, on_site

PROMPTS = st.lists(st.integers(0, 3), max_size=40)


def hashes(prompt: list[int], block_size: int = 4, group: str = "org/a", known: bytes = b"") -> list[bytes]:
    joined = block_hashes(pack_tokens(prompt), block_size, group, known)
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


@given(PROMPTS, PROMPTS, st.integers(1, 9))
def test_hashes_are_equal_for_equal_prefixes(one: list[int], other: list[int], block_size: int) -> None:
    """Block hashes of two prompts are equal exactly as far as the prompts are."""
    ours, theirs = hashes(one, block_size), hashes(other, block_size)
    assert len(ours) == len(one) // block_size and all(len(h) == HASH_BYTES for h in ours)
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (a == b) == (one[: at * block_size] == other[: at * block_size])


@given(PROMPTS.filter(lambda p: len(p) >= 8), PROMPTS, st.integers(1, 4))
def test_groups_and_sizes_share_no_hash(prompt: list[int], other: list[int], size: int) -> None:
    """Cache groups and block sizes have no hash in common."""
    ours = set(hashes(prompt, size))
    for group in ("org/b", "org", "", "org/a "):
        assert not ours & set(hashes(prompt, size, group)) and not ours & set(hashes(other, size, group))
    assert not ours & set(hashes(prompt, size + 1))


@given(PROMPTS, PROMPTS, st.integers(1, 9))
def test_known_hashes_are_extended(prompt: list[int], more: list[int], block_size: int) -> None:
    """Hashes of a longer prompt computed from known ones equal those computed afresh."""
    known = b"".join(hashes(prompt, block_size))
    assert hashes(prompt + more, block_size, known=known) == hashes(prompt + more, block_size)


def test_hash_count_fits_a_message() -> None:
    """The number of hashes of a prompt is bounded so that they fit into one message."""
    assert len(hashes([1] * (MAX_BLOCK_HASHES + 5), 1)) == MAX_BLOCK_HASHES
    assert MAX_BLOCK_HASHES * HASH_BYTES < MAX_FRAME_BYTES


def test_resume_names_kept_blocks() -> None:
    """A resume names the prompt's blocks and those that earlier attempts have computed."""

    async def test(site: Site) -> None:
        site.cluster.interrupt_at = {1: 10, 2: 17}
        await completion(site, prompt=[9, 8, 7, 6, 5], max_tokens=30)
        (first, _), (second, _), (third, ids) = site.cluster.submits
        assert first.hash_block_size == BLOCK_SIZE == 2 and len(first.block_hashes) == 2 * HASH_BYTES
        assert second.block_hashes == kept_names(first.block_hashes, first.request_id, 1, 2, second.prompt_tokens)
        assert second.resumed_tokens == 10 and len(second.block_hashes) == 7 * HASH_BYTES
        assert third.block_hashes == kept_names(second.block_hashes, first.request_id, 2, 2, third.prompt_tokens)
        assert len(third.block_hashes) == len(ids) // 2 * HASH_BYTES > len(second.block_hashes)

    on_site(test)


def test_separate_choices_are_named_by_tokens() -> None:
    """Choices that resume one by one name their blocks by their tokens."""

    async def test(site: Site) -> None:
        site.cluster.interrupt_at = {1: 10}
        await completion(site, prompt=[9, 8, 7, 6, 5], max_tokens=30, n=2)
        _, *resumed = site.cluster.submits
        assert len(resumed) == 2
        for submit, ids in resumed:
            assert submit.block_hashes == block_hashes(pack_tokens(ids), BLOCK_SIZE, "tenant:default")

    on_site(test)


def test_kept_names_belong_to_one_attempt() -> None:
    """Names of kept blocks differ between requests and between attempts."""
    prompt = BlockNames.of(pack_tokens([1, 2, 3, 4, 5]), 2, "org/a")
    kept = prompt.of_kept("r", 1, 5, 9)
    assert kept is not None and len(kept.hashes) == 4 * HASH_BYTES and kept.hashes.startswith(prompt.hashes)
    for other in (prompt.of_kept("r", 2, 5, 9), prompt.of_kept("s", 1, 5, 9), prompt.of_kept("r 1", 1, 5, 9)):
        assert other is not None and other.hashes[-HASH_BYTES:] != kept.hashes[-HASH_BYTES:]
    assert prompt.of_kept("r", 1, 7, 9) is None, "of a prompt not all blocks of which had names"
    long = prompt.of_kept("r", 1, 5, 2 * MAX_BLOCK_HASHES + 8)
    assert long is not None and len(long.hashes) == MAX_BLOCK_HASHES * HASH_BYTES


def test_unknown_block_size_gives_no_hashes() -> None:
    """A submission has no block hashes if the block size is not known."""

    async def test(site: Site) -> None:
        site.cluster.backend._hash_block_sizes.clear()
        await completion(site, max_tokens=3)
        assert site.cluster.submits[0][0].block_hashes == b"" and site.cluster.submits[0][0].hash_block_size == 0

    on_site(test)


def test_usage_reports_cached_tokens() -> None:
    """Usage counts the cached tokens once for each prompt, not for each choice."""

    async def test(site: Site) -> None:
        site.cluster.cached = lambda submit: submit.prompt_tokens - 1
        answer = await completion(site, prompt=[[9, 8, 7], [6, 5]], n=2, max_tokens=3)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}, "once for each prompt, not each choice"
        chunks, _ = await events(site, "/v1/completions", prompt=[9, 8, 7], stream_options={"include_usage": True})
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}

    on_site(test)


def test_resumed_kv_is_not_cached() -> None:
    """KV that an interrupted attempt left behind does not count as cached in the usage."""

    async def test(site: Site) -> None:
        site.cluster.cached = lambda submit: submit.prompt_tokens - 1 if submit.attempt > 1 else 0
        site.cluster.interrupt_at = {1: 0, 2: 10}
        answer = await completion(site, prompt=[9, 8, 7])
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    on_site(test)
