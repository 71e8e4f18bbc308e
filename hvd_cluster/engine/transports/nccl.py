"""Collectives among GPUs, through a private NCCL process group.

NCCL work is ordered by the stream on which it is launched. The engine launches it on its own stream, and readers of the
result wait on the GPU for the event recorded after it. So no thread of this process waits for NCCL. A handle is done
when its work is launched; the engine polls whether the GPU has completed it (:mod:`hvd_cluster.engine.launched_work`).
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports.gloo import REDUCE_OPS
from hvd_cluster.engine.transports.transport import FinishedWork, Transport, Work
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.torch_store import AuthenticatedStore
from hvd_cluster.topology import export

logger = logging.getLogger(__name__)

#: How often the GPU is polled when the transport is closed.
_LOOK_S = 0.001
#: The engine limits the time of work. Torch's own limit would only mark work as completed that is not.
_TORCH_TIMEOUT = timedelta(days=365)


class NcclTransport(Transport):
    """An NCCL communicator among workers, each with its own GPU.

    Args:
        client: the job's store; NCCL's unique id goes through it at the first collective.
        prefix: keys of this group in the store start with this.
        index: this rank's index in the group.
        ranks: the global ranks of the group, by index.
        device: this rank's GPU.
        host_transport: moves the few numbers that the host must read.
        timeout_s: seconds for the GPU to finish when the transport is closed.
    """

    name: ClassVar[str] = "NCCL"
    is_asynchronous: ClassVar[bool] = True

    def __init__(
        self,
        client: KeyValueClient,
        prefix: str,
        *,
        index: int,
        ranks: tuple[int, ...],
        device: torch.device,
        host_transport: Transport,
        timeout_s: float = 30.0,
    ) -> None:
        self.device = device
        self.index = index
        self.ranks = ranks
        self._host_transport = host_transport
        self._timeout_s = timeout_s
        #: The latest work: when the GPU has finished it, it has finished all earlier work.
        self._last: Any = None
        self._is_aborted = False
        self._client = client.clone()
        self._store = AuthenticatedStore(self._client, prefix)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TORCH_TIMEOUT
        # By default torch ends the process when a collective fails; ours must raise HorovodInternalError. The variable
        # is read during construction and restored for the user's own groups.
        before = export({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
        try:
            self._group: Any = dist.ProcessGroupNCCL(self._store, index, len(ranks), options)
        finally:
            export(before)

    @property
    def for_sizes(self) -> Transport:
        # The engine's thread must never wait for a GPU, because it has to notice dead peers.
        return self._host_transport

    def allreduce(self, buffer: torch.Tensor, op: ReduceOp) -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]
        return self._launched(self._group.allreduce([buffer], options))

    def allgather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        return self._launched(self._group._allgather_base(output, buffer))

    def broadcast(self, buffer: torch.Tensor, root_index: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root_index
        return self._launched(self._group.broadcast([buffer], options))

    def alltoall(
        self, output: torch.Tensor, buffer: torch.Tensor, output_bytes: list[int], input_bytes: list[int]
    ) -> Work:
        options = dist.AllToAllOptions()
        return self._launched(self._group.alltoall_base(output, buffer, output_bytes, input_bytes, options))

    def abort(self) -> None:
        self._is_aborted = True
        with suppress(RuntimeError):  # a communicator that is broken already
            self._group.abort()

    @property
    def is_idle(self) -> bool:
        return self._last is None or bool(self._last.is_completed())

    def close(self) -> None:
        if not self._is_aborted:
            self._end()
        self._group = None
        self._client.close()

    def _end(self) -> None:
        """Let the GPU finish work of done handles, which an abort would interrupt."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self.is_idle and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        if self.is_idle:
            self._group.shutdown()
        else:  # a peer has died or hangs in the middle
            logger.warning(
                "NCCL's work of rank %d was not done %g s after the last operation and is aborted",
                self.ranks[self.index],
                self._timeout_s,
            )
            self.abort()

    def _launched(self, work: Any) -> Work:
        # Makes the engine's stream wait for NCCL's own; the host does not wait.
        work.wait()
        self._last = work
        return _NcclWork(work, self._group)


class _NcclWork(FinishedWork):
    """Launched work of a process group."""

    def __init__(self, work: Any, group: Any) -> None:
        self._work = work
        self._group = group

    def is_complete(self) -> bool:
        get_error = getattr(self._group, "get_error", None)  # torch >= 2.6
        error = "SUCCESS" if get_error is None else get_error().name
        if error != "SUCCESS":
            raise RuntimeError(f"NCCL has failed with {error}")
        return bool(self._work.is_completed())
