"""``horovod.runner.common.util.secret``: keys, and digests of messages."""

from __future__ import annotations

import hmac

from hvd_cluster.rendezvous.secret import new_secret

#: Bytes of a digest.
DIGEST_LENGTH = 32
#: The variable that has a job's key in Horovod. Our launchers do not set it.
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """32 random bytes."""
    return new_secret()


def compute_digest(key: bytes, message: bytes) -> bytes:
    """The HMAC-SHA256 of ``message``."""
    return hmac.digest(key, message, "sha256")


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether ``digest`` is the digest of ``message``."""
    return hmac.compare_digest(compute_digest(key, message), digest)
