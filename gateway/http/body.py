"""Reads request bodies within limits: on the number of open requests, on the bytes of one body and of all bodies, and on the
time for one body.

`shares` divides the totals between tenants, so that no tenant can keep the others out.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from ipaddress import AddressValueError, IPv6Address
from typing import Final

from starlette.requests import Request

from gateway.http.errors import UNSUPPORTED_ENCODING, ApiError
from gateway.shares import FairShare

OPEN_PROMPTS_MAX: Final = 4096  # being read or answered at once; a request counts as one until it is read
BODIES_BYTES_MAX: Final = 256 << 20  # Bytes of all bodies that are read or prepared at once
_LARGE_BYTES: Final = 1 << 20


class Slots:
    """The part of the gateway's bound on prompts that one request holds."""

    def __init__(self, share: FairShare, owner: str) -> None:
        self._share = share
        self._owner = owner
        self._held = 0

    def hold(self, prompts: int) -> None:
        """Hold `prompts` slots in all. Raises `ApiError` if no slots are free (503) or if this tenant holds too many (429)."""
        more = prompts - self._held
        if more > 0 and not self._share.take(self._owner, more):
            raise _no_room(self._share, more)
        self._held = max(self._held, prompts)

    def release(self) -> None:
        self._share.give_back(self._owner, self._held)
        self._held = 0


class Intake:
    """Admits requests to the gateway's memory."""

    def __init__(
        self, *, body_bytes_max: int, client_timeout_s: float, tenant_requests_max: int = OPEN_PROMPTS_MAX
    ) -> None:
        """`client_timeout_s`: the time within which a body must arrive, and within which a client must take the next piece of
        its answer."""
        self.body_bytes_max = body_bytes_max
        self.client_timeout_s = client_timeout_s
        self._slots = FairShare(OPEN_PROMPTS_MAX, tenant_requests_max)
        self._bytes = FairShare(BODIES_BYTES_MAX)
        self._joining = asyncio.Lock()

    @property
    def idle(self) -> bool:
        """Nothing is held."""
        return self._slots.held == self._bytes.held == 0

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[Slots]:
        """Holds a slot for a request of this tenant, or address, until left. Raises `ApiError`."""
        slots = Slots(self._slots, owner)
        slots.hold(1)
        try:
            yield slots
        finally:
            slots.release()

    @asynccontextmanager
    async def body(self, request: Request, owner: str) -> AsyncIterator[bytes]:
        """Reads the body and accounts for it until left. Raises `ApiError` and `ClientDisconnect`."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            message = "The Content-Type must be application/json."
            raise ApiError(415, message, code="unsupported_media_type")
        check_encoding(request)
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced[:18]) > self.body_bytes_max:
            raise self._too_large()
        held = 0
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self.client_timeout_s):
                async for part in request.stream():
                    if held + len(part) > self.body_bytes_max:
                        raise self._too_large()
                    if not self._bytes.take(owner, len(part)):
                        raise _no_room(self._bytes, len(part))
                    held += len(part)
                    parts.append(part)
            if held >= _LARGE_BYTES:
                async with self._joining:  # copied in milliseconds: at most one in each turn of the event loop
                    await asyncio.sleep(0)
            parts[:] = [b"".join(parts)]
            yield parts.pop()  # and keep none: the caller may be done with it before it leaves
        except TimeoutError:
            raise ApiError(408, "The body took too long to arrive.", code="request_timeout") from None
        finally:
            self._bytes.give_back(owner, held)

    @contextmanager
    def bytes_held(self, owner: str, size: int) -> Iterator[None]:
        """Accounts for bytes that come by another way than as a body, until left. Raises `ApiError`."""
        if not self._bytes.take(owner, size):
            raise _no_room(self._bytes, size)
        try:
            yield
        finally:
            self._bytes.give_back(owner, size)

    def _too_large(self) -> ApiError:
        message = f"The body is larger than the {self.body_bytes_max} bytes allowed."
        return ApiError(413, message, code="request_too_large")


def _no_room(share: FairShare, amount: int) -> ApiError:
    """Returns the error that says why the share had no room: none is left at all, or none for this tenant."""
    if not share.has_room(amount):
        return ApiError(503, "Too many requests are open.", code="gateway_overloaded", retry_after_s=1.0)
    message = "Too many of your requests are open: a tenant may not hold more of this gateway than it leaves free."
    return ApiError(429, message, code="too_many_open_requests", retry_after_s=1.0)


def check_encoding(request: Request) -> None:
    """Raises `ApiError` (415) if the body is compressed. No client that we know compresses it."""
    encoding = ",".join(request.headers.getlist("content-encoding"))
    if encoding.strip().lower() not in ("", "identity"):
        message = f"The Content-Encoding {encoding[:100]!r} is not supported: send the body as it is."
        raise ApiError(415, message, code=UNSUPPORTED_ENCODING)


def owner_of(tenant: str, client_host: str | None) -> str:
    """The owner that a request counts for: its tenant, or its client's address where there are no keys (`tenant` is empty). An
    IPv6 client has a whole /64."""
    if tenant:
        return tenant
    try:
        address = IPv6Address(client_host or "")
    except AddressValueError:
        return f"address:{client_host}"
    return f"address:{address.ipv4_mapped or hex(int(address) >> 64)}"
