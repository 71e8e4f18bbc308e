"""A worker that runs a program of the user; its exit code is its outcome."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_cluster.launch import die_with_parent
from hvd_cluster.launch.child import ChildProcess
from hvd_cluster.launch.environment import worker_environment
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.process import ChildWorker
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.topology import Topology

_NONE = pickle.dumps(None)  # the value of a command that succeeded


class ProgramProcess(ChildWorker):
    """A command as a worker of this host; see :class:`hvd_cluster.launch.worker_group.Worker`.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        topology: Topology,
        command: Sequence[str],
        callbacks: Callbacks,
        env: Mapping[str, str | None],
        as_horovod: bool | None,
    ) -> None:
        super().__init__(topology, callbacks)
        self.ready = True
        self._ended = threading.Event()
        self._child = ChildProcess(
            self.rank,
            [sys.executable, "-I", "-S", str(Path(die_with_parent.__file__)), str(os.getpid()), *command],
            worker_environment(topology, env, as_horovod=as_horovod),
            on_line=callbacks.on_line,
            on_exit=self._exited,
        )
        self._tail = self._child.tail
        self._child.start()

    def wait(self) -> Outcome | None:
        self._ended.wait()
        self._child.join()
        return self.outcome

    def _exited(self, exit_code: int) -> None:
        self.outcome = Outcome(
            self.rank,
            self.topology.host,
            value=None if exit_code else _NONE,
            exit_code=exit_code,
            finished_at=time.time(),
            output_tail=self.output_tail,
            stopped=self._stopping and exit_code != 0,
        )
        self._ended.set()
        self._callbacks.on_change()
