"""Where a job runs and with how many workers, as the arguments of ``hvd_cluster.run`` and the flags of hvdrun say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_cluster.launch.elastic.spec import ElasticSpec
from hvd_cluster.launch.hosts import Host, fill
from hvd_cluster.launch.job import JobSpec, on_this_host
from hvd_cluster.launch.ssh.options import SshOptions
from hvd_cluster.launch.task import Task


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The arguments under their names in :func:`hvd_cluster.run`, where each is described; None means not given."""

    num_proc: int | None
    min_num_proc: int | None
    max_num_proc: int | None
    slots: int | None
    reset_limit: int | None
    cooldown_range: Sequence[float] | None
    #: The hosts that ``hosts``, ``hostfile`` or a batch system name.
    hosts: tuple[Host, ...] | None
    hostfile: str | None
    host_discovery_script: str | None
    elastic_timeout: float | None
    ssh: SshOptions
    #: The network interfaces to use; if empty, a probe decides.
    interfaces: tuple[str, ...]

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

    def spec(self, task: Task, elastic_timeout_s: float, start_timeout_s: float) -> JobSpec | ElasticSpec:
        """The job that runs ``task``; the timeouts hold the defaults for arguments that were not given.

        Raises:
            ValueError: the numbers of workers and the hosts do not fit together.
        """
        minimum = next((count for count in (self.min_num_proc, self.num_proc) if count is not None), 1)
        count = minimum if self.num_proc is None else self.num_proc
        if not self.is_elastic:
            return JobSpec(
                task=task,
                hosts=tuple(fill(self.hosts or on_this_host(count), count)),
                num_proc=count,
                ssh=self.ssh,
                interfaces=self.interfaces,
                start_timeout_s=start_timeout_s,
            )
        return ElasticSpec(
            task=task,
            num_proc=count,
            min_num_proc=minimum,
            max_num_proc=self.max_num_proc,
            hosts=self.hosts or (),
            discovery_script=self.host_discovery_script or "",
            slots=1 if self.slots is None else self.slots,
            reset_limit=self.reset_limit,
            cooldown_range_s=None if self.cooldown_range is None else (self.cooldown_range[0], self.cooldown_range[1]),
            elastic_timeout_s=elastic_timeout_s,
            ssh=self.ssh,
            interfaces=self.interfaces,
        )
