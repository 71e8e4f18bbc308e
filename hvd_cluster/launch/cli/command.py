"""A user's command as the workers of a job: what ``hvdrun`` does once it knows what to do."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvd_cluster.launch import leash
from hvd_cluster.launch.child import ChildProcess
from hvd_cluster.launch.environment import worker_environment
from hvd_cluster.launch.group import Group
from hvd_cluster.launch.logs import OnLine
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.placement import Seat, place
from hvd_cluster.launch.ports import ReservedPort
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import Topology, join_address

_NOTHING = pickle.dumps(None)  # the value of a command that ended well


class CommandProcess:
    """One worker that is a program of the user's: its exit code is its outcome. A :class:`~..group.Worker`."""

    def __init__(
        self,
        topology: Topology,
        command: Sequence[str],
        env: Mapping[str, str | None],
        as_horovod: bool | None,
        on_line: OnLine,
        on_change: Callable[[], None],
    ) -> None:
        self.rank = topology.rank
        self.ready = True
        self.reported: Outcome | None = None
        self.outcome: Outcome | None = None
        self._topology = topology
        self._on_change = on_change
        self._stopping = False
        self._ended = threading.Event()
        self._child = ChildProcess(
            self.rank,
            [sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid()), *command],
            worker_environment(topology, env, as_horovod=as_horovod),
            on_line=on_line,
            on_exit=self._exited,
        )
        self._child.start()

    @property
    def output_tail(self) -> str:
        """The last lines of its output."""
        return self._child.tail.text()

    def terminate(self) -> None:
        """SIGTERM to the process and its group."""
        self._stopping = True
        self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the process and its group."""
        self._stopping = True
        self._child.signal(signal.SIGKILL)

    def wait(self) -> Outcome | None:
        """Wait until it has ended."""
        self._ended.wait()
        self._child.join()
        return self.outcome

    def _exited(self, exit_code: int) -> None:
        self.outcome = Outcome(
            self.rank,
            self._topology.host,
            value=None if exit_code else _NOTHING,
            exit_code=exit_code,
            finished_at=time.time(),
            output_tail=self.output_tail,
            stopped=self._stopping and exit_code != 0,
        )
        self._ended.set()
        self._on_change()


def run_command(
    command: Sequence[str],
    seats: Sequence[Seat],
    *,
    env: Mapping[str, str | None],
    as_horovod: bool | None,
    on_line: OnLine,
    on_failure: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run ``command`` once on every seat of this host; the first that fails ends the others.

    Whatever happens, also an interrupt, no process of the job is left when this returns or raises.

    Args:
        command: program and arguments.
        seats: one per worker, all on this host.
        env: variables on top of this process's environment.
        as_horovod: whether ``import horovod`` resolves in the workers; None: as in this process.
        on_line: gets the workers' lines.
        on_failure: called once, when the first failure is noticed.
    """
    secret, job_id = new_secret(), uuid.uuid4().hex[:12]
    placements = place(seats)
    host = placements[0].seat.address
    with KeyValueServer(secret, host) as server, ReservedPort(host) as master:
        group = Group[CommandProcess](failure_grace_s=0.0, on_failure=on_failure)
        try:
            group.start(
                functools.partial(
                    CommandProcess,
                    placement.topology(
                        rendezvous=join_address(host, server.port),
                        secret=secret,
                        master=join_address(host, master.port),
                        job_id=job_id,
                    ),
                    command,
                    {**placement.device_env(), **env},
                    as_horovod,
                    on_line,
                )
                for placement in placements
            )
            return group.ends()
        finally:
            group.stop()
