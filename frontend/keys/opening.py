"""Let only callers with a key or a token in, and share their limits with the other frontends of the mesh."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.extension import FrontendParts, Run
from kvmesh.frontend.keys.guard import ApiKeyGuard, Doorkeeper
from kvmesh.frontend.keys.issuer import IssuerKeys
from kvmesh.frontend.keys.meters import Meters
from kvmesh.frontend.keys.sharing import LimitSharing
from kvmesh.frontend.keys.tokens import TokenRules, TokenVerifier
from kvmesh.mesh.discovery import standing_calls
from kvmesh.mesh.plane.server import PlaneServer
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import new_generation

MAX_SECRET_BYTES = 64
MIN_SECRET_BYTES = 16


def prepare(config: FrontendConfig) -> Run | None:
    """Read the keys. Raise ConfigError."""
    limits = LimitSharing(f"{config.name}-{new_generation():x}")
    meters = Meters(sharing=limits)
    guard = open_guard(config, meters)
    return None if guard is None else partial(guarded, guard, meters, limits)


@asynccontextmanager
async def guarded(guard: Doorkeeper, meters: Meters, limits: LimitSharing, parts: FrontendParts) -> AsyncIterator[None]:
    """Guard the API. The frontends of the mesh hold keys to their limits together."""
    config, discovery, plane = parts.config, parts.discovery, parts.plane
    parts.guard = guard
    server = PlaneServer(limits.handlers(), standing=standing_calls(discovery), credentials=plane.credentials)
    try:
        address = await server.start(config.host, config.limits_port, advertise_host=config.advertise_host)
        parts.follow(limits.run(discovery, plane, address), "share limits")
        if guard.issuer is not None:
            parts.follow(guard.issuer.run(), "fetch public keys")
        await limits.joined()
        yield
    finally:
        await server.close()
        await limits.close()
        meters.close()


def open_guard(config: FrontendConfig, meters: Meters) -> Doorkeeper | None:
    """Return what lets requests in; None if the API is open. Raise ConfigError."""
    secret, issuer = read_secret(config.salt_secret_file), open_issuer(config)
    keys = ApiKeyGuard(config.api_keys_file, meters=meters, secret=secret) if config.api_keys_file else None
    if issuer is None:
        return None if keys is None else Doorkeeper(keys, None)
    rules = TokenRules(config.jwt_issuer, config.jwt_audience, config.jwt_leeway_s, config.jwt_tenant_claim)
    return Doorkeeper(keys, TokenVerifier(issuer, rules, meters, secret=secret))


def open_issuer(config: FrontendConfig) -> IssuerKeys | None:
    """Return the keys of tokens' issuer; None if tokens are not taken. Raise ConfigError."""
    if not config.jwt_keys:
        return None
    if not (config.jwt_issuer and config.jwt_audience):
        raise ConfigError(
            "--jwt-keys is given without --jwt-issuer and --jwt-audience", hint="a token made for others must not count"
        )
    return IssuerKeys(config.jwt_keys)


def read_secret(path: str) -> bytes:
    """Return the secret in a file, b"" without one. Raise ConfigError."""
    if not path:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read --salt-secret-file {path}: {error.strerror}") from error
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"--salt-secret-file {path} has {len(secret)} bytes",
            hint=f"write {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} random ones: openssl rand -hex 32",
        )
    return secret
