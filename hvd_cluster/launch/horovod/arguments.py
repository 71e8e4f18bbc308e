"""A launch described by an object.

``horovod.runner._HorovodArgs`` and ``horovod.runner.launch._run``.
"""

from __future__ import annotations

import argparse
from typing import Any

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch.cli.config import apply_config
from hvd_cluster.launch.cli.main import execute
from hvd_cluster.launch.cli.parser import build_parser
from hvd_cluster.launch.cli.plan import make_plan
from hvd_cluster.launch.function import run
from hvd_cluster.oldpaths.shim import serves_horovod
from hvd_cluster.oldpaths.table import HOROVOD_VERSION
from hvd_cluster.topology import inherited_env

#: Attributes of Horovod's object that our parser does not have.
_FURTHER = ("run_func", "executable", "use_gloo", "use_mpi", "use_jsrun", "mpi_args", "disable_cache")
#: The arguments of :func:`hvd_cluster.run` that such an object may have.
_FOR_FUNCTIONS = (
    *("num_proc", "min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "hosts", "hostfile"),
    *("host_discovery_script", "start_timeout", "ssh_port", "ssh_identity_file", "output_filename", "executable"),
    *("use_gloo", "use_mpi", "mpi_args", "elastic_timeout", "prefix_output_with_timestamp"),
)


class _HorovodArgs(argparse.Namespace):
    """The flags of ``horovodrun``, one attribute each.

    ``run_func`` is a function to run instead of a command. All are unset at first. ``_run`` takes such an object, or
    what ``parse_args`` returns.
    """

    def __init__(self, **given: Any) -> None:
        unset = vars(build_parser("horovodrun", HOROVOD_VERSION).parse_args([]))
        super().__init__(**{**unset, **dict.fromkeys(_FURTHER), "command": [], **given})


def _run(args: Any) -> list[Any] | None:
    """Run what ``args`` describes, and wait until it has ended.

    Returns:
        The return values of ``args.run_func`` by rank; None for a command.

    Raises:
        ValueError: the job cannot run.
        LaunchError: a host cannot be reached, or the workers cannot be started.
        WorkerFailedError: a worker failed; its output is on stderr.
    """
    options = _HorovodArgs(**vars(args))
    if options.run_func is not None:
        given = {name: getattr(options, name) for name in _FOR_FUNCTIONS if getattr(options, name) is not None}
        verbose = max(1, int(options.verbose or 0))  # Horovod shows the workers' lines in any case
        return run(options.run_func, network_interfaces=options.nics or None, verbose=verbose, **given)
    if not options.command:
        raise ValueError("args.command is empty: set it to the words of a command, or args.run_func to a function")
    if options.config_file is not None:
        apply_config(options, options.config_file)
    code = execute(make_plan(options, inherited_env(), as_horovod=serves_horovod()), options)
    if code:
        raise WorkerFailedError(
            f"Horovod detected that one or more processes exited with non-zero status ({code}), thus causing the job "
            "to be terminated; their output is on stderr",
            exit_code=code,
        )
    return None


def is_gloo_used(use_gloo: bool | None = None, use_mpi: bool | None = None, use_jsrun: bool | None = None) -> bool:  # noqa: ARG001 - Horovod's signature
    """True: hvd_cluster does not use MPI."""
    return True


def mpi_available(env: Any = None) -> bool:  # noqa: ARG001 - Horovod's signature
    """False: hvd_cluster does not use MPI."""
    return False
