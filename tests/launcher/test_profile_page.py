"""docs/ratio-lab.md and the schema of profiles: both say what the program reads."""

import json
import re

import msgspec
import pytest
from jsonschema import Draft202012Validator

from lab.profile import Profile, ProfileError, decoded, encoded
from tests.documents import ROOT
from tests.lab.profiles import GPU
from tools.profile_schema import schema

PAGE = (ROOT / "docs" / "ratio-lab.md").read_text(encoding="utf-8")
EXAMPLE = json.loads(PAGE.rpartition("```json\n")[2].partition("```")[0])


def test_profile_schema_is_up_to_date() -> None:
    """docs/profile.schema.json equals the generated schema."""
    file = ROOT / "docs" / "profile.schema.json"
    assert file.read_bytes() == schema(), "run: python -m tools.profile_schema docs/profile.schema.json"


def test_schema_and_program_agree() -> None:
    """The example and a real profile are accepted by both the schema and the program."""
    validator = Draft202012Validator(json.loads(schema()))
    for value in (EXAMPLE, json.loads(encoded(GPU))):
        validator.validate(value)
        assert isinstance(decoded(json.dumps(value).encode(), "it"), Profile)


def test_every_profile_field_is_explained() -> None:
    """Every field of a profile is named in the page."""
    words = set(re.findall(r"`([a-z_.]+)`", PAGE.partition("## The profile file")[2]))
    words |= {part for word in words for part in word.split(".")}
    assert {field.name for field in msgspec.structs.fields(Profile)} <= words


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("prefill.curve.ms", [0, 1], r"\$\.prefill\.curve\.ms"),
        ("prefill.curve.at", [9, 9], r"prefill\.curve needs rising counts"),
        ("decode.curve.at", [1], r"decode\.curve needs rising counts"),
        ("decode.kv_token_ms", -1, r"\$\.decode\.kv_token_ms"),
        ("decode_capacity.kv_blocks", 0, r"\$\.decode_capacity\.kv_blocks"),
        ("prefill_capacity.block_size", 0, r"\$\.prefill_capacity\.block_size"),
        ("transfer.bytes_per_ms", 0, r"\$\.transfer\.bytes_per_ms"),
        ("step_tokens", 0, r"\$\.step_tokens"),
        ("origin", "guessed", r"\$\.origin"),
        ("format", 2, "of format 2; this version reads 1"),
    ],
)
def test_unusable_profile_field_is_named(path: str, value: object, named: str) -> None:
    """A profile with an unusable field is refused with the field's path."""
    broken = json.loads(json.dumps(EXAMPLE))
    *outer, last = path.split(".")
    part = broken
    for name in outer:
        part = part[name]
    part[last] = value
    with pytest.raises(ProfileError, match=rf"mine\.json: .*{named}"):
        decoded(json.dumps(broken).encode(), "mine.json")
