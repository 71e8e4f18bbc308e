"""RayExecutor: runs functions, or a class's methods, on actors of one world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvd_cluster.launch.run_options import checked_arguments, fields_of
from hvd_cluster.ray.adapter import Adapter, Callback
from hvd_cluster.ray.client import ClientAdapter
from hvd_cluster.ray.elastic_adapter import ElasticAdapter
from hvd_cluster.ray.session import connect, is_client
from hvd_cluster.ray.settings import MiniSettings, store_key
from hvd_cluster.ray.spec import ExecutorSpec
from hvd_cluster.ray.static import StaticAdapter


class RayExecutor:
    """Runs functions on Ray actors, which form one world.

    Each actor is a worker. Also a context manager: ``with RayExecutor(settings, num_workers=4) as executor:
    executor.run(train)``.

    Pass ``num_workers``; or ``num_hosts`` and ``num_workers_per_host``; or, for a job that may lose and gain workers,
    ``min_workers`` and optionally ``max_workers``. Inside a placement group (for example in a Tune trial) the workers
    use its bundles, and ``num_workers`` may be left out.

    Args:
        settings: from :meth:`create_settings`; its defaults if None.
        num_workers: number of workers, packed onto as few nodes as possible.
        num_hosts: number of nodes, with the same number of workers on each.
        num_workers_per_host: that number; 1 by default.
        cpus_per_worker: CPUs of each worker.
        use_gpu: whether each worker gets a GPU, which it sees at its local rank.
        gpus_per_worker: GPUs of each worker; 1 by default with ``use_gpu``.
        use_current_placement_group: False creates a new group even inside of one.
        min_workers: makes the job elastic: it starts and continues with at least this many workers.
        max_workers: the maximum number of workers; None for as many as fit.
        reset_limit: how many times the workers may change; None for no limit.
        cooldown_range: shortest and longest time, in seconds, for which a node on which a worker failed is not used;
            None for forever.
        elastic_timeout: seconds to wait for ``min_workers`` while the job runs.
        override_discovery: find nodes by asking Ray, even if ``settings.discovery`` is set.

    Raises:
        TypeError: an argument does not exist; the message suggests a similar one.
        ValueError: arguments contradict each other; the message lists all contradictions.
    """

    @checked_arguments
    def __init__(
        self,
        settings: MiniSettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        self.settings = settings = self.create_settings() if settings is None else settings
        self.num_workers = num_workers
        self._spec = ExecutorSpec(**fields_of(ExecutorSpec, locals()))
        self.adapter: Adapter
        if min_workers is None:
            self.adapter = StaticAdapter(self.settings, self._spec.strategy)
        else:
            self.adapter = ElasticAdapter(
                self._spec.elastic_settings(), self._spec.resources, self._spec.use_current_placement_group
            )

    @classmethod
    @checked_arguments
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: str | Iterable[str] | None = None,
        verbose: int | bool = 1,
    ) -> MiniSettings:
        """The settings of an executor.

        Args:
            timeout_s: seconds for all workers to report, once there is room for them.
            ssh_identity_file: accepted for compatibility; Ray starts the workers.
            ssh_str: text of a key, which is written to ``ssh_identity_file``, readable only by this user.
            placement_group_timeout_s: seconds to wait for room in the cluster, or in the placement group to be used.
            nics: network interface for the workers' data; by default the one on the route to the driver's node.
            verbose: 0 drops the workers' output.
        """
        store_key(ssh_str, ssh_identity_file)
        return MiniSettings(**fields_of(MiniSettings, locals()))

    @checked_arguments
    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers. An executor that is already running is restarted.

        Args:
            executable_cls: each worker creates an instance, which :meth:`execute` passes to its function.
            executable_args: positional arguments of the class.
            executable_kwargs: keyword arguments of the class.
            extra_env_vars: environment variables for the workers; None as a value removes one.

        Raises:
            StartTimeoutError: there is no room in the cluster, or workers do not report; a ``TimeoutError``. (The
                workers of an elastic job start with each call; there it is the call that raises for workers that do not
                report.)
            NotEnoughSlotsError: the placement group that the program runs in is too small.
            WorkerFailedError: ``executable_cls`` raised an exception; the message starts with the user's traceback.
            LaunchError: the workers cannot be started, or cannot work together.
        """
        connect()  # RAY_ADDRESS may make this process a Ray Client
        if is_client() and not isinstance(self.adapter, ClientAdapter):
            self.adapter = ClientAdapter(self._spec, RayExecutor)
        self.adapter.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)

    @checked_arguments
    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Run ``fn(executable)`` on every worker.

        Args:
            fn: called with the worker's executable, or None if there is none.
            callbacks: each is called here with every dict that a worker passes to ``ray_logger.log``.

        Returns:
            The results by rank.

        Raises:
            WorkerFailedError: a worker raised an exception, exited or was killed; the message starts with the user's
                own traceback, and ``__cause__`` is the user's exception. If a worker died, or hung after another one's
                failure, all workers have ended.
            LaunchError: what is to be sent to the workers cannot be pickled, or there are no workers.
        """
        return self.adapter.execute(fn, callbacks)

    @checked_arguments
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every worker; otherwise like :meth:`execute`."""
        return self.adapter.run(fn, args, kwargs, callbacks)

    @checked_arguments
    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Start ``fn(*args, **kwargs)`` on every worker without waiting.

        Returns:
            By rank, the ``ObjectRef`` of each result; ``ray.get`` raises what the function raised.

        Raises:
            NotImplementedError: the job is elastic.
        """
        return self.adapter.run_remote(fn, args, kwargs)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Run ``fn(executable)`` on rank 0 only; returns its result.

        Raises:
            NotImplementedError: the job is elastic.
        """
        return self.adapter.execute_single(fn)

    def shutdown(self) -> None:
        """End the workers; :meth:`start` starts new ones.

        The placement group is removed if it was created for them.
        """
        self.adapter.shutdown()

    def __enter__(self) -> RayExecutor:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
