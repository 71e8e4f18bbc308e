"""What a Ray actor does: it *is* a worker. Everything that happens in its process is on this page."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import hvd_cluster
from hvd_cluster.launch import progress
from hvd_cluster.launch.call import PackedCall, unpack
from hvd_cluster.launch.checks import checked_variables
from hvd_cluster.launch.environment import answer_for_horovod, thread_variables
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.launch.ports import ReservedPort
from hvd_cluster.launch.wire.messages import ProgressEvent
from hvd_cluster.launch.worker import perform
from hvd_cluster.ray import ray_logger
from hvd_cluster.ray.driver_connection import DriverConnection
from hvd_cluster.ray.messages import ActorHandshake, CallFinished, LogRecord
from hvd_cluster.ray.pickling import dumps
from hvd_cluster.rendezvous.listening import ANY
from hvd_cluster.topology import Topology, export, inherited, is_of_one_job


@dataclass(frozen=True)
class WorkerAssignment:
    """What makes an actor a worker of a job."""

    topology: Topology
    #: Variables on top of the topology's; None removes one.
    env: Mapping[str, str | None]
    #: Let ``import horovod`` resolve there, because the driver does.
    as_horovod: bool = False


class BaseHorovodWorker:
    """The class of the actors. A program may make some itself, for a cluster manager of its own.

    Args:
        world_rank: its rank, until a launcher says another.
        world_size: the number of workers.
    """

    #: What ``executable_cls`` made, if one was given.
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

    # --- Horovod's own methods ---------------------------------------------------------------------------------------

    def node_id(self) -> str:
        """The id of the Ray node; equal for workers that are grouped on one host."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        """What the machine calls itself."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray gave to this actor, as CUDA_VISIBLE_DEVICES spells them."""
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set variables in the worker's environment."""
        export(checked_variables(env_vars))

    def env_vars(self) -> dict[str, str]:
        """The worker's environment."""
        return inherited()

    def start_executable(self, executable_cls: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> None:
        """Make ``executable_cls(*args, **kwargs)`` and keep it for :meth:`execute`."""
        self.executable = None if executable_cls is None else executable_cls(*args, **kwargs)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """``func(executable)``; what it raises is Ray's to report."""
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """Let ``ray_logger.log`` put into ``queue``."""
        ray_logger.configure(queue)

    # --- the launcher's methods --------------------------------------------------------------------------------------

    def handshake(self, secret: bytes) -> ActorHandshake:
        """Who and where this actor is; from now on it waits for a driver that holds the job's ``secret``."""
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
        """Become the worker that ``assignment`` describes. It has greeted before."""
        foreign = {name: None for name in inherited() if is_of_one_job(name)}
        self._topology = assignment.topology  # not read back later: the environment is the user's too
        threads = thread_variables(inherited(), assignment.topology.local_size)
        export({**foreign, **threads, **assignment.topology.to_env(), **assignment.env})
        if assignment.as_horovod:
            answer_for_horovod()
        line = self._driver
        assert line is not None
        rank = assignment.topology.rank
        progress.attach(lambda fields: line.tell(ProgressEvent(rank, fields)))
        ray_logger.attach(lambda info: line.tell(LogRecord(info)))

    def prepare(self, executable: PackedCall) -> Outcome:
        """Make the executable: a packed call of its class."""
        return self._finished(self._make(executable))

    def perform(self, call: PackedCall, with_executable: bool, executable: PackedCall | None = None) -> Outcome:
        """Run a packed call and say how it ended.

        Args:
            call: what to run.
            with_executable: give it the executable, behind its own arguments.
            executable: makes that first; None where it is there, or not wanted.
        """
        if executable is not None and not (made := self._make(executable)).ok:
            return self._finished(made)
        more = (self.executable,) if with_executable else ()
        return self._finished(perform(call, self._place(), *more, dumps=dumps))

    def call(self, call: PackedCall) -> Any:
        """Run a packed call; what it returns and raises is Ray's to bring."""
        try:
            return unpack(call)()
        finally:
            if self._driver is not None:
                self._driver.catch_up()

    def _make(self, executable: PackedCall) -> Outcome:
        def keep(made: Any) -> None:
            self.executable = made

        return perform(executable, self._place(), keep=keep, dumps=dumps)

    def _place(self) -> Topology:
        topology = self._topology
        assert topology is not None
        return topology

    def _finished(self, outcome: Outcome) -> Outcome:
        """``outcome``, when the driver has been sent all output, and told that there is something to fetch."""
        if self._driver is not None:
            try:
                self._driver.catch_up()
            finally:
                self._driver.tell(CallFinished())
        return outcome
