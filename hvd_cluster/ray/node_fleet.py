"""The hosts of an elastic job on Ray: its nodes, or a placement group's.

Ray starts the workers on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvd_cluster.launch.fleet import Fleet
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.placement import Placement
from hvd_cluster.launch.task import Task
from hvd_cluster.launch.worker_group import Callbacks, Worker
from hvd_cluster.ray import nodes
from hvd_cluster.ray.actor import ActorCall, ActorWorker, OnLog
from hvd_cluster.ray.actor_group import shared
from hvd_cluster.ray.messages import ActorHandshake
from hvd_cluster.ray.resources import WorkerResources, bundles_of, device_env, in_bundle
from hvd_cluster.ray.session import Connection
from hvd_cluster.ray.worker import BaseHorovodWorker, WorkerAssignment
from hvd_cluster.topology import Topology, join_address


@dataclass(frozen=True)
class _StartedActor:
    """A worker and its location."""

    host: str
    actor: ActorWorker
    #: Its bundle of the placement group; None outside of one.
    bundle: int | None


@dataclass
class _FleetNode:
    """A node of the fleet."""

    node: nodes.Node
    #: The options with which Ray puts its workers there, outside of a placement group.
    options: Mapping[str, Any]
    #: For torch.distributed's own rendezvous; 0 before a worker there has reported.
    master_port: int = 0


class NodeFleet(Fleet):
    """A fleet of Ray nodes."""

    def __init__(
        self, secret: bytes, resources: WorkerResources, call: ActorCall, on_log: OnLog, group: Any = None
    ) -> None:
        super().__init__(secret)
        self._connection = Connection.current()
        self._group = group
        self._resources = resources
        self._call = shared(call)
        self._on_log = on_log
        self._nodes: dict[str, _FleetNode] = {}
        self._started: dict[str, _StartedActor] = {}  # by the worker's name in the job
        #: Workers have formed a world.
        self.has_world = False

    def add(self, host: Host) -> str:
        """Add a node by its id, its address or its host name."""
        known = self._nodes.get(host.name)
        if known is not None and host.name == known.node.node_id:
            return ""  # a node id is never reused, and this runs after every discovery
        living = nodes.living()
        if known is not None and any(node.node_id == known.node.node_id for node in living):
            return ""
        # A new node, or one that was restarted: Ray gives it another id at the same address.
        found = [node for node in living if host.name in (node.node_id, node.address, node.hostname)]
        if not found:
            return "Ray has no such node"
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if len(found) == 1:
            options: dict[str, Any] = {
                "scheduling_strategy": NodeAffinitySchedulingStrategy(found[0].node_id, soft=False)
            }
        else:  # several nodes on one machine
            options = {"resources": {f"node:{found[0].address}": 0.001}}
        self._nodes[host.name] = _FleetNode(found[0], options)
        return ""

    def host_key(self, name: str) -> str:
        return self._nodes[name].node.node_id

    def rendezvous(self, name: str) -> str:
        address = nodes.own_address()
        return join_address(address, self.server.port_at(address))

    def topology(self, placement: Placement, name: str, first: str, job_id: str, generation: int = 0) -> Topology:
        self.has_world = True
        rank_0_node = self._nodes[first]
        topology = placement.topology(
            rendezvous=self.rendezvous(name),
            secret=self.secret,
            master=join_address(rank_0_node.node.address, rank_0_node.master_port),
            job_id=job_id,
            generation=generation,
        )
        return replace(topology, host=self._nodes[name].node.address)

    def gpus(self, worker: str) -> tuple[str, ...]:
        started = self._started.get(worker)
        return () if started is None or started.actor.handshake is None else started.actor.handshake.gpus

    def num_workers(self, node_id: str) -> int:
        """How many workers of the job run on a node."""
        return sum(self._nodes[one.host].node.node_id == node_id for one in self._living())

    def num_in_bundle(self, index: int) -> int:
        """How many workers of the job run in a bundle of the placement group."""
        return sum(one.bundle == index for one in self._living())

    def num_reported(self) -> int:
        """How many workers of the job have ever reported."""
        return sum(one.actor.handshake is not None for one in list(self._started.values()))

    def _living(self) -> list[_StartedActor]:
        return [one for one in list(self._started.values()) if one.actor.outcome is None]

    def _bundle(self, node_id: str) -> int | None:
        """The bundle for one more worker on a node; None without a placement group."""
        if self._group is None:
            return None
        here = [(b, self.num_in_bundle(b.index)) for b in bundles_of(self._group) if b.node_id == node_id]
        # Other executors may use some of them; Ray's count of free resources is a second late.
        free = [bundle for bundle, num_own in here if bundle.slots(self._resources, num_own) > num_own]
        large_enough = [bundle for bundle, num_own in here if self._resources.slots(bundle.resources) > num_own]
        return next((bundle.index for bundle in [*free, *large_enough, *(bundle for bundle, _ in here)]), None)

    def start(
        self, name: str, task: Task, topology: Topology, env: Mapping[str, str | None], callbacks: Callbacks
    ) -> Worker:
        """Have Ray start an actor on a host.

        It becomes a worker after its handshake.
        """
        entry = self._nodes[name]
        topology = replace(topology, host=entry.node.address)

        def assign(handshake: ActorHandshake) -> WorkerAssignment:
            entry.master_port = handshake.master_port
            # When the worker joins its first world, the driver lists the GPUs of the whole node.
            return WorkerAssignment(topology, {**device_env(handshake.gpus), **task.env, **env}, bool(task.as_horovod))

        actor_class = self._connection.ray().remote(BaseHorovodWorker)
        wants = {"num_cpus": self._resources.cpus, "num_gpus": self._resources.gpus}
        bundle = self._bundle(entry.node.node_id)
        options = entry.options if bundle is None else in_bundle(self._group, bundle)
        handle = actor_class.options(**wants, **options).remote(topology.rank, topology.size)
        handshake = handle.handshake.remote(self.secret)
        worker = ActorWorker(
            self._connection, handle, handshake, topology.rank, assign, callbacks, self._on_log, self._call
        )
        self._started[topology.worker] = _StartedActor(name, worker, bundle)
        return worker
