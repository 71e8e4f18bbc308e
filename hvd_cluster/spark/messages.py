"""The messages from a task to the driver while it runs; pickled, over an authenticated channel."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.wire.messages import OutputLine, ProgressEvent

#: From the driver to a task: stop your workers.
STOP = b"stop"


@dataclass(frozen=True)
class TaskStarted:
    """A barrier task is running; ``index`` is its partition."""

    index: int
    host: str


@dataclass(frozen=True)
class RanksAssigned:
    """The task knows its workers' ranks and starts them; ``host`` is the address for the other workers."""

    index: int
    ranks: tuple[int, ...]
    host: str


@dataclass(frozen=True)
class TaskWarning:
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class WorkerEnded:
    """A worker ended. The outcome has no value; the value arrives as a row of the job."""

    outcome: Outcome


@dataclass(frozen=True)
class TaskLost:
    """The connection of a task ended: its workers have finished, or its executor died."""

    index: int


Message = TaskStarted | RanksAssigned | TaskWarning | OutputLine | ProgressEvent | WorkerEnded | TaskLost
