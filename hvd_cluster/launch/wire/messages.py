"""What a worker's process and its driver say to each other, pickled, over a signed channel."""

from __future__ import annotations

from dataclasses import dataclass

#: To the worker: no more orders; exit.
END = b""


@dataclass(frozen=True)
class RunRequest:
    """To the worker: run this call and send its Outcome."""

    #: What :func:`hvd_cluster.launch.call.pack` returned.
    call: bytes
    #: The driver's ``sys.path``, to go before the worker's; None if the worker runs another interpreter.
    sys_path: list[str] | None


@dataclass(frozen=True)
class Ready:
    """To the driver: the interpreter is up and waits for orders."""

    pid: int


@dataclass(frozen=True)
class ProgressEvent:
    """To the driver: progress, as JSON text."""

    json: bytes
