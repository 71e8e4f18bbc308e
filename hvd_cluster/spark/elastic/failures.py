"""When a job of which tasks are replaced for ever had better be given up. Pure: the clock is an argument."""

from __future__ import annotations

from hvd_cluster.launch.outcome import Outcome

#: Spark's own default for spark.task.maxFailures.
DEFAULT_MAX_FAILURES = 4
#: Failures within this many seconds of each other belong together.
_TOGETHER_S = 60.0


class Failures:
    """Counts what the user's function raised, and deaths that follow each other fast.

    A worker that dies is replaced, however often that happens in a long job. But a function that raises does so again,
    and so does one whose workers are killed as soon as they have started.

    Args:
        max_failures: so many of either end the job.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._num_raised = 0
        self._deaths_s: list[float] = []

    def judge(self, outcome: Outcome, now_s: float) -> str:
        """Take note of a worker's failure; says why the job is to end, if it is."""
        if outcome.is_echo:
            return ""
        if outcome.error is not None and not is_loss(outcome):
            self._num_raised += 1
        else:
            self._deaths_s = [at_s for at_s in self._deaths_s if now_s - at_s < _TOGETHER_S] + [now_s]
        for count, what in (
            (self._num_raised, "workers raised an exception"),
            (len(self._deaths_s), f"workers died within {_TOGETHER_S:g} s"),
        ):
            if count >= self._max_failures:
                return (
                    f"giving up: {count} {what}; spark.task.maxFailures, now {self._max_failures}, says how many are "
                    "replaced (hvd_cluster.spark.conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK for all)"
                )
        return ""


def is_loss(outcome: Outcome) -> bool:
    """The worker did not raise: its task or its executor went, and the launcher says so in an error of its own."""
    return outcome.error is not None and outcome.error.type_name == "LaunchError" and outcome.error.pickled is None
