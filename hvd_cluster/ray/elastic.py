"""ElasticRayExecutor: the older way to run an elastic job.

``RayExecutor(min_workers=...)`` is the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_cluster.launch.checks import flag_problems
from hvd_cluster.launch.elastic.discovery import HostDiscovery
from hvd_cluster.launch.run_options import checked_arguments, fields_of
from hvd_cluster.ray.adapter import Callback
from hvd_cluster.ray.discovery import RayHostDiscovery, TestDiscovery
from hvd_cluster.ray.elastic_adapter import ElasticAdapter
from hvd_cluster.ray.session import connect, refuse_client
from hvd_cluster.ray.settings import ElasticSettings
from hvd_cluster.ray.spec import resource_problems, worker_resources

__all__ = ["ElasticRayExecutor", "RayHostDiscovery", "TestDiscovery"]


class ElasticRayExecutor:
    """Runs a function on workers that are replaced when they are lost.

    Others join when nodes join.

    Args:
        settings: from :meth:`create_settings`.
        use_gpu: whether each worker uses GPUs.
        cpus_per_slot: CPUs of each worker.
        gpus_per_slot: GPUs of each worker; 1 by default with ``use_gpu``.
        env_vars: environment variables for the workers; None as a value removes one.
        override_discovery: find nodes by asking Ray, even if ``settings.discovery`` is set.

    Raises:
        ValueError: arguments contradict each other.
    """

    @checked_arguments
    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        given: Any = settings
        wrong = resource_problems(cpus_per_slot, use_gpu, gpus_per_slot)
        wrong += flag_problems("override_discovery", override_discovery)
        if not isinstance(given, ElasticSettings):
            wrong.append(f"settings={given!r} must be what ElasticRayExecutor.create_settings() returns")
        elif not override_discovery and settings.discovery is None:
            wrong.append("override_discovery=False needs settings with a discovery: set settings.discovery")
        if wrong:
            raise ValueError("; ".join(wrong).replace("_per_worker", "_per_slot"))
        self.settings = replace(settings, discovery=None) if override_discovery else settings
        self._env = dict(env_vars or {})
        self._adapter = ElasticAdapter(self.settings, worker_resources(cpus_per_slot, use_gpu, gpus_per_slot))

    @classmethod
    @checked_arguments
    def create_settings(
        cls,
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: str | Iterable[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        *,
        verbose: int | bool = 1,
        key: Any = None,
        ssh_port: int | None = None,
        elastic: bool = True,
        placement_group_timeout_s: float = 100,
        cooldown_range: tuple[float, float] | None = None,
        discovery: HostDiscovery | None = None,
    ) -> ElasticSettings:
        """The settings of an executor.

        :class:`~hvd_cluster.ray.settings.ElasticSettings` describes them. ``min_np`` and ``max_np`` are the old names
        of ``min_num_proc`` and ``max_num_proc``.

        Raises:
            TypeError: an argument does not exist; the message suggests a similar one.
        """
        min_num_proc = min_num_proc if min_np is None else min_np
        max_num_proc = max_num_proc if max_np is None else max_np
        return ElasticSettings(**fields_of(ElasticSettings, locals()))

    def start(self) -> None:
        """Connect to Ray, and wait for room for ``min_num_proc`` workers.

        Raises:
            ValueError: the settings are invalid.
            StartTimeoutError: there is no room; the message says what is missing.
            NotEnoughSlotsError: the placement group that the program runs in is too small.
            LaunchError: this process cannot connect to the Ray cluster.
        """
        connect()
        refuse_client("ElasticRayExecutor")
        self._adapter.start(extra_env_vars=self._env)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Run ``worker_fn()`` on every worker.

        It trains inside a function decorated with ``hvd.elastic.run``.

        Args:
            worker_fn: what every worker calls, including those that join later.
            callbacks: each is called here with every dict that a worker passes to ``ray_logger.log``.

        Returns:
            The return values of the workers that finished, by their last rank.

        Raises:
            WorkerFailedError: all workers that held the state were lost, or the function raised an exception; the
                message starts with the user's own traceback.
            LaunchError: there were too few workers for too long, or too many resets.
        """
        return self._adapter.run(worker_fn, callbacks=callbacks)
