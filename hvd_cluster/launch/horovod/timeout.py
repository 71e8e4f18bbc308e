"""``horovod.runner.common.util.timeout``: a time limit."""

from __future__ import annotations

import time

from hvd_cluster.errors import StartTimeoutError

#: What our launchers raise in place of Horovod's exception.
TimeoutException = StartTimeoutError


class Timeout:
    """A time limit that starts now.

    Args:
        timeout: seconds.
        message: text of the exception; ``{activity}`` and ``{timeout}`` are replaced.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._timeout_at = time.time() + timeout
        self._message = message

    def remaining(self) -> float:
        """The remaining seconds; 0 after the limit."""
        return max(0.0, self._timeout_at - time.time())

    def timeout_at(self) -> float:
        """The time of the limit, in seconds since the epoch."""
        return self._timeout_at

    def timed_out(self) -> bool:
        """Whether the limit has passed."""
        return time.time() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        """Raise if the limit has passed.

        Raises:
            TimeoutException: it has; the message names the activity.
        """
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
