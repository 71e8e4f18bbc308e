"""What the workers of a job run: the user's command or a packed call.

Frozen, so that it can be sent to hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvd_cluster.launch.process import ProgramProcess, WorkerProcess
from hvd_cluster.launch.worker_group import Callbacks, Worker
from hvd_cluster.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Task:
    """Either ``command`` or ``call``."""

    #: Program and arguments.
    command: tuple[str, ...] | None = None
    #: What :func:`hvd_cluster.launch.call.pack` returned.
    call: bytes | None = None
    #: Variables on top of the environment of the process that starts the worker; None removes a variable.
    env: Mapping[str, str | None] = field(default_factory=dict)
    #: The Python that runs ``call``; None for that of the process that starts the worker.
    executable: str | None = None
    #: Make ``import horovod`` work in the worker; None means as in the process that starts it.
    as_horovod: bool | None = None

    def __post_init__(self) -> None:
        if (self.command is None) == (self.call is None):
            raise ValueError("a task is either a command or a call")


def start_worker(task: Task, topology: Topology, env: Mapping[str, str | None], callbacks: Callbacks) -> Worker:
    """Start one worker of ``task`` on this host.

    Raises:
        OSError: the program cannot be started.
    """
    variables = {**task.env, **env}
    if task.command is not None:
        return ProgramProcess(topology, task.command, callbacks, variables, task.as_horovod)
    return WorkerProcess(
        topology, task.call, callbacks, env=variables, executable=task.executable, as_horovod=task.as_horovod
    )
