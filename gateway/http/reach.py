"""Checks where a request comes from. Finds the client behind a reverse proxy and, if no key is needed, checks the Host and
Origin headers. Pure.

Without keys the gateway lets in every client that reaches its port, including a web page in a user's browser. If the page's
owner points a name at this machine (DNS rebinding), the browser treats the page as the gateway's own. So the names are
checked.
"""

import ipaddress
from collections.abc import Callable, Collection, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import ApiError
from runtime.settings.addresses import is_local_name, split_authority

PROXIES_MAX: Final = 32  # Entries of X-Forwarded-For that are looked at, from the nearest on
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Reach:
    """An ASGI layer."""

    def __init__(
        self,
        app: ASGIApp,
        answer: Callable[[ApiError, Scope], Response],
        *,
        keys_needed: Callable[[], bool],
        allowed_hosts: Collection[str] = (),
        origins: Collection[str] = (),
        trusted_proxies: Sequence[str] = (),
    ) -> None:
        """`allowed_hosts`: host names that are accepted besides addresses and localhost. `origins`: origins of web pages that
        may call. `*` in either accepts all. `trusted_proxies`: addresses and networks."""
        self._app = app
        self._answer = answer
        self._keys_needed = keys_needed
        self._any_host = "*" in allowed_hosts
        self._hosts = frozenset(name.lower().removesuffix(".") for name in allowed_hosts if name)
        self._origins = frozenset(origins)
        self._proxies = [ipaddress.ip_network(proxy, strict=False) for proxy in trusted_proxies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._proxies and scope.get("client"):
            scope["client"] = (self._client(scope["client"][0], _values(scope, b"x-forwarded-for")), 0)
        error = None if self._keys_needed() else self._refusal(scope)
        await (self._app if error is None else self._answer(error, scope))(scope, receive, send)

    def _client(self, connected: str, forwarded: list[str]) -> str:
        """Returns the nearest address that is not a trusted proxy. If a proxy forwards an entry that is not an address, the
        proxy itself counts as the client."""
        client = _address(connected)
        for entry in reversed(",".join(forwarded).rsplit(",", PROXIES_MAX)):
            if client is None or not any(client in proxy for proxy in self._proxies):
                break
            before = _address(entry.strip())
            if before is None:
                break
            client = before
        return connected if client is None else str(client)

    def _refusal(self, scope: Scope) -> ApiError | None:
        hosts = _values(scope, b"host")
        if not hosts and scope.get("http_version") == "1.0":
            return None  # no browser's
        asked = split_authority(hosts[0]) if len(hosts) == 1 else None
        if asked is None:
            return ApiError(400, "The request must have one Host header, with a host.", code="invalid_host")
        if not (self._any_host or is_local_name(asked[0]) or asked[0] in self._hosts):
            message = (
                f"This gateway does not answer to the name {asked[0][:100]!r}. It needs no API key, so it answers to its"
                " address, to localhost and to the names in --allowed-hosts."
            )
            return ApiError(403, message, code="host_not_allowed")
        for origin in _values(scope, b"origin"):
            if not (origin in self._origins or "*" in self._origins or _is_own(origin, asked)):
                message = f"Web pages of {origin[:100]!r} may not call this gateway; see --cors-origins."
                return ApiError(403, message, code="origin_not_allowed")
        return None


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


def _is_own(origin: str, asked: tuple[str, str]) -> bool:
    """Whether the page is from the gateway itself: the host and port that the request asks for."""
    scheme, _, authority = origin.partition("://")
    page, default = split_authority(authority), _DEFAULT_PORTS.get(scheme)
    return page is not None and default is not None and (page[0], page[1] or default) == (asked[0], asked[1] or default)


def _address(text: str) -> _Address | None:
    """An address, perhaps with a port, as proxies write it; None for anything else."""
    parts = split_authority(text)
    try:
        found = ipaddress.ip_address(parts[0] if parts is not None else text)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address):
        return None if found.scope_id else found.ipv4_mapped or found
    return found
