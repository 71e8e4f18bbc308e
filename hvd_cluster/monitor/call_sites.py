"""Where the training thread is while other ranks wait for it.

That is the line of the user, what it calls, and which activity. A sample costs some microseconds, so the text is made
only when it is reported.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

from hvd_cluster.monitor.stacks import WORKER, code_name, library_path, reader_calls, shown_path
from hvd_cluster.monitor.step_clock import COMPUTE, DATA, OPTIMIZER, OTHER, SAVE, StepClock

#: What a call means, if the clock does not know: a part of the path of its file, the beginning of its name.
_MEANING = (
    ("torch/utils/data/", "", DATA),
    ("hvd_cluster/data/reading/", "", DATA),
    ("hvd_cluster/data/files/", "write", SAVE),
    ("torch/serialization.py", "save", SAVE),
    ("torch/serialization.py", "_save", SAVE),
    ("torch/distributed/checkpoint/", "", SAVE),
    ("safetensors/", "save", SAVE),
    ("keras/src/saving/", "save", SAVE),
    ("torch/optim/", "", OPTIMIZER),
)
#: Functions that only time what they call, or call it in a context.
_WRAPPERS = ("hvd_cluster/monitor/timed_calls.py", "hvd_cluster/torch/timed_calls.py", "contextlib.py")
#: More different places are not counted.
_MAX_SITES = 512


class CallSite(NamedTuple):
    """A place in the user's program, and what the thread does or waits for there."""

    #: What is called and where, e.g. "DataLoader.__next__ (train.py:41)".
    text: str
    activity: int


class CallSites:
    """Counts where the training thread is.

    Args:
        clock: names that thread and its activity.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        #: By the innermost code of the user, its line, the code that it calls, and the activity.
        self._counts: dict[tuple[CodeType | None, int, CodeType | None, int], int] = {}

    def sample(self) -> None:
        """Look once; called from another thread."""
        frame = sys._current_frames().get(self._clock.thread or 0)
        if frame is None:
            return
        activity = self._clock.activity
        user, called, meant = _resolve(frame)
        if activity in (COMPUTE, OTHER) and meant is not None:
            activity = meant
        if activity == DATA and called is not None and _is_reader(called):
            # A variable with the frames of all threads would refer to itself, and keep what they hold.
            reader = next(reader_calls(sys._current_frames()), None)
            user, called = (user, called) if reader is None else (reader[1], None)
        key = (None if user is None else user.f_code, 0 if user is None else user.f_lineno, called, activity)
        if key in self._counts or len(self._counts) < _MAX_SITES:
            self._counts[key] = self._counts.get(key, 0) + 1

    def take(self, max_sites: int) -> tuple[tuple[CallSite, int], ...]:
        """The most frequent places since the last call, each with its count."""
        counts, self._counts = self._counts, {}
        frequent = sorted(counts.items(), key=lambda item: -item[1])[:max_sites]
        return tuple(
            (CallSite(_text(user, line, called), activity), count) for (user, line, called, activity), count in frequent
        )


def _resolve(frame: FrameType) -> tuple[FrameType | None, CodeType | None, int | None]:
    """The user's innermost frame, the library code it calls, and the activity.

    If no code of the user is running, as in a fit of a model made of torch's layers, our training loop stands for it.
    """
    called: CodeType | None = None
    meant: int | None = None
    in_our_loop: tuple[FrameType | None, CodeType | None] = (None, frame.f_code)
    innermost: FrameType | None = frame
    while innermost is not None:
        code = innermost.f_code
        path = library_path(code.co_filename)
        if path is None:
            return innermost, called, meant
        if path == WORKER:
            break
        if path not in _WRAPPERS:
            if in_our_loop[0] is None and path.startswith("hvd_cluster/estimators/"):
                in_our_loop = innermost, called
            called = code
        if meant is None:
            name = code.co_name
            meant = next((what for part, start, what in _MEANING if part in path and name.startswith(start)), None)
        innermost = innermost.f_back
    return *in_our_loop, meant


def _is_reader(code: CodeType) -> bool:
    return (library_path(code.co_filename) or "").startswith(("hvd_cluster/data/", "hvd_cluster/petastorm/"))


def _text(user: CodeType | None, line: int, called: CodeType | None) -> str:
    code = called or user
    name = "?" if code is None else code_name(code)
    if user is None:
        return name
    return f"{name} ({library_path(user.co_filename) or shown_path(user)}:{line})"
