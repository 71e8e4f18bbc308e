"""What a task tells the driver while it runs; pickled, over a signed channel."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.wire.messages import OutputLine, ProgressEvent

#: From the driver to a task: stop your worker.
STOP = b"stop"


@dataclass(frozen=True)
class TaskStarted:
    """A barrier task runs; ``index`` is its partition."""

    index: int
    host: str


@dataclass(frozen=True)
class RanksAssigned:
    """The task has learnt its workers' ranks and starts them; ``host`` is the address for the other workers."""

    index: int
    ranks: tuple[int, ...]
    host: str


@dataclass(frozen=True)
class TaskWarning:
    """Something that the user should know."""

    text: str


@dataclass(frozen=True)
class WorkerEnded:
    """A worker ended; the outcome has no value, which comes as a row of the job."""

    outcome: Outcome


@dataclass(frozen=True)
class TaskLost:
    """The connection of a task ended: all is done, or its executor died."""

    index: int


Message = TaskStarted | RanksAssigned | TaskWarning | OutputLine | ProgressEvent | WorkerEnded | TaskLost
