"""Hold the certificate of this process, read it again when it changes, and use it in both directions of TLS.

A folder holds `ca.pem` (one or more certificates that sign the members'), `cert.pem` and `key.pem`. Connections made
after a change use the new files; no service is started again.
"""

import logging
import ssl
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from msgspec import Meta

from kvmesh.mesh.identity.names import Identity, MeshRole, expiry_of, identity_of
from kvmesh.mesh.identity.rights import EVERYBODY, check_peer
from kvmesh.mesh.watched_files import Stamp, WatchedFiles, stamp_of
from kvmesh.protocol.errors import ConfigError, ExpiredError, IdentityError

log = logging.getLogger(__name__)

CA, CA_KEY, CERT, KEY = "ca.pem", "ca-key.pem", "cert.pem", "key.pem"
ISSUED = "issued"  # folder of the members in the folder of a CA
WARN_DAYS = 7
DAY_S = 86_400.0
HANDSHAKE_S = 3.0
GOODBYE_S = 1.0  # for the peer to close too
EXPIRED = "it has expired"
_HINT = "`kvmesh certs issue` writes such a folder"

# The type of a service's setting.
MeshTls = Annotated[
    str, Meta(description="folder with ca.pem, cert.pem and key.pem: mutual TLS within the mesh; default: none")
]

MeshProbes = Annotated[
    bool, Meta(description="--mesh-tls: /health and /live also answer clients without a certificate, with ok or not")
]


class ShownIdentity(NamedTuple):
    """The other side of a connection, as its certificate names it."""

    identity: Identity
    expires_at_s: float  # since the epoch


def member_of(tls: ssl.SSLObject | ssl.SSLSocket) -> ShownIdentity:
    """Return who is at the other side, after the handshake. Raises IdentityError."""
    certificate = tls.getpeercert()
    if not certificate:
        raise IdentityError("the peer has shown no certificate", hint=_HINT)
    return ShownIdentity(identity_of(certificate), expiry_of(certificate))


class MeshContext(ssl.SSLContext):
    """A TLS context whose handshake also checks which member of the mesh the peer is."""

    check: Callable[[Identity], None]
    needs_member = True


class _CheckedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        _check(self)


class _CheckedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _check(self)


def _check(tls: ssl.SSLObject | ssl.SSLSocket) -> None:
    """End the handshake with an error that asyncio takes for one of TLS."""
    context = tls.context
    if not isinstance(context, MeshContext) or not (context.needs_member or tls.getpeercert()):
        return
    try:
        context.check(member_of(tls).identity)
    except IdentityError as error:
        raise ssl.SSLCertVerificationError(str(error)) from error


class _Loaded(NamedTuple):
    member: ShownIdentity  # this process
    server: MeshContext
    probed: MeshContext  # a server that also takes clients without a certificate
    clients: dict[frozenset[MeshRole], MeshContext]


class Credentials:
    """Make the TLS contexts of this process: with what it shows to others, and what it demands of them."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the folder. Raise ConfigError for one that cannot be used, which includes an expired certificate."""
        self.folder = folder
        self._roles: set[frozenset[MeshRole]] = set()
        self._files = WatchedFiles(
            partial(_look, folder), lambda: _load(folder, self._roles), f"TLS files of {folder}", clock
        )
        self._warned = False

    @property
    def member(self) -> ShownIdentity:
        """Return who this process is, by the files as they are now. Looks at the files at most every 2 seconds."""
        return self._files.read().member

    @property
    def identity(self) -> Identity:
        return self.member.identity

    def server_context(self, *, with_probes: bool = False) -> MeshContext:
        """Return the context for the next connection that is accepted.

        `with_probes` also takes clients without a certificate, such as probes of Kubernetes; whoever handles their
        requests has to look.
        """
        loaded = self._files.read()
        return loaded.probed if with_probes else loaded.server

    def client_context(self, roles: frozenset[MeshRole] = EVERYBODY) -> MeshContext:
        """Return the context for the next connection that is opened, to a member with one of `roles`.

        The same object as before means that the files have not changed. Raises ConfigError.
        """
        loaded = self._files.read()
        context = loaded.clients.get(roles)
        if context is None:
            self._roles.add(roles)
            context = loaded.clients[roles] = _client_context(self.folder, loaded.member.identity, roles)
        return context

    def dialing(self, roles: frozenset[MeshRole] = EVERYBODY) -> ssl.SSLContext:
        """Return a context for a client that keeps one for good: each of its handshakes uses the files of then."""
        return _DialingContext(self, roles)

    def ca_expires_at_s(self) -> float:
        """Return when the first of the trusted CAs expires, in seconds since the epoch."""
        trusted = self._files.read().server.get_ca_certs()
        return min(expiry_of(certificate) for certificate in trusted if isinstance(certificate, dict))

    def warn_before_expiry(self, now_s: float) -> None:
        """Warn in the log, once, when a certificate is near its end. `now_s` is in seconds since the epoch."""
        left_s, of = min(
            (self.member.expires_at_s - now_s, CERT),
            (self.ca_expires_at_s() - now_s, CA),
        )
        if left_s > WARN_DAYS * DAY_S:
            self._warned = False
        elif not self._warned:
            self._warned = True
            text = "the certificate in %s expires in %.1f days; renew it with `kvmesh certs rotate`"
            log.warning(text, self.folder / of, left_s / DAY_S)


class _DialingContext(ssl.SSLContext):
    """Passes each handshake on to the context of the present files."""

    _find: Callable[[], MeshContext]

    def __new__(cls, credentials: Credentials, roles: frozenset[MeshRole]) -> "_DialingContext":
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._find = partial(credentials.client_context, roles)
        return made

    def wrap_bio(self, *args: Any, **settings: Any) -> ssl.SSLObject:
        return self._find().wrap_bio(*args, **settings)

    def wrap_socket(self, *args: Any, **settings: Any) -> ssl.SSLSocket:
        return self._find().wrap_socket(*args, **settings)


def open_credentials(folder: str) -> Credentials | None:
    """Return the credentials of a setting; None where it is empty and the mesh is open. Raises ConfigError."""
    return Credentials(Path(folder)) if folder else None


def issued_folder(ca: Path, role: MeshRole, name: str) -> Path:
    """Return the folder of a member in the folder of its CA."""
    return ca / ISSUED / f"{role}-{name}"


def _look(folder: Path) -> Stamp:
    try:
        return stamp_of([str(folder / name) for name in (CA, CERT, KEY)])
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}", hint=_HINT) from error


def _load(folder: Path, roles: set[frozenset[MeshRole]]) -> _Loaded:
    """Read a folder. Raises ConfigError."""
    check_key(folder / KEY)
    server, client = _server_context(folder), _context(folder, ssl.PROTOCOL_TLS_CLIENT)
    member = _prove(folder, server, client)
    probed = _server_context(folder)
    probed.verify_mode, probed.needs_member = ssl.CERT_OPTIONAL, False
    server.check = probed.check = partial(check_peer, own=member.identity, roles=EVERYBODY)
    return _Loaded(member, server, probed, {of: _client_context(folder, member.identity, of) for of in roles})


def check_key(path: Path) -> None:
    """Raise ConfigError if the key cannot be read, or if every user of this machine can read or change it."""
    try:
        mode = path.stat().st_mode
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=_HINT) from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"every user of this machine can read or change the key {path}", hint="chmod o-rw it")


def _server_context(folder: Path) -> MeshContext:
    context = _context(folder, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # connections last; a resumed session would keep a right that has been taken away
    return context


def _client_context(folder: Path, own: Identity, roles: frozenset[MeshRole]) -> MeshContext:
    context = _context(folder, ssl.PROTOCOL_TLS_CLIENT)
    context.check = partial(check_peer, own=own, roles=roles)
    return context


def _context(folder: Path, kind: int) -> MeshContext:
    """Return a context with the files of a folder. Raises ConfigError."""
    context = MeshContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslobject_class, context.sslsocket_class = _CheckedObject, _CheckedSocket
    context.check_hostname = False  # a member is named by its URI: addresses of workers change
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(folder / CERT, folder / KEY, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{CERT} and {KEY} in {folder} cannot be used together: {getattr(error, 'reason', None) or error}",
            hint=_HINT,
        ) from error
    try:
        context.load_verify_locations(folder / CA)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{folder / CA} holds no certificate: {getattr(error, 'reason', None) or error}", hint=_HINT
        ) from error
    return context


def _no_password() -> NoReturn:
    raise ConfigError("the TLS key is encrypted", hint="take one that is not: nobody can be asked here")


def _prove(folder: Path, server: MeshContext, client: MeshContext) -> ShownIdentity:
    """Return who the certificate names, by a handshake of this process with itself. Raises ConfigError.

    It fails just as that of another member would: for an expired certificate, or one that `ca.pem` has not signed.
    """
    seen: list[ShownIdentity] = []
    client.check = server.check = lambda identity: None
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(back, there, server_side=False)
    answerer = server.wrap_bio(there, back, server_side=True)
    try:
        for side in (caller, answerer, caller, answerer):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        seen.append(member_of(caller))
    except ssl.SSLCertVerificationError as error:
        why = verify_problem(error)
        kind = ExpiredError if why == EXPIRED else ConfigError
        raise kind(f"the certificate in {folder} does not count: {why}", hint=_HINT) from error
    except ssl.SSLError as error:
        raise ConfigError(f"the files in {folder} cannot be used: {error.reason or error}", hint=_HINT) from error
    except IdentityError as error:
        raise ConfigError(f"the certificate in {folder} names nobody: {error}", hint=_HINT) from error
    return seen[0]


def verify_problem(error: ssl.SSLCertVerificationError) -> str:
    """Return why a certificate was refused, in words."""
    text: Any = getattr(error, "verify_message", "") or str(error)
    if text == "certificate has expired":
        return EXPIRED
    if "self-signed certificate" in text or "unable to get local issuer" in text:
        return f"no certificate in {CA} has signed it ({text})"
    return str(text)
