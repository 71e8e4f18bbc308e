"""Workers on this host: :func:`run` for one call, :class:`Executor` for several."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TextIO

from hvd_cluster.launch.call import pack
from hvd_cluster.launch.outcome import collect
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.launch.process import WorkerProcess
from hvd_cluster.launch.run_options import RunOptions, checked_arguments
from hvd_cluster.launch.worker_group import Callbacks, OnEvent, WorkerGroup
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import LOOPBACK, ReservedPort
from hvd_cluster.topology import join_address

logger = logging.getLogger(__name__)


@checked_arguments
def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    env: Mapping[str, str | None] | None = None,
    executable: str | None = None,
    start_timeout: float | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    prefix_output_with_timestamp: bool = False,
    on_event: OnEvent | None = None,
    verbose: int = 1,
    torch_backend: str | None = None,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` in ``num_proc`` new processes on this host.

    Args:
        fn: any function that cloudpickle can pickle, also one from a script or a notebook, or a closure.
        args: its positional arguments, the same on every rank.
        kwargs: its keyword arguments.
        num_proc: number of workers.
        env: additional variables for the workers; None removes a variable.
        executable: the workers' Python; by default this process's.
        start_timeout: seconds for all workers to report; by default ``Settings.start_timeout_s``.
        stdout: a stream for the workers' lines, each prefixed with ``[rank]<stdout>:``; by default this process's
            stdout.
        stderr: the same for stderr.
        prefix_output_with_timestamp: print the time before each line.
        on_event: called, from another thread, with the rank and the fields of each
            :func:`hvd_cluster.launch.progress.report`.
        verbose: 0 drops the workers' lines unless ``stdout`` or ``stderr`` is given. A failure always shows the last
            lines.
        torch_backend: see :func:`hvd_cluster.run`.

    Returns:
        The return values of ``fn``, by rank.

    Raises:
        ValueError: ``num_proc`` is less than 1.
        LaunchError: the call cannot be pickled, or the workers cannot be started.
        StartTimeoutError: not all workers reported in time.
        WorkerFailedError: a worker raised an exception, exited or was killed; the message starts with the user's
            traceback.
    """
    options = RunOptions.of(locals())
    with _workers(options, options.callbacks(), pack(fn, args, kwargs)) as group:
        outcomes = group.ends()
    return collect(outcomes)


class Executor:
    """Runs several calls on the same workers.

    They keep what they imported and initialised. A context manager. The workers start at the first :meth:`run`, or at
    :meth:`start`. They survive a call that raises an exception. If a worker has died, or hangs after another one's
    failure, all are replaced before the next call.

    The arguments are those of :func:`run`. Not thread-safe.
    """

    @checked_arguments
    def __init__(
        self,
        num_proc: int = 1,
        *,
        env: Mapping[str, str | None] | None = None,
        executable: str | None = None,
        start_timeout: float | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        prefix_output_with_timestamp: bool = False,
        on_event: OnEvent | None = None,
        verbose: int = 1,
        torch_backend: str | None = None,
    ) -> None:
        self._options = RunOptions.of(locals())
        self._callbacks = self._options.callbacks()
        self._lock = threading.RLock()
        self._running: ExitStack | None = None
        self._group: WorkerGroup[WorkerProcess] | None = None

    def start(self) -> None:
        """Start the workers and wait until they have reported.

        No effect if they are running.

        Raises:
            StartTimeoutError: not all workers reported in time.
        """
        with self._lock:
            if self._group is not None and self._group.all_live:
                return
            self.close()
            with ExitStack() as stack:
                self._group = stack.enter_context(_workers(self._options, self._callbacks, None))
                self._running = stack.pop_all()

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every worker; returns and raises as :func:`run`."""
        call = pack(fn, args, kwargs)
        with self._lock:
            self.start()
            assert self._group is not None
            self._callbacks.on_call()
            try:
                for worker in self._group.workers:
                    worker.submit(call)
                outcomes = self._group.reports()
                for worker in self._group.workers:
                    worker.forget_report()
            except BaseException:  # an interrupt: no caller waits for what the workers are doing now
                self._drop()
                raise
            if not self._group.all_live:
                self.close()
        return collect(outcomes)

    def close(self) -> None:
        """Let the workers exit. May be called twice."""
        with self._lock:
            try:
                if self._group is not None:
                    for worker in self._group.workers:
                        worker.finish()
                    self._group.let_exit()
            finally:
                self._drop()

    def _drop(self) -> None:
        """Stop the workers, even if they are busy."""
        running, self._running, self._group = self._running, None, None
        if running is not None:
            running.close()

    def __enter__(self) -> Executor:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextmanager
def _workers(options: RunOptions, callbacks: Callbacks, call: bytes | None) -> Iterator[WorkerGroup[WorkerProcess]]:
    """A group of workers that have reported, in a world of their own.

    It has its own secret, key-value store and job id. When the context ends, the workers have ended too.

    Args:
        call: the one call that each of them runs; None to submit calls later.
    """
    num_proc, _ = options.counts
    env, start_timeout_s = options.variables, options.settings().start_timeout_s
    secret, job_id = new_secret(), uuid.uuid4().hex[:12]
    placements = place([Slot(index, LOOPBACK, LOOPBACK) for index in range(num_proc)])
    with KeyValueServer(secret, LOOPBACK) as server, ReservedPort(LOOPBACK) as master:
        topologies = [
            placement.topology(
                rendezvous=join_address(LOOPBACK, server.port),
                secret=secret,
                master=join_address(LOOPBACK, master.port),
                job_id=job_id,
            )
            for placement in placements
        ]
        logger.info("job %s: starting %d workers on this host", job_id, num_proc)
        group = WorkerGroup[WorkerProcess]()
        try:
            starters = [
                partial(WorkerProcess, topology, call, env=env, executable=options.executable)
                for topology in topologies
            ]
            group.start(starters, callbacks)
            group.wait_ready(start_timeout_s)
            yield group
        finally:
            group.stop()
