"""JSON Web Tokens in place of API keys: which are taken, which attacks fail, and how keys are read."""

import asyncio
import base64
import hmac
import json
import logging
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gateway import jwt_tenants
from gateway.http.errors import ApiError
from gateway.jwt_tenants import JwtTenants
from gateway.jwt_tokens import TOKEN_CHARS_MAX, TokenError, TokenRules, read_key_set
from runtime.process.exits import ConfigError
from runtime.settings.options import SettingsError
from runtime.settings.options import load as load_settings
from runtime.settings.roles import GatewaySettings
from runtime.tenancy.tenants import parse
from tests.gateway.fakes import Site
from tests.gateway.http_words import on_site
from tests.gateway.test_tenancy import FILE, KEY, ask, last_submit

RULES = TokenRules("https://login.example.org", "crossdock", "tenant")
TENANTS = parse(FILE)
HOUR_S = 3600


@lru_cache
def private_key(key_id: str) -> Any:
    if key_id.startswith("rsa"):
        return rsa.generate_private_key(65537, 1024 if key_id == "rsa-short" else 2048)
    return ed25519.Ed25519PrivateKey.generate() if key_id.startswith("ed") else ec.generate_private_key(ec.SECP256R1())


def jwk(key_id: str, **fields: str) -> dict[str, Any]:
    kind = jwt.get_algorithm_by_name({"r": "RS256", "e": "ES256"}[key_id[0]] if key_id[:2] != "ed" else "EdDSA")
    entry: dict[str, Any] = kind.to_jwk(private_key(key_id).public_key(), as_dict=True)  # type: ignore[attr-defined]
    return {name: value for name, value in entry.items() if name != "key_ops"} | {"kid": key_id} | fields


def key_set(*key_ids: str) -> str:
    return json.dumps({"keys": [jwk(key_id) for key_id in key_ids]})


def token(key_id: str = "rsa", algorithm: str = "", header: dict[str, Any] | None = None, **claims: Any) -> str:
    """A good token, but for these claims; None leaves one out."""
    algorithm = algorithm or {"r": "RS256", "e": "EdDSA" if key_id[1] == "d" else "ES256"}[key_id[0]]
    usual = {"iss": RULES.issuer, "aud": "crossdock", "exp": time.time() + HOUR_S, "tenant": "acme/ann", "sub": "7"}
    content = {name: value for name, value in (usual | claims).items() if value is not None}
    return jwt.encode(content, private_key(key_id), algorithm, {"kid": key_id} | (header or {}))


@lru_cache
def good_payload() -> str:
    return token().split(".")[1]


def by_hand(header: dict[str, Any], sign: Any = None) -> str:
    """A token of a good payload with this header, which no library would make."""
    signed = f"{base64.urlsafe_b64encode(json.dumps(header).encode()).decode().rstrip('=')}.{good_payload()}"
    signature = base64.urlsafe_b64encode(sign(signed.encode()) if sign else b"").decode().rstrip("=")
    return f"{signed}.{signature}"


def hmac_with_public_key(form: PublicFormat, encoding: Encoding) -> str:
    secret = private_key("rsa").public_key().public_bytes(encoding, form)
    return by_hand({"alg": "HS256", "kid": "rsa"}, lambda text: hmac.digest(secret, text, "sha256"))


def swapped(good: str) -> str:
    """The token with another tenant in its payload."""
    head, payload, signature = good.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    other = base64.urlsafe_b64encode(json.dumps(claims | {"tenant": "acme/bob"}).encode()).decode().rstrip("=")
    return f"{head}.{other}.{signature}"


def tenants_with(
    tmp_path: Path, *key_ids: str, rules: TokenRules = RULES, on_refused: Callable[[str], None] = lambda reason: None
) -> JwtTenants:
    path = tmp_path / "keys.json"
    path.write_text(key_set(*key_ids))
    return JwtTenants(str(path), rules, on_refused)


async def tenant_of(source: JwtTenants, text: str) -> str | None:
    if not source.keys:
        await source.start()
    return await source.tenant_of(text, TENANTS)


@pytest.mark.parametrize(
    "good",
    [
        partial(token, "rsa"),
        partial(token, "rsa", "PS512"),
        partial(token, "ec"),
        partial(token, "ed"),
        partial(token, aud=["other", "crossdock"]),
        lambda: token(nbf=time.time() + 30, iat=time.time() + 30),
        lambda: token(exp=time.time() - 30),
    ],
)
def test_good_token_names_its_tenant(tmp_path: Path, good: Any) -> None:
    """A token of the issuer's keys, for this audience, names its tenant; clocks may differ by a minute."""
    source = tenants_with(tmp_path, "rsa", "ec", "ed")
    assert asyncio.run(tenant_of(source, good())) == "acme/ann"


ATTACKS: dict[str, tuple[Any, str]] = {
    "no signature": (lambda: by_hand({"alg": "none", "kid": "rsa"}), "an algorithm that its key may not"),
    "None in other letters": (lambda: by_hand({"alg": "nOnE", "kid": "rsa"}), "an algorithm that its key may not"),
    "HMAC with the public key": (
        lambda: hmac_with_public_key(PublicFormat.SubjectPublicKeyInfo, Encoding.PEM),
        "an algorithm that its key may not",
    ),
    "HMAC with the public key's bytes": (
        lambda: hmac_with_public_key(PublicFormat.PKCS1, Encoding.DER),
        "an algorithm that its key may not",
    ),
    "algorithm of another type of key": (
        lambda: token("ec", header={"kid": "rsa"}),
        "an algorithm that its key may not",
    ),
    "key of its own": (lambda: token("rsa-2", header={"kid": "rsa", "jwk": jwk("rsa-2")}), "a wrong signature"),
    "claims changed": (lambda: swapped(token()), "a wrong signature"),
    "signature cut off": (lambda: token().rpartition(".")[0] + ".", "a wrong signature"),
    "unknown key": (lambda: token("rsa-2"), "an unknown key"),
    "no key named among several": (lambda: by_hand({"alg": "RS256"}, private_key("ed").sign), "an unknown key"),
    "short key": (lambda: token("rsa-short"), "is not valid"),
    "another audience": (lambda: token(aud="billing"), "another audience"),
    "audience that begins alike": (lambda: token(aud="crossdock-admin"), "another audience"),
    "another issuer": (lambda: token(iss="https://login.example.org.evil"), "another issuer"),
    "expired": (lambda: token(exp=time.time() - HOUR_S), "has expired"),
    "not yet valid": (lambda: token(nbf=time.time() + HOUR_S), "not valid yet"),
    "issued in the future": (lambda: token(iat=time.time() + HOUR_S), "not valid yet"),
    "without an end": (lambda: token(exp=None), "lacks"),
    "without an audience": (lambda: token(aud=None), "lacks"),
    "without an issuer": (lambda: token(iss=None), "lacks"),
    "end that is no number": (lambda: token(exp=float("inf")), "is not valid"),
    "unknown tenant": (lambda: token(tenant="acme/eve"), "names no tenant"),
    "tenant that is no name": (lambda: token(tenant="acme/../acme/bob"), "names no tenant"),
    "tenant that is no text": (lambda: token(tenant=["acme/ann"]), "no text in its claim 'tenant'"),
    "no tenant": (lambda: token(tenant=None), "no text in its claim 'tenant'"),
    "very long": (lambda: token(more="x" * TOKEN_CHARS_MAX), "longer than"),
}
REASONS = {
    "expired": "expired",
    "not yet valid": "not_yet_valid",
    "another audience": "audience",
    "another issuer": "issuer",
    "no signature": "algorithm",
    "claims changed": "signature",
    "without an end": "claims",
    "unknown key": "unknown_key",
    "unknown tenant": "tenant",
    "no tenant": "tenant",
    "short key": "invalid",
    "very long": "too_long",
}  # as the metrics have them


@pytest.mark.filterwarnings("ignore:The RSA key is 1024 bits")
@pytest.mark.parametrize("attack", ATTACKS)
def test_bad_token_is_refused(tmp_path: Path, attack: str) -> None:
    """A token that was forged, or is for others, gets 401; the message says why, and repeats no part of the token."""
    make, words = ATTACKS[attack]
    reasons: list[str] = []
    source = tenants_with(tmp_path, "rsa", "ec", "ed", "rsa-short", on_refused=reasons.append)
    bad = make()
    with pytest.raises(ApiError, match=words) as refused:
        asyncio.run(tenant_of(source, bad))
    assert (refused.value.status, refused.value.code) == (401, "invalid_token")
    assert not any(part and part in refused.value.message for part in bad.split("."))
    assert len(reasons) == 1 and reasons[0] == REASONS.get(attack, reasons[0])


@pytest.mark.parametrize(
    "text",
    [
        "sk-1.2.3",
        "..",
        "e30.e30.e30",
        "a.b.c",
        token().replace(".", "", 1),
        token() + ".e30",
        base64.urlsafe_b64encode(b"[" * 4_000).decode().rstrip("=") + ".e30.e30",
        by_hand({"alg": "RS256", "kid": 7}),
        by_hand({"alg": "RS256", "kid": "rsa", "crit": ["exp"], "exp": 1}),
    ],
)
def test_other_bearer_is_no_token(tmp_path: Path, text: str) -> None:
    """What is no signed token is left to the API keys."""
    assert asyncio.run(tenant_of(tenants_with(tmp_path, "rsa"), text)) is None


def test_unnamed_key_is_the_only_one(tmp_path: Path) -> None:
    """A token that names no key is verified with the only key there is."""
    unnamed = by_hand({"alg": "EdDSA"}, private_key("ed").sign)
    assert asyncio.run(tenant_of(tenants_with(tmp_path, "ed"), unnamed)) == "acme/ann"


def test_only_signature_keys_are_used() -> None:
    """Secrets, keys for encryption and broken keys of a set are left out, and a key's own algorithm alone is taken."""
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"}
    entries = [secret, jwk("rsa", use="enc"), jwk("rsa-2", alg="PS256"), {"kty": "EC", "crv": "P-256", "kid": "broken"}]
    found = read_key_set(json.dumps({"keys": entries}).encode())
    assert {key_id: key.algorithms for key_id, key in found.items()} == {"rsa-2": ("PS256",)}
    for content in (b"", b"[]", b'{"keys": 1}', b'{"keys": [1]}', b'{"keys": []}', b"[" * 100_000, b"\xff"):
        with pytest.raises(TokenError):
            read_key_set(content)


def test_rotated_key_is_found(tmp_path: Path) -> None:
    """A key that the issuer has added is found when a token names it."""
    source = tenants_with(tmp_path, "rsa")

    async def body() -> None:
        assert await tenant_of(source, token()) == "acme/ann"
        tenants_with(tmp_path, "rsa", "ec")
        assert await tenant_of(source, token("ec")) == "acme/ann"

    asyncio.run(body())


def test_unknown_keys_never_flood_the_issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand tokens with invented keys have the keys read once, and none of them waits for an issuer that hangs."""
    source, reads = tenants_with(tmp_path, "rsa"), 0
    monkeypatch.setattr(jwt_tenants, "READ_S", 0.2)

    async def hang(url: str) -> bytes:
        nonlocal reads
        reads += 1
        await asyncio.sleep(60)
        raise AssertionError

    async def body() -> None:
        await source.start()
        source._from_url = True
        monkeypatch.setattr(jwt_tenants, "_fetch", hang)
        flood = [by_hand({"alg": "RS256", "kid": f"invented-{number}"}) for number in range(1_000)]
        async with asyncio.timeout(5):
            refused = await asyncio.gather(*(tenant_of(source, one) for one in flood), return_exceptions=True)
            refused += [*await asyncio.gather(tenant_of(source, flood[0]), return_exceptions=True)]
        assert {error.status for error in refused if isinstance(error, ApiError)} == {401} and len(refused) == 1_001
        assert await tenant_of(source, token()) == "acme/ann"

    asyncio.run(body())
    assert reads == 1


def test_unreachable_issuer_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the keys could never be read, a token gets 503 and a time to try again."""

    async def body() -> None:
        source = JwtTenants("https://127.0.0.1:9/keys", RULES)
        await source.start()
        with pytest.raises(ApiError) as refused:
            await source.tenant_of(token(), TENANTS)
        assert refused.value.status == 503 and refused.value.retry_after_s

    asyncio.run(body())


@pytest.mark.parametrize("content", ["{}", "", key_set("rsa") + " " * jwt_tenants.KEY_SET_BYTES_MAX])
def test_broken_key_file_changes_nothing(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """A gateway does not start with a file that has no keys, and keeps the earlier keys if the file breaks later."""
    source = tenants_with(tmp_path, "rsa")

    async def body() -> None:
        await source.start()
        (tmp_path / "keys.json").write_text(content)
        await source._read()
        assert await tenant_of(source, token()) == "acme/ann"
        with pytest.raises(ConfigError, match="--jwt-jwks"):
            await JwtTenants(source.source, RULES).start()

    asyncio.run(body())


def test_keys_are_fetched_within_bounds() -> None:
    """Keys come over HTTP; an error, a redirect or a body without end is no key set."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        status = {b"/gone": b"404 Gone", b"/moved": b"302 Found"}.get(path, b"200 OK")
        writer.write(b"HTTP/1.1 " + status + b"\r\nLocation: /keys\r\nConnection: close\r\n\r\n")
        writer.write(key_set("ec").encode() if path != b"/endless" else b" " * (1 << 20))
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1")
        base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert list(read_key_set(await jwt_tenants._fetch(f"{base}/keys"))) == ["ec"]
        for path, words in (("gone", "HTTP 404"), ("moved", "HTTP 302"), ("endless", "larger than")):
            with pytest.raises(TokenError, match=words):
                await jwt_tenants._fetch(f"{base}/{path}")
        server.close()

    asyncio.run(body())


def test_tokens_and_keys_work_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A gateway with both takes either, refuses all others, and never shows a token."""

    async def test(site: Site) -> None:
        site.gateway.token_tenants = source
        for bearer, tenant in ((token(tenant="acme/bob"), "acme/bob"), (KEY, "acme/ann"), ("own.key.dots", "default")):
            assert (await ask(site, bearer)).status_code == 200
            assert last_submit(site).tenant == tenant
        expired = token(exp=1)
        for bearer, code in ((expired, "invalid_token"), ("no.token.here", "invalid_api_key")):
            answer = await ask(site, bearer)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (401, code, "authentication_error")
            assert answer.headers["x-should-retry"] == "false" and bearer not in answer.text
        site.gateway.keys.replace(parse("[tenants.other]"))
        assert (await ask(site, token())).status_code == 401
        assert not any(part in caplog.text for part in expired.split("."))

    source = tenants_with(tmp_path, "rsa")
    asyncio.run(source.start())
    with caplog.at_level(logging.DEBUG):
        on_site(test, tenants=FILE, api_keys=("own.key.dots",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jwt_jwks": "keys.json"}, "--jwt-audience"),
        ({"jwt_issuer": "i", "jwt_audience": "a", "jwt_jwks": "keys.json"}, "--tenants"),
        ({"jwt_issuer": "i", "jwt_audience": "a", "jwt_jwks": "http://login/keys", "tenants": "t"}, "https"),
    ],
)
def test_token_options_need_each_other(options: dict[str, str], words: str) -> None:
    """Tokens need all of their options and a tenants file, and their keys never come in the clear."""
    with pytest.raises(SettingsError, match=words):
        load_settings(GatewaySettings, {"model": "m"} | options)
