"""What this process's threads wait for outside of Python, such as files.

Reports of hangs name it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

#: How long the watcher sleeps at most while there is something to watch.
_MAX_SLEEP_S = 1.0

#: For each thread, what it does, since when, and whether to warn of it.
_activities: dict[int, tuple[str, float, bool]] = {}
#: For this process, and for those that it was forked from: wakes the thread that watches the activities.
_wakeups: dict[int, threading.Event] = {}


@contextmanager
def activity(text: str, *, warns: bool = True) -> Iterator[None]:
    """Name what this thread does in the block, e.g. "reading s3://b/x".

    Args:
        text: its name.
        warns: log a warning if it takes longer than ``HOROVOD_STALL_CHECK_TIME_SECONDS``. One thread watches all.
    """
    thread = threading.get_ident()
    before = _activities.get(thread)
    _begin(thread, (text, time.monotonic(), warns))
    try:
        yield
    finally:
        if before is None:
            del _activities[thread]
        else:
            _begin(thread, before)


def describe_activities() -> list[str]:
    """What the threads of this process do.

    For example "hvd-reader-0 has been reading s3://b/x for 58.1 s".
    """
    now_s = time.monotonic()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"{names[thread]} has been {text} for {now_s - since_s:.1f} s"
        for thread, (text, since_s, _) in list(_activities.items())
        if thread in names
    ]


def _begin(thread: int, entry: tuple[str, float, bool]) -> None:
    _activities[thread] = entry
    if entry[2]:
        wakeup = _wakeups.get(os.getpid()) or _start_watcher()
        if not wakeup.is_set():
            wakeup.set()


def _start_watcher() -> threading.Event:
    wakeup = threading.Event()
    first = _wakeups.setdefault(os.getpid(), wakeup)
    if first is wakeup:
        with suppress(RuntimeError):  # the interpreter ends: what is written now is not watched
            threading.Thread(target=_watch, args=(wakeup,), name="hvd-activities", daemon=True).start()
    return first


def _watch(wakeup: threading.Event) -> None:
    """Warn once of each activity that takes long; sleep while there is none."""
    warned: set[tuple[int, float]] = set()
    while True:
        wakeup.wait()
        time.sleep(_warn_of_late(warned))
        wakeup.clear()
        if any(warns for _, _, warns in list(_activities.values())):
            wakeup.set()


def _warn_of_late(warned: set[tuple[int, float]]) -> float:
    """Warn of newly late activities; returns after how many seconds to look again."""
    try:
        settings = Settings.from_env()
    except ValueError:  # init() reports it
        settings = Settings()
    watched = [(thread, since_s, text) for thread, (text, since_s, warns) in list(_activities.items()) if warns]
    warned &= {(thread, since_s) for thread, since_s, _ in watched}
    sleep_s = min(_MAX_SLEEP_S, settings.stall_warning_s)
    for thread, since_s, text in watched:
        left_s = since_s + settings.stall_warning_s - time.monotonic()
        if left_s > 0:
            sleep_s = min(sleep_s, left_s)
        # A forked child has inherited the activities of threads that it does not have.
        elif (thread, since_s) not in warned and thread in sys._current_frames() and not settings.stall_check_disable:
            warned.add((thread, since_s))
            logger.warning("%s has taken %g s and is not done", text, settings.stall_warning_s)
    return sleep_s
