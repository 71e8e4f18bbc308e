"""How long a rank waits for the others of its host, and what is said of them when that was too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

#: Where more than this lies between two looks, this rank did not run itself.
_MAX_BETWEEN_CHECKS_S = 1.0


class Deadline:
    """Looks around while a wait in shared memory lasts, and ends it when it has lasted too long.

    Of the time between two looks at most a second counts. By the clock, every rank of a job whose processes were all
    stopped for a while (``scontrol suspend``) has waited for the others all along; so its waits go on nevertheless.

    Args:
        check: called at each look; raises when the world is broken.
        limit_s: how many seconds a wait may last.
        late: the ranks that are waited for, as far as that is known.
        did_not: what they should have done.
    """

    #: How often to look.
    period_s: ClassVar[float] = 0.05

    def __init__(
        self,
        check: Callable[[], None],
        limit_s: float,
        late: Callable[[], Sequence[int]],
        did_not: str = "come to a collective",
    ) -> None:
        self._check = check
        self._limit_s = limit_s
        self._late = late
        self._did_not = did_not
        self._waited_s = 0.0
        self._checked_s = 0.0

    def start(self) -> None:
        """A wait begins."""
        self._waited_s = 0.0
        self._checked_s = time.monotonic()

    def check(self) -> None:
        """The wait goes on; called every :attr:`period_s` seconds of it.

        Raises:
            RuntimeError: it has lasted too long; or whatever ``check`` raises.
        """
        self._check()
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._checked_s, _MAX_BETWEEN_CHECKS_S)
        self._checked_s = now_s
        if self._waited_s > self._limit_s:
            raise self._error()

    def _error(self) -> RuntimeError:
        ranks = self._late()
        listed = ", ".join(map(str, ranks))
        who, are = (f"rank {listed}", "it is") if len(ranks) == 1 else (f"ranks {listed}", "they are")
        if not ranks:
            who, are = "the other ranks", "one of them is"
        return RuntimeError(
            f"{who} of this host did not {self._did_not} within {self._limit_s:g} s: {are} stopped or overloaded. "
            "HOROVOD_GLOO_TIMEOUT_SECONDS sets how long to wait"
        )
