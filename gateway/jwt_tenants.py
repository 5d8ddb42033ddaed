"""Finds the tenant of a JSON Web Token, and keeps the keys of its issuer, from a file or an https URL.

The keys are read again from time to time, and when a token names an unknown one, which issuers add when they rotate keys. If
they cannot be read, the earlier ones stay.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import aiohttp

from gateway.http.errors import ApiError
from gateway.jwt_tokens import PublicKey, TokenError, TokenRules, find_key, key_id_of, read_key_set, tenant_in
from runtime.process import clock, log
from runtime.process.exits import ConfigError
from runtime.tenancy.tenants import Tenants

READ_S: Final = 5.0  # within which the keys must be read; no request waits longer for them
UNKNOWN_KEY_S: Final = 30.0  # between two readings because of unknown keys
_FILE_POLL_S: Final = 5.0
_URL_POLL_S: Final = 300.0
KEY_SET_BYTES_MAX: Final = 256 << 10
_log = log.get("crossdock.jwt")


class JwtTenants:
    """`source`: the path of a file, or an https URL. `on_refused` is told why a token was refused, in one word."""

    def __init__(self, source: str, rules: TokenRules, on_refused: Callable[[str], None] = lambda reason: None) -> None:
        self.source, self.rules, self._on_refused = source, rules, on_refused
        self.keys: Mapping[str, PublicKey] = {}
        self._from_url = source.startswith("https://")
        self._reading: asyncio.Task[None] | None = None
        self._read_at = 0.0
        self._fault = ""

    async def start(self) -> None:
        """Read the keys. Raises `ConfigError` if a file cannot be used; an issuer may answer later."""
        await self._read()
        if self._fault and not self._from_url:
            raise ConfigError(f"--jwt-jwks: {self.source}: {self._fault}")

    async def watch(self) -> None:
        """Read the keys again and again, until cancelled."""
        while True:
            await asyncio.sleep(_URL_POLL_S if self._from_url else _FILE_POLL_S)
            await self._read()

    async def tenant_of(self, token: str, tenants: Tenants) -> str | None:
        """Returns the tenant that a token names, or None if it is no signed token. Raises `ApiError` (401; 503 while the keys
        were never read)."""
        try:
            key_id = key_id_of(token)
            if key_id is None:
                return None
            key = find_key(self.keys, key_id)
            if key is None:
                await self._read_for_unknown_key()
                key = find_key(self.keys, key_id)
            if not self.keys:
                self._on_refused("no_keys")
                message = "The keys that verify tokens cannot be read at the moment."
                raise ApiError(503, message, code="token_keys_unavailable", retry_after_s=UNKNOWN_KEY_S)
            if key is None:
                raise TokenError("The token is signed with an unknown key.", "unknown_key")
            tenant = tenant_in(token, key, self.rules)
            if tenants.policy(tenant) is None:
                message = f"The token's claim {self.rules.tenant_claim!r} names no tenant of this service."
                raise TokenError(message, "tenant")
        except TokenError as error:
            self._on_refused(error.reason)
            raise ApiError(401, str(error), code="invalid_token") from None
        return tenant

    async def _read_for_unknown_key(self) -> None:
        """Read the keys, or wait for the reading that goes on. Does nothing if the last one began a short time ago: tokens with
        invented keys must not flood the issuer."""
        if self._reading is None or self._reading.done():
            if self._read_at and clock.now() < self._read_at + UNKNOWN_KEY_S:
                return
            self._read_at = clock.now()
            self._reading = asyncio.get_running_loop().create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        fault = ""
        try:
            async with asyncio.timeout(READ_S):
                content = await (_fetch(self.source) if self._from_url else asyncio.to_thread(_load, self.source))
            self.keys = await asyncio.to_thread(read_key_set, content)
        except (TokenError, aiohttp.ClientError, OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error)
            fault = f"no answer within {READ_S:g} s" if isinstance(error, TimeoutError) else words or "cannot be read"
        if fault != self._fault:
            self._fault = fault
            if fault:
                _log.error("keys of tokens not taken, the earlier ones stay", source=self.source, error=fault)
            else:
                _log.info("keys of tokens taken", source=self.source, keys=len(self.keys))


def _load(path: str) -> bytes:
    with open(Path(path).expanduser(), "rb") as file:
        content = file.read(KEY_SET_BYTES_MAX + 1)
    return _bounded(content)


async def _fetch(url: str) -> bytes:
    # A redirect could lead to a plain http address.
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise TokenError(f"HTTP {response.status}")
        content = b""
        async for part in response.content.iter_chunked(64 << 10):
            content = _bounded(content + part)
        return content


def _bounded(content: bytes) -> bytes:
    if len(content) > KEY_SET_BYTES_MAX:
        raise TokenError(f"larger than {KEY_SET_BYTES_MAX} bytes")
    return content
