"""Hosts that have failed, and when they may be used again. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Entry:
    num_failures: int
    #: When the host may be used again; None for never.
    until_s: float | None


class Blacklist:
    """Excludes failed hosts, forever or for a time that doubles with each failure.

    Args:
        cooldown_range_s: shortest and longest time, in seconds; None for forever.
        random: returns a number between 0 and 1, so that hosts that failed together are not all used again at once.
    """

    def __init__(self, cooldown_range_s: tuple[float, float] | None, random: Callable[[], float]) -> None:
        self._range_s = cooldown_range_s
        self._random = random
        self._entries: dict[str, _Entry] = {}

    def add(self, host: str, now_s: float) -> float | None:
        """Record a failure of ``host``. Returns for how many seconds it is excluded; None for forever.

        Several failures while the host is excluded count as one: when a host fails, all its workers fail.
        """
        entry = self._entries.setdefault(host, _Entry(0, 0.0))
        if entry.until_s is not None and entry.until_s <= now_s:
            entry.until_s = self._until(entry.num_failures, now_s)
            entry.num_failures += 1
        return None if entry.until_s is None else entry.until_s - now_s

    def holds(self, host: str, now_s: float) -> bool:
        """Whether ``host`` is excluded."""
        entry = self._entries.get(host)
        return entry is not None and (entry.until_s is None or entry.until_s > now_s)

    def hosts(self) -> list[str]:
        """All hosts that have ever failed."""
        return list(self._entries)

    def _until(self, num_failures: int, now_s: float) -> float | None:
        if self._range_s is None:
            return None
        low_s, high_s = self._range_s
        delay_s = low_s * 2.0 ** min(num_failures, 30) + self._random() * low_s
        return now_s + min(max(delay_s, low_s), high_s)
