"""Delays tracebacks of commands until it is known whether they end their ranks, so that one mistake is shown once."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection

from hvd_cluster.launch.logs import OnLine

#: Seconds that a rank gets to exit after a traceback; then the traceback is shown like other output.
HOLD_S = 3.0
#: The first line of a traceback; a syntax error in a script has no headline.
_HEADLINE = re.compile(r'\s*(\+ Exception Group )?Traceback \(most recent call last\):$|  File ".*", line \d+$')


class Tracebacks:
    """Passes lines on, but holds what a rank writes to stderr from the headline of a traceback on. Thread-safe."""

    def __init__(self, on_line: OnLine, hold_s: float = HOLD_S) -> None:
        self._on_line = on_line
        self._hold_s = hold_s
        self._held: dict[int, list[str]] = {}
        self._timers: dict[int, threading.Timer] = {}
        self._lock = threading.RLock()

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Handle one line of a rank."""
        with self._lock:
            if stream == "stderr" and rank in self._held:
                self._held[rank].append(line)
            elif stream == "stderr" and _HEADLINE.match(line):
                self._held[rank] = [line]
                timer = self._timers[rank] = threading.Timer(self._hold_s, self.release, (rank,))
                timer.daemon = True
                timer.start()
            else:
                self._on_line(rank, stream, line)

    def release(self, rank: int) -> None:
        """Pass on the held lines of ``rank``."""
        for line in self._take(rank):
            self._on_line(rank, "stderr", line)

    def close(self) -> None:
        """Pass on all held lines."""
        for rank in sorted(self._held):
            self.release(rank)

    def take(self, ranks: Collection[int]) -> list[tuple[list[int], str]]:
        """Remove the held lines of some ranks. Returns each text once, with the ranks that wrote it in order."""
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            if lines := self._take(rank):
                groups.setdefault("\n".join(lines), []).append(rank)
        return [(sorted(group), text) for text, group in groups.items()]

    def _take(self, rank: int) -> list[str]:
        with self._lock:
            if (timer := self._timers.pop(rank, None)) is not None:
                timer.cancel()
            return self._held.pop(rank, [])
