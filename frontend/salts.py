"""Make the salts of callers' prompts, so that no caller can name a salt of another tenant. Pure."""

import hashlib
import re

_SALT_BYTES = 16
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
