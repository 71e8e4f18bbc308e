"""The job's secret: made by the launcher, known to its workers, never printed or put on a command line."""

from __future__ import annotations

import hmac
import secrets

from hvd_cluster.errors import AuthenticationError

SECRET_BYTES = 32
_MAC_BYTES = 32


def new_secret(*, encrypted: bool = False) -> bytes:
    """A fresh secret of 32 random bytes for one job.

    Args:
        encrypted: the job's connections are to be encrypted too; behind the 32 bytes comes the certificate for that.

    Raises:
        LaunchError: no certificate can be made here.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    if not encrypted:
        return secret
    from hvd_cluster.rendezvous.tls import new_certificate

    return secret + new_certificate()


def certificate_of(secret: bytes) -> bytes:
    """The certificate, with its key, for a job's connections; empty where they are signed only."""
    return secret[SECRET_BYTES:] if secret[SECRET_BYTES:].startswith(b"-----BEGIN") else b""


def sign(secret: bytes, label: str, content: bytes) -> bytes:
    """``content`` behind an HMAC-SHA256 over it and ``label``, for bytes that travel outside a signed channel.

    Args:
        secret: the job's secret.
        label: what the content is for; the reader gives the same, so that one content cannot be passed for another.
        content: what to sign.
    """
    return _mac(secret, label, content) + content


def verify(secret: bytes, label: str, signed: bytes) -> bytes:
    """The content that :func:`sign` signed.

    Raises:
        AuthenticationError: it was not signed with this secret and label.
    """
    mac, content = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, label, content)):
        raise AuthenticationError(f"{label!r} does not carry the job's signature")
    return content


def _mac(secret: bytes, label: str, content: bytes) -> bytes:
    # The label is hashed first, so that no label and content can be cut differently into the same bytes.
    return hmac.digest(hmac.digest(secret, label.encode(), "sha256"), content, "sha256")
