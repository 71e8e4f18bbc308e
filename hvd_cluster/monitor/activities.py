"""What the threads of this process wait for outside of Python, such as files; named in reports of hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

#: For each thread, what it does, and since when.
_activities: dict[int, tuple[str, float]] = {}


@contextmanager
def activity(text: str, *, warns: bool = True) -> Iterator[None]:
    """Name what this thread does in the block, e.g. "reading s3://b/x".

    Args:
        text: its name.
        warns: log a warning if it takes longer than ``HOROVOD_STALL_CHECK_TIME_SECONDS``. This costs a thread.
    """
    thread = threading.get_ident()
    before = _activities.get(thread)
    _activities[thread] = (text, time.monotonic())
    settings = Settings.from_env() if warns else None
    timer = None
    if settings is not None and not settings.stall_check_disable:
        timer = threading.Timer(settings.stall_warning_s, _warn, (text, settings.stall_warning_s))
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        if before is None:
            del _activities[thread]
        else:
            _activities[thread] = before


def describe_activities() -> list[str]:
    """What the threads of this process do, e.g. "hvd-reader-0 has been reading s3://b/x for 58.1 s"."""
    now_s = time.monotonic()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"{names[thread]} has been {text} for {now_s - since_s:.1f} s"
        for thread, (text, since_s) in list(_activities.items())
        if thread in names
    ]


def _warn(text: str, after_s: float) -> None:
    logger.warning("%s has taken %g s and is not done", text, after_s)
