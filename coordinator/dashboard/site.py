"""Serves the dashboard: its files, one stream of snapshots for all viewers, and orders.

Everyone who reaches the port may look. Orders, and timelines, which cost a process, need the key of `--admin-key-file`. The
page sends it in a header, so that no page of another origin can have it sent.
"""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from proto.drain import DrainRequest, FlipRequest
from proto.messages import Message
from proto.policy import PolicyRequest
from runtime.process import clock
from runtime.process.exits import ConfigError
from runtime.tenancy.tenants import TenantsError, tables_of, without_secrets

PATH: Final = "/dashboard"
EVERY_S: Final = 1.0
REST_FACTOR: Final = 20.0  # a snapshot that took long is followed by a pause of so many times as long
VIEWERS_MAX: Final = 8
KEY_CHARS_MIN: Final = 16
EXPLAIN_S: Final = 60.0
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
FILES: Final = {
    "": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
}
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "connection": "close",
}
_STATIC: Final = Path(__file__).parent / "static"
_orders: Final = msgspec.json.Decoder(DrainRequest | FlipRequest | PolicyRequest)


class AdminKey:
    """The key in a file, which is read for each order, so that it can be replaced."""

    def __init__(self, path: str) -> None:
        """Raises `ConfigError`. An empty path: there is no key, and no order is taken."""
        self.given = bool(path)
        self._path = Path(path).expanduser()
        if path and not self._read():
            raise ConfigError(
                f"--admin-key-file: {path} must be a file with a key of at least {KEY_CHARS_MIN} characters"
            )

    def _read(self) -> bytes:
        try:
            key = self._path.read_bytes().strip()
        except OSError:
            return b""
        return key if len(key) >= KEY_CHARS_MIN else b""

    def opens(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = self._read() if self.given else b""
        return bool(key) and len(given) == 1 and hmac.compare_digest(given[0], b"Bearer " + key)


class DashboardSite:
    """An ASGI app for the paths from `PATH` on."""

    def __init__(
        self,
        snapshot: Callable[[], dict[str, Any]],
        carry_out: Callable[[Message], Awaitable[str]],
        key: AdminKey,
        explain: Sequence[str],
    ) -> None:
        """`carry_out`: returns why an order was refused, or an empty string. `explain`: the command that explains the request
        whose id follows; empty: there is no event log."""
        self._snapshot, self._carry_out, self._key, self._explain = snapshot, carry_out, key, explain
        self._viewers = 0
        self._made, self._made_at, self._due_at = b"", 0.0, 0.0
        self._explaining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"].removeprefix(PATH), scope["method"]
        if path in ("/orders", "/explain"):
            status, found = await self._asked(path, scope, receive) if method == "POST" else (405, {"error": "POST it"})
            await _answer(send, status, "application/json", msgspec.json.encode(found))
        elif method not in ("GET", "HEAD"):
            await _answer(send, 405)
        elif path == "/events":
            await self._stream(scope, receive, send)
        elif path in FILES:
            name, content_type = FILES[path]
            await _answer(send, 200, content_type, (_STATIC / name).read_bytes())
        else:
            await _answer(send, 404)

    # --- the stream -----------------------------------------------------------------------------------------------------

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends snapshots until the viewer leaves. Each must be taken before the connection's time is over."""
        if self._viewers >= VIEWERS_MAX:
            await _answer(send, 503, body=f"{VIEWERS_MAX} viewers are connected already".encode())
            return
        self._viewers += 1
        leaving = asyncio.ensure_future(_left(receive))
        seen_at = -1.0
        try:
            await send(_start(200, {"content-type": "text/event-stream"}))
            while not leaving.done():
                if seen_at == self._made_at:
                    await asyncio.wait({leaving}, timeout=self._due_at - clock.now())
                    if clock.now() < self._due_at:
                        continue
                if clock.now() >= self._due_at:
                    self._make()
                seen_at = self._made_at
                scope["extensions"]["crossdock.keep"](0.0)
                await send({"type": "http.response.body", "body": self._made, "more_body": True})
        finally:
            self._viewers -= 1
            leaving.cancel()

    def _make(self) -> None:
        """Made by the first viewer that is due, for all."""
        began = clock.now()
        self._made = b"data: " + msgspec.json.encode(self._snapshot()) + b"\n\n"
        self._made_at = clock.now()
        self._due_at = began + max(EVERY_S, REST_FACTOR * (self._made_at - began))

    # --- orders ---------------------------------------------------------------------------------------------------------

    async def _asked(self, path: str, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        if not self._key.given:
            return 403, {"error": "the coordinator has no --admin-key-file, so the dashboard only shows"}
        if not self._key.opens(scope):
            return 401, {"error": "this is not the admin key"}
        body = await _body(receive)
        if path == "/explain":
            return await self._explained(body.decode("utf-8", "replace"), scope)
        try:
            refusal = await self._carry_out(_order(body))
        except (msgspec.MsgspecError, RecursionError, TenantsError) as error:
            return 400, {"error": str(error)[:500]}
        return (409, {"error": refusal}) if refusal else (200, {})

    async def _explained(self, request_id: str, scope: Scope) -> tuple[int, dict[str, Any]]:
        """The timeline of a request. Replaying the event log takes long, so another process does it."""
        if not self._explain:
            return 404, {"error": "the coordinator has no --event-log, which timelines are made from"}
        if not REQUEST_ID.fullmatch(request_id):
            return 400, {"error": "this is no id of a request"}
        if self._explaining:
            return 503, {"error": "another request is being explained; try again"}
        scope["extensions"]["crossdock.keep"](EXPLAIN_S)
        self._explaining = True
        try:
            return await _run((*self._explain, request_id))
        finally:
            self._explaining = False


def _order(body: bytes) -> Message:
    """Reads the message that `crossdock drain`, `flip` or `policy` would send, as JSON; of a policy, with the text of a tenants
    file. Raises `MsgspecError`, `RecursionError`, `TenantsError`."""
    order: Message = _orders.decode(body)
    if isinstance(order, PolicyRequest) and order.content:
        tables = without_secrets(tables_of(order.content))
        order = msgspec.structs.replace(order, content=msgspec.json.encode(tables).decode())
    return order


async def _run(command: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Runs `crossdock explain --json`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(EXPLAIN_S):
            said, trouble = await process.communicate()
    except TimeoutError:
        return 504, {"error": f"the event log takes over {EXPLAIN_S:.0f} s to replay; use crossdock explain"}
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        return 404, {"error": trouble.decode("utf-8", "replace").strip()[-500:]}
    found = msgspec.json.decode(said)
    return 200, {name: found[name] for name in ("request", "words", "summary")}


async def _body(receive: Receive) -> bytes:
    """The server bounds its size."""
    body, message = b"", dict[str, Any](more_body=True)
    while message.get("more_body"):
        message = dict(await receive())
        body += message.get("body", b"")
    return body


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: dict[str, str]) -> dict[str, Any]:
    encoded = [(name.encode(), value.encode()) for name, value in (HEADERS | headers).items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _answer(send: Send, status: int, content_type: str = "text/plain; charset=utf-8", body: bytes = b"") -> None:
    await send(_start(status, {"content-type": content_type, "content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body})
