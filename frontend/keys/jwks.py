"""Read sets of public keys (JWKS), and choose the one that a token names. Pure, except that PyJWT reads the keys."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE

MAX_KEYS = 100
MAX_BYTES = 1 << 20
MIN_RSA_BITS = 2048
_ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}


class PublicKey(NamedTuple):
    """A key with the one algorithm that it may be used with: a token never chooses how it is verified."""

    algorithm: str
    key: Any  # of `cryptography`


def read_jwks(data: bytes, source: str) -> Mapping[str, PublicKey]:
    """Return the keys for signatures by their ids. Raise ConfigError if there is none.

    Keys of other kinds are left out, and symmetric ones above all: whoever can read them could sign.
    """
    try:
        content = msgspec.json.decode(data, type=dict[str, Any])
        entries = [entry for entry in content["keys"] if isinstance(entry, dict)][:MAX_KEYS]
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise ConfigError(
            f"{source} is no set of keys (JWKS)", hint="give the issuer's jwks_uri or its content"
        ) from error
    found = {str(entry.get("kid", "")): key for entry in entries if (key := _read_key(entry)) is not None}
    if not found:
        raise ConfigError(
            f"{source} has no key that can be used", hint="RSA of 2048 bits or more, EC P-256 and Ed25519 are known"
        )
    return found


def _read_key(entry: dict[str, Any]) -> PublicKey | None:
    kty = entry.get("kty")
    curve = None if kty == "RSA" else entry.get("crv")
    algorithm = _ALGORITHMS.get((kty, curve)) if isinstance(curve, str | None) and isinstance(kty, str) else None
    if algorithm is None or entry.get("use", "sig") != "sig" or entry.get("alg", algorithm) != algorithm:
        return None
    import jwt  # an extra, which only those who take tokens need

    public = {name: value for name, value in entry.items() if name in ("kty", "crv", "n", "e", "x", "y")}
    try:
        key = jwt.PyJWK(public, algorithm=algorithm).key
    except (jwt.exceptions.PyJWKError, jwt.exceptions.InvalidKeyError, ValueError, TypeError):
        return None
    if algorithm == "RS256" and key.key_size < MIN_RSA_BITS:
        return None
    return PublicKey(algorithm, key)
