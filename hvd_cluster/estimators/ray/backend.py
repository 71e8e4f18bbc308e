"""Fits whose workers are Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_cluster.estimators.backend import LauncherBackend


class RayBackend(LauncherBackend):
    """Workers are actors of a Ray cluster, in a placement group of their own or in the one that the program is in.

    Args:
        num_proc: how many; as many as there are free GPUs (or, without ``use_gpu``, CPUs) in the cluster if not given,
            or as the placement group that the program is in has room for.
        env: variables for the workers.
        kwargs: further arguments of :func:`hvd_cluster.ray.run`, such as ``use_gpu``, ``cpus_per_worker``, ``verbose``,
            ``stdout``, ``stderr`` or ``placement_group_timeout``.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str | None] | None = None, **kwargs: Any) -> None:
        super().__init__(num_proc, env, **kwargs)
        self._num_found: int | None = None

    def _launch(self) -> Callable[..., list[Any]]:
        from hvd_cluster.ray.function import run

        return run

    def check(self) -> None:
        """Begin a fit: where the number of workers was not given, what was found for an earlier one counts no more.

        Raises:
            NotEnoughSlotsError: there is no room for one; or the placement group that the program is in is too small
                for as many as were given.
        """
        self._num_found = None
        self.check_again()

    def check_again(self) -> None:
        """The fit keeps its number of workers, with which the learning rate goes: its start waits for their room.

        Raises:
            NotEnoughSlotsError: as :meth:`check`.
        """
        from hvd_cluster.ray.spec import require_capacity

        require_capacity(self.num_processes(), **self._of_a_worker())

    def check_unpickles(self, name: str, values: Mapping[str, Any]) -> None:
        """Unpickle ``values`` in one worker, where the cluster has other machines than this one.

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
        """The number of workers; asks the cluster once in each fit where it was not given.

        Raises:
            NotEnoughSlotsError: there is no room for one.
        """
        if self._num_proc is not None:
            return self._num_proc
        if self._num_found is None:
            from hvd_cluster.ray.spec import num_workers_that_fit

            self._num_found = num_workers_that_fit(**self._of_a_worker())
        return self._num_found

    def _of_a_worker(self) -> dict[str, Any]:
        """What was said about the room that a worker needs."""
        names = ("cpus_per_worker", "use_gpu", "gpus_per_worker", "use_current_placement_group")
        return {name: self._kwargs[name] for name in names if self._kwargs.get(name) is not None}


def backend_for(num_proc: int | None, *, use_gpu: bool, verbose: int) -> RayBackend:
    """The backend of a fit of a Ray Dataset: on GPUs where the cluster has any, and the estimator may use them."""
    from hvd_cluster.ray.session import connect

    has_gpus = connect().cluster_resources().get("GPU", 0) > 0
    return RayBackend(num_proc, use_gpu=use_gpu and has_gpus, verbose=verbose)
