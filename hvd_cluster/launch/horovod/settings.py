"""The settings of a launch.

``horovod.runner.common.util.settings`` and ``horovod.runner.elastic.settings``. These classes only hold values;
hvd_cluster's launchers take their arguments one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class BaseSettings:
    """The settings of every launch, under Horovod's names."""

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: bytes | None = None
    #: A :class:`~hvd_cluster.launch.horovod.timeout.Timeout`.
    start_timeout: Any = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: Any = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


@dataclass(kw_only=True)
class Settings(BaseSettings):
    """The settings of a job with a fixed number of workers."""

    hosts: str | None = None


@dataclass(kw_only=True)
class ElasticSettings(BaseSettings):
    """The settings of an elastic job."""

    discovery: Any
    min_num_proc: int
    max_num_proc: int | None
    elastic_timeout: float | None
    reset_limit: int | None
    cooldown_range: Any = None
    elastic: bool = True
