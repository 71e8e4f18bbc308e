"""The HorovodTrainer of :mod:`ray.train.horovod`, for both versions of Ray Train.

>>> from hvd_cluster.ray.train import HorovodTrainer
>>> result = HorovodTrainer(train_loop, scaling_config=ScalingConfig(num_workers=4, use_gpu=True)).fit()

Ray Train starts and restarts the workers, and keeps metrics and checkpoints. The loop calls ``hvd.init()`` and
``ray.train.report(metrics, checkpoint=...)``. Any other trainer based on DataParallelTrainer can use
``backend_config=HorovodConfig()``.
"""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchTrainer

from hvd_cluster.launch.checks import flag_problems, interface_problems, seconds_problems
from hvd_cluster.launch.environment import enable_horovod_import, interface_variables, thread_variables
from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.oldpaths.shim import serves_horovod
from hvd_cluster.ray.resources import device_env
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import ANY, ReservedPort
from hvd_cluster.topology import Topology, export, inherited_env, join_address

#: Ray has two classes of that name; its version and a setting decide which one is used, and TorchTrainer follows them.
_DataParallelTrainer: Any = TorchTrainer.__bases__[0]
_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
#: Horovod's default here: Ray may start the workers at very different times.
_TIMEOUT_S = 300
#: In the worker of rank 0, which owns the job's key-value store.
_held: list[Any] = []


@dataclass
class HorovodConfig(BackendConfig):
    """Makes the workers of a Ray Train run form a world.

    Args:
        nics: network interface for the workers' data; by default the one on the route to rank 0's node.
        timeout_s: seconds that the workers wait for each other in ``hvd.init()``, and the limit of each collective on
            CPUs; by default HOROVOD_GLOO_TIMEOUT_SECONDS in the workers (from a ``runtime_env``, say), else 300.
        as_horovod: make ``import horovod`` work in the workers; by default as in this process.
    """

    nics: str | None = None
    timeout_s: float | None = None
    as_horovod: bool = field(default_factory=serves_horovod)

    def __post_init__(self) -> None:
        wrong = seconds_problems({"timeout_s": self.timeout_s}) + flag_problems("as_horovod", self.as_horovod)
        if wrong := wrong + interface_problems(self.nics):
            raise ValueError("; ".join(wrong))

    def timeout(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variable for :attr:`timeout_s` in a worker; none if it is set already."""
        if self.timeout_s is None and environ.get(_TIMEOUT):
            return {}
        return {_TIMEOUT: f"{_TIMEOUT_S if self.timeout_s is None else self.timeout_s:g}"}

    @property
    def backend_cls(self) -> type[HorovodBackend]:
        """The backend class for Ray Train."""
        return HorovodBackend


class HorovodBackend(Backend):
    """Assigns each worker its topology before Ray Train calls the user's function."""

    #: Ray would list devices by number, which is not the order of local ranks if a worker has two.
    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """The workers have started but do not run the function yet."""
        size = len(worker_group)
        where = worker_group.execute(_where)
        secret, job_id = new_secret(), uuid.uuid4().hex[:12]
        addresses = [address for _, address, _ in where]
        store_port, master_port = worker_group.execute_single(0, _serve, secret, addresses[0])
        slots = [Slot(rank, node, address, gpus) for rank, (node, address, gpus) in enumerate(where)]
        # Ray Train has already assigned ranks, in any order of nodes; they are kept.
        for on_node in _by_node(slots):
            devices = device_env(place(on_node)[0].visible_devices)
            for slot in on_node:
                topology = Topology(
                    rank=slot.index,
                    size=size,
                    local_size=size,
                    local_rank=slot.index,
                    host=slot.address,
                    rendezvous=join_address(addresses[0], store_port),
                    master=join_address(addresses[0], master_port),
                    secret=secret,
                    job_id=job_id,
                    launcher="hvd_cluster",
                ).with_local_indices([slot.host_key for slot in slots])
                worker_group.execute_single(slot.index, _assign, topology, devices, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """The run has ended, or its workers are being replaced."""
        worker_group.execute_single(0, _stop_serving)


def _by_node(slots: list[Slot]) -> list[list[Slot]]:
    """The slots of each node, in the order of their ranks."""
    on_nodes: dict[str, list[Slot]] = {}
    for slot in slots:
        on_nodes.setdefault(slot.host_key, []).append(slot)
    return list(on_nodes.values())


def _where() -> tuple[str, str, tuple[str, ...]]:
    """A worker's node, by id and address, and the GPUs that Ray assigned to it."""
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), ray.util.get_node_ip_address(), tuple(context.get_accelerator_ids().get("GPU", ()))


def _serve(secret: bytes, address: str) -> tuple[int, int]:
    """Open the job's key-value store at the node's address, in rank 0.

    Returns its port and one for torch.
    """
    _stop_serving()
    _held[:] = [KeyValueServer(secret, address), ReservedPort(ANY)]
    server, master = _held
    return server.port, master.port


def _stop_serving() -> None:
    while _held:
        _held.pop().close()


def _assign(topology: Topology, devices: dict[str, str], config: HorovodConfig) -> None:
    """In a worker: set its topology."""
    if config.as_horovod:
        enable_horovod_import()
    here = inherited_env()
    export(
        {
            **thread_variables(here, topology.local_size),
            **topology.to_env(),
            **devices,
            **interface_variables(config.nics),
            **config.timeout(here),
        }
    )


class HorovodTrainer(_DataParallelTrainer):
    """A Ray Train run whose workers form a world.

    Args:
        train_loop_per_worker: what every worker calls, with ``train_loop_config`` if it has a parameter.
        horovod_config: the backend's settings.
        arguments: the arguments of DataParallelTrainer: ``train_loop_config``, ``scaling_config``, ``run_config``,
            ``datasets``, ...
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        horovod_config: HorovodConfig | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(train_loop_per_worker, backend_config=horovod_config or HorovodConfig(), **arguments)

    def fit(self) -> Any:
        """Run it. Returns a ``ray.train.Result``.

        Raises:
            ray.train.TrainingFailedError: a worker failed, more often than ``run_config`` allows.
        """
        if threading.current_thread() is not threading.main_thread():
            return super().fit()
        before = signal.getsignal(signal.SIGINT)
        try:
            return super().fit()
        finally:
            # Ray leaves its own handler installed: the program's next Ctrl-C would go to a run that has ended, and the
            # handler keeps that run's controller alive.
            if before is not None:  # None if it was not set from Python
                signal.signal(signal.SIGINT, before)
