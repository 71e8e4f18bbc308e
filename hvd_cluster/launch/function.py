"""``hvd_cluster.run``: runs a function on workers on this or other hosts.

It has the arguments of ``horovod.run``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_cluster.launch.call import pack
from hvd_cluster.launch.host_options import HostOptions
from hvd_cluster.launch.job import run_job
from hvd_cluster.launch.logs import also_written
from hvd_cluster.launch.outcome import collect
from hvd_cluster.launch.run_options import checked_arguments, renamed
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.topology import inherited_env

logger = logging.getLogger(__name__)


@checked_arguments
def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str | None] | None = None,
    elastic_timeout: float | None = None,
    prefix_output_with_timestamp: bool = False,
    torch_backend: str | None = None,
) -> list[Any]:
    """Run ``func(*args, **kwargs)`` once on each of ``num_proc`` workers.

    Args:
        func: any picklable function, also one from a notebook or a script; it calls ``hvd.init()`` itself.
        args: its positional arguments, the same on every rank.
        kwargs: its keyword arguments.
        num_proc: number of workers; 1 by default. ``np`` is its deprecated name.
        min_num_proc: makes the job elastic: it continues with at least this many workers. Needs
            ``host_discovery_script``, or at least two hosts in ``hosts`` or ``hostfile``. ``min_np`` is its deprecated
            name.
        max_num_proc: the maximum number of workers of an elastic job. ``max_np`` is its deprecated name.
        slots: slots of hosts for which the hostfile or the discovery script has no number.
        reset_limit: how many times the workers of an elastic job may change.
        cooldown_range: shortest and longest time, in seconds, for which a failed host is not used.
        hosts: hosts and their slots, such as ``"a:2,b:4"``; by default this host.
        hostfile: a file with lines such as ``host slots=4``.
        host_discovery_script: a program that prints hosts and their slots; makes the job elastic.
        start_timeout: seconds for every host and worker to report; by default ``HOROVOD_START_TIMEOUT``, else 30.
        ssh_port: the port of ssh on the other hosts.
        ssh_identity_file: the private key for ssh.
        disable_cache: accepted; hvd_cluster does not cache Horovod's checks of remote hosts.
        output_filename: a directory for each worker's output: ``rank.<rank>/stdout`` and ``rank.<rank>/stderr``.
        verbose: 0 does not show the workers' output; 2 shows every line, also if a rank writes very many. False and
            True, which programs for Horovod pass, show it as usual.
        use_gloo, use_mpi: accepted for compatibility, but not both; hvd_cluster does not use MPI.
        mpi_args: accepted without effect.
        network_interface: deprecated; ``network_interfaces`` as one text.
        network_interfaces: names of the interfaces to use; by default ``HOROVOD_GLOO_IFACE``, else those through which
            the hosts reach each other.
        executable: the workers' Python; by default this one.
        env: additional variables for the workers; None removes a variable.
        elastic_timeout: seconds that an elastic job waits for enough slots; by default ``HOROVOD_ELASTIC_TIMEOUT``,
            else 600.
        prefix_output_with_timestamp: print the time before each line of the workers' output.
        torch_backend: the backend of ``torch.distributed``, such as "hvd" or "gloo", whose default group exists when
            ``func`` starts; by default ``HOROVOD_TORCH_BACKEND``, else none.

    Returns:
        The return values of ``func`` by rank; in an elastic job, those of the workers that finished, by their last
        rank.

    Raises:
        ValueError: arguments contradict each other, ``num_proc`` is less than 1, or there are too few slots.
        LaunchError: a host cannot be reached, or the workers cannot be started.
        WorkerFailedError: a worker raised an exception or died; the message starts with the user's own traceback.
    """
    del disable_cache
    verbose = 1 if isinstance(verbose, bool) else verbose
    num_proc = renamed("np", np, "num_proc", num_proc)
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    nics = renamed("network_interface", network_interface, "network_interfaces", network_interfaces)
    options = HostOptions.of({**locals(), "names": {"nics": "network_interfaces"}})
    if mpi_args:
        logger.warning("mpi_args has no effect: hvd_cluster does not use MPI")
    for name in options.unused():
        without = "hostfile" if name == "slots" else "min_num_proc"
        logger.warning("%s has no effect without %s or host_discovery_script", name, without)
    task = options.task(pack(func, args, kwargs), options.variables_but_interface)  # the launcher sets the interface
    found = options.named_hosts() or options.allocated_hosts(inherited_env(), logger.warning)
    spec = options.spec(task, found, options.settings())
    callbacks = options.callbacks()
    with also_written(callbacks.on_line, output_filename, spec.num_proc) as on_line:
        return collect(run_job(spec, SshFleet.of(spec), replace(callbacks, on_line=on_line)))
