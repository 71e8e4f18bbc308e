"""Worlds that the user selects: a list of ranks, or mpi4py's communicator."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeGuard

from hvd_cluster.rendezvous.addresses import first_reachable, host_key, interface_addresses
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import JoinedStore, KeyValueServer
from hvd_cluster.rendezvous.sockets import ANY, LOOPBACK
from hvd_cluster.topology import Topology, join_address

_FAILED = "Horovod initialization failed"


class Communicator(Protocol):
    """What is needed of an ``mpi4py.MPI.Comm``."""

    def Get_rank(self) -> int: ...  # noqa: N802 - MPI's spelling
    def Get_size(self) -> int: ...  # noqa: N802
    def Is_inter(self) -> bool: ...  # noqa: N802
    def bcast(self, obj: Any, root: int = 0) -> Any: ...
    def allgather(self, sendobj: Any) -> list[Any]: ...


def is_communicator(comm: object) -> TypeGuard[Communicator]:
    """Whether it is a communicator of mpi4py, which is not imported."""
    return all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "bcast", "allgather"))


def ranks_in(comm: Any, world: Any = None) -> list[int]:
    """The ranks, sorted, that the processes of ``comm`` have in ``world``.

    ``world`` is MPI's COMM_WORLD by default.

    Raises:
        ValueError: a process is not in ``world``.
    """
    from mpi4py import MPI

    group = comm.Get_group()
    # Called on the class, it takes the same arguments in mpi4py 3 and 4.
    found = MPI.Group.Translate_ranks(group, list(range(comm.Get_size())), (world or MPI.COMM_WORLD).Get_group())
    if MPI.UNDEFINED in found:
        raise ValueError("a process set's communicator has processes that are not in the world of init()")
    return sorted(found)


def some_of(topology: Topology, ranks: Sequence[Any]) -> Topology:
    """This process's topology in a world of some ranks, in the given order.

    On several hosts the local indices are not known yet: :meth:`Topology.with_local_indices` sets them.

    Raises:
        ValueError: ``ranks`` is not a list of ranks of the launcher's world, or this process's rank is not in it.
    """
    size, wanted = topology.size, list(ranks)
    if not wanted or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in wanted):
        raise ValueError(f"{_FAILED}: comm={ranks!r} is neither a list of ranks nor a communicator of mpi4py")
    wrong = [rank for rank in wanted if not 0 <= rank < size]
    if wrong:
        raise ValueError(f"{_FAILED}: comm={ranks!r} names ranks {wrong}; the launcher started 0 to {size - 1}")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"{_FAILED}: comm={ranks!r} names a rank twice")
    if topology.rank not in wanted:
        raise ValueError(
            f"{_FAILED}: rank {topology.rank} called init(comm={ranks!r}) and is not in that list: ranks outside of "
            "it must not call init(), or must pass a list that contains them"
        )
    if wanted == list(range(size)):
        return topology
    name = hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]
    rank, is_one_host = wanted.index(topology.rank), topology.local_size == size
    return replace(
        topology,
        rank=rank,
        size=len(wanted),
        local_rank=rank if is_one_host else 0,
        local_size=len(wanted) if is_one_host else 1,
        cross_rank=0,
        cross_size=1,
        world=name,
    )


def join_store_over_mpi(comm: Communicator, timeout_s: float, interface: str = "") -> JoinedStore:
    """Agree on a store over MPI: this process keeps its rank in ``comm``.

    Args:
        comm: an intracommunicator; all its processes call this.
        timeout_s: how long to try to reach rank 0.
        interface: rank 0's network interface to use; by default any that the others reach.

    Raises:
        ValueError: ``comm`` is not an intracommunicator.
        ConnectionError: a process cannot reach rank 0; raised by all processes.
    """
    try:
        is_inter = comm.Is_inter()
    except Exception as error:  # mpi4py's own, for a null communicator
        raise ValueError(f"{_FAILED}: comm={comm!r} cannot be used: {error}") from error
    if is_inter:
        raise ValueError(f"{_FAILED}: comm={comm!r} joins two groups; use its Merge()")
    rank, keys = comm.Get_rank(), comm.allgather(host_key())
    is_one_host = len(set(keys)) == 1
    server, offer, failure = None, None, ""
    if rank == 0 and len(keys) > 1:
        secret = new_secret()
        wanted = interface_addresses(interface) if interface else []
        server = KeyValueServer(secret, LOOPBACK if is_one_host else wanted or ANY)
        addresses = [LOOPBACK] if is_one_host else wanted if interface else interface_addresses()
        offer = (addresses, server.port, secret)
    world, offer = comm.bcast((secrets.token_hex(6), offer))
    topology = Topology(rank=rank, size=len(keys), host=socket.gethostname(), world=world, launcher="mpi4py")
    if offer is None:
        return JoinedStore(topology)
    addresses, port, secret = offer
    reached = ""
    if rank != 0:
        try:
            reached = first_reachable(addresses, port, secret, timeout_s)
        except OSError as error:  # any error, because the others wait for the answer
            failure = f"rank {rank} on {topology.host} cannot reach rank 0: {error}"
    # All ranks must take part in this call, also those that failed: MPI has no timeouts.
    answers = comm.allgather((reached, failure))
    failures = [text for _, text in answers if text]
    if failures:
        if server is not None:
            server.close()
        raise ConnectionError(
            f"{_FAILED}: {failures[0]}; open the ports between the hosts, or set HOROVOD_GLOO_IFACE to the "
            "interface of rank 0 to use"
        )
    address = reached or own_address(keys, [address for address, _ in answers])
    return JoinedStore(replace(topology, rendezvous=join_address(address, port), secret=secret), server)


def own_address(host_keys: Sequence[str], reached: Sequence[str]) -> str:
    """The address of rank 0's host that ranks on other hosts have reached.

    Rank 0 uses it itself.

    Args:
        host_keys: by rank.
        reached: the address that each rank has used; "" for rank 0.
    """
    by_others = [address for key, address in zip(host_keys, reached, strict=True) if key != host_keys[0]]
    return (by_others or [*filter(None, reached), LOOPBACK])[0]
