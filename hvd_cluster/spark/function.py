"""``hvd_cluster.spark.run``: runs a function on the workers of a Spark job.

It returns the results by rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from hvd_cluster.launch.call import pack
from hvd_cluster.launch.checks import count_problems
from hvd_cluster.launch.outcome import collect
from hvd_cluster.launch.run_options import RunOptions, checked_arguments
from hvd_cluster.spark import preflight
from hvd_cluster.spark.active_session import active
from hvd_cluster.spark.job import Job
from hvd_cluster.spark.session import check_profile
from hvd_cluster.spark.task_function import MODULE_REMEDY, Rows

logger = logging.getLogger(__name__)


@checked_arguments
def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | set[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    spark: Any = None,
    workers_per_task: int = 1,
    resource_profile: Any = None,
    on_event: Callable[[int, dict[str, Any]], None] | None = None,
    rows: Rows | None = None,
    torch_backend: str | None = None,
) -> list[Any]:
    """Run a function in ``num_proc`` workers, on the tasks of one Spark job.

    Each worker calls ``fn(*args, **kwargs)``, in a child process of a task. All workers start together (a barrier
    stage). It works on classic and on Spark Connect sessions.

    Args:
        fn: what every worker calls. Functions of scripts and notebooks and local functions are pickled by value.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        num_proc: number of workers; by default as many as fit into the tasks that the session runs at once.
        start_timeout: seconds for all tasks to start; by default HOROVOD_SPARK_START_TIMEOUT, else 600.
        use_mpi, use_gloo: accepted for compatibility, but not both; hvd_cluster does not use MPI.
        extra_mpi_args: accepted without effect.
        env: additional environment variables for the workers; a value of None removes one. The driver's own environment
            is not sent to the workers.
        stdout: a text stream for the lines that workers write to stdout, each prefixed with ``[rank]<stdout>:``; by
            default the driver's (in a notebook, the cell's).
        stderr: the same for stderr.
        verbose: 0 drops the workers' output unless ``stdout`` or ``stderr`` is given. The launcher's own messages go to
            the logger ``hvd_cluster``.
        nics: name of the network interface for the workers' data; by default the one on the route to rank 0's host.
        prefix_output_with_timestamp: print the time before each line of output.
        executable: path on the executors of the Python that runs the workers; by default the executors' own. A relative
            path with a directory, such as ``environment/bin/python``, refers to ``spark.archives``.
        spark: the session; by default the active one.
        workers_per_task: number of workers that share a task and its GPUs, for example if one task uses a whole node
            (``spark.task.resource.gpu.amount`` is then a multiple of it).
        resource_profile: a ``pyspark.resource.ResourceProfile`` with the resources of each task, instead of the
            session's settings; needs Spark 4.0 and a cluster for which Spark supports such profiles.
        on_event: called as ``on_event(rank, fields)`` in this thread for each ``launch.progress.report(**fields)``.
        rows: rows of a DataFrame for the tasks, which this job computes; see
            :class:`hvd_cluster.spark.task_function.Rows`.
        torch_backend: see :func:`hvd_cluster.run`.

    Returns:
        The return values of ``fn`` on rank 0, rank 1, ...

    Raises:
        ValueError: an argument is invalid, such as ``num_proc=0``.
        NotEnoughSlotsError: the session can never run that many tasks at once; no worker has started.
        StartTimeoutError: not all tasks started in time; the message says how many slots are missing.
        WorkerFailedError: a worker raised an exception, exited or was killed; the message starts with the user's
            traceback, and ``__cause__`` is the user's exception.
        LaunchError: there is no session, an argument cannot be pickled, or the executors lack this package.
    """
    options = RunOptions.of(locals(), _workers_per_task_problems(num_proc, workers_per_task))
    if extra_mpi_args:
        logger.warning("extra_mpi_args=%r has no effect: hvd_cluster does not use MPI", extra_mpi_args)
    start_timeout_s = options.settings().spark_start_timeout_s
    call = pack(fn, args, kwargs, remedy=MODULE_REMEDY)
    session = active(spark)
    check_profile(session, resource_profile)
    if num_proc is None:
        num_tasks = preflight.infer_num_tasks(session, workers_per_task)
    else:
        num_tasks = num_proc // workers_per_task
    logger.info("the call is %.1f kB when pickled", len(call) / 1000)
    began_s = time.monotonic()
    preflight.wait_for_slots(session, num_tasks, start_timeout_s, resource_profile)
    job = Job(session, num_tasks, options, workers_per_task=workers_per_task, profile=resource_profile, rows=rows)
    return collect(job.run(call, max(1.0, start_timeout_s - (time.monotonic() - began_s))))


def _workers_per_task_problems(num_proc: int | None, workers_per_task: int) -> list[str]:
    wrong = count_problems("workers_per_task", workers_per_task)
    if wrong or num_proc is None or count_problems("num_proc", num_proc) or num_proc % workers_per_task == 0:
        return wrong
    return [f"num_proc={num_proc} must be a multiple of workers_per_task={workers_per_task}"]
