"""Turns flags into a job: what runs where."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_cluster.launch.allocation import find_allocation
from hvd_cluster.launch.checks import interface_names
from hvd_cluster.launch.cli.knobs import knob_environment
from hvd_cluster.launch.elastic.spec import ElasticSpec
from hvd_cluster.launch.hosts import Host, is_local, parse_hosts, read_hostfile
from hvd_cluster.launch.job import JobSpec
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.launch.run_options import RunOptions
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.task import Task
from hvd_cluster.oldpaths.shim import serves_horovod
from hvd_cluster.settings import Settings

#: Arguments of :class:`RunOptions` that the parser stores under the same names.
_ARGUMENTS = (
    *("num_proc", "min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range"),
    *("hostfile", "host_discovery_script", "elastic_timeout"),
)
_ELASTIC = "--min-np or --host-discovery-script, which make a job elastic"
#: Argument of :class:`RunOptions` -> its flag, and the flags without which it has no effect.
_FLAGS = {
    "max_num_proc": ("--max-np", _ELASTIC),
    "reset_limit": ("--reset-limit", _ELASTIC),
    "elastic_timeout": ("--elastic-timeout", _ELASTIC),
    "cooldown_range": ("--blacklist-cooldown-range", _ELASTIC),
    "slots": ("--slots", "--hostfile or --host-discovery-script"),
}


@dataclass(frozen=True)
class LaunchPlan:
    """The job that the command line describes."""

    #: The job.
    spec: JobSpec | ElasticSpec
    #: One line each, for the user.
    notes: tuple[str, ...] = ()


def make_plan(parsed: argparse.Namespace, environ: Mapping[str, str], *, as_horovod: bool) -> LaunchPlan:
    """Check everything that can be checked before anything starts.

    Raises:
        ValueError: the job cannot run.
    """
    variables = knob_environment(parsed)
    settings = Settings.from_env(environ)  # reports unreadable variables once, here, instead of in every worker
    start_timeout_s = settings.start_timeout_s if parsed.start_timeout is None else parsed.start_timeout
    if not start_timeout_s > 0:
        raise ValueError(f"--start-timeout={start_timeout_s:g} must be > 0")
    task = Task(command=tuple(parsed.command), env=variables, as_horovod=as_horovod or serves_horovod())
    notes = list(parsed.notes or [])
    hosts = _hosts(parsed, environ, notes)
    num_proc = parsed.num_proc
    options = RunOptions(
        **{name: getattr(parsed, name) for name in _ARGUMENTS},
        hosts=hosts,
        ssh=SshOptions(port=parsed.ssh_port, identity_file=parsed.ssh_identity_file, connect_timeout_s=start_timeout_s),
        interfaces=interface_names(parsed.nics or settings.gloo_interface),
    )
    notes += [f"{flag} has no effect without {others}" for flag, others in map(_FLAGS.__getitem__, options.unused())]
    if num_proc is None and parsed.min_num_proc is None:
        if options.is_elastic:
            raise ValueError("the number of workers is missing: -np N, or --min-np N")
        if hosts is None:
            raise ValueError("the number of workers is missing: -np N")
        num_proc = sum(host.slots for host in hosts)
        options = replace(options, num_proc=num_proc)
        notes.append(f"-np was not given: one worker on each of the {num_proc} slots")
    elastic_timeout_s = settings.elastic_timeout_s if parsed.elastic_timeout is None else parsed.elastic_timeout
    spec = options.spec(task, elastic_timeout_s, start_timeout_s)
    if parsed.nics and spec.hosts and all(is_local(host.name) for host in spec.hosts):
        notes.append("--network-interfaces has no effect: all workers are on this host and use its loopback interface")
    if any(is_local(host.name) for host in spec.hosts) and shutil.which(parsed.command[0]) is None:
        raise ValueError(_not_a_program(parsed.command[0]))
    return LaunchPlan(spec, tuple(notes))


def _not_a_program(name: str) -> str:
    """Why the first word of the command cannot be run; users of ``torchrun`` leave out ``python``."""
    if not Path(name).is_file():
        return f"the program {name!r} does not exist on this host"
    if name.endswith(".py"):
        return f"{name!r} is a Python script, not a program: write python {name}"
    return f"{name!r} is not executable: put its interpreter before its name, or run chmod +x and give its path"


def _hosts(parsed: argparse.Namespace, environ: Mapping[str, str], notes: list[str]) -> tuple[Host, ...] | None:
    """The hosts from the flags or a batch system; None if there are none."""
    if parsed.host_discovery_script is not None:
        return None
    if parsed.hosts is not None:
        return tuple(parse_hosts(parsed.hosts))
    if parsed.hostfile is not None:
        return tuple(read_hostfile(parsed.hostfile, parsed.slots))
    allocation = find_allocation(environ)
    if allocation is None:
        return None
    slots = sum(host.slots for host in allocation.hosts)
    if parsed.num_proc is not None and parsed.num_proc > slots and all(is_local(h.name) for h in allocation.hosts):
        return None  # one node of a batch system, and the user wants more workers than tasks
    notes.append(
        f"{allocation.system} gave this job {', '.join(f'{host.name}:{host.slots}' for host in allocation.hosts)}; "
        "use -H or --hostfile for other hosts"
    )
    return tuple(allocation.hosts)


def describe(spec: JobSpec | ElasticSpec) -> str:
    """The output of ``--dry-run``: the ssh command of each host; each worker's placement, variables and command."""
    command = shlex.join(spec.task.command or ())
    lines = [f"# {name}={value}" for name, value in sorted(spec.task.env.items())]
    if isinstance(spec, ElasticSpec):
        maximum = spec.max_num_proc if spec.max_num_proc is not None else "as many as there are slots"
        where = f"the hosts that {spec.discovery_script} prints" if spec.discovery_script else _listed(spec.hosts)
        lines.append(f"# elastic: {spec.min_num_proc} to {maximum} workers, {spec.num_proc} at the start, on {where}")
        return "\n".join([*lines, command]) + "\n"
    names = [host.name for host in spec.hosts for _ in range(host.slots)]
    lines += [
        f"# {host.name}: {shlex.join(spec.ssh.arguments(host.name, spec.ssh.agent_command({})))}"
        for host in spec.hosts
        if not is_local(host.name)
    ]
    keys = {host.name: "this host" if is_local(host.name) else host.name for host in spec.hosts}
    for placement in place([Slot(index, keys[name], name) for index, name in enumerate(names)]):
        place_variables = " ".join(
            f"HOROVOD_{name}={getattr(placement, name.lower())}"
            for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        )
        lines.append(f"[{placement.rank}] {names[placement.slot.index]}: {place_variables} {command}")
    return "\n".join(lines) + "\n"


def _listed(hosts: tuple[Host, ...]) -> str:
    return ", ".join(f"{host.name}:{host.slots}" for host in hosts)
