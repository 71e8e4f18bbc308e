"""``hvd_cluster.run``: a function on several workers of this host, with the argument names of ``horovod.run``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_cluster.launch import local
from hvd_cluster.launch.arguments import warn_of_mpi, wrong_controllers, wrong_num_proc
from hvd_cluster.launch.cli.hosts import local_seats, parse_hosts


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    hosts: str | None = None,
    start_timeout: float | None = None,
    disable_cache: bool | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    executable: str | None = None,
    np: int | None = None,
) -> list[Any]:
    """Run ``func(*args, **kwargs)`` once on each of ``num_proc`` workers of this host.

    Args:
        func: any picklable function, also one of a notebook or a script; it calls ``hvd.init()`` itself.
        num_proc: number of workers. ``np`` is its deprecated name.
        hosts: names of this host with their slots, ``"localhost:4"``: the launch is refused where they are too few.
        start_timeout: seconds until every worker must have reported; ``HOROVOD_START_TIMEOUT`` or 30.
        disable_cache: accepted; it is about Horovod's cache of checks of remote hosts, and nothing is cached.
        verbose: 0 keeps the workers' output off this process's.
        use_gloo, use_mpi: accepted for Horovod's sake, not both; workers always meet through our own rendezvous.
        executable: the workers' Python; this one by default.

    Returns:
        What ``func`` returned, by rank.

    Raises:
        ValueError: the arguments contradict each other, ``num_proc`` is less than 1, or the slots are too few.
        WorkerFailedError: a worker raised or died; the text begins with the user's own traceback.
    """
    del disable_cache
    if np is not None:
        warnings.warn("np is deprecated, use num_proc", DeprecationWarning, stacklevel=2)
        num_proc = np
    if wrong := wrong_num_proc(num_proc) + wrong_controllers(use_gloo, use_mpi):
        raise ValueError("; ".join(wrong))
    warn_of_mpi(use_mpi)
    if hosts is not None:
        local_seats(num_proc, parse_hosts(hosts))
    return local.run(
        func,
        tuple(args),
        dict(kwargs or {}),
        num_proc,
        executable=executable,
        start_timeout=start_timeout,
        verbose=1 if verbose is None else verbose,
    )
