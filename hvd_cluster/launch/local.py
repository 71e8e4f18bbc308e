"""Workers on this host: :func:`run` for one call, :class:`Executor` for several."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from hvd_cluster.launch.arguments import none_is_default
from hvd_cluster.launch.call import pack
from hvd_cluster.launch.checks import checked_variables, num_proc_problems
from hvd_cluster.launch.logs import printer
from hvd_cluster.launch.outcome import collect
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.launch.ports import ReservedPort
from hvd_cluster.launch.process import OnEvent, WorkerProcess, ignore_event
from hvd_cluster.launch.worker_group import WorkerGroup
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.settings import Settings
from hvd_cluster.topology import Topology, join_address

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"


@none_is_default
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
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` in ``num_proc`` new processes of this host, one world of them.

    Args:
        fn: any function that cloudpickle takes; one of a script, a notebook or a closure is fine.
        args: its positional arguments, the same on every rank.
        kwargs: its keyword arguments.
        num_proc: how many workers.
        env: variables on top of this process's environment; None removes one.
        executable: the Python of the workers; this process's by default.
        start_timeout: seconds within which all workers must report; ``Settings.start_timeout_s`` by default.
        stdout: where the workers' lines go, with ``[rank]<stdout>:`` in front; this process's stdout by default.
        stderr: likewise.
        prefix_output_with_timestamp: put the time before each line.
        on_event: gets the rank and the fields of each :func:`hvd_cluster.launch.progress.report`, from another thread.
        verbose: 0 drops the workers' lines, unless ``stdout`` or ``stderr`` says where they go. A failure shows the
            last of them all the same.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        ValueError: ``num_proc`` is less than 1.
        LaunchError: the call cannot be pickled, or the workers cannot be started.
        StartTimeoutError: not all workers reported in time.
        WorkerFailedError: a worker raised, exited or was killed; the text begins with the user's traceback.
    """
    executor = Executor(
        num_proc,
        env=env,
        executable=executable,
        start_timeout=start_timeout,
        stdout=stdout,
        stderr=stderr,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        on_event=on_event,
        verbose=verbose,
    )
    call = pack(fn, args, kwargs)
    with executor.workers(call) as group:
        outcomes = group.ends()
    return collect(outcomes)


class Executor:
    """The same workers for several calls: they keep what they imported and initialised from call to call.

    A context manager. The workers start at the first :meth:`run`, or at :meth:`start`. A call that raises leaves them;
    when one of them has died, or hangs after another one's failure, all are replaced at the next call.

    The arguments are those of :func:`run`. One thread at a time may use it.
    """

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
    ) -> None:
        if wrong := num_proc_problems(num_proc):
            raise ValueError("; ".join(wrong))
        self._num_proc = num_proc
        self._env = checked_variables(env)
        self._executable = executable
        self._start_timeout_s = Settings.from_env(start_timeout_s=start_timeout).start_timeout_s
        self._on_line = printer(stdout, stderr, with_timestamp=prefix_output_with_timestamp, verbose=verbose)
        self._on_event = on_event or ignore_event
        self._lock = threading.RLock()
        self._running: ExitStack | None = None
        self._group: WorkerGroup[WorkerProcess] | None = None

    def start(self) -> None:
        """Start the workers and wait until they have reported; nothing happens if they run.

        Raises:
            StartTimeoutError: not all workers reported in time.
        """
        with self._lock:
            if self._group is not None and self._group.all_live:
                return
            self.close()
            with ExitStack() as stack:
                self._group = stack.enter_context(self.workers(None))
                self._running = stack.pop_all()

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every worker; returns and raises as :func:`run` does."""
        call = pack(fn, args, kwargs)
        with self._lock:
            self.start()
            assert self._group is not None
            try:
                for worker in self._group.workers:
                    worker.submit(call)
                outcomes = self._group.reports()
            except BaseException:  # an interrupt: what the workers are doing now belongs to nobody
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
        """Stop the workers, whatever they do."""
        running, self._running, self._group = self._running, None, None
        if running is not None:
            running.close()

    def __enter__(self) -> Executor:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextmanager
    def workers(self, call: bytes | None) -> Iterator[WorkerGroup[WorkerProcess]]:
        """A world of workers that have reported in, with a secret, a store and a job id of its own.

        They are gone, whatever happened, when the context ends.

        Args:
            call: the one call that each of them runs; None to submit calls later.
        """
        secret, job_id = new_secret(), uuid.uuid4().hex[:12]
        placements = place([Slot(index, _HOST, _HOST) for index in range(self._num_proc)])
        with KeyValueServer(secret, _HOST) as server, ReservedPort(_HOST) as master:
            topologies = [
                placement.topology(
                    rendezvous=join_address(_HOST, server.port),
                    secret=secret,
                    master=join_address(_HOST, master.port),
                    job_id=job_id,
                )
                for placement in placements
            ]
            logger.info("job %s: starting %d workers on this host", job_id, self._num_proc)
            group = WorkerGroup[WorkerProcess]()
            try:
                group.start(self._starter(topology, call) for topology in topologies)
                group.wait_ready(self._start_timeout_s)
                yield group
            finally:
                group.stop()

    def _starter(self, topology: Topology, call: bytes | None) -> Callable[[Callable[[], None]], WorkerProcess]:
        return lambda on_change: WorkerProcess(
            topology,
            call,
            env=self._env,
            executable=self._executable,
            on_line=self._on_line,
            on_event=self._on_event,
            on_change=on_change,
        )
