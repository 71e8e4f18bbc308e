"""Cancelling the work of a cluster until it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_GIVE_UP_S = 60.0
#: Seconds between two attempts.
_AGAIN_S = 0.5


def cancel_until(ended: Callable[[float], bool], cancel: Callable[[], None]) -> bool:
    """Cancel repeatedly, until the work has ended or a minute is over.

    A single cancel may be lost: Spark ignores one that comes before the job was submitted, and Ray one that comes while
    the task begins.

    Args:
        ended: waits at most this many seconds for the end, and returns whether it came.
        cancel: cancels the work once.

    Returns:
        Whether it has ended.
    """
    give_up_s = time.monotonic() + _GIVE_UP_S
    while not ended(0.0):
        if time.monotonic() > give_up_s:
            return False
        try:
            cancel()
        except Exception as error:  # noqa: BLE001  a session or cluster that has gone has no tasks any more
            logger.debug("the work could not be cancelled: %s", error)
        ended(_AGAIN_S)
    return True
