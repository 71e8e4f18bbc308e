"""What a job is: with a fixed number of workers, or elastic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.run_options import RunOptions
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.task import Task
from hvd_cluster.settings import Settings


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job with a fixed number of workers: what to run, and where."""

    task: Task
    #: Workers at the start.
    num_proc: int
    #: Hosts with enough slots.
    hosts: tuple[Host, ...] = ()
    ssh: SshOptions = field(default_factory=SshOptions)
    #: Names of the network interfaces to use; if empty, a probe decides.
    interfaces: tuple[str, ...] = ()
    #: Seconds for workers that run a function to report; a command does not report.
    start_timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class ElasticSpec(JobSpec):
    """An elastic job.

    Its hosts do not change, or ``discovery_script`` or the launcher itself finds them.
    """

    #: With fewer workers the job waits.
    min_num_proc: int
    #: The maximum number of workers; None for as many as there are slots.
    max_num_proc: int | None = None
    #: A program that prints the hosts, one "name:slots" per line; empty if ``hosts`` lists them.
    discovery_script: str = ""
    #: The launcher discovers the hosts itself, and lost hosts return under other names.
    is_discovered: bool = False
    #: Slots of a host that the script prints without a number.
    slots: int = 1
    #: How many times the workers may change; None for no limit.
    reset_limit: int | None = None
    #: Shortest and longest time, in seconds, for which a failed host is not used; None for forever.
    cooldown_range_s: tuple[float, float] | None = None
    #: Seconds to wait for ``min_num_proc`` slots.
    elastic_timeout_s: float = 600.0

    @classmethod
    def of(cls, options: RunOptions, task: Task, settings: Settings, **hosts: Any) -> ElasticSpec:
        """The job that runs ``task`` as the options say.

        ``hosts`` are the fields that say where.
        """
        count, minimum = options.counts
        pair = options.cooldown_range
        return cls(
            task=task,
            num_proc=count,
            min_num_proc=minimum,
            max_num_proc=options.max_num_proc,
            reset_limit=options.reset_limit,
            cooldown_range_s=None if pair is None else (pair[0], pair[1]),
            elastic_timeout_s=settings.elastic_timeout_s,
            **{"interfaces": options.interfaces, **hosts},
        )

    @property
    def may_come(self) -> bool:
        """Whether new hosts may become available."""
        return self.is_discovered or bool(self.discovery_script)

    @property
    def may_return(self) -> bool:
        """Whether failed hosts may be used again."""
        return self.is_discovered or self.cooldown_range_s is not None

    def __post_init__(self) -> None:
        wrong = []
        if not self.is_discovered and bool(self.hosts) == bool(self.discovery_script):
            wrong.append(
                "an elastic job needs hosts (-H, --hostfile; hosts=, hostfile=), or a script that finds them "
                "(--host-discovery-script; host_discovery_script=)"
            )
        slots = sum(host.slots for host in self.hosts)
        if len(self.hosts) == 1:
            wrong.append(
                "Cannot run in fault tolerance mode with fewer than 2 hosts. (Name more, or give a "
                "--host-discovery-script: it may print a single host, at least at the start.)"
            )
        elif self.hosts and slots < self.num_proc:
            wrong.append(f"Requested more processes ({self.num_proc}) than there are available slots ({slots})")
        if wrong:
            raise ValueError("; ".join(wrong))
