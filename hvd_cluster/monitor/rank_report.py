"""What one rank reports to the root every few seconds."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hvd_cluster.monitor.call_sites import CallSite, CallSites
from hvd_cluster.monitor.node_usage import NodeUsage
from hvd_cluster.monitor.step_clock import ACTIVITIES, StepClock, StepTime

_MAX_CALL_SITES = 16


def max_steps(size: int) -> int:
    """How many steps of each of ``size`` ranks are reported and compared.

    8,192 of all, but 20 to 200 of each.
    """
    return min(200, max(8192 // size, 20))


@dataclass(frozen=True)
class RankReport:
    """The steps of one rank since its last report."""

    rank: int
    #: The numbers of the steps in ``packed``, uint64.
    numbers: bytes
    #: float32, the activities of one step after the other.
    packed: bytes
    #: All steps since the world began: their number, and seconds of each activity.
    totals: tuple[int, StepTime]
    #: Where the training thread was while other ranks waited for it.
    call_sites: tuple[tuple[CallSite, int], ...]
    #: Seconds in which the training thread could have run and had no core, and seconds since the last report.
    core_wait_s: float
    interval_s: float
    #: Of the rank's host, from the first rank of each host.
    usage: NodeUsage | None = None

    def times(self) -> dict[int, StepTime]:
        """The steps by their numbers."""
        values = iter(array("f", self.packed))
        return {number: StepTime(*islice(values, len(ACTIVITIES))) for number in array("Q", self.numbers)}


class RankReporter:
    """Makes the reports of this rank.

    Args:
        rank: this rank.
        size: the number of ranks.
        clock: measures its steps.
        usage: measures its host; None if another rank of the host does.
    """

    def __init__(self, rank: int, size: int, clock: StepClock, usage: Callable[[], NodeUsage] | None) -> None:
        self._rank = rank
        self._max_steps = max_steps(size)
        self._clock = clock
        self._usage = usage
        self._next_step = 0
        self._core_wait = (0, 0.0, 0.0)
        self._core_wait_s()
        self.call_sites = CallSites(clock)

    def report(self) -> RankReport:
        """What has happened since the last call."""
        steps = self._clock.since(self._next_step)
        self._next_step = max(steps, default=self._next_step - 1) + 1
        chosen = _choose(list(steps), self._max_steps)
        return RankReport(
            self._rank,
            array("Q", chosen).tobytes(),
            array("f", (value for number in chosen for value in steps[number])).tobytes(),
            self._clock.totals,
            self.call_sites.take(_MAX_CALL_SITES),
            *self._core_wait_s(),
            None if self._usage is None else self._usage(),
        )

    def _core_wait_s(self) -> tuple[float, float]:
        thread, before_s, at_s = self._core_wait
        native_id = next((t.native_id for t in threading.enumerate() if t.ident == self._clock.thread), None) or 0
        waited_s, now_s = core_wait_s(native_id), time.monotonic()
        self._core_wait = (native_id, waited_s, now_s)
        return waited_s - before_s if native_id == thread else 0.0, now_s - at_s


def _choose(numbers: Sequence[int], at_most: int) -> list[int]:
    """Not too many of these steps.

    All ranks choose nearly the same ones, although they do not report at the same time. The choice is a hash of the
    number, so it does not follow a pattern such as every other step.
    """
    one_in = 1
    while len(numbers) > at_most * one_in:
        one_in *= 2
    return [number for number in numbers if one_in == 1 or _mixed(number) % one_in == 0]


def _mixed(number: int) -> int:
    """A hash without a pattern in its low bits, MurmurHash3's finalizer.

    Consecutive numbers show none.
    """
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


def core_wait_s(native_id: int) -> float:
    """Seconds that a thread of this process was ready and had no core.

    0 if the kernel does not count them.
    """
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
