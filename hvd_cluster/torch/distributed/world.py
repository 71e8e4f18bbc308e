"""How a process group gets its world: from ``hvd.init()``, or by making one."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvd_cluster.engine import basics, current
from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.signature import SetId
from hvd_cluster.rendezvous.torch_store import AuthenticatedStore
from hvd_cluster.topology import PLATFORMS, Topology

#: The scheme of the URL with which torch asks for the job's own store.
SCHEME = "hvd"
#: Counts the groups of this process, equally on all ranks: each has keys of its own.
_numbers = itertools.count()

#: How many groups with the same ranks and label a world has had.
_made: weakref.WeakKeyDictionary[Engine, Counter[tuple[SetId, str]]] = weakref.WeakKeyDictionary()

#: Kept: torch holds only the C++ half of a store.
_stores: list[AuthenticatedStore] = []


def rendezvous(*_: object, timeout: timedelta = timedelta(0), **__: object) -> Iterator[tuple[Any, int, int]]:
    """The job's store, which authenticates clients, for ``init_method="hvd://"``."""
    basics.lend(None, timeout.total_seconds())
    world = current.engine().world
    rank, size = world.topology.rank, world.topology.size
    if world.client is None:
        yield dist.HashStore(), rank, size  # type: ignore[attr-defined]
        return
    client = world.client.clone()
    store = AuthenticatedStore(client, f"{world.prefix}torch/{next(_numbers)}/")
    weakref.finalize(store, client.close)
    _stores[:] = [store]
    yield store, rank, size


def begin(backend: str) -> bool:
    """Make torch's default group of the launcher's ranks; False if there is one.

    Args:
        backend: any of torch's backends, such as "hvd" or "gloo".

    Raises:
        ValueError: there is one of another backend.
    """
    if dist.is_initialized():
        # Names such as "gloo" stand for one backend a device, "cpu:gloo,cuda:gloo".
        wanted, found = (
            dict(one.split(":") for one in str(config).split(","))
            for config in (dist.BackendConfig(dist.Backend(backend)), dist.get_backend_config())
        )
        if any(found.get(device, name) != name for device, name in wanted.items()):
            raise ValueError(
                f"rank {dist.get_rank()}: the default group of torch.distributed has the backend "
                f"{dist.get_backend_config()}, and this "
                f"needs {backend!r}: leave out HOROVOD_TORCH_BACKEND and torch_backend of the launcher, or set them to "
                f"{backend!r}; destroy a group of your own first"
            )
        return False
    dist.init_process_group(backend, init_method=f"{SCHEME}://")
    return True


def end() -> None:
    """Destroy the default group; end the world unless the user called ``hvd.init()``."""
    if dist.is_initialized():
        if dist.get_backend() != "hvd":
            basics.give_back(dist.barrier)
        dist.destroy_process_group()
        _stores.clear()


def join_world(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Be ``rank`` of ``size`` in the engine's world.

    The world is that of ``hvd.init()``, of the launcher, or of torch's store.

    Args:
        store: torch's store of the default group. Ranks that no launcher has numbered meet in it.
        rank: torch's rank.
        size: torch's number of ranks.
        timeout: how long the other ranks may take to come.

    Raises:
        ValueError: ``hvd.init()`` has numbered the ranks otherwise.
        ConnectionError: the other ranks did not come in time.
    """
    if not current.is_initialized():
        topology = Topology.from_env()
        # A platform's ranks would meet at the address at which torch's store is now.
        has_launcher = topology.launcher not in ("", *PLATFORMS)
        is_launched = (topology.rank, topology.size) == (rank, size) and (has_launcher or size == 1)
        basics.lend(None if is_launched else StoreCommunicator(store, rank, size), timeout.total_seconds())
    topology = current.topology()
    if (topology.rank, topology.size) != (rank, size):
        raise ValueError(
            f"torch.distributed calls this process rank {rank} of {size}, and hvd.init() has made it rank "
            f"{topology.rank} of {topology.size}: pass rank=hvd.rank() and world_size=hvd.size() to "
            "init_process_group()"
        )


def set_of(ranks: Sequence[int]) -> SetId:
    """The engine's name for the ranks of a group that is not the default one.

    Raises:
        ValueError: the engine has no world with torch's ranks.
    """
    if not current.is_initialized():
        raise ValueError(
            'a group of the backend "hvd" needs a world: call init_process_group("hvd"), or hvd.init() on all ranks'
        )
    topology = current.topology()
    if (topology.rank, topology.size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"the ranks of torch.distributed (this is {dist.get_rank()} of {dist.get_world_size()}) are not those of "
            f"hvd.init() (this is {topology.rank} of {topology.size})"
        )
    return 0 if list(ranks) == list(range(topology.size)) else tuple(ranks)


def numbered(label: str, set_id: SetId) -> str:
    """``label`` for a new group, unlike those of its ranks' earlier groups.

    torch uses names again.

    Args:
        label: torch's name of the group; equal on all its ranks.
        set_id: the engine's name of its ranks, which make their groups in one order.
    """
    made = _made.setdefault(current.engine(), Counter())
    made[set_id, label] += 1
    count = made[set_id, label]
    return label if count == 1 else f"{label} ({count})"


class StoreCommunicator:
    """Two collectives of mpi4py, over torch's store, for ``hvd.init(comm=...)``.

    It publishes the job's secret there, and torch's store does not authenticate its clients: on a network that others
    share, use a launcher of this package.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._num_calls = 0
        #: One store may serve several worlds, one after the other.
        self._world = store.add(f"hvd/world/{rank}", 1)

    def Get_rank(self) -> int:  # noqa: N802 - MPI's spelling
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._size

    def Is_inter(self) -> bool:  # noqa: N802
        return False

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of ``root``, on every rank."""
        if self._rank == root:
            self._put(obj)
        return self._get(root, ends=True)

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks."""
        self._put(sendobj)
        answers = [self._get(rank) for rank in range(self._size)]
        self._num_calls += 1
        return answers

    def _put(self, obj: Any) -> None:
        self._store.set(self._key(self._rank), json.dumps(obj, default=lambda data: {"bytes": data.hex()}))

    def _get(self, rank: int, *, ends: bool = False) -> Any:
        obj = json.loads(self._store.get(self._key(rank)), object_hook=lambda found: bytes.fromhex(found["bytes"]))
        self._num_calls += ends
        return obj

    def _key(self, rank: int) -> str:
        return f"hvd/{self._world}/{self._num_calls}/{rank}"
