"""Verify JWTs offline: who signed a token, for whom, until when, and what its claims allow."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvmesh.frontend.hints import MAX_PRIORITY
from kvmesh.frontend.keys.budget import KeyLimits
from kvmesh.frontend.keys.caller import KeyCaller
from kvmesh.frontend.keys.issuer import IssuerKeys
from kvmesh.frontend.keys.jwks import PublicKey
from kvmesh.frontend.keys.keyfile import Pattern
from kvmesh.frontend.keys.meters import Meters
from kvmesh.mesh.http.errors import UnauthorizedError
from kvmesh.protocol.errors import ConfigError, OverloadedError
from kvmesh.protocol.messages import UNREADABLE, KeyLimit

MAX_TOKEN_CHARS = 8192
MAX_CACHED = 10_000  # tokens that have been verified
CLAIM = "kvmesh"
_REFUSED = "Incorrect API key provided: the token"


class Allowed(Struct, frozen=True):
    """Hold what the claim `kvmesh` of a token allows; each field is as in the file of keys."""

    tenant: Annotated[str, Meta(pattern=r"^[\x21-\x7e]{0,256}$")] = ""
    models: Annotated[tuple[Pattern, ...], Meta(max_length=1000)] = ()
    max_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    requests_per_minute: KeyLimit = None
    tokens_per_minute: KeyLimit = None
    streams: KeyLimit = None


class TokenRules(NamedTuple):
    """Says which tokens count."""

    issuer: str
    audience: str
    leeway_s: float = 30.0
    tenant_claim: str = "tenant"  # where the claim `kvmesh` names none


class _Verified(NamedTuple):
    caller: KeyCaller
    begins: float
    ends: float


class TokenVerifier:
    """Verifies tokens and remembers those that were right until they expire."""

    def __init__(
        self,
        keys: IssuerKeys,
        rules: TokenRules,
        meters: Meters,
        *,
        secret: bytes = b"",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raise ConfigError if the package for signatures is missing."""
        try:
            import cryptography  # noqa: F401
            import jwt  # noqa: F401
        except ImportError as error:
            raise ConfigError("--jwt-keys needs PyJWT and cryptography", hint="pip install 'kvmesh[jwt]'") from error
        self.issuer = keys
        self._rules = rules
        self._meters = meters
        self._secret = secret
        self._wall_clock = wall_clock
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()
        self._of_keys: Mapping[str, PublicKey] = {}  # with which these were verified

    def caller(self, token: str) -> KeyCaller:
        """Return whom a token stands for. Raise UnauthorizedError, OverloadedError."""
        keys = self.issuer.keys
        if keys is not self._of_keys:
            self._verified.clear()  # one of them may have been withdrawn
            self._of_keys = keys
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        found = self._verified.get(digest)
        if found is None:
            found = self._verify(token, keys)
            self._verified[digest] = found
            if len(self._verified) > MAX_CACHED:
                self._verified.popitem(last=False)
        now = self._wall_clock()
        if now >= found.ends + self._rules.leeway_s:
            self._verified.pop(digest, None)
            raise UnauthorizedError(f"{_REFUSED} has expired", hint="ask its issuer for a new one")
        if now < found.begins - self._rules.leeway_s:
            raise UnauthorizedError(f"{_REFUSED} does not count yet", hint="compare the clocks")
        return found.caller

    def _verify(self, token: str, keys: Mapping[str, PublicKey]) -> _Verified:
        import jwt

        if len(token) > MAX_TOKEN_CHARS:
            raise UnauthorizedError(
                f"{_REFUSED} has {len(token)} characters", hint=f"at most {MAX_TOKEN_CHARS} are read"
            )
        try:
            key = self._key(jwt.get_unverified_header(token), keys)
            claims = jwt.decode(
                token,
                key=key.key,
                algorithms=[key.algorithm],
                issuer=self._rules.issuer,
                audience=self._rules.audience,
                options={
                    "require": ["exp", "iss", "aud", "sub"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
            ends, begins = float(claims["exp"]), float(claims.get("nbf", 0))
        except (jwt.exceptions.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UnauthorizedError(
                f"{_REFUSED} cannot be verified ({type(error).__name__})",
                hint="send one of the issuer that this mesh trusts, made for this audience",
            ) from None
        return _Verified(self._caller(claims), begins, ends)

    def _key(self, header: Mapping[str, Any], keys: Mapping[str, PublicKey]) -> PublicKey:
        """Return the key that a token names. A token without a name takes the only one."""
        kid = header.get("kid")
        found = keys.get(kid) if isinstance(kid, str) else next(iter(keys.values())) if len(keys) == 1 else None
        if found is not None:
            return found
        if self.issuer.want() or not self.issuer.is_known:
            raise OverloadedError("the keys of the token's issuer are being fetched", retry_after_s=1)
        raise UnauthorizedError(
            f"{_REFUSED} is signed with a key that is not known", hint="ask its issuer for a new one"
        )

    def _caller(self, claims: Mapping[str, Any]) -> KeyCaller:
        try:
            allowed = msgspec.convert(claims.get(CLAIM, {}), Allowed)
            named = allowed.tenant or claims.get(self._rules.tenant_claim, "")
            tenant = msgspec.convert({"tenant": named}, Allowed).tenant
        except UNREADABLE:
            raise UnauthorizedError(f"{_REFUSED} has claims that cannot be read", hint="see docs/api.md") from None
        name = "\0".join((self._rules.issuer, str(claims["sub"])))
        owner = hashlib.sha256(f"token {name}".encode(errors="surrogatepass")).hexdigest()
        limits = KeyLimits(allowed.requests_per_minute, allowed.tokens_per_minute, allowed.streams)
        usage, meter = self._meters.of_token(f"token-{owner}", limits)
        return KeyCaller(
            usage,
            tenant=tenant,
            models=allowed.models,
            max_priority=allowed.max_priority,
            meter=meter,
            owner=owner,
            secret=self._secret,
        )
