"""What people are told of two workers between which KV cannot cross."""

import pytest

from proto.compatible import join_fields, mismatch

FIELDS = {
    "model": "llama 1f",
    "revision": "9e",
    "dtype": "float32",
    "layers": 2,
    "kv_heads": 2,
    "rope": '{"a": [1, 2]}',
}


def between(there: dict[str, object], size: int = 16, size_there: int = 16) -> str:
    return mismatch("a", join_fields(FIELDS), size, "b", join_fields(there), size_there)


def test_equal_fingerprints_and_block_sizes_of_a_whole_ratio_fit() -> None:
    assert between(dict(FIELDS)) == between(dict(FIELDS), 16, 48) == between(dict(FIELDS), 8, 1) == ""


@pytest.mark.parametrize("field", FIELDS)
def test_the_field_that_differs_is_named_with_both_values(field: str) -> None:
    assert between(FIELDS | {field: "other"}) == f"{field} is {FIELDS[field]} at a and other at b"


def test_block_sizes_without_a_whole_ratio_are_named() -> None:
    assert "block_size is 16 at a and 24 at b" in between(dict(FIELDS), 16, 24)
    assert between(FIELDS | {"dtype": "bfloat16"}, 3, 2).count(" at a and ") == 2


def test_nothing_a_peer_says_breaks_the_message() -> None:
    many = {f"field{number}": number for number in range(50)}
    said = [between(many), between(FIELDS | {"dtype": "\n\x1b[31m" + "x" * 400}), mismatch("a", "f", 1, "b", "", 1)]  # type: ignore[arg-type]
    said.append(mismatch("a", "x=1;y=2", 1, "b", "y=2;x=1", 1))
    said.append(mismatch("a", "x=1;y=2", 1, "b", ";;=;x", 1))
    assert all(text and text.isprintable() and len(text) < 480 for text in said), said
