"""Make the salts of callers' prompts, so that no caller can name a salt of another tenant. Pure."""

import hashlib
import re
from pathlib import Path

from kvmesh.protocol.errors import ConfigError

_SALT_BYTES = 16
MAX_SECRET_BYTES = 64
MIN_SECRET_BYTES = 16
_PLAIN = re.compile(r"[A-Za-z0-9_.:+=-]{1,128}")


def own_salt(tenant: str, asked: str | None, secret: bytes = b"") -> str | None:
    """Return the salt of a prompt of `tenant` that asks for the salt `asked`.

    It is a digest of both, so a client cannot write what another tenant's prompts are salted with. With a secret it
    cannot be computed by clients either. Callers without a tenant that ask for no salt share their blocks.
    """
    if not tenant and asked is None:
        return None
    said = b"" if asked is None else b"\1" + asked.encode(errors="surrogatepass")
    digest = hashlib.blake2b(digest_size=_SALT_BYTES, key=secret, person=b"kvmesh salt")
    digest.update(f"{len(tenant)} {tenant} ".encode() + said)
    return digest.hexdigest()


def open_salt(asked: str | None) -> str | None:
    """Return the salt of a caller without a key: what it asks for, or a digest of that if it has unusual characters.

    KV connectors of engines write salts into keys and file names, where `@`, `/` or NUL would mean something else.
    """
    return asked if asked is None or _PLAIN.fullmatch(asked) else own_salt("", asked)


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
