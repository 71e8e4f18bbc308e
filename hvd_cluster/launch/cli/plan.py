"""Turns flags into a job: what runs where."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_cluster.launch.cli.knobs import knob_environment
from hvd_cluster.launch.host_options import HostOptions
from hvd_cluster.launch.hosts import Host, is_local
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.launch.spec import ElasticSpec, JobSpec
from hvd_cluster.launch.task import Task
from hvd_cluster.oldpaths.shim import serves_horovod
from hvd_cluster.rendezvous.addresses import interface_names

#: Argument of :class:`HostOptions` -> its flag, where that is not ``--argument``.
_FLAGS = {
    "num_proc": "-np",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "reset_limit": "--reset-limit",
    "start_timeout": "--start-timeout",
    "elastic_timeout": "--elastic-timeout",
    "cooldown_range": "--blacklist-cooldown-range",
    "slots": "--slots",
    "hosts": "-H",
    "hostfile": "--hostfile",
    "ssh_port": "--ssh-port",
}
#: The first word of a command that is more likely the rest of a list of hosts.
_HOST_LIKE = re.compile(r",|[\w.-]+:\d+")
#: A variable in front of a command, as in a shell.
_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=")


@dataclass(frozen=True)
class LaunchPlan:
    """The job that the command line describes."""

    #: The job.
    spec: JobSpec
    #: One line each, for the user.
    notes: tuple[str, ...] = ()


def make_plan(parsed: argparse.Namespace, environ: Mapping[str, str], *, as_horovod: bool) -> LaunchPlan:
    """Check everything that can be checked before anything starts.

    Raises:
        ValueError: the job cannot run.
    """
    if parsed.hosts is not None and _HOST_LIKE.match(parsed.command[0]) and shutil.which(parsed.command[0]) is None:
        raise ValueError(
            f"-H ends with {parsed.hosts!r}, and the command begins with {parsed.command[0]!r}: write the hosts "
            "without spaces between them, such as -H a:2,b:2"
        )
    variables = knob_environment(parsed)
    options = HostOptions.of({**vars(parsed), "names": _FLAGS})
    settings = options.settings(environ)  # reports unreadable variables once, here, instead of in every worker
    task = Task(command=_command(parsed.command), env=variables, as_horovod=as_horovod or serves_horovod())
    notes = list(parsed.notes or [])
    hosts = options.named_hosts() or options.allocated_hosts(environ, notes.append)
    for argument in options.unused():
        elastic = "--min-np or --host-discovery-script, which make a job elastic"
        others = "--hostfile or --host-discovery-script" if argument == "slots" else elastic
        notes.append(f"{options.name_of(argument)} has no effect without {others}")
    if options.num_proc is None and options.min_num_proc is None:
        if options.is_elastic:
            raise ValueError("the number of workers is missing: -np N, or --min-np N")
        if not hosts:
            raise ValueError("the number of workers is missing: -np N")
        num_proc = sum(host.slots for host in hosts)
        options = replace(options, num_proc=num_proc)
        notes.append(f"-np was not given: one worker on each of the {num_proc} slots")
    spec = options.spec(task, hosts, settings)
    if parsed.nics and spec.hosts and all(is_local(host.name) for host in spec.hosts):
        text = "--network-interfaces has no effect: all workers are on this host and use its loopback interface"
        notes.append(text + _missing_interfaces(interface_names(parsed.nics)))
    assigned = list(itertools.takewhile(_ASSIGNMENT.match, parsed.command))
    path = dict(word.split("=", 1) for word in assigned).get("PATH")
    program, path = (parsed.command[len(assigned)], path) if parsed.command[len(assigned) :] else ("env", None)
    if any(is_local(host.name) for host in spec.hosts) and shutil.which(program, path=path) is None:
        raise ValueError(_not_a_program(program))
    return LaunchPlan(spec, tuple(notes))


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """The program and its arguments.

    Variables may come first, as in Horovod, which gives the command to a shell.
    """
    return ("env", *words) if _ASSIGNMENT.match(words[0]) else tuple(words)


def _missing_interfaces(names: Iterable[str]) -> str:
    """The end of a sentence if this host has none of these interfaces.

    A name may be a prefix.
    """
    existing = [name for _, name in socket.if_nameindex()]
    missing = [repr(name) for name in names if not any(each.startswith(name) for each in existing)]
    return f". This host has no interface {' or '.join(missing)}; it has {', '.join(existing)}" if missing else ""


def _not_a_program(name: str) -> str:
    """Why the first word of the command cannot be run.

    Users of ``torchrun`` leave out ``python``.
    """
    if not Path(name).is_file():
        return f"the program {name!r} does not exist on this host"
    if name.endswith(".py"):
        return f"{name!r} is a Python script, not a program: write python {name}"
    return f"{name!r} is not executable: put its interpreter before its name, or run chmod +x and give its path"


def describe(spec: JobSpec) -> str:
    """The output of ``--dry-run``.

    The ssh command of each host; each worker's placement, variables and command.
    """
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
