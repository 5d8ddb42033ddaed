"""Rows of a ledger whose amounts follow from the request's id, so that anyone can say what they should be."""

from zlib import crc32

from coordinator.accounting.billing import Closed, Opened
from coordinator.accounting.quota import Ask


def opened(request_id: str, tenant: str = "a/x", day: int = 0) -> Opened:
    ask = Ask(10 + crc32(request_id.encode()) % 100, 50, 3, 400)
    return Opened(request_id, day, tenant, "m", "standard", False, ask)


def closed(request_id: str, outcome: str = "finished") -> Closed:
    output = crc32(request_id.encode()) % 50
    prompt = opened(request_id).ask.prompt_tokens
    return Closed(request_id, outcome, prompt + output, prompt, 0, output, 1.0, 2.0, 3.0, 4.0)
