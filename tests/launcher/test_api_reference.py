"""docs/api.md names every field of every request, and is up to date."""

from pathlib import Path

from gateway.openai.request_types import NEUTRAL_ONLY, ChatRequest
from tools import api

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_api_page_is_up_to_date() -> None:
    """docs/api.md equals the text that tools.api generates."""
    assert PAGE.read_text(encoding="utf-8") == api.text(), "run: python -m tools.api docs/api.md"


def test_every_field_has_a_support_status() -> None:
    """Every field of a chat request is listed as supported, refused or without effect."""
    chat = api.text().partition("## POST /v1/chat/completions")[2].partition("\n## ")[0]
    rows = dict(line.split(" | ")[:2] for line in chat.splitlines() if line.startswith("| `"))
    assert {name.strip("| `") for name in rows} == {*ChatRequest.model_fields, *NEUTRAL_ONLY}
    assert set(rows.values()) == {"supported", "refused", "without effect"}
