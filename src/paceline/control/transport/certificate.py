"""The key and the certificate of a job, derived from its secret.

Every process of a job derives the same Ed25519 key and the same self-signed certificate, so that
there is no certificate to hand out, to renew or to remove. Both ends of a connection present it
and accept nothing else. The certificate has fixed names and dates: clocks of hosts may differ, and
the secret lives as long as the job.

The package `cryptography` takes about 45 ms to import. It is imported here, when the first
connection leaves the machine, and nowhere else.
"""

from __future__ import annotations

import datetime
import functools
import os
import ssl
from typing import NamedTuple

from paceline.control.transport.auth import hkdf
from paceline.errors import SetupError

_NAME = "paceline job"
_NOT_BEFORE = datetime.datetime(2000, 1, 1)
_NOT_AFTER = datetime.datetime(9999, 12, 31)


class TlsContexts(NamedTuple):
    """What both sides of a connection need, and the only certificate that they accept."""

    caller: ssl.SSLContext
    listener: ssl.SSLContext
    certificate: bytes  # DER


@functools.lru_cache(maxsize=4)
def tls_contexts(secret: bytes) -> TlsContexts:
    """Return the TLS contexts of the job with this secret; SetupError if TLS cannot be used."""
    try:
        key, certificate = _derive(secret)
        caller, listener = (
            _context(protocol, key, certificate)
            for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
    except (ImportError, ssl.SSLError) as error:
        raise SetupError(
            f"connections to other hosts cannot be encrypted: {error}; install the package"
            " `cryptography`, or set PACELINE_ENCRYPT=off in every process of the job"
        ) from error
    listener.num_tickets = 0  # no resumption: every connection has a key exchange of its own
    return TlsContexts(caller, listener, ssl.PEM_cert_to_DER_cert(certificate))


def _derive(secret: bytes) -> tuple[str, str]:
    """Return the private key and the certificate, both as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = Ed25519PrivateKey.from_private_bytes(hkdf(secret, b"", b"paceline tls key"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)  # Ed25519 signatures are deterministic
    )
    private: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public: bytes = certificate.public_bytes(Encoding.PEM)
    return private.decode(), public.decode()


def _context(protocol: int, key: str, certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate names the job; the handshake names the process
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    # Python loads a key only from a file: this one has no name and never reaches a disk.
    with open(os.memfd_create("paceline-key", os.MFD_CLOEXEC), "wb") as file:
        file.write((key + certificate).encode())
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
