"""Watches the start of workers for which there is room: they must report in time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hvd_cluster.errors import StartTimeoutError
from hvd_cluster.ray.session import load_ray

#: Seconds between two checks.
_POLL_S = 0.5
_SLOW_PARTS = ("pip", "uv", "conda", "image_uri", "container", "working_dir", "py_modules")


def late_text(timeout_s: float, parts: Sequence[str]) -> str:
    """Why workers for which there is room are late, and what to set. Pure."""
    preparing = f"preparing the program's runtime_env ({', '.join(parts)})" if parts else "preparing a runtime_env"
    return (
        f"Ray has room for them but has not started them: its nodes may be busy, or still {preparing}, which takes "
        f"minutes where packages are installed. Raise create_settings(timeout_s=...), now {timeout_s:g}."
    )


def slow_parts() -> list[str]:
    """The parts of this program's ``runtime_env`` that delay a worker's start.

    A node must download or install them first.
    """
    ray = load_ray()
    with contextlib.suppress(Exception):  # only for an error message, so any error of Ray is ignored
        if ray.is_initialized():
            return [name for name in _SLOW_PARTS if ray.get_runtime_context().runtime_env.get(name)]
    return []


class StartWatch:
    """Watches, in a thread, until the workers that the job starts with have reported."""

    def __init__(
        self,
        num_reported: Callable[[], int],
        usable: Callable[[], Mapping[str, int]],
        needed: int,
        timeout_s: float,
        stop: Callable[[], None],
    ) -> None:
        self._num_reported = num_reported
        self._usable = usable
        self._needed = needed
        self._timeout_s = timeout_s
        self._stop = stop
        #: Why it has called ``stop``; None before.
        self.error: StartTimeoutError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvd-start", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        has_room_since_s: float | None = None
        while (here := self._num_reported()) < self._needed and not self._closed.wait(_POLL_S):
            now_s = time.monotonic()
            has_room = sum(self._usable().values()) >= self._needed
            has_room_since_s = (has_room_since_s or now_s) if has_room else None
            if has_room_since_s is not None and now_s - has_room_since_s > self._timeout_s:
                self.error = StartTimeoutError(
                    f"{self._needed - here} of the {self._needed} workers that the job begins with did not start "
                    f"within {self._timeout_s:g} s. {late_text(self._timeout_s, slow_parts())}"
                )
                self._stop()
                return
