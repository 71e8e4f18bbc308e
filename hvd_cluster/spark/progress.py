"""What the driver knows about a running Spark job from its tasks' messages. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hvd_cluster.data.spark_jobs import missing_module
from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.launch.outcome import Outcome, collect
from hvd_cluster.spark.messages import Message, RanksAssigned, TaskLost, TaskStarted, WorkerEnded

_REASON_CHARS = 800
_REASON_SENTENCES = 3
#: How lines of stack traces start: frames and source lines are indented; py4j and Spark have headlines.
_NO_SENTENCE = (
    " ",
    "\t",
    "...",
    "An error occurred while calling",
    "Driver stacktrace",
    "JVM stacktrace",
    "Traceback ",
)
_JAVA_CLASS = re.compile(r"^(?:Caused by: )?(?:[a-z]\w*\.)+[\w$]*(?:Exception|Error): ")
#: Spark's names for results that were lost with the executor that held them.
_RESULTS_LOST = re.compile("ExecutorLostFailure|TaskResultLost")


@dataclass
class Progress:
    """The state of one job's tasks."""

    #: Number of tasks.
    size: int
    #: Partition -> host name, of the tasks that run or ran.
    host_of_task: dict[int, str] = field(default_factory=dict)
    #: Partition -> the ranks of its workers, of the tasks that have agreed on ranks.
    ranks_of_task: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: The outcome of each rank, without its value.
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    #: Partitions whose task was lost before its worker ended, in order, once each.
    lost: list[int] = field(default_factory=list)
    #: A worker failed by itself before any task was lost; failures after a loss result from it.
    failed_first: bool = False

    def handle(self, message: Message) -> None:
        """Handle a message of a task."""
        if isinstance(message, TaskStarted):
            self.host_of_task[message.index] = message.host
        elif isinstance(message, RanksAssigned):
            self.ranks_of_task[message.index] = message.ranks
        elif isinstance(message, WorkerEnded):
            self.outcomes[message.outcome.rank] = message.outcome
            self.failed_first |= not self.lost and not message.outcome.is_secondary
        elif isinstance(message, TaskLost) and self._left(message.index) and message.index not in self.lost:
            self.lost.append(message.index)

    @property
    def started(self) -> bool:
        """Whether all tasks run: they agree on ranks only together."""
        return bool(self.ranks_of_task) or len(self.host_of_task) == self.size

    def _left(self, task: int) -> list[int | None]:
        """The ranks of a task's running workers; None before its ranks are known."""
        return [rank for rank in self.ranks_of_task.get(task, (None,)) if rank is None or rank not in self.outcomes]

    def _all_are_done(self) -> bool:
        """Whether every worker has finished successfully."""
        ranks = [rank for ranks in self.ranks_of_task.values() for rank in ranks]
        return len(self.ranks_of_task) == self.size and all(
            rank in self.outcomes and self.outcomes[rank].ok for rank in ranks
        )

    def failure(self, spark_says: str) -> LaunchError:
        """The error of a job that Spark gave up."""
        if self.failed_first:
            try:
                collect(list(self.outcomes.values()))
            except WorkerFailedError as error:
                return error
        reason = f"Spark says: {spark_says}"
        if self._all_are_done():
            text = f"All workers finished, but Spark could not bring their results. {reason}"
            # Results that were too large will be too large again.
            return WorkerFailedError(text, died=True) if _RESULTS_LOST.search(spark_says) else LaunchError(text)
        if not self.lost:
            advice = missing_module(spark_says)
            text = f"Spark could not run the workers{f': {advice}' if advice else f'. {reason}'}"
            return WorkerFailedError(text, died=True) if self.started else LaunchError(text)
        task = self.lost[0]
        rank = next(iter(self._left(task) or self.ranks_of_task[task]))
        who = f"The task of partition {task}" if rank is None else f"Rank {rank}"
        others = f"; {len(self.lost) - 1} more tasks ended after it" if len(self.lost) > 1 else ""
        return WorkerFailedError(
            f"{who} on host {self.host_of_task.get(task, 'unknown')} was lost: its Spark task ended without a "
            "message, so its executor or Python process was killed, perhaps for lack of memory, or its host is gone"
            f"{others}. {reason}",
            rank,
            died=True,
        )


def short_reason(error: BaseException) -> str:
    """The sentences of a Spark exception, without its stack traces."""
    sentences = [
        _JAVA_CLASS.sub("", line.lstrip(": ")).partition(" Consider setting ")[0].rstrip()
        for line in str(error).splitlines()
        if not line.startswith(_NO_SENTENCE) and not line.endswith("Traceback (most recent call last):")
    ]
    text = " ".join(list(dict.fromkeys(filter(None, sentences)))[:_REASON_SENTENCES]) or type(error).__name__
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 4] + " ..."
