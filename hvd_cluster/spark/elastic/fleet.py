"""The hosts of an elastic job on Spark: each is a task with one slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvd_cluster.launch.agent_fleet import AgentFleet
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.placement import Placement
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.worker_group import Callbacks, Worker
from hvd_cluster.spark.elastic.task_pool import TaskPool
from hvd_cluster.topology import Topology


class TaskFleet(AgentFleet):
    """A fleet whose hosts connect by themselves."""

    def __init__(self, secret: bytes, task_pool: TaskPool, interfaces: Sequence[str]) -> None:
        super().__init__(secret, interfaces)
        self._task_pool = task_pool

    def add(self, host: Host) -> str:
        remote = self._task_pool.remote(host.name)
        if remote is None:
            return "its task has ended"
        if host.name not in self._hosts:
            self.add_remote(remote)
        return ""

    def host_key(self, name: str) -> str:
        """Equal for two tasks of one machine whose workers number devices alike.

        A worker with its own GPUs sees no others. It counts as alone on its host, so that ``set_device(local_rank())``
        selects its GPU in every world.
        """
        remote = self._hosts[name].remote
        is_alone = remote is not None and remote.handshake is not None and remote.handshake.owns_devices
        return name if is_alone else super().host_key(name)

    def topology(self, placement: Placement, name: str, first: str, job_id: str, generation: int = 0) -> Topology:
        """A worker's topology, with the address as its host.

        The name of a task is not an address.
        """
        topology = super().topology(placement, name, first, job_id, generation)
        return replace(topology, host=self._hosts[name].address)

    def start(
        self, name: str, task: Task, topology: Topology, env: Mapping[str, str | None], callbacks: Callbacks
    ) -> Worker:
        """Start a worker in the named task, which ends with it.

        The driver's environment is not sent.
        """
        remote = self._hosts[name].remote
        assert remote is not None
        started: list[Worker] = []

        def on_end() -> None:
            if started and started[0].outcome is not None:
                self._task_pool.release(name)
            callbacks.on_change()

        env = {**self.environment(name, task), **env}
        worker = remote.start(next(self._keys), task, topology, env, replace(callbacks, on_change=on_end))
        started.append(worker)
        on_end()  # for changes before the worker was in the list
        return worker
