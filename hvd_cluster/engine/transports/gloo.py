"""Collectives over TCP on the CPU, through a private Gloo process group.

The group is built directly on the job's store. The user's default group stays untouched, so DDP or FSDP may use
``torch.distributed`` at the same time, and an elastic job can build the next world's group after this one failed.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports.transport import Transport, Work
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.torch_store import AuthenticatedStore

logger = logging.getLogger(__name__)

#: torch's names of the reductions, for NCCL too.
REDUCE_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}

#: What listens once a device is made, and did not before, is that device: so they are made one after the other.
_making_device = threading.Lock()


class GlooTransport(Transport):
    """A Gloo group among workers.

    Args:
        client: the job's store; the transport uses it during construction only.
        prefix: keys of this group in the store start with this.
        index: this rank's index in the group.
        ranks: the global ranks of the group, by index.
        host: this host's address that reaches the others.
        timeout_s: seconds for connecting, and for one collective.

    Raises:
        ConnectionError: the other ranks could not be reached in time.
    """

    name: ClassVar[str] = "GLOO"
    needs_equal_sizes: ClassVar[bool] = True

    def __init__(
        self,
        client: KeyValueClient,
        prefix: str,
        *,
        index: int,
        ranks: tuple[int, ...],
        host: str,
        timeout_s: float = 30.0,
    ) -> None:
        self.device = torch.device("cpu")
        self.index = index
        self.ranks = ranks
        self._store = AuthenticatedStore(client, prefix)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        with _making_device:
            before = {each.inode for each in _tcp_sockets()}
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            own_ports = {each.port for each in _tcp_sockets() if each.listens and each.inode not in before}
        client.set(f"{prefix}.ports/{index}", " ".join(map(str, own_ports)).encode())
        try:
            self._group: Any = dist.ProcessGroupGloo(self._store, index, len(ranks), options)
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {index} of {len(ranks)} could not connect to the others over Gloo at {host}: "
                f"{error}. If they are on different networks, name the one they share in HOROVOD_GLOO_IFACE; if "
                f"they are slow to start, raise HOROVOD_GLOO_TIMEOUT_SECONDS (now {timeout_s:g})."
            ) from error
        published = client.get_many([f"{prefix}.ports/{other}" for other in range(len(ranks))])
        ports = {int(port) for text in published for port in text.split()}
        #: The descriptors and inodes of the group's connections. Others of this process have other ports.
        self._sockets = [
            (each.descriptor, each.inode)
            for each in _tcp_sockets()
            if not each.listens and (each.port in own_ports or each.peer_port in ports)
        ]

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]
        return _GlooWork(self._group.allreduce([buffer], options), buffer)

    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        return _GlooWork(self._group._allgather_base(output, buffer), output, buffer)

    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root_index
        return _GlooWork(self._group.broadcast([buffer], options), buffer)

    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        options = dist.AllToAllOptions()
        work = self._group.alltoall_base(output, buffer, output_bytes, input_bytes, options)
        return _GlooWork(work, output, buffer)

    def abort(self) -> None:
        # Gloo's abort() and shutdown() leave work in flight waiting for its whole timeout, and destroying the
        # group then waits too. Ending its connections wakes it in less than a millisecond; it is done on
        # duplicates, because Gloo itself closes the descriptors.
        for descriptor, inode in self._sockets:
            with suppress(OSError), closing(socket.socket(fileno=os.dup(descriptor))) as duplicate:
                if os.fstat(duplicate.fileno()).st_ino == inode:
                    duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._group = None


class _GlooWork(Work):
    """Gloo's work, and the buffers that must stay alive until it is done."""

    def __init__(self, work: Any, *buffers: torch.Tensor) -> None:
        self._work = work
        self._buffers = buffers

    def on_done(self, callback: Callable[[], None]) -> None:
        self._work.get_future().add_done_callback(lambda _: callback())

    def result(self) -> None:
        self._work.wait()


class _TcpSocket(NamedTuple):
    """A socket of this process.

    One that listens must never be shut down under Gloo: it ends in ``std::terminate``.
    """

    descriptor: int
    inode: int
    listens: bool
    port: int
    #: 0 if it is not connected.
    peer_port: int


def _tcp_sockets() -> list[_TcpSocket]:
    found = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only, in a directory that changes as it is read
        with suppress(OSError):
            status = os.fstat(int(entry))
            if stat.S_ISSOCK(status.st_mode):
                with closing(socket.socket(fileno=os.dup(int(entry)))) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                        listens = bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                        peer_port = 0
                        with suppress(OSError):
                            peer_port = duplicate.getpeername()[1]
                        port = duplicate.getsockname()[1]
                        found.append(_TcpSocket(int(entry), status.st_ino, listens, port, peer_port))
    return found
