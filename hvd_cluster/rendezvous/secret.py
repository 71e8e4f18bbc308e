"""The job's secret: made by the launcher, known to its workers, never printed or put on a command line."""

from __future__ import annotations

import hmac
import secrets

from hvd_cluster.errors import AuthenticationError

SECRET_BYTES = 32
_MAC_BYTES = 32


def new_secret() -> bytes:
    """A fresh secret of 32 random bytes for one job."""
    return secrets.token_bytes(SECRET_BYTES)


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
