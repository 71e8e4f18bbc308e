"""``hvd_cluster.ray.run``: runs a function on workers of a Ray cluster.

It returns the results by rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from hvd_cluster.launch.checks import amount_problems, flag_problems
from hvd_cluster.launch.run_options import RunOptions, checked_arguments
from hvd_cluster.launch.worker_group import OnEvent
from hvd_cluster.ray.actor import ActorCall
from hvd_cluster.ray.actor_group import ActorGroup
from hvd_cluster.ray.adapter import packed
from hvd_cluster.ray.session import connect, refuse_client
from hvd_cluster.ray.settings import START_TIMEOUT_S
from hvd_cluster.ray.spec import packed_strategy, resource_problems, worker_resources
from hvd_cluster.settings import Settings


@checked_arguments
def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    gpus_per_worker: float | None = None,
    use_current_placement_group: bool = True,
    env: Mapping[str, Any] | None = None,
    start_timeout: float | None = None,
    placement_group_timeout: float = 100,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    on_event: OnEvent | None = None,
    torch_backend: str | None = None,
) -> list[Any]:
    """Run a function in ``num_proc`` actors that form one world, and end them.

    Each calls ``fn(*args, **kwargs)``.

    Args:
        fn: what every worker calls. Functions of scripts and notebooks and local functions are pickled by value.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        num_proc: number of workers; inside a placement group None means as many as fit.
        cpus_per_worker, use_gpu, gpus_per_worker, use_current_placement_group: see
            :class:`~hvd_cluster.ray.executor.RayExecutor`.
        env: additional environment variables for the workers; a value of None removes one.
        start_timeout: seconds for all workers to report, once there is room for them; None means
            HOROVOD_START_TIMEOUT, or 300.
        placement_group_timeout: seconds to wait for room in the cluster.
        stdout: a text stream for the lines that workers write to stdout, each prefixed with ``[rank]<stdout>:``; by
            default the driver's.
        stderr: the same for stderr.
        verbose: 0 drops the workers' output unless ``stdout`` or ``stderr`` is given.
        nics: network interface for the workers' data.
        prefix_output_with_timestamp: print the time before each line of output.
        on_event: called, from another thread, with the rank and the fields of each ``launch.progress.report``.
        torch_backend: see :func:`hvd_cluster.run`.

    Returns:
        The return values of ``fn`` on rank 0, rank 1, ...

    Raises:
        ValueError: an argument is invalid.
        StartTimeoutError, NotEnoughSlotsError, WorkerFailedError, LaunchError: as
            :class:`~hvd_cluster.ray.executor.RayExecutor` raises them.
    """
    wrong = resource_problems(cpus_per_worker, use_gpu, gpus_per_worker)
    wrong += flag_problems("use_current_placement_group", use_current_placement_group)
    wrong += amount_problems("placement_group_timeout", placement_group_timeout, " of seconds")
    options = RunOptions.of(locals(), wrong)
    connect()
    refuse_client("hvd_cluster.ray.run")
    call = packed(fn, args, kwargs)
    resources = worker_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    group = ActorGroup(
        packed_strategy(num_proc, resources, use_current_placement_group, "num_proc"),
        options.callbacks(),
        options.variables,
        placement_timeout_s=placement_group_timeout,
        start_timeout_s=_start_timeout_s(start_timeout),
    )
    with contextlib.closing(group) as actors:
        actors.start(None)
        return actors.call(ActorCall("perform", (call, False)), is_last=True)


def _start_timeout_s(given: float | None) -> float:
    is_set = given is not None or "start_timeout_s" in Settings.given()
    return Settings.from_env(start_timeout_s=given if is_set else START_TIMEOUT_S).start_timeout_s
