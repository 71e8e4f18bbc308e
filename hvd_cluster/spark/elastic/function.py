"""``hvd_cluster.spark.run_elastic``: workers come and go with Spark's tasks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from hvd_cluster.launch.call import pack
from hvd_cluster.launch.elastic.controller import ElasticController
from hvd_cluster.launch.outcome import Outcome, collect
from hvd_cluster.launch.run_options import RunOptions, checked_arguments, renamed
from hvd_cluster.launch.spec import ElasticSpec
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.spark import encryption, preflight, slots
from hvd_cluster.spark.active_session import active
from hvd_cluster.spark.elastic.failures import DEFAULT_MAX_FAILURES, Failures
from hvd_cluster.spark.elastic.fleet import TaskFleet
from hvd_cluster.spark.elastic.task_pool import TaskPool
from hvd_cluster.spark.session import Session, check_profile
from hvd_cluster.spark.task_function import MODULE_REMEDY

logger = logging.getLogger(__name__)


@checked_arguments
def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | set[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    spark: Any = None,
    resource_profile: Any = None,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` in workers that are replaced when they are lost.

    ``fn`` calls ``hvd.init()`` and trains inside a function decorated with ``hvd.elastic.run``. Each worker has its own
    Spark task, and each task is a Spark job of its own: if it or its executor dies, another one is started. There is no
    barrier stage, so dynamic allocation may be on; up to ``max_num_proc`` tasks are requested.

    Args:
        fn, args, kwargs, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp, spark, resource_profile: see
            :func:`hvd_cluster.spark.run`.
        num_proc: workers at the start; by default as many as the session runs tasks at once.
        min_num_proc: with fewer workers the job waits; by default ``num_proc``.
        max_num_proc: the maximum number of workers; by default ``num_proc``.
        start_timeout: seconds for ``num_proc`` tasks to start; by default HOROVOD_SPARK_START_TIMEOUT, else 600.
        elastic_timeout: seconds to wait for ``min_num_proc`` workers after a loss; by default HOROVOD_ELASTIC_TIMEOUT,
            else 600.
        reset_limit: how many times the workers may change; None for no limit.
        min_np, max_np: deprecated names of ``min_num_proc`` and ``max_num_proc``.

    Returns:
        The return values of ``fn`` in the workers that finished, by their last rank.

    Raises:
        ValueError: an argument is invalid.
        NotEnoughSlotsError: the session can never run ``num_proc`` tasks at once.
        StartTimeoutError: fewer tasks than that started in time; the message says how many slots are missing.
        WorkerFailedError: all workers that held the state were lost, or ``spark.task.maxFailures`` of them raised an
            exception; the message starts with the user's own traceback.
        LaunchError: there were too few workers for too long, too many resets, no session, an argument that cannot be
            pickled, tasks that Spark refuses, or executors that lack this package or cannot reach this process.
    """
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    options = RunOptions.of(locals())
    settings = options.settings()
    call = pack(fn, args, kwargs, remedy=MODULE_REMEDY)
    session = active(spark)
    check_profile(session, resource_profile)
    if num_proc is None:
        num_proc = max(preflight.infer_num_tasks(session), min_num_proc or 1)
        num_proc = min(num_proc, max_num_proc or num_proc)
    slots.check(num_proc, session.slots(resource_profile), barrier=False)
    options = replace(options, num_proc=num_proc, max_num_proc=max_num_proc or num_proc)
    spec = ElasticSpec.of(options, options.task(call), settings, is_discovered=True)
    return collect(_run(session, spec, resource_profile, settings.spark_start_timeout_s, options.callbacks()))


def _run(
    session: Session, spec: ElasticSpec, profile: Any, start_timeout_s: float, callbacks: Callbacks
) -> list[Outcome]:
    """Run the job; nothing of it remains when this returns or raises."""
    encrypted = encryption.is_wanted(session.conf)
    if encrypted and not session.is_local:
        logger.warning("if torch has no TLS for Gloo (its wheels have none): %s", encryption.OPEN_TENSORS_TEXT)
    secret = new_secret(encrypted=encrypted)
    max_failures = int(session.conf("spark.task.maxFailures") or DEFAULT_MAX_FAILURES)
    failures = Failures(max_failures)
    num_tasks = spec.max_num_proc or spec.num_proc
    task_pool = TaskPool(session, num_tasks, secret, profile, spec.interfaces, max_failures)
    with contextlib.closing(task_pool):
        task_pool.start()
        task_pool.wait_for(spec.num_proc, start_timeout_s)
        with TaskFleet(secret, task_pool, spec.interfaces) as fleet:
            fleet.open(others=not session.is_local)

            def give_up(outcome: Outcome) -> str:
                return failures.record(outcome, time.monotonic())

            with ElasticController(spec, fleet, task_pool, callbacks, give_up) as controller:
                task_pool.on_change = controller.wake_up
                return controller.run()
