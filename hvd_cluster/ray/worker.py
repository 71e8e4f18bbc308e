"""The Ray actor that is a worker, with everything that happens in its process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import hvd_cluster
from hvd_cluster.launch import progress
from hvd_cluster.launch.call import PackedCall, unpack
from hvd_cluster.launch.checks import checked_variables
from hvd_cluster.launch.environment import enable_horovod_import, thread_variables
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.torch_group import torch_group
from hvd_cluster.launch.wire.messages import ProgressEvent
from hvd_cluster.launch.worker import perform
from hvd_cluster.ray import ray_logger
from hvd_cluster.ray.driver_connection import DriverConnection
from hvd_cluster.ray.messages import ActorHandshake, CallFinished, LogRecord
from hvd_cluster.ray.pickling import dumps
from hvd_cluster.rendezvous.sockets import ANY, ReservedPort
from hvd_cluster.topology import Topology, export, inherited_env, is_job_variable


@dataclass(frozen=True)
class WorkerAssignment:
    """What makes an actor a worker of a job."""

    topology: Topology
    #: Variables on top of the topology's; None removes a variable.
    env: Mapping[str, str | None]
    #: Make ``import horovod`` work there, as in the driver.
    as_horovod: bool = False


class BaseHorovodWorker:
    """The class of the actors.

    A program may create some itself, for a cluster manager of its own.

    Args:
        world_rank: its rank, until a launcher assigns another one.
        world_size: the number of workers.
    """

    #: The instance of ``executable_cls``, if one was given.
    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        export(
            {
                "HOROVOD_HOSTNAME": self.node_id(),
                "HOROVOD_RANK": str(world_rank),
                "HOROVOD_SIZE": str(world_size),
            }
        )
        self._driver: DriverConnection | None = None
        self._topology: Topology | None = None
        self._master: ReservedPort | None = None
        self._remote_failure: ErrorReport | None = None

    # --- Horovod's own methods ---------------------------------------------------------------------------------------

    def node_id(self) -> str:
        """The id of the Ray node; equal for workers on one host."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        """The host name of the machine."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray assigned to this actor, as in CUDA_VISIBLE_DEVICES."""
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set variables in the worker's environment."""
        export(checked_variables(env_vars))

    def env_vars(self) -> dict[str, str]:
        """The worker's environment."""
        return inherited_env()

    def start_executable(self, executable_cls: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> None:
        """Create ``executable_cls(*args, **kwargs)`` and keep it for :meth:`execute`."""
        self.executable = None if executable_cls is None else executable_cls(*args, **kwargs)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Return ``func(executable)``; Ray reports its exceptions."""
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """Make ``ray_logger.log`` put into ``queue``."""
        ray_logger.configure(queue)

    # --- the launcher's methods --------------------------------------------------------------------------------------

    def handshake(self, secret: bytes) -> ActorHandshake:
        """Describe this actor, which then waits for a driver with the job's secret."""
        import ray

        address = str(ray.util.get_node_ip_address())
        self._driver = self._driver or DriverConnection(secret, address)
        self._master = self._master or ReservedPort(ANY)
        return ActorHandshake(
            node_id=self.node_id(),
            address=address,
            hostname=self.hostname(),
            pid=os.getpid(),
            worker_id=str(ray.get_runtime_context().get_worker_id()),
            gpus=tuple(self.get_gpu_ids()),
            driver_port=self._driver.port,
            master_port=self._master.port,
            version=hvd_cluster.__version__,
        )

    def assign(self, assignment: WorkerAssignment) -> None:
        """Become the worker that an assignment describes.

        Called after :meth:`handshake`.
        """
        inherited_job = {name: None for name in inherited_env() if is_job_variable(name)}
        self._topology = assignment.topology  # not read back later, because the user may change the environment
        threads = thread_variables(inherited_env(), assignment.topology.local_size)
        export({**inherited_job, **threads, **assignment.topology.to_env(), **assignment.env})
        if assignment.as_horovod:
            enable_horovod_import()
        driver = self._driver
        assert driver is not None
        rank = assignment.topology.rank
        progress.attach(lambda fields: driver.send(ProgressEvent(rank, fields)))
        ray_logger.attach(lambda info: driver.send(LogRecord(info)))

    def run_call(self, number: int, method: str, *arguments: Any) -> Outcome:
        """Return the outcome of a method, after its output was sent.

        A message with ``number`` goes to the driver after the output.
        """
        driver = self._driver
        assert driver is not None
        try:
            outcome: Outcome = getattr(self, method)(*arguments)
            driver.catch_up()
        finally:
            driver.send(CallFinished(number))
        return outcome

    def prepare(self, executable: PackedCall) -> Outcome:
        """Create the executable: a packed call of its class."""
        return self._make(executable)

    def perform(self, call: PackedCall, with_executable: bool, executable: PackedCall | None = None) -> Outcome:
        """Run a packed call and return its outcome.

        Args:
            with_executable: pass it the executable, after its own arguments.
            executable: creates the executable first; None if it exists or is not needed.
        """
        if executable is not None and not (made := self._make(executable)).ok:
            return made
        more = (self.executable,) if with_executable else ()
        return perform(call, self._own_topology(), *more, dumps=dumps)

    def perform_alone(self, call: PackedCall) -> Outcome:
        """Run a packed call on this rank only, and return its outcome."""
        return perform(call, self._own_topology(), self.executable, dumps=dumps, is_alone=True)

    def call(self, call: PackedCall) -> Any:
        """Run a packed call; Ray transports its result or exception.

        It is also kept for :meth:`settle`.
        """
        try:
            function = unpack(call)
            with torch_group():
                return function()
        except BaseException as error:  # raised again: settle() reports it too
            self._remote_failure = self._remote_failure or ErrorReport.of(error, dumps)
            raise
        finally:
            if self._driver is not None:
                self._driver.catch_up()

    def settle(self) -> Outcome:
        """The outcome of all uses of :meth:`call` since the last call of this method.

        It is the first failure, if there was one.
        """
        failure, self._remote_failure = self._remote_failure, None
        topology = self._own_topology()
        value, _ = dumps(None)
        ended_s = time.time()
        return Outcome(topology.rank, topology.host, None if failure else value, failure, finished_at=ended_s)

    def _make(self, executable: PackedCall) -> Outcome:
        def keep(made: Any) -> None:
            self.executable = made

        return perform(executable, self._own_topology(), keep=keep, dumps=dumps)

    def _own_topology(self) -> Topology:
        topology = self._topology
        assert topology is not None
        return topology
