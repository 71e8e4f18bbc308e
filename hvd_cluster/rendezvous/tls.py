"""TLS below the signed conversation, without any input or output: for jobs whose connections have to be encrypted.

A job has one certificate of its own, self-signed, made by its launcher; its key is a part of the job's secret. Both
ends show that certificate and accept no other (mutual TLS 1.3), so it needs no name, no authority and no long life.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import ssl
import subprocess

from hvd_cluster.errors import AuthenticationError, LaunchError

_NAME = "hvd_cluster job"
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which the ssl module does not name
#: Nobody looks at it; a certificate has to have one.
_VALID_DAYS = 3650
_READ_BYTES = 1 << 18


class TlsLayer:
    """One end of a TLS connection. Feed it what arrived; send what :meth:`pending` returns.

    Args:
        certificate: what :func:`new_certificate` returned.
        accepts: True for the end that accepted the connection.
    """

    def __init__(self, certificate: bytes, *, accepts: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _context(certificate, accepts)
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)
        self._early = bytearray()
        self._ready = False
        self._shake_hands()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt ``data``; before the handshake is done it waits for that."""
        if self._ready:
            self._tls.write(data)
        else:
            self._early += data

    def feed(self, data: bytes | memoryview) -> bytes:
        """Take bytes that arrived; return those that they were before encryption.

        Raises:
            AuthenticationError: the peer does not speak TLS, or has not the job's certificate.
        """
        self._incoming.write(data)
        try:
            self._shake_hands()
            plain = bytearray()
            if self._ready:
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                    while piece := self._tls.read(_READ_BYTES):
                        plain += piece
            return bytes(plain)
        except ssl.SSLError as error:
            raise AuthenticationError(
                f"the peer does not encrypt its messages with the certificate of this job: {error.reason or error}"
            ) from None

    def pending(self) -> bytes:
        """What has to be sent."""
        return self._outgoing.read()

    def _shake_hands(self) -> None:
        if self._ready:
            return
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self._ready = True
            if self._early:
                self._tls.write(self._early)
                self._early.clear()


@functools.lru_cache(maxsize=16)
def _context(certificate: bytes, accepts: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # No other certificate is accepted, and it is gone with the job: the clocks of the hosts need not agree.
    context.verify_flags |= _NO_CHECK_TIME
    context.load_verify_locations(cadata=certificate[certificate.index(b"-----BEGIN CERTIFICATE") :].decode())
    # Python takes a key from a file only: one that has no name, and is gone when it is closed.
    descriptor = os.memfd_create("hvd-certificate")
    with open(descriptor, "wb") as file:  # noqa: PTH123 - it has no path
        file.write(certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    return context


def new_certificate() -> bytes:
    """A fresh key and a certificate signed with it, as PEM text.

    Made by the package ``cryptography``, or else by the program ``openssl``.

    Raises:
        LaunchError: there is neither.
    """
    try:
        return _by_package()
    except ImportError:
        pass
    try:
        return _by_program()
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(
            f"connections are to be encrypted, but no certificate can be made for the job: {error}. Install the "
            "package cryptography (pip install cryptography), or the program openssl, where the job is started"
        ) from error


def _by_package() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = dt.datetime.now(dt.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=_VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private: bytes = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public: bytes = certificate.public_bytes(pem)
    return private + public


def _by_program() -> bytes:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = subprocess.run(
        ["openssl", "req", "-x509", *curve, "-days", str(_VALID_DAYS), "-subj", f"/CN={_NAME}", "-keyout", "-"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    return made.stdout
