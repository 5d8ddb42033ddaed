"""A cluster with keys, as on several hosts: it serves, others are turned away and counted, and nothing that is secret is
written anywhere, however much is logged."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvloop

from launcher.admin.keys import NewKeysSettings
from launcher.admin.keys import run as make_keys
from launcher.admin.status import NoAnswer, as_dict, ask
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Role
from runtime.link.client import LinkClient
from runtime.link.keys import Keys
from runtime.link.server import LinkSettings
from tests.e2e.parts import Parts, listening, parts
from tests.gateway.test_jwt import RULES, key_set, token
from tests.helpers import until
from tests.runtime.test_link import End

PROMPT = "xylophone-canary-of-the-prompt"
KEY = "sk-canary-of-the-api-key-0123456789"
GROUP = "canary-of-the-cache-group"
TENANTS = f"""
[tenants.acme]
cache_group = "{GROUP}"
[tenants.acme.users.ann]
keys = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
"""


@dataclass
class Secured:
    up: Parts
    folder: Path
    tokens: str
    kv: str

    def ask(self, key: str = KEY, /, **body: object) -> httpx.Response:
        body = {"model": self.up.model_id, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, **body}
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{self.up.base_url}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=120.0, trust_env=False)

    def metrics(self) -> str:
        address = self.up.status().metrics["gateway"]
        return httpx.get(f"http://{address}/metrics", timeout=60.0, trust_env=False).text


@pytest.fixture(scope="module")
def secured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp("secured")
    make_keys(NewKeysSettings(folder=str(home / "keys")))
    (home / "tenants.toml").write_text(TENANTS)
    (home / "jwks.json").write_text(key_set("ec"))
    debug = ("--log-level", "debug", "--log-format", "json")
    tenants = ("--tenants", str(home / "tenants.toml"))
    with parts(tiny, keys=home / "keys") as up:
        up.start(
            "coordinator", *debug, *tenants, "--event-log", str(home / "events"), "--usage-db", str(home / "usage.db")
        )
        tokens = ("--jwt-issuer", RULES.issuer, "--jwt-audience", RULES.audience, "--jwt-jwks", str(home / "jwks.json"))
        up.start("gateway", *debug, *tenants, *tokens)
        up.start("prefill_worker", *debug)
        up.start("decode_worker", *debug)
        up.wait_registered(2)
        yield Secured(up, home, listening(up, "gateway"), listening(up, "decode_worker"))


def test_secured_cluster_serves(secured: Secured) -> None:
    """A cluster with keys serves requests."""
    answer = secured.ask()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
    report = secured.up.status()
    assert {w.role for w in report.workers} == {Role.PREFILL, Role.DECODE} and report.kv_pairs


def test_token_is_taken_beside_keys(secured: Secured) -> None:
    """A gateway with --jwt-issuer takes a good token, and refuses an expired one."""
    assert secured.ask(token("ec")).status_code == 200
    assert secured.ask(token("ec", exp=1)).json()["error"]["message"] == "The token has expired."
    assert 'crossdock_gateway_jwt_refused_total{reason="expired"} 1.0' in secured.metrics()


def _knock(address: str, role: Role, keys: Keys | None, to: Role) -> str:
    """Try to get a link as this role; why it failed."""
    found: list[str] = []

    async def body() -> None:
        hello = Hello(PROTOCOL_VERSION, role, 99, "intruder", model="m")
        end, settings = End(), LinkSettings(handshake_timeout_ms=5_000, keys=keys)
        client: LinkClient = end.client(address, hello=hello, settings=settings, to=to)
        await client.start()
        await until(lambda: bool(client.last_error))
        found.append(client.last_error)
        assert end.events.empty(), "it was let in"
        await client.close()

    uvloop.run(body())
    return found[0]


def knock_in_vain(folder: Path, foreign: Path, coordinator: str, tokens: str, kv: str) -> None:
    """At each port of a cluster with these keys: a plain client, one with an unknown key, and a worker that poses as another
    role are turned away, with their reasons. `foreign` is a folder to make."""
    make_keys(NewKeysSettings(folder=str(foreign)))
    for public in folder.glob("*.key"):
        (foreign / public.name).write_bytes(public.read_bytes())
    worker, unknown = Keys(folder, Role.PREFILL), Keys(foreign, Role.PREFILL)
    doors = (
        (coordinator, Role.COORDINATOR, Role.GATEWAY),
        (tokens, Role.GATEWAY, Role.DECODE),
        (kv, Role.DECODE, Role.DECODE),
    )
    for address, to, pose in doors:
        assert "--keys" in _knock(address, Role.PREFILL, None, to)
        assert "does not let this key in" in _knock(address, Role.PREFILL, unknown, to)
        assert "its key is prefill, which may not be a" in _knock(address, pose, worker, to)
    with pytest.raises(NoAnswer, match="keys"):
        uvloop.run(ask(coordinator, 3_000))


def test_intruders_are_turned_away_everywhere(secured: Secured, tmp_path: Path) -> None:
    """Unknown keys, plain clients and impostors are turned away at every port and counted."""
    knock_in_vain(secured.folder / "keys", tmp_path / "foreign", secured.up.coordinator, secured.tokens, secured.kv)
    counters, metrics = secured.up.status().counters, secured.metrics()
    for reason in ("plain", "unknown_key", "wrong_role"):
        assert counters[f"turned_away_{reason}"] >= 1, counters
        found = re.search(
            rf'^crossdock_link_turned_away_total{{port="tokens",reason="{reason}"}} (\S+)', metrics, re.MULTILINE
        )
        assert found and float(found[1]) >= 1, metrics
    assert secured.ask().status_code == 200


def test_no_secret_is_written_anywhere(secured: Secured) -> None:
    """At the most talkative level, with requests that succeed, fail, and are refused for each reason there is to quote them."""
    assert secured.ask().status_code == 200
    assert secured.ask(stream=True, stream_options={"include_usage": True}).status_code == 200
    assert secured.ask(prompt=PROMPT * 20_000).status_code == 400
    assert secured.ask(stop=[PROMPT] * 17).status_code == 400
    assert secured.ask(**{PROMPT: 1}).status_code == 400
    assert secured.ask(model=PROMPT).status_code == 404
    assert secured.ask(priority=PROMPT).status_code == 400
    url = f"{secured.up.base_url}/v1/completions"
    for key in (KEY + "x", KEY[:-1], f"{KEY} {KEY}"):
        answer = httpx.post(url, json={}, headers={"Authorization": f"Bearer {key}"}, timeout=60.0, trust_env=False)
        assert answer.status_code == 401 and KEY not in answer.text
    httpx.get(f"{secured.up.base_url}/v1/models/{PROMPT}?key={KEY}", timeout=60.0, trust_env=False)
    tokens = [token("ec"), token("ec", exp=1), token("ec", tenant=PROMPT), token("ec-2")]
    assert [secured.ask(one).status_code for one in tokens] == [200, 401, 401, 401]
    status, metrics = str(as_dict(secured.up.status())), secured.metrics()
    secured.up.stop()
    written = {path.name: path.read_bytes().decode("latin-1") for path in secured.folder.glob("[eu]*")}
    assert {"events", "usage.db"} <= set(written)
    written |= {"logs": "".join(secured.up.output), "status": status, "metrics": metrics}
    assert "decoding" in written["logs"], "the level is debug"
    files = [path.read_text() for path in (secured.folder / "keys").glob("*_secret")]
    keys = [line.split('"')[1] for text in files for line in text.splitlines() if '"' in line]
    parts_of_tokens = {part for one in tokens for part in one.split(".")}
    secrets = [*parts_of_tokens, PROMPT[:12], KEY[:12], hashlib.sha256(KEY.encode()).hexdigest(), GROUP, *keys]
    found = [(where, secret[:8]) for where, text in written.items() for secret in secrets if secret in text]
    assert not found
