"""Make the certificates of a mesh: its CA, and the folders of its members. Import it where they are made alone."""

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvmesh.mesh.identity.credentials import CA, CA_KEY, CERT, ISSUED, KEY
from kvmesh.mesh.identity.names import SCHEME, Identity, check_name, identity_of_uri
from kvmesh.protocol.errors import ConfigError, IdentityError

CA_DAYS = 3650.0
MEMBER_DAYS = 90.0
_EARLY = datetime.timedelta(minutes=5)  # clocks of hosts differ


class Authority(NamedTuple):
    """The CA of a mesh, as it stands in its folder."""

    namespace: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    bundle: bytes  # what members trust: this CA first, and the one before it while the CA is being changed


class Issued(NamedTuple):
    """A member's certificate, as it stands in a folder."""

    folder: Path
    identity: Identity
    hosts: tuple[str, ...]
    expires_at_s: float
    certificate: x509.Certificate


def init(folder: Path, namespace: str, days: float = CA_DAYS) -> None:
    """Make a CA in a new folder. Raises ConfigError, IdentityError."""
    check_name(namespace, "namespace")
    if (folder / CA_KEY).exists():
        raise ConfigError(f"there is a CA in {folder} already", hint="`kvmesh certs rotate --roll-ca begin` changes it")
    certificate, key = _new_ca(namespace, days)
    _make(folder, 0o700)
    _write(folder / CA_KEY, _pem_of_key(key), 0o600)
    _write(folder / CA, _pem(certificate), 0o644)


def issue(ca: Path, identity: Identity, folder: Path, hosts: Sequence[str] = (), days: float = MEMBER_DAYS) -> None:
    """Write the folder of a member: a new key, its certificate, its trust. Raises ConfigError, IdentityError."""
    authority = read_authority(ca)
    if identity.namespace != authority.namespace:
        raise IdentityError(
            f"{identity} is not of this CA's mesh", hint=f"its namespace is {authority.namespace}; make another CA"
        )
    check_name(identity.name, "name")
    certificate, key = _new_member(authority, identity, hosts, days)
    _make(folder, 0o755)
    # The order is that in which a reader can do with a part of them: it takes none until the key fits.
    _write(folder / CA, authority.bundle, 0o644)
    _write(folder / KEY, _pem_of_key(key), 0o600)
    _write(folder / CERT, _pem(certificate), 0o644)


def rotate(ca: Path, folders: Iterable[Path], within_s: float, now_s: float, days: float = MEMBER_DAYS) -> list[Path]:
    """Renew the certificates that expire within `within_s`, or that the CA's newest certificate has not signed.

    Each folder also gets the present trust of the CA. Return the folders with a new certificate. Raises ConfigError.
    """
    authority = read_authority(ca)
    renewed = []
    for folder in folders:
        member = read_member(folder)
        if member.expires_at_s - now_s <= within_s or not _has_signed(authority.certificate, member.certificate):
            issue(ca, member.identity, folder, member.hosts, days)
            renewed.append(folder)
        else:
            _write(folder / CA, authority.bundle, 0o644)
    return renewed


def begin_roll(ca: Path, folders: Iterable[Path], days: float = CA_DAYS) -> None:
    """Make a new CA beside the old one, and let all trust both. Members keep their certificates. Raises ConfigError."""
    authority = read_authority(ca)
    if authority.bundle.count(b"BEGIN CERTIFICATE") > 1:
        raise ConfigError(f"the CA in {ca} is being changed already", hint="finish it with --roll-ca end")
    certificate, key = _new_ca(authority.namespace, days)
    bundle = _pem(certificate) + authority.bundle
    for folder in folders:
        _write(folder / CA, bundle, 0o644)
    _write(ca / CA, bundle, 0o644)
    _write(ca / CA_KEY, _pem_of_key(key), 0o600)


def end_roll(ca: Path, folders: Sequence[Path]) -> None:
    """Let nobody trust the old CA any more. Raises ConfigError while a member has a certificate of it."""
    authority = read_authority(ca)
    for folder in folders:
        if not _has_signed(authority.certificate, read_member(folder).certificate):
            raise ConfigError(f"the certificate in {folder} is of the old CA", hint="run `kvmesh certs rotate` first")
    for folder in (*folders, ca):
        _write(folder / CA, _pem(authority.certificate), 0o644)


def read_authority(folder: Path) -> Authority:
    """Raises ConfigError."""
    try:
        bundle = (folder / CA).read_bytes()
        certificate = x509.load_pem_x509_certificates(bundle)[0]
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        uri = _uris(certificate)[0]
    except OSError as error:
        raise ConfigError(
            f"cannot read the CA in {folder}: {error.strerror}", hint="`kvmesh certs init` makes one"
        ) from error
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"there is no CA in {folder}: {error}", hint="`kvmesh certs init` makes one") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{CA_KEY} in {folder} does not belong to the first certificate of {CA}")
    return Authority(uri.removeprefix(SCHEME), certificate, key, bundle)


def read_member(folder: Path) -> Issued:
    """Return what stands in the folder of a member. Raises ConfigError, IdentityError."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / CERT).read_bytes())
        uri = _uris(certificate)[0]
    except OSError as error:
        raise ConfigError(f"cannot read {folder / CERT}: {error.strerror}") from error
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{folder / CERT} is no certificate of a member: {error}") from error
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return Issued(folder, identity_of_uri(uri), tuple(hosts), certificate.not_valid_after_utc.timestamp(), certificate)


def members_of(ca: Path) -> list[Path]:
    """Return the folders of the members that were issued into the folder of the CA."""
    return sorted(path.parent for path in (ca / ISSUED).glob(f"*/{CERT}"))


# --- certificates -------------------------------------------------------------------------------------


def _new_ca(namespace: str, days: float) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = _new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvmesh {namespace} CA"[:64])])
    builder = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(SCHEME + namespace)]), critical=False
        )
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder.sign(key, SHA256()), key


def _new_member(
    authority: Authority, identity: Identity, hosts: Sequence[str], days: float
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = _new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{identity.role} {identity.name}"[:64])])
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = [x509.UniformResourceIdentifier(identity.uri), *map(_host_name, hosts)]
    issuer = x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key())
    builder = (
        _builder(name, authority.certificate.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer),
            critical=False,
        )
    )
    return builder.sign(authority.key, SHA256()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _has_signed(ca: x509.Certificate, member: x509.Certificate) -> bool:
    try:
        member.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _uris(certificate: x509.Certificate) -> list[str]:
    """Raises ValueError."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise ValueError("it has no alternative names") from error
    return list(names.get_values_for_type(x509.UniformResourceIdentifier))


# --- files -------------------------------------------------------------------------------------------


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _make(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}", hint="name another folder") from error


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file as a whole: whoever reads it sees the old or the new content. Raises ConfigError."""
    part = path.with_name(f".{path.name}.new")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="name another folder") from error
