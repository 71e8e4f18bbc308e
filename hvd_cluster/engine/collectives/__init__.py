"""How requests are executed over a transport: a file per kind but the barrier.

A collective is a generator over :class:`~hvd_cluster.engine.collectives.stage.Stage`: it packs, yields the work that it
has launched, and is resumed when that work is done. So the progress thread runs several of them at once. A transport
without threads, such as shared memory, finishes the work when it is launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.collectives.allgather import allgather
from hvd_cluster.engine.collectives.allreduce import allreduce
from hvd_cluster.engine.collectives.alltoall import alltoall
from hvd_cluster.engine.collectives.broadcast import broadcast
from hvd_cluster.engine.collectives.reducescatter import reducescatter
from hvd_cluster.engine.collectives.stage import Stage, Stages
from hvd_cluster.engine.request import Request
from hvd_cluster.engine.signature import Kind
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.transport import Transport


def barrier(requests: list[Request], transport: Transport, buffers: BufferPool, recorder: Recorder) -> Stages:
    """Do nothing: the negotiation runs this because every rank has arrived."""
    yield Stage([], f"{transport.name}_BARRIER", time.monotonic())
    return [[] for _ in requests]


#: The collective of each kind of bucket.
COLLECTIVES: dict[Kind, Callable[[list[Request], Transport, BufferPool, Recorder], Stages]] = {
    Kind.ALLREDUCE: allreduce,
    Kind.ALLGATHER: allgather,
    Kind.BROADCAST: broadcast,
    Kind.ALLTOALL: alltoall,
    Kind.REDUCESCATTER: reducescatter,
    Kind.BARRIER: barrier,
}
