"""What a launcher needs of a cluster's hosts.

Another kind of cluster subclasses it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.placement import Placement
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.worker_group import Callbacks, Worker
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import LOOPBACK, Closing
from hvd_cluster.topology import Topology


class Fleet(Closing, ABC):
    """The hosts of one job and the job's key-value store. A context manager.

    The names of hosts are those that the user, the host discovery or the cluster gives them.
    """

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._stack = contextlib.ExitStack()
        self._server: KeyValueServer | None = None

    @property
    def server(self) -> KeyValueServer:
        """The job's key-value store; it exists after :meth:`open`."""
        assert self._server is not None
        return self._server

    def open(self, *, others: bool) -> None:
        """Start the key-value store.

        Workers on other hosts use a port that the server opens for them later.
        """
        if self._server is None:
            self._server = self._stack.enter_context(KeyValueServer(self.secret, LOOPBACK))

    def close(self) -> None:
        """Release all hosts; no process of the job remains on them."""
        self._stack.close()

    # --- the hosts ---------------------------------------------------------------------------------------------------

    def connect(self, hosts: Sequence[Host]) -> None:
        """Connect all hosts of a job of fixed size; no more are added afterwards.

        Raises:
            LaunchError: hosts cannot be used; the message names all of them.
        """
        self.open(others=len(hosts) > 1)
        lost = [f"{host.name}: {reason}" for host in hosts if (reason := self.add(host))]
        if lost := lost or list(self.probe().values()):
            raise LaunchError("these hosts cannot be used:\n  " + "\n  ".join(lost))

    @abstractmethod
    def add(self, host: Host) -> str:
        """Connect one more host. Returns why it cannot be used, or an empty string."""

    @abstractmethod
    def host_key(self, name: str) -> str:
        """A text that is equal for two names of the same machine."""

    def address(self, name: str) -> str:
        """The address at which workers on other hosts reach that host."""
        return name

    def unprobed(self) -> set[str]:
        """The hosts that were added, or added again, since the last :meth:`probe`."""
        return set()

    def probe(self) -> dict[str, str]:
        """Find an address of each host that the others reach.

        Returns the reason for each host that has none.
        """
        return {}

    def is_lost(self, name: str) -> bool:
        """Whether the host is gone and the outcomes of its workers are known."""
        return False

    def give_up(self) -> None:
        """End soon what other threads wait for in :meth:`add` and :meth:`probe`."""

    # --- the workers -------------------------------------------------------------------------------------------------

    @abstractmethod
    def rendezvous(self, name: str) -> str:
        """The address at which workers on that host reach the key-value store."""

    @abstractmethod
    def topology(self, placement: Placement, name: str, first: str, job_id: str, generation: int = 0) -> Topology:
        """A worker's topology, with addresses as its host sees them.

        Args:
            first: the host of rank 0.
        """

    @abstractmethod
    def start(
        self, name: str, task: Task, topology: Topology, env: Mapping[str, str | None], callbacks: Callbacks
    ) -> Worker:
        """Start a worker on the host ``name``.

        The arguments are those of :func:`hvd_cluster.launch.task.start_worker`.

        Raises:
            OSError: the program cannot be started on this host; elsewhere the worker's outcome says so.
        """

    def interface(self, name: str) -> str:
        """The host's network interface that the others reach.

        Empty if there are no others.
        """
        return ""

    def gpus(self, worker: str) -> tuple[str, ...]:
        """The GPUs that the scheduler has assigned to the worker of that name.

        Empty without such a scheduler.
        """
        return ()
