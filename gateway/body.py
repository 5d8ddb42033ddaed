"""Reading request bodies within bounds: bytes of one, bytes of all, and the time one may take."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.backend import ClientLeft
from gateway.errors import ApiError, bad_value

REQUESTS_MAX = 2048
"""Generation requests being read or answered at once."""
BODIES_BYTES_MAX = 256 << 20
"""Of all bodies being read or prepared at once."""


class Intake:
    """Admits requests to the gateway's memory."""

    def __init__(self, *, body_bytes_max: int, client_timeout_s: float) -> None:
        """`client_timeout_s`: in which a body must be there, and a client must take the next piece of its answer."""
        self.body_bytes_max = body_bytes_max
        self.client_timeout_s = client_timeout_s
        self._requests = 0
        self._bytes = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Holds one of the places for a request. Raises `ApiError` (503) where all are taken."""
        if self._requests >= REQUESTS_MAX:
            raise ApiError(503, "Too many requests are open.", code="gateway_overloaded", retry_after_s=1.0)
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Reads the body and accounts for it until left. Raises `ApiError` and `ClientLeft`."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            message = "The Content-Type must be application/json."
            raise ApiError(415, message, code="unsupported_media_type")
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced[:18]) > self.body_bytes_max:
            raise self._too_large()
        held = 0
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self.client_timeout_s):
                async for part in request.stream():
                    held += len(part)
                    self._bytes += len(part)
                    if held > self.body_bytes_max:
                        raise self._too_large()
                    if self._bytes > BODIES_BYTES_MAX:
                        raise ApiError(503, "Too much is being read.", code="gateway_overloaded", retry_after_s=1.0)
                    parts.append(part)
            yield b"".join(parts)
        except TimeoutError:
            raise ApiError(408, "The body took too long to arrive.", code="request_timeout") from None
        except ClientDisconnect:
            raise ClientLeft from None
        finally:
            self._bytes -= held

    def _too_large(self) -> ApiError:
        message = f"The body is larger than the {self.body_bytes_max} bytes allowed."
        return ApiError(413, message, code="request_too_large")


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no lone surrogates, bounded depth. Raises `ApiError` (400)."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise bad_value(None, f"The body is not valid JSON: {str(error)[:200]}.", "invalid_json") from None
