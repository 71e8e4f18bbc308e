"""What is left to do once a model is trained: a failure of it must not cost the model, or hide another error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from hvd_cluster.estimators.spec import error_text

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def as_warnings(text: str) -> Iterator[None]:
    """Log an exception of the context as a warning that begins with ``text``."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of a store, a tracking server or a cluster, which may raise anything
        logger.warning("%s: %s", text, error_text(error))
