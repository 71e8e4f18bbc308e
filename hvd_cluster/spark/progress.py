"""What the driver knows of a running Spark job, from what its tasks have told: values in, conclusions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.launch.outcome import Outcome, collect
from hvd_cluster.spark.sidechannel import Ended, Lost, Message, Placed, Seated

_REASON_CHARS = 800


@dataclass
class Progress:
    """The state of one job's tasks."""

    size: int
    #: Partition -> name of the host, of the tasks that run or ran.
    host_of_seat: dict[int, str] = field(default_factory=dict)
    #: Partition -> rank, of the tasks that have agreed on it.
    rank_of_seat: dict[int, int] = field(default_factory=dict)
    #: How each rank ended, without its value.
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    #: Partitions whose task was lost before its worker ended, the first one first.
    lost: list[int] = field(default_factory=list)

    def hear(self, message: Message) -> None:
        """Take what a task has told."""
        if isinstance(message, Seated):
            self.host_of_seat[message.index] = message.host
        elif isinstance(message, Placed):
            self.rank_of_seat[message.index] = message.rank
        elif isinstance(message, Ended):
            self.outcomes[message.outcome.rank] = message.outcome
        elif isinstance(message, Lost) and self.rank_of_seat.get(message.index) not in self.outcomes:
            self.lost.append(message.index)

    @property
    def started(self) -> bool:
        """All tasks run: they agree on ranks only together."""
        return bool(self.rank_of_seat) or len(self.host_of_seat) == self.size

    def failure(self, spark_says: str) -> LaunchError:
        """The story of a job that Spark gave up."""
        causes = [outcome for outcome in self.outcomes.values() if not outcome.is_echo]
        if causes:
            try:
                collect(list(self.outcomes.values()))
            except WorkerFailedError as error:
                return error
        reason = f"Spark says: {spark_says}"
        if not self.lost:
            kind = WorkerFailedError if self.started else LaunchError
            return kind(f"Spark could not run the workers. {reason}")
        seat = self.lost[0]
        rank = self.rank_of_seat.get(seat)
        who = f"The task of partition {seat}" if rank is None else f"Rank {rank}"
        others = f"; {len(self.lost) - 1} more tasks ended after it" if len(self.lost) > 1 else ""
        return WorkerFailedError(
            f"{who} on host {self.host_of_seat.get(seat, 'unknown')} was lost: its Spark task ended without a word, so "
            f"its executor or its Python process was killed, perhaps for lack of memory{others}. {reason}",
            rank,
        )


def short_reason(error: BaseException) -> str:
    """The sentences of a Spark exception, without its thousands of characters of JVM frames."""
    frames = ("at ", "...", "Driver stacktrace", "org.apache.spark.", "JVM stacktrace", "~[")
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith(frames) and "py4j" not in line.lower()]
    return _clip(" ".join(_most_telling(telling)) or type(error).__name__)


def _most_telling(lines: Sequence[str]) -> list[str]:
    """The first line, and what a Python process on an executor printed last before it gave up."""
    python = [
        line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) and "spark.api" not in line
    ]
    return list(dict.fromkeys([*lines[:1], *python[-1:]]))


def _clip(text: str) -> str:
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 4] + " ..."
