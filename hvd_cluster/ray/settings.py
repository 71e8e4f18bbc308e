"""The settings for the start of a job on Ray, under Horovod's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hvd_cluster.launch.checks import amount_problems
from hvd_cluster.launch.elastic.discovery import HostDiscovery
from hvd_cluster.launch.environment import interface_variables
from hvd_cluster.launch.run_options import RunOptions

#: The default is longer than that of hosts, because a node may have to install a runtime environment.
START_TIMEOUT_S = 300


@dataclass
class MiniSettings:
    """What :meth:`RayExecutor.create_settings` returns."""

    #: Network interface for the workers' data; None for the one on the route to the driver's node.
    nics: str | Iterable[str] | None = None
    #: 0 drops the workers' output.
    verbose: int | bool = 1
    #: Accepted for compatibility; each job has a new secret.
    key: Any = None
    #: Accepted for compatibility, like the next one: Ray starts the workers, not ssh.
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    #: Seconds for the workers that a job starts with to report, once there is room for them.
    timeout_s: float = START_TIMEOUT_S
    #: Seconds to wait for room in the cluster.
    placement_group_timeout_s: float = 100
    elastic: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is None:  # "not given", as in Horovod's functions
                setattr(self, each.name, each.default)
        wrong = amount_problems("timeout_s", self.timeout_s, " of seconds")
        wrong += amount_problems("placement_group_timeout_s", self.placement_group_timeout_s, " of seconds")
        try:
            self.options({})
        except ValueError as error:
            wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def start_timeout(self) -> float:
        """Horovod's name for :attr:`timeout_s`."""
        return self.timeout_s

    def options(self, env: Mapping[str, str | None]) -> RunOptions:
        """These settings as the options of a job whose workers get the variables ``env``."""
        return RunOptions(nics=self.nics, env=env, verbose=self.verbose)


@dataclass
class ElasticSettings(MiniSettings):
    """What :meth:`ElasticRayExecutor.create_settings` returns."""

    #: With fewer workers the job waits.
    min_num_proc: int = 1
    #: The maximum number of workers; None for as many as fit.
    max_num_proc: int | None = None
    #: How many times the workers may change; None for no limit.
    reset_limit: int | None = None
    #: Shortest and longest time, in seconds, for which a node on which a worker failed is not used; None for forever.
    cooldown_range: Sequence[float] | None = None
    #: Seconds to wait for ``min_num_proc`` workers.
    elastic_timeout: float = 600
    #: Finds the nodes if ``override_discovery=False``.
    discovery: HostDiscovery | None = None
    elastic: bool = True

    def options(self, env: Mapping[str, str | None]) -> RunOptions:
        return replace(
            super().options(env),
            min_num_proc=self.min_num_proc,
            max_num_proc=self.max_num_proc,
            reset_limit=self.reset_limit,
            cooldown_range=self.cooldown_range,
            elastic_timeout=self.elastic_timeout,
        )


#: Horovod's name for this function.
nics_to_env_var = interface_variables


def store_key(ssh_str: str | None, ssh_identity_file: str | None) -> None:
    """Write an ssh key to a file that only this user can read, as Horovod does."""
    if not ssh_str or not ssh_identity_file:
        return
    path = Path(ssh_identity_file)
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(ssh_str, encoding="utf-8")
    path.chmod(0o600)
