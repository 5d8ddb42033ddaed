"""Verifies JSON Web Tokens (RFC 7519), which clients may send in place of API keys, with the keys of their issuer.

Only asymmetric algorithms are accepted, and a key verifies only those of its own type. So neither `none` passes, nor a public
key that is taken for the secret of an HMAC. No error repeats a part of a token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jwt

from proto.errors import CrossdockError

TOKEN_CHARS_MAX: Final = 8 << 10
CLOCK_SKEW_S: Final = 60
_ALGORITHMS: Final = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}  # by type of key
_FAULTS: Final = {
    jwt.ExpiredSignatureError: ("expired", "has expired"),
    jwt.ImmatureSignatureError: ("not_yet_valid", "is not valid yet"),
    jwt.InvalidAudienceError: ("audience", "is for another audience"),
    jwt.InvalidIssuerError: ("issuer", "is from another issuer"),
    jwt.InvalidAlgorithmError: ("algorithm", "is signed with an algorithm that its key may not be used with"),
    jwt.InvalidSignatureError: ("signature", "has a wrong signature"),
    jwt.MissingRequiredClaimError: ("claims", "lacks one of the claims exp, iss and aud"),
    jwt.PyJWTError: ("invalid", "is not valid"),
}  # the first that an error is: its reason in the metrics, and words for the client


class TokenError(CrossdockError):
    """A token that is refused, or a key set that cannot be used; `str()` says why, and `reason` in one word."""

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class PublicKey:
    key: Any  # of `cryptography`
    algorithms: tuple[str, ...]


@dataclass(frozen=True)
class TokenRules:
    issuer: str
    audience: str
    tenant_claim: str  # the claim that names the tenant


def read_key_set(content: bytes) -> dict[str, PublicKey]:
    """Returns the usable keys of a JSON Web Key Set (RFC 7517) by their id, which is empty if a key has none. Raises
    `TokenError`."""
    try:
        keys = {str(entry.get("kid", "")): _public_key(entry) for entry in json.loads(content)["keys"]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise TokenError("not a JSON Web Key Set") from None
    found = {key_id: key for key_id, key in keys.items() if key is not None}
    if not found:
        raise TokenError("a JSON Web Key Set without a key that can verify signatures")
    return found


def _public_key(entry: Mapping[str, Any]) -> PublicKey | None:
    """Returns None for a key that cannot verify signatures: one for encryption, a secret, or one of an unknown type."""
    allowed = _ALGORITHMS.get(entry.get("kty", ""), ())
    algorithms = tuple(name for name in allowed if name == entry.get("alg", name))
    if not algorithms or entry.get("use", "sig") != "sig":
        return None
    try:
        return PublicKey(jwt.PyJWK(dict(entry)).key, algorithms)
    except jwt.PyJWTError:
        return None


def key_id_of(token: str) -> str | None:
    """Returns the id of the key that has signed a token, empty if the token does not say, or None if it is no signed token.
    Raises `TokenError` for one that is too long."""
    if token.count(".") != 2:
        return None
    if len(token) > TOKEN_CHARS_MAX:
        raise TokenError(f"The token is longer than {TOKEN_CHARS_MAX} characters.", "too_long")
    try:
        header = jwt.get_unverified_header(token.partition(".")[0] + "..")  # decodes the header alone
    except jwt.PyJWTError:
        return None
    return str(header.get("kid", "")) if "alg" in header else None


def find_key(keys: Mapping[str, PublicKey], key_id: str) -> PublicKey | None:
    """A token without a key id is verified with the only key, if there is just one."""
    return keys.get(key_id) if key_id or len(keys) != 1 else next(iter(keys.values()))


def tenant_in(token: str, key: PublicKey, rules: TokenRules) -> str:
    """Returns the tenant that a token names. Raises `TokenError` unless the token was signed with this key, by this issuer, for
    this audience, and is valid at this time."""
    try:
        claims = jwt.decode(
            token,
            key.key,
            algorithms=key.algorithms,
            audience=rules.audience,
            issuer=rules.issuer,
            leeway=CLOCK_SKEW_S,
            options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
        )
    except jwt.PyJWTError as error:
        reason, fault = next(words for kind, words in _FAULTS.items() if isinstance(error, kind))
        raise TokenError(f"The token {fault}.", reason) from None
    tenant = claims.get(rules.tenant_claim)
    if not isinstance(tenant, str):
        raise TokenError(f"The token has no text in its claim {rules.tenant_claim!r}.", "tenant")
    return tenant
