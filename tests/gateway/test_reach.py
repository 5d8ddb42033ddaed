"""From where requests may come: names and pages where no key is needed, and clients behind reverse proxies."""

import asyncio
import socket

import httpx
import openai
import pytest
from pydantic import ValidationError

from gateway import main
from gateway.app import create_app
from gateway.http.body import owner_of
from gateway.http.reach import Reach
from runtime.settings.roles import GatewaySettings
from tests.gateway.fakes import make_site, served

OWN = [
    "127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:8000", "localhost.", "localhost.:8000", "[::1]", "[::1]:8000",
    "10.0.0.5", "models.example.org", "Models.Example.Org.:8000",
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "models.example.org.evil",
    "2130706433", "0x7f.1", "localhost..", "xmodels.example.org", "sub.localhost",
]  # fmt: skip
BROKEN = [
    "",
    " ",
    "a b",
    "localhost:x",
    "localhost:80:80",
    "[::1",
    "::1",
    "localhost/x",
    "user@localhost",
    "localhost,evil",
]


async def _asked(headers: list[tuple[str, str]], *, http_version: str = "1.1", **site) -> tuple[int, str]:
    """(status, code of the error) for a request with exactly these headers."""
    one = make_site(allowed_hosts=("models.example.org",), **site)
    sent: list[dict] = []  # type: ignore[type-arg]

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": "GET", "path": "/version", "raw_path": b"/version", "query_string": b"", "scheme": "http",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers], "http_version": http_version,
        "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    await create_app(one.gateway)(scope, receive, send)
    one.gateway.threads.shutdown()
    await one.gateway.models[0].grammars.close()
    body = b"".join(message.get("body", b"") for message in sent)
    status = sent[0]["status"]
    return status, httpx.Response(status, content=body).json()["error"]["code"] if status >= 400 else ""


def ask(*headers: tuple[str, str], **site) -> tuple[int, str]:
    return asyncio.run(_asked(list(headers), **site))


def test_keyless_gateway_checks_host_names() -> None:
    """A gateway without keys answers only requests for its own host names."""
    assert {host: ask(("host", host)) for host in OWN} == dict.fromkeys(OWN, (200, ""))
    assert {host: ask(("host", host)) for host in FOREIGN} == dict.fromkeys(FOREIGN, (403, "host_not_allowed"))
    assert {host: ask(("host", host)) for host in BROKEN} == dict.fromkeys(BROKEN, (400, "invalid_host"))


def test_request_needs_exactly_one_host() -> None:
    """A request with several Host headers, or none in HTTP/1.1, is refused."""
    twice = [("host", "localhost"), ("host", "evil.example")]
    assert ask() == ask(*twice) == ask(*reversed(twice)) == ask(twice[0], twice[0]) == (400, "invalid_host")
    assert ask(http_version="1.0") == (200, "")
    assert ask(twice[1], http_version="1.0") == (403, "host_not_allowed")


def test_keyed_gateway_answers_any_host() -> None:
    """A page does not have the key."""
    assert ask(("host", "evil.example"), ("origin", "http://evil.example"), api_keys=("k",)) == (200, "")


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("https://LOCALHOST:8000", "localhost:8000", True),
        ("http://localhost", "localhost:80", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("https://chat.example", "localhost:8000", True),
        ("http://chat.example", "localhost:8000", False),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://127.0.0.1:8000", "localhost:8000", False),
        ("http://evil.example", "127.0.0.1:8000", False),
        ("https://chat.example.evil", "127.0.0.1:8000", False),
        ("null", "127.0.0.1:8000", False),
        ("", "127.0.0.1:8000", False),
        ("file://", "127.0.0.1:8000", False),
        ("localhost:8000", "localhost:8000", False),
    ],
)
def test_foreign_origins_are_refused(origin: str, host: str, allowed: bool) -> None:
    """Pages of other origins are refused unless the origin is configured."""
    expected = (200, "") if allowed else (403, "origin_not_allowed")
    assert ask(("host", host), ("origin", origin), cors_origins=["https://chat.example"]) == expected
    assert ask(("host", host), ("origin", origin), cors_origins=["*"]) == (200, "")


def test_two_origins_are_refused() -> None:
    """A request with two Origin headers is refused although one of them is allowed."""
    two = ("origin", "http://localhost"), ("origin", "http://evil.example")
    assert ask(("host", "localhost"), *two) == (403, "origin_not_allowed")


def test_own_names_follow_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's own names come from its host, advertised address and allowed hosts."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")

    def names(**options: object) -> set[str]:
        return main._own_names(GatewaySettings(model="m", **options))  # type: ignore[arg-type]

    assert names() == {"127.0.0.1"} and names(host="::1") == {"::1"} and names(host="localhost") == {"localhost"}
    assert names(host="gpu.lan", allowed_hosts="a.example,b") == {"gpu.lan", "a.example", "b", "node-1", ""}
    assert names(host="0.0.0.0", advertise="models.lan:0") == {"0.0.0.0", "models.lan", "node-1"}
    for wrong in ("http://a", "a:80", "a b", "a/b"):
        with pytest.raises(ValidationError):
            names(allowed_hosts=wrong)


def test_clients_by_address_are_served() -> None:
    """Clients that use the address or localhost are served, and foreign host names are refused."""

    async def body() -> None:
        site = make_site(allowed_hosts=())
        async with served(site) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            assert (await client.models.list()).data
            async with httpx.AsyncClient(base_url=url.replace("127.0.0.1", "localhost")) as other:
                assert (await other.get("/health")).status_code == 200
                refused = await other.get("/v1/models", headers={"Host": "evil.example"})
                assert refused.status_code == 403 and "--allowed-hosts" in refused.json()["error"]["message"]

    asyncio.run(body())


# --- clients behind proxies -------------------------------------------------------------------------------------------


def owner(connected: str, *forwarded: str, proxies: tuple[str, ...] = ("10.0.0.0/8", "fd00::/8", "192.0.2.1")) -> str:
    seen: list[str] = []

    async def app(scope, receive, send):
        seen.append(owner_of("", scope["client"][0]))

    reach = Reach(app, lambda error, scope: None, keys_needed=lambda: True, trusted_proxies=proxies)  # type: ignore[arg-type, return-value]
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in forwarded]
    asyncio.run(reach({"type": "http", "client": (connected, 5), "headers": headers}, None, None))  # type: ignore[arg-type]
    return seen[0]


def test_only_trusted_proxy_names_the_client() -> None:
    """The client's address is taken from a forwarding header only if a trusted proxy sent it."""
    assert owner("127.0.0.1", "203.0.113.7") == "address:127.0.0.1"
    assert owner("203.0.113.1", "203.0.113.7") == "address:203.0.113.1"
    assert owner("10.0.0.1", "203.0.113.7") == "address:203.0.113.7"
    assert owner("10.0.0.1", "203.0.113.7", proxies=()) == "address:10.0.0.1"
    assert owner("::ffff:10.0.0.1", "203.0.113.7:4711") == "address:203.0.113.7"
    assert (
        owner("10.0.0.1", "[2001:db8:1:2::7]:443")
        == owner("fd00::1", "2001:db8:1:2::9")
        == "address:0x20010db800010002"
    )


def test_forged_forwarding_is_ignored() -> None:
    """Proxies append; so the last address that is no proxy's is the client's."""
    assert owner("10.0.0.1", "198.51.100.1, 203.0.113.7") == "address:203.0.113.7"
    assert owner("10.0.0.1", "198.51.100.1, 203.0.113.7, 10.2.3.4") == "address:203.0.113.7"
    assert owner("10.0.0.1", "198.51.100.1", "203.0.113.7") == "address:203.0.113.7"
    assert owner("10.0.0.1", "10.0.0.9") == "address:10.0.0.9"
    assert owner("10.0.0.1", "203.0.113.7" + ", 10.0.0.2" * 10_000) == "address:10.0.0.2"


@pytest.mark.parametrize(
    "value",
    ["anything", "", ",", "unknown", "_hidden", "1.2.3", "203.0.113.7x", "fe80::1%a", "010.1.1.1", "\xb2", "localhost"],
)
def test_invalid_forwarded_address_is_ignored(value: str) -> None:
    """A forwarded value that is no address is ignored, and the last proxy's address counts."""
    assert owner("10.0.0.1", value) == "address:10.0.0.1"
    assert owner("10.0.0.1", f"{value}, 10.0.0.3") == "address:10.0.0.3"


def test_server_ignores_forwarding_headers() -> None:
    """The HTTP server takes neither the client nor the scheme from forwarding headers."""

    async def body() -> None:
        site = make_site(trusted_proxies=())
        seen: list[str] = []

        async def app(scope, receive, send):
            seen.append(scope["client"][0] + scope["scheme"])
            await site.app(scope, receive, send)

        async with served(type(site)(site.gateway, site.cluster, app)) as url, httpx.AsyncClient() as client:
            names = ("X-Forwarded-For", "Forwarded", "X-Real-IP", "X-Forwarded-Proto")
            values = ("203.0.113.7", "for=203.0.113.7", "203.0.113.7", "https")
            await client.get(f"{url}/health", headers=dict(zip(names, values, strict=True)))
        assert seen == ["127.0.0.1http"]

    asyncio.run(body())


@pytest.mark.parametrize("value", ["proxy.example", "10.0.0.0/33", "*"])
def test_trusted_proxies_must_be_addresses(value: str) -> None:
    """A trusted proxy must be an address or a network."""
    with pytest.raises(ValidationError, match="neither an address nor a network"):
        GatewaySettings(model="m", trusted_proxies=value)
    assert GatewaySettings(model="m", trusted_proxies="10.0.0.1/8, ::1").trusted_proxies == ["10.0.0.1/8", "::1"]
