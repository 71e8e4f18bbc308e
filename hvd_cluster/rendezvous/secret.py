"""The job's secret: made by the launcher, known to its workers, never printed or put on a command line."""

from __future__ import annotations

import secrets

SECRET_BYTES = 32


def new_secret() -> bytes:
    """A fresh secret of 32 random bytes for one job."""
    return secrets.token_bytes(SECRET_BYTES)
