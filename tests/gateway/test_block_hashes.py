"""Names of KV blocks: equal exactly where prompts of one cache group begin alike."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.block_hashes import block_hashes
from proto.codec import pack_tokens
from proto.limits import HASH_BYTES, MAX_BLOCK_HASHES, MAX_FRAME_BYTES

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
