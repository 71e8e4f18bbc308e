"""The arguments of ``hvd_cluster.run`` and the flags of hvdrun.

They also say which hosts to use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvd_cluster.launch import checks
from hvd_cluster.launch.allocation import find_allocation
from hvd_cluster.launch.hosts import Host, fill, is_local, parse_hosts, read_hostfile
from hvd_cluster.launch.run_options import RunOptions
from hvd_cluster.launch.spec import ElasticSpec, JobSpec
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.task import Task
from hvd_cluster.rendezvous.addresses import interface_names
from hvd_cluster.settings import Settings


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HostOptions(RunOptions):
    """The arguments of :func:`hvd_cluster.run`, which describes them.

    They have the same names; None means not given.
    """

    slots: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    host_discovery_script: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None

    def problems(self) -> list[str]:
        """What is wrong with the arguments, a sentence each."""
        wrong = super().problems()
        wrong += checks.count_problems(self.name_of("slots"), self.slots)
        wrong += checks.string_problems(self.name_of("hosts"), self.hosts, "hosts and slots such as 'a:2,b:4'")
        for name in ("hostfile", "host_discovery_script", "ssh_identity_file"):
            wrong += checks.string_problems(self.name_of(name), getattr(self, name), "a path", os.PathLike)
        wrong += checks.port_problems(self.name_of("ssh_port"), self.ssh_port)
        if sum(source is not None for source in (self.hosts, self.hostfile, self.host_discovery_script)) > 1:
            wrong.append("hosts, hostfile and host_discovery_script exclude each other: pass only one of them")
        return wrong

    def elastic_problems(self) -> list[str]:
        """As for all launchers, but other jobs only ignore these arguments.

        See :meth:`unused`.
        """
        return super().elastic_problems() if self.is_elastic else []

    @property
    def is_elastic(self) -> bool:
        """Whether the job may lose and gain workers."""
        return self.min_num_proc is not None or self.host_discovery_script is not None

    def unused(self) -> list[str]:
        """The names of arguments that were given and that this job does not read."""
        if self.is_elastic:
            return []
        names = ("max_num_proc", "reset_limit", "cooldown_range", "elastic_timeout")
        slots = ["slots"] if self.slots is not None and self.hostfile is None else []
        return [name for name in names if getattr(self, name) is not None] + slots

    def named_hosts(self) -> tuple[Host, ...]:
        """The hosts in ``hosts`` or the hostfile; empty if there is neither.

        Raises:
            ValueError: they cannot be read.
        """
        if self.hosts is not None:
            return tuple(parse_hosts(self.hosts))
        return () if self.hostfile is None else tuple(read_hostfile(self.hostfile, self.slots or 1))

    def allocated_hosts(self, environ: Mapping[str, str], note: Callable[[str], object]) -> tuple[Host, ...]:
        """The hosts that a batch system gave this job.

        Empty if there are none, or a discovery script finds them.

        Args:
            environ: the environment of this process.
            note: called with a sentence about them.
        """
        allocation = None if self.host_discovery_script is not None else find_allocation(environ)
        if allocation is None:
            return ()
        slots = sum(host.slots for host in allocation.hosts)
        if self.num_proc is not None and self.num_proc > slots and all(is_local(h.name) for h in allocation.hosts):
            return ()  # one node of a batch system, and the user wants more workers than tasks
        note(
            f"{allocation.system} gave this job {', '.join(f'{host.name}:{host.slots}' for host in allocation.hosts)}; "
            f"use {self.name_of('hosts')} or {self.name_of('hostfile')} for other hosts"
        )
        return tuple(allocation.hosts)

    def spec(self, task: Task, hosts: tuple[Host, ...], settings: Settings) -> JobSpec:
        """The job that runs ``task`` on ``hosts``; without hosts, on this one.

        Raises:
            ValueError: the numbers of workers and the hosts do not fit together.
        """
        ssh = SshOptions(
            port=self.ssh_port, identity_file=self.ssh_identity_file, connect_timeout_s=settings.start_timeout_s
        )
        interfaces = self.interfaces or interface_names(settings.gloo_interface)
        if self.is_elastic:
            return ElasticSpec.of(
                self,
                task,
                settings,
                hosts=hosts,
                discovery_script=self.host_discovery_script or "",
                slots=self.slots or 1,
                ssh=ssh,
                interfaces=interfaces,
            )
        count, _ = self.counts
        return JobSpec(
            task=task,
            hosts=tuple(fill(hosts or (Host("localhost", count),), count)),
            num_proc=count,
            ssh=ssh,
            interfaces=interfaces,
            start_timeout_s=settings.start_timeout_s,
        )
