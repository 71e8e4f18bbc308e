"""How long a rank waits for the others of its host, and the error after that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

#: If more time than this passes between two checks, this rank itself was not running.
_MAX_BETWEEN_CHECKS_S = 1.0


class Check(Protocol):
    """A check, made now and then in waits for ranks; raises if the world is broken."""

    def __call__(self, wait: Deadline | None = None) -> None: ...


class Deadline:
    """The end of waits in shared memory that last too long or whose world is broken.

    Of the time between two checks at most a second counts. If all processes of a job are stopped for a while
    (``scontrol suspend``), every rank has waited for the others by the clock; their waits must continue.

    Args:
        check: called at each check, with this object.
        limit_s: how many seconds a wait may last.
        late: returns the ranks that the wait is for, as far as they are known.
        did_not: what they should have done.
    """

    #: How often to check.
    period_s: ClassVar[float] = 0.05

    def __init__(
        self,
        check: Check,
        limit_s: float,
        late: Callable[[], Sequence[int]],
        did_not: str = "come to a collective",
    ) -> None:
        self._check = check
        self.limit_s = limit_s
        #: Returns the ranks that the wait is for, as far as they are known.
        self.late = late
        self._did_not = did_not
        self.waited_s = 0.0
        #: The stall inspector has reported this wait.
        self.is_reported = False
        self._checked_s = 0.0

    def start(self) -> None:
        """A wait starts."""
        self.waited_s = 0.0
        self.is_reported = False
        self._checked_s = time.monotonic()

    def check(self) -> None:
        """The wait continues; call this every :attr:`period_s` seconds.

        Raises:
            RuntimeError: the wait has lasted too long; or what ``check`` raises.
        """
        self._check(self)
        now_s = time.monotonic()
        self.waited_s += min(now_s - self._checked_s, _MAX_BETWEEN_CHECKS_S)
        self._checked_s = now_s
        if self.waited_s > self.limit_s:
            raise self._error()

    def _error(self) -> RuntimeError:
        ranks = self.late()
        listed = ", ".join(map(str, ranks))
        who, are = (f"rank {listed}", "it is") if len(ranks) == 1 else (f"ranks {listed}", "they are")
        if not ranks:
            who, are = "the other ranks", "one of them is"
        return RuntimeError(
            f"{who} of this host did not {self._did_not} within {self.limit_s:g} s: {are} stopped or overloaded. "
            "HOROVOD_GLOO_TIMEOUT_SECONDS sets how long to wait"
        )
