"""What a task tells the driver while it runs; pickled, over a signed channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_cluster.launch.outcome import Outcome

#: From the driver to a task: stop your worker.
STOP = b"stop"


@dataclass(frozen=True)
class Seated:
    """A barrier task runs; ``index`` is its partition."""

    index: int
    host: str


@dataclass(frozen=True)
class Placed:
    """The task has learnt its workers' ranks and starts them; ``host`` is the address for the other workers."""

    index: int
    ranks: tuple[int, ...]
    host: str


@dataclass(frozen=True)
class Warned:
    """Something that the user should know."""

    text: str


@dataclass(frozen=True)
class Line:
    """A line that a worker wrote to ``stream`` ("stdout" or "stderr")."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True)
class Event:
    """What a worker reported with ``launch.progress.report``."""

    rank: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """A worker ended; the outcome has no value, which comes as a row of the job."""

    outcome: Outcome


@dataclass(frozen=True)
class Lost:
    """The connection of a task ended: all is done, or its executor died."""

    index: int


Message = Seated | Placed | Warned | Line | Event | Ended | Lost
