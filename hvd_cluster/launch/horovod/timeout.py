"""``horovod.runner.common.util.timeout``: how long something may still take."""

from __future__ import annotations

import time

from hvd_cluster.errors import StartTimeoutError

#: What our launchers raise where Horovod's raise this.
TimeoutException = StartTimeoutError


class Timeout:
    """A time limit that begins now.

    Args:
        timeout: seconds.
        message: text of the exception; ``{activity}`` and ``{timeout}`` in it are filled in.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._timeout_at = time.time() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds that are left; 0 when there are none."""
        return max(0.0, self._timeout_at - time.time())

    def timeout_at(self) -> float:
        """When the time is over, in seconds since the epoch."""
        return self._timeout_at

    def timed_out(self) -> bool:
        """Whether the time is over."""
        return time.time() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        """Raise if the time is over.

        Raises:
            TimeoutException: it is; the text says what took so long.
        """
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
