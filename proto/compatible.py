"""Whether one worker may decode on another's KV, and if not, why.

A fingerprint names, in one readable string of fields, what must be equal:

    model=llama 1f0c…;tokenizer=07ab…;revision=9e21…;dtype=bfloat16;layers=32;kv_heads=8;head_dim=128;rope=…

Two fingerprints are compared as whole strings. The fields are for people: a refusal says which of them differ. Block sizes may
differ, but one must be a multiple of the other.
"""

from collections.abc import Iterable, Mapping

_SHOWN_CHARS = 60
_SHOWN_FIELDS = 3
_OF_TEXT = ("model", "tokenizer")


def join_fields(fields: Mapping[str, object]) -> str:
    """The fingerprint of these fields, in this order."""
    return ";".join(f"{name}={str(value).replace(';', ',')}" for name, value in fields.items())


def block_sizes_fit(one: int, other: int) -> bool:
    """Whether KV can cross between blocks of these sizes, in tokens: one must be a multiple of the other."""
    return max(one, other) % min(one, other) == 0


def mismatch(name: str, fingerprint: str, block_size: int, name2: str, fingerprint2: str, block_size2: int) -> str:
    """Why KV cannot cross between two workers: each field that differs, with both values; empty if it can."""
    found = _differing(name, fingerprint, name2, fingerprint2) if fingerprint != fingerprint2 else []
    if not block_sizes_fit(block_size, block_size2):
        sizes = f"{block_size} at {name} and {block_size2} at {name2}"
        found.append(f"block_size is {sizes}: one must be a multiple of the other")
    return "; ".join(found)


def text_mismatch(name: str, fingerprint: str, name2: str, fingerprint2: str) -> str:
    """Why two workers may not serve revisions of one model, whose text gateways encode and decode alike; empty if they may."""
    one, other = _split(fingerprint), _split(fingerprint2)
    return "; ".join(
        _words(name, one, name2, other, [field for field in _OF_TEXT if one.get(field) != other.get(field)])
    )


def _differing(name: str, fingerprint: str, name2: str, fingerprint2: str) -> list[str]:
    one, other = _split(fingerprint), _split(fingerprint2)
    fields = [field for field in dict.fromkeys((*one, *other)) if one.get(field) != other.get(field)]
    said = _words(name, one, name2, other, fields)
    if not said:
        return ["the fingerprints have their fields in different orders"]
    return said[:_SHOWN_FIELDS] + ([f"{len(said) - _SHOWN_FIELDS} more fields"] if len(said) > _SHOWN_FIELDS else [])


def _words(name: str, one: Mapping[str, str], name2: str, other: Mapping[str, str], fields: Iterable[str]) -> list[str]:
    return [f"{_shown(f)} is {_shown(one.get(f))} at {name} and {_shown(other.get(f))} at {name2}" for f in fields]


def _split(fingerprint: str) -> dict[str, str]:
    parts = (part.partition("=") for part in fingerprint.split(";"))
    return {name if equals else "fingerprint": value if equals else name for name, equals, value in parts}


def _shown(value: str | None) -> str:
    """A peer's value in a message: nothing that is not printable, and not long."""
    if value is None:
        return "not said"
    printable = "".join(char if char.isprintable() else "?" for char in value[:_SHOWN_CHARS])
    return printable + ("…" if len(value) > _SHOWN_CHARS else "")
