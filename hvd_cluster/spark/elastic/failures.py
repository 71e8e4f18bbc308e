"""Decides when a job whose tasks keep failing is given up.

Pure: the time is an argument.
"""

from __future__ import annotations

from hvd_cluster.launch.outcome import Outcome

#: Spark's default for spark.task.maxFailures.
DEFAULT_MAX_FAILURES = 4
#: Workers of one node or executor fail together: failures within this many seconds are one incident.
_AT_ONCE_S = 5.0
#: Deaths within this many seconds of each other are counted together.
_IN_A_ROW_S = 60.0


class Failures:
    """Counts exceptions of the user's function, and deaths in quick succession.

    A worker that dies is replaced, however often that happens in a long job. But a function that raises will raise
    again, and a function whose workers are killed right after their start will not survive later either.

    Args:
        max_failures: this many incidents of either kind end the job.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        #: When each incident began.
        self._raised_s: list[float] = []
        self._died_s: list[float] = []

    def record(self, outcome: Outcome, now_s: float) -> str:
        """Record a worker's failure; returns why the job should end, or an empty string."""
        if outcome.is_secondary:
            return ""
        if outcome.error is not None and not is_loss(outcome):
            self._raised_s = _with_incident(self._raised_s, now_s)
        else:
            recent = [at_s for at_s in self._died_s if now_s - at_s < _IN_A_ROW_S]
            self._died_s = _with_incident(recent, now_s)
        for count, what in (
            (len(self._raised_s), "times workers raised an exception"),
            (len(self._died_s), f"times workers died within {_IN_A_ROW_S:g} s"),
        ):
            if count >= self._max_failures:
                return (
                    f"giving up: {count} {what}; spark.task.maxFailures, now {self._max_failures}, says how often they "
                    "are replaced (hvd_cluster.spark.conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK: always)"
                )
        return ""


def _with_incident(began_s: list[float], now_s: float) -> list[float]:
    return began_s if began_s and now_s - began_s[-1] < _AT_ONCE_S else [*began_s, now_s]


def is_loss(outcome: Outcome) -> bool:
    """Whether the worker was lost with its task or executor, and did not raise.

    The error is then the launcher's own.
    """
    return outcome.error is not None and outcome.error.type_name == "LaunchError" and outcome.error.pickled is None
