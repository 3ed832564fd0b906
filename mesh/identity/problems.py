"""Say why a handshake has failed, and what to do. Pure."""

import ssl

from kvmesh.protocol.errors import IdentityError

_ALERTS = {  # what the peer thinks of our certificate, by OpenSSL's names of TLS alerts
    "CERTIFICATE_EXPIRED": ("this process's certificate has expired", "renew it with `kvmesh certs rotate`"),
    "UNKNOWN_CA": ("the peer's CA has not signed this process's certificate", "issue both with one CA"),
    "CERTIFICATE_REQUIRED": ("the peer wants a certificate, and got none", "start this process with --mesh-tls"),
    "BAD_CERTIFICATE": ("the peer does not take this process's certificate", "see the peer's log"),
}
_SETS = "it has no --mesh-tls, or trusts another CA: see its log"


def handshake_problem(error: OSError) -> tuple[str, str]:
    """Return why a handshake failed, from this side, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_problem(error)
    reason = str(getattr(error, "reason", None) or "")
    for name, problem in _ALERTS.items():
        if name in reason:
            return problem
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer has shown no certificate", "start it with --mesh-tls"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE"):
        return "the peer does not speak TLS 1.3", "start it with --mesh-tls"
    if isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "the peer hung up during the handshake", _SETS
    return f"the handshake failed: {reason or error or type(error).__name__}", _SETS


def _certificate_problem(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    code, text = getattr(error, "verify_code", 0), getattr(error, "verify_message", "")
    if not code:  # of mesh/identity/credentials.py: the certificate counts, its member does not
        return str(error), ""
    if text == "certificate has expired":
        return "the peer's certificate has expired", "renew it with `kvmesh certs rotate`"
    return f"no CA in our ca.pem has signed the peer's certificate ({text})", "issue both with one CA"


def refused_by(address: str, error: OSError, *, is_expired: bool) -> IdentityError:
    """Return the error of a connection that could not be made because of its handshake.

    `is_expired`: the certificate of this process is. A peer that refuses it hangs up, and does not always say why.
    """
    why, hint = _ALERTS["CERTIFICATE_EXPIRED"] if is_expired else handshake_problem(error)
    return IdentityError(f"cannot connect to {address}: {why}", hint=hint)
