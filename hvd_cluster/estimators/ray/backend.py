"""The backend whose workers are Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO

from hvd_cluster.estimators.backend import LauncherBackend, OnEvent
from hvd_cluster.launch.run_options import checked_arguments


class RayBackend(LauncherBackend):
    """Actors of a Ray cluster as workers, in a new or the program's placement group.

    Args:
        num_proc: the number of workers; by default as many as the cluster has free GPUs (without ``use_gpu``, CPUs), or
            as fit into the program's placement group.
        env: variables for the workers.

    The other arguments are those of :func:`hvd_cluster.ray.run`.
    """

    @checked_arguments
    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, Any] | None = None,
        *,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        start_timeout: float | None = None,
        placement_group_timeout: float = 100,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        verbose: int = 1,
        nics: Any = None,
        prefix_output_with_timestamp: bool = False,
        on_event: OnEvent | None = None,
        torch_backend: str | None = None,
    ) -> None:
        super().__init__(locals())
        self._num_found: int | None = None

    def _launch(self) -> Callable[..., list[Any]]:
        from hvd_cluster.ray.function import run

        return run

    def check(self) -> None:
        """Check that workers have room; count them again unless ``num_proc`` was given.

        Raises:
            NotEnoughSlotsError: there is no room for one worker, or the program's placement group is too small for
                ``num_proc``.
        """
        self._num_found = None
        self.check_again()

    def check_again(self) -> None:
        """Check room for the same number of workers, on which the learning rate depends.

        Raises:
            NotEnoughSlotsError: as :meth:`check`.
        """
        from hvd_cluster.ray.spec import require_capacity

        require_capacity(self.num_processes(), **self._of_a_worker())

    def check_unpickles(self, name: str, values: Mapping[str, Any]) -> None:
        """Unpickle ``values`` in one worker if the cluster has machines other than this.

        Raises:
            LaunchError: they cannot be unpickled; the text names the module and the remedy.
        """
        if self.is_far:
            self._unpickle_there(name, values)

    @property
    def is_far(self) -> bool:
        """Whether the cluster has other machines than this one."""
        from hvd_cluster.ray import nodes
        from hvd_cluster.ray.session import connect

        connect()
        here = nodes.own_address()
        return any(node.address != here for node in nodes.living())

    def num_processes(self) -> int:
        """The number of workers. If it was not given, asks the cluster once in each fit.

        Raises:
            NotEnoughSlotsError: there is no room for one worker.
        """
        if self._num_proc is not None:
            return self._num_proc
        if self._num_found is None:
            from hvd_cluster.ray.spec import num_workers_that_fit

            self._num_found = num_workers_that_fit(**self._of_a_worker())
        return self._num_found

    def _of_a_worker(self) -> dict[str, Any]:
        """The arguments about the resources of a worker."""
        names = ("cpus_per_worker", "use_gpu", "gpus_per_worker", "use_current_placement_group")
        return {name: self._kwargs[name] for name in names if self._kwargs.get(name) is not None}


def backend_for(num_proc: int | None, *, use_gpu: bool, verbose: int) -> RayBackend:
    """The backend for a Ray Dataset, on the cluster's GPUs if any may be used."""
    from hvd_cluster.ray.session import connect

    has_gpus = connect().cluster_resources().get("GPU", 0) > 0
    return RayBackend(num_proc, use_gpu=use_gpu and has_gpus, verbose=verbose)
