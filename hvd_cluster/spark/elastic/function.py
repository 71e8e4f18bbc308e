"""``hvd_cluster.spark.run_elastic``: runs a function on workers that may come and go with a cluster's tasks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from hvd_cluster.launch.arguments import none_is_default, renamed
from hvd_cluster.launch.call import pack
from hvd_cluster.launch.checks import (
    checked_variables,
    interface_names,
    num_proc_problems,
    num_proc_range_problems,
    seconds_problems,
    variable_problems,
)
from hvd_cluster.launch.elastic.controller import ElasticController
from hvd_cluster.launch.elastic.host_manager import HostManager
from hvd_cluster.launch.elastic.spec import ElasticSpec
from hvd_cluster.launch.environment import interface_variables
from hvd_cluster.launch.logs import OnLine, printer
from hvd_cluster.launch.outcome import Outcome, collect
from hvd_cluster.launch.process import ignore_event
from hvd_cluster.launch.task import Task
from hvd_cluster.oldpaths.shim import serves_horovod
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.settings import Settings
from hvd_cluster.spark import encryption, preflight, slots
from hvd_cluster.spark.active_session import active
from hvd_cluster.spark.elastic.failures import DEFAULT_MAX_FAILURES, Failures
from hvd_cluster.spark.elastic.fleet import TaskFleet
from hvd_cluster.spark.elastic.task_pool import TaskPool
from hvd_cluster.spark.session import Session, check_profile
from hvd_cluster.spark.task_function import MODULE_REMEDY

logger = logging.getLogger(__name__)


@none_is_default
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
        fn: what every worker calls. Functions of scripts and notebooks and local functions are pickled by value.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        num_proc: workers at the start; by default as many as the session runs tasks at once.
        min_num_proc: with fewer workers the job waits; by default ``num_proc``.
        max_num_proc: the maximum number of workers; by default ``num_proc``.
        start_timeout: seconds for ``num_proc`` tasks to start; by default HOROVOD_SPARK_START_TIMEOUT, else 600.
        elastic_timeout: seconds to wait for ``min_num_proc`` workers after a loss; by default HOROVOD_ELASTIC_TIMEOUT,
            else 600.
        reset_limit: how many times the workers may change; None for no limit.
        env: additional environment variables for the workers; a value of None removes one.
        stdout, stderr, verbose, nics, prefix_output_with_timestamp: see :func:`hvd_cluster.spark.run`.
        min_np, max_np: deprecated names of ``min_num_proc`` and ``max_num_proc``.
        spark: the session; by default the active one.
        resource_profile: see :func:`hvd_cluster.spark.run`.

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
    count = num_proc_problems(num_proc)
    if wrong := [
        *seconds_problems(start_timeout=start_timeout, elastic_timeout=elastic_timeout),
        *variable_problems(env),
        *(count or num_proc_range_problems(num_proc, min_num_proc, max_num_proc, reset_limit)),
    ]:
        raise ValueError("; ".join(wrong))
    settings = Settings.from_env(spark_start_timeout_s=start_timeout, elastic_timeout_s=elastic_timeout)
    call = pack(fn, args, kwargs, remedy=MODULE_REMEDY)
    session = active(spark)
    check_profile(session, resource_profile)
    if num_proc is None:
        num_proc = max(preflight.infer_num_tasks(session), min_num_proc or 1)
        num_proc = min(num_proc, max_num_proc or num_proc)
    slots.check(num_proc, session.slots(resource_profile), barrier=False)
    interfaces = interface_names(nics)
    spec = ElasticSpec(
        task=Task(
            call=call, env={**interface_variables(interfaces), **checked_variables(env)}, as_horovod=serves_horovod()
        ),
        num_proc=num_proc,
        min_num_proc=num_proc if min_num_proc is None else min_num_proc,
        max_num_proc=num_proc if max_num_proc is None else max_num_proc,
        is_discovered=True,
        reset_limit=reset_limit,
        elastic_timeout_s=settings.elastic_timeout_s,
        interfaces=interfaces,
    )
    on_line = printer(stdout, stderr, with_timestamp=prefix_output_with_timestamp, verbose=verbose)
    return collect(_run(session, spec, resource_profile, settings.spark_start_timeout_s, on_line))


def _run(session: Session, spec: ElasticSpec, profile: Any, start_timeout_s: float, on_line: OnLine) -> list[Outcome]:
    """Run the job from start to end; nothing of it remains when this returns or raises."""
    encrypted = encryption.is_wanted(session.conf)
    if encrypted and not session.is_local:
        logger.warning("if torch has no TLS for Gloo (its wheels have none): %s", encryption.OPEN_TENSORS_TEXT)
    secret = new_secret(encrypted=encrypted)
    max_failures = int(session.conf("spark.task.maxFailures") or DEFAULT_MAX_FAILURES)
    failures = Failures(max_failures)
    wakeups: list[Callable[[], None]] = []

    def on_change() -> None:
        for wakeup in wakeups:
            wakeup()

    with contextlib.ExitStack() as stack:
        num_tasks = spec.max_num_proc or spec.num_proc
        task_pool = TaskPool(session, num_tasks, secret, profile, on_change, spec.interfaces, max_failures)
        stack.callback(task_pool.close)
        task_pool.start()
        task_pool.wait_for(spec.num_proc, start_timeout_s)
        fleet = stack.enter_context(TaskFleet(secret, task_pool, spec.interfaces))
        fleet.open(others=not session.is_local)
        controller = ElasticController(
            spec, fleet, on_line, ignore_event, lambda outcome: failures.record(outcome, time.monotonic())
        )
        hosts = HostManager(task_pool, fleet, None, spec.discovery_interval_s, controller.wakeup.set)
        stack.callback(hosts.close)
        stack.callback(controller.close)  # first, so that workers end even while a discovery blocks
        wakeups.append(controller.wakeup.set)
        hosts.start()
        return controller.run(hosts)
