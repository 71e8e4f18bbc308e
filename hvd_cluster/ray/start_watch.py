"""The start of an elastic job: workers for which there is room must report in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from hvd_cluster.errors import StartTimeoutError

#: Seconds between two looks.
_LOOK_S = 0.5


class StartWatch:
    """Watches in a thread of its own until as many workers as the job begins with have reported.

    Args:
        num_greeted: how many have reported.
        usable: host -> slots.
        needed: how many the job begins with.
        timeout_s: seconds for them to report, once there is room for them.
        stop: called when they have not.
    """

    def __init__(
        self,
        num_greeted: Callable[[], int],
        usable: Callable[[], Mapping[str, int]],
        needed: int,
        timeout_s: float,
        stop: Callable[[], None],
    ) -> None:
        self._num_greeted = num_greeted
        self._usable = usable
        self._needed = needed
        self._timeout_s = timeout_s
        self._stop = stop
        #: Why it has called ``stop``; None before it has.
        self.verdict: StartTimeoutError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvd-start", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        has_room_since_s: float | None = None
        while (here := self._num_greeted()) < self._needed and not self._closed.wait(_LOOK_S):
            now_s = time.monotonic()
            has_room = sum(self._usable().values()) >= self._needed
            has_room_since_s = (has_room_since_s or now_s) if has_room else None
            if has_room_since_s is not None and now_s - has_room_since_s > self._timeout_s:
                self.verdict = StartTimeoutError(
                    f"{self._needed - here} of the {self._needed} workers that the job begins with did not start "
                    f"within {self._timeout_s:g} s. Ray has room for them but has not started them: its nodes may "
                    "be busy, or still installing a runtime_env. create_settings(timeout_s=...) says how long to wait."
                )
                self._stop()
                return
