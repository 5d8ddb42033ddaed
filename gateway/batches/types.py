"""Requests about files and batches, as types; OpenAI's, as far as it is served."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gateway.http.bounds import MaxKeys
from gateway.openai.request_types import RequestType

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WINDOW_H_MAX = 168
_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataText = Annotated[str, Field(max_length=512)]


def window_h(window: str) -> int:
    """The hours that `24h` stands for; 0 if it stands for none."""
    hours = window.removesuffix("h")
    return int(hours) if window != hours and hours.isascii() and hours.isdigit() else 0


def _check_window(window: str) -> str:
    if not 0 < window_h(window) <= WINDOW_H_MAX:
        raise ValueError(f"it must be a whole number of hours from 1h to {WINDOW_H_MAX}h, like 24h")
    return window


class ExpiresAfter(RequestType):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class CreateBatchRequest(RequestType):
    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    """A file with the purpose `batch`."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Field(min_length=2, max_length=4), AfterValidator(_check_window)]
    """`24h`, or another whole number of hours up to `168h`: requests that have not run by then do not run any more."""
    metadata: Annotated[dict[_MetadataKey, _MetadataText], MaxKeys(16)] | None = None
    """It is given back with the batch."""
    output_expires_after: ExpiresAfter | None = None
    """When the files of results are deleted, from the end of the batch on; at the latest after `--batch-keep-days`."""


class UploadRequest(RequestType):
    """Its fields are parts of a multipart/form-data body."""

    file: Annotated[Any, Field(json_schema_extra={"type": "string", "format": "binary"})]
    """JSON lines: each has `custom_id`, `method` (`POST`), `url` and `body`. At most 50,000, each within `--body-bytes-max`."""
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None
    """When the file is deleted; at the latest after `--batch-keep-days`."""


def listed(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Returns a page of a list. `found` holds the entries of the page, and one more if there are more pages."""
    page = found[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(found) > limit}
