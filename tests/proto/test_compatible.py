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


def test_equal_fingerprints_fit() -> None:
    """Workers with equal fingerprints and block sizes in a whole ratio fit."""
    assert between(dict(FIELDS)) == between(dict(FIELDS), 16, 48) == between(dict(FIELDS), 8, 1) == ""


@pytest.mark.parametrize("field", FIELDS)
def test_differing_field_is_named(field: str) -> None:
    """The mismatch names the differing field with the values of both workers."""
    assert between(FIELDS | {field: "other"}) == f"{field} is {FIELDS[field]} at a and other at b"


def test_unmatched_block_sizes_are_named() -> None:
    """Block sizes without a whole ratio are named with both values."""
    assert "block_size is 16 at a and 24 at b" in between(dict(FIELDS), 16, 24)
    assert between(FIELDS | {"dtype": "bfloat16"}, 3, 2).count(" at a and ") == 2


def test_mismatch_text_is_printable() -> None:
    """The mismatch text stays printable and short whatever a peer's fingerprint holds."""
    many = {f"field{number}": number for number in range(50)}
    said = [between(many), between(FIELDS | {"dtype": "\n\x1b[31m" + "x" * 400}), mismatch("a", "f", 1, "b", "", 1)]  # type: ignore[arg-type]
    said.append(mismatch("a", "x=1;y=2", 1, "b", "y=2;x=1", 1))
    said.append(mismatch("a", "x=1;y=2", 1, "b", ";;=;x", 1))
    assert all(text and text.isprintable() and len(text) < 480 for text in said), said
