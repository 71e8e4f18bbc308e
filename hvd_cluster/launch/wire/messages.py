"""The messages between a worker's process and its parent.

And those that every launcher passes on to the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: To the worker: there are no more requests; exit.
END = b""
#: Seconds after which a driver that accepts no more output counts as stalled.
STALLED_S = 60.0


@dataclass(frozen=True)
class RunRequest:
    """To the worker: run this call and send its Outcome."""

    #: What :func:`hvd_cluster.launch.call.pack` returned.
    call: bytes
    #: The entries of the parent's ``sys.path`` that go before the worker's own.
    sys_path: list[str]


@dataclass(frozen=True)
class Ready:
    """To the parent: the interpreter runs and waits for requests."""

    pid: int


@dataclass(frozen=True)
class ProgressEvent:
    """To the driver: what a worker gave to ``report``.

    See :func:`hvd_cluster.launch.progress.report`.
    """

    #: The worker's rank, or the key that the launcher gave it.
    key: int
    #: Plain data that JSON can hold.
    fields: dict[str, Any]


@dataclass(frozen=True)
class OutputLine:
    """To the driver: a line of a worker's output."""

    #: The worker's rank, or the key that the launcher gave it.
    key: int
    #: "stdout" or "stderr".
    stream: str
    text: str
