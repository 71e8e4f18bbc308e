"""Which transport serves which process set and device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch.distributed import is_nccl_available

from hvd_cluster.engine.host_memory import HostMemory, has_core_per_rank
from hvd_cluster.engine.shared_memory.deadline import Check
from hvd_cluster.engine.shared_memory.segment import Closable, Segment, SharingGroup, share
from hvd_cluster.engine.signature import SetId, ranks_of
from hvd_cluster.engine.transports.alone import AloneTransport
from hvd_cluster.engine.transports.exchange import HostExchange, piece_bytes_for
from hvd_cluster.engine.transports.gloo import GlooTransport
from hvd_cluster.engine.transports.hierarchical import HierarchicalTransport
from hvd_cluster.engine.transports.shm import ShmTransport
from hvd_cluster.engine.transports.shm_layout import segment_bytes
from hvd_cluster.engine.transports.transport import Transport
from hvd_cluster.engine.world import World
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.settings import Settings
from hvd_cluster.topology import inherited_env

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Closable)


class TransportTable:
    """The transports of one rank, by process set and kind of device.

    Transports for the CPU are built with the process set, those for GPUs at the first bucket on a GPU: only then is it
    known which device each rank uses. Both happen at fixed positions of the log, so all ranks build in one order.

    Args:
        world: the world that the transports connect.
        settings: the timeout, the network interface and the use of shared memory are read.
        process_sets: the ranks of each process set.
        check: called now and then by a transport that waits; raises if the world is broken.
        host: the shared memory of this host; None if there is none.
        wakeup: this rank's eventfd.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        process_sets: Mapping[int, tuple[int, ...]],
        check: Check,
        host: HostMemory | None,
        wakeup: int,
    ) -> None:
        self._host = host
        self._wakeup = wakeup
        self._world = world
        self._settings = settings
        self._process_sets = process_sets
        self._check = check
        self._transports: dict[tuple[SetId, str], Transport] = {}

    def build(self, process_set_id: SetId) -> None:
        """Build the CPU transport of a process set; collective over its members."""
        ranks = ranks_of(self._process_sets, process_set_id)
        if self._world.topology.rank in ranks:
            self._transports[process_set_id, "cpu"] = self._for_cpu(process_set_id, ranks)

    def is_idle(self, process_set_id: SetId) -> bool:
        """The transports of a process set have no work in progress, not even on a GPU."""
        return all(transport.is_idle for key, transport in self._transports.items() if key[0] == process_set_id)

    def remove(self, process_set_id: SetId) -> None:
        """Release the transports of a process set."""
        gone = {key: self._transports.pop(key) for key in list(self._transports) if key[0] == process_set_id}
        for transport in {id(transport): transport for transport in gone.values()}.values():
            transport.close()

    def __contains__(self, key: tuple[SetId, torch.device]) -> bool:
        """Whether a (set id, device) has its transport; building one waits for ranks."""
        return (key[0], key[1].type) in self._transports

    def __getitem__(self, key: tuple[SetId, torch.device]) -> Transport:
        """The transport for (process set id, device).

        The first GPU of a set, and the first tensor of a set without registration, build it.
        """
        process_set_id, device = key
        by_type = (process_set_id, device.type)  # torch makes a new text at each look
        transport = self._transports.get(by_type)
        if transport is None:
            if (process_set_id, "cpu") not in self._transports:  # a set without registration
                self.build(process_set_id)
            if device.type != "cpu":
                self._transports[by_type] = self._for_gpu(process_set_id, device)
            transport = self._transports[by_type]
        return transport

    def gpu(self, process_set_id: SetId, default: int) -> int:
        """The index of the GPU that a set's transport works on; ``default`` if none yet."""
        transport = self._transports.get((process_set_id, "cuda"))
        return default if transport is None or transport.device.index is None else transport.device.index

    def abort(self) -> None:
        """Make all work in progress fail now."""
        for transport in self._distinct():
            transport.abort()

    def close(self) -> None:
        """Release everything."""
        distinct = self._distinct()
        self._transports.clear()
        for transport in distinct:
            transport.close()

    def _distinct(self) -> list[Transport]:
        """Each transport once; if ranks share a GPU, one serves both kinds of device."""
        return list({id(transport): transport for transport in self._transports.values()}.values())

    def _for_cpu(self, process_set_id: SetId, ranks: tuple[int, ...]) -> Transport:
        world = self._world
        if len(ranks) == 1 or world.client is None:
            return AloneTransport(torch.device("cpu"), ranks[0])
        if self._host is not None and set(ranks) <= set(world.tree_position.host_ranks):
            # Not for a group with the same ranks in another order: places and shares go by the order.
            if self._host.transport is not None and ranks == self._host.transport.ranks:
                return self._host.transport
            shared = self._shm(world.client, process_set_id, ranks)
            if shared is not None:
                return shared
        flat = self._gloo(world.client, f"gloo/{_label(process_set_id)}/", ranks)
        try:
            return self._hierarchical(world.client, process_set_id, flat) or flat
        except BaseException:  # raised again: its sockets would leak
            flat.close()
            raise

    def _hierarchical(
        self, client: KeyValueClient, process_set_id: SetId, flat: GlooTransport
    ) -> HierarchicalTransport | None:
        """Shared memory in hosts, Gloo between; None if useless or memory is not shared."""
        world, ranks = self._world, flat.ranks
        hosts: dict[str, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(world.host_keys[rank], []).append(rank)
        is_wanted = self._settings.shared_memory and self._settings.hierarchical_allreduce
        if not is_wanted or len(hosts) == 1 or len(hosts) == len(ranks):
            return None
        mine = tuple(hosts[world.host_keys[world.topology.rank]])
        within = self._exchange(client, process_set_id, mine, piece_bytes_for(max(map(len, hosts.values()))))
        with ExitStack() as undo:
            if within is not None:
                undo.callback(within.close)
            prefix = f"{world.prefix}hierarchical/{_label(process_set_id)}/"
            client.set(f"{prefix}{world.topology.rank}", str(int(within is not None)).encode())
            answers = _from_each(client, prefix, ranks, 2 * self._settings.gloo_timeout_s)
            if within is None or b"0" in answers:
                return None
            leaders = tuple(sorted(members[0] for members in hosts.values()))
            between = None
            if world.topology.rank in leaders:
                between = self._gloo(client, f"gloo/leaders/{_label(process_set_id)}/", leaders)
            undo.pop_all()
            return HierarchicalTransport(flat, within, between, self._check)

    def _exchange(
        self, client: KeyValueClient, process_set_id: SetId, ranks: tuple[int, ...], piece_bytes: int
    ) -> HostExchange | None:
        """The exchange of local ``ranks`` and leader; None if they share no memory."""
        timeout_s = self._settings.gloo_timeout_s
        if len(ranks) == 1:
            return HostExchange(
                None, index=0, ranks=ranks, piece_bytes=piece_bytes, check=self._check, timeout_s=timeout_s
            )

        def build(segment: Segment) -> HostExchange:
            exchange = HostExchange(
                segment.memory,
                index=segment.index,
                ranks=ranks,
                piece_bytes=piece_bytes,
                check=self._check,
                timeout_s=timeout_s,
            )
            segment.close()  # the exchange holds the memory and does not use the wakeup descriptors
            return exchange

        return self._shared(client, process_set_id, ranks, HostExchange.num_bytes(len(ranks), piece_bytes), build)

    def _shm(self, client: KeyValueClient, process_set_id: SetId, ranks: tuple[int, ...]) -> ShmTransport | None:
        """Shared memory among ``ranks`` of this host; None on all if they have none."""
        world = self._world
        spins = has_core_per_rank(world.host_keys.count(world.host_keys[world.topology.rank]))

        def build(segment: Segment) -> ShmTransport:
            transport = ShmTransport(
                segment.memory,
                arena=None if self._host is None else self._host.arena,
                index=segment.index,
                ranks=ranks,
                check=self._check,
                timeout_s=self._settings.gloo_timeout_s,
                spins=spins,
            )
            segment.close()  # the transport holds the memory and does not use the wakeup descriptors
            return transport

        return self._shared(client, process_set_id, ranks, segment_bytes(len(ranks)), build)

    def _shared(
        self,
        client: KeyValueClient,
        process_set_id: SetId,
        ranks: tuple[int, ...],
        num_bytes: int,
        build: Callable[[Segment], T],
    ) -> T | None:
        # Hosts do this at the same time, each with its leader's rank in the key.
        world, timeout_s = self._world, self._settings.gloo_timeout_s
        prefix = f"{world.prefix}shm/{_label(process_set_id)}/{ranks[0]}/"
        group = SharingGroup(client, prefix, world.topology.secret, ranks, world.topology.rank, timeout_s)
        return share(group, num_bytes, self._wakeup, build)

    def _gloo(self, client: KeyValueClient, prefix: str, ranks: tuple[int, ...]) -> GlooTransport:
        world = self._world
        return GlooTransport(
            client,
            f"{world.prefix}{prefix}",
            index=ranks.index(world.topology.rank),
            ranks=ranks,
            host=world.address,
            timeout_s=self._settings.gloo_timeout_s,
        )

    def _for_gpu(self, process_set_id: SetId, device: torch.device) -> Transport:
        """NCCL if every rank has its own GPU, else the CPU's transport, with copies."""
        world, ranks = self._world, ranks_of(self._process_sets, process_set_id)
        if len(ranks) == 1 or world.client is None:
            return AloneTransport(device, ranks[0])
        mine = _own_gpu(device, world.topology.rank)
        prefix = f"{world.prefix}gpu/{_label(process_set_id)}/"
        world.client.set(f"{prefix}{world.topology.rank}", mine.encode())
        devices = _from_each(world.client, prefix, ranks, self._settings.gloo_timeout_s)
        if len(set(devices)) < len(ranks) or not is_nccl_available():
            logger.warning(
                "process set %s: ranks share a GPU or NCCL is missing: GPU tensors go through the memory of hosts",
                process_set_id,
            )
            return self._transports[process_set_id, "cpu"]
        from hvd_cluster.engine.transports.nccl import NcclTransport

        return NcclTransport(
            world.client,
            f"{world.prefix}nccl/{_label(process_set_id)}/",
            index=ranks.index(world.topology.rank),
            ranks=ranks,
            device=device,
            host_transport=self._transports[process_set_id, "cpu"],
            timeout_s=self._settings.gloo_timeout_s,
        )


def _own_gpu(device: torch.device, rank: int) -> str:
    """This rank's GPU; NCCL would refuse two ranks with the same text.

    NCCL refuses ranks of one host that share a GPU, unless a setting allows it (from 2.30 on).
    """
    environ = inherited_env()
    gpu = f"{torch.cuda.get_device_properties(device).uuid} {environ.get('NCCL_HOSTID', '')}"
    allows_several = environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_version() >= 23000
    return f"{gpu} {rank}" if allows_several else gpu


def _label(process_set_id: SetId) -> str:
    """Identifies a process set in keys of the store."""
    return "-".join(map(str, process_set_id)) if isinstance(process_set_id, tuple) else str(process_set_id)


def _from_each(client: KeyValueClient, prefix: str, ranks: tuple[int, ...], timeout_s: float) -> list[bytes]:
    """The value that each of ``ranks`` has put into the store under its number.

    Raises:
        ConnectionError: not all of them have within the time.
    """
    try:
        return client.get_many([f"{prefix}{rank}" for rank in ranks], timeout_s)
    except TimeoutError as error:
        raise ConnectionError(f"not all of the ranks {list(ranks)} came to build their transport: {error}") from error


def nccl_version() -> int:
    """NCCL's version as one integer, e.g. 22703 for 2.27.3; 0 if torch lacks NCCL."""
    if torch.version.cuda is None or not is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)
