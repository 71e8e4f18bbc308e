"""A communication hook that keeps DDP's buckets in shared memory.

An allreduce does not copy them there.
"""

# DDP compares annotations with its classes: without "from __future__ import annotations"
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.torch.distributed.futures import CallFuture, CallName
from hvd_cluster.torch.distributed.group import HvdProcessGroup
from hvd_cluster.torch.shared import is_shared, shared_empty

#: This many buckets are reduced without a copy in one call.
_MAX_HELD = 32


def shared_bucket_hook(
    process_group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined,unused-ignore]  # torch hides it from mypy
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a DDP bucket in memory that a host's workers share.

    For the backend "hvd"::

        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
        net.register_comm_hook(None, hvd.shared_bucket_hook)

    A bucket moves to shared memory (:func:`hvd_cluster.torch.shared_empty`) at its first reduction, and once more after
    DDP has rebuilt it. The gradients, which are views of it, move along; other views and numpy arrays that were made of
    them before do not. The averages are those of an all_reduce with ``ReduceOp.AVG``.

    A bucket is reduced where it is, as usual, if ``gradient_as_bucket_view`` is not set, if it is on a GPU, if one of
    its parameters gets no gradient or a sparse one, and if ``shared_empty`` has no shared memory or not enough.

    If all workers are on one host that has fewer than two cores for each, a reduction takes its time from the backward
    pass. All buckets then wait for the last one, and the workers wait for each other only once.

    Args:
        process_group: DDP's group; the default group if None.
        bucket: the gradients of some parameters; its buffer is flat, of any floating-point dtype.

    Returns:
        a future of the averages, of the buffer's shape.
    """
    buffer = bucket.buffer()
    if buffer.is_cpu and buffer.layout == torch.strided and not is_shared(buffer):
        _share(buffer, bucket.parameters())
    group = process_group or dist.group.WORLD
    if isinstance(group, HvdProcessGroup) and buffer.is_cpu:
        if group not in _held:
            _held[group] = _HeldBuckets(group)
        if _held[group].waits_for_last:
            return _held[group].add(bucket, group)
    work = dist.all_reduce(buffer, dist.ReduceOp.AVG, group=group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


class _HeldFuture(CallFuture):
    """The average of a bucket; its reduction begins with a later one's, or at a wait."""

    def __init__(self, name: CallName | None, reduce: Callable[[], None]) -> None:
        super().__init__(name, [])
        self._reduce = reduce

    def wait(self) -> Any:
        self._reduce()
        return super().wait()


class _HeldBuckets:
    """The buckets, of all its models, that a group has not begun to reduce."""

    def __init__(self, group: HvdProcessGroup) -> None:
        lacks_cores = torch.tensor(float(running_engine().lacks_cores))
        group.allreduce([lacks_cores], dist.ReduceOp.MIN).wait()
        self.waits_for_last = bool(lacks_cores)  # equal on all ranks, which may run on different sets of cores
        self._futures: dict[torch.Tensor, _HeldFuture] = {}
        self._num_buckets = 0

    def add(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined,unused-ignore]
        group: HvdProcessGroup,
    ) -> _HeldFuture:
        """The future of the averages."""
        self._num_buckets += 1
        reduce = partial(self._reduce, group)
        future = _HeldFuture(group.calls.name_of(f"bucket #{self._num_buckets}"), reduce)
        self._futures[bucket.buffer()] = future
        if bucket.is_last() or len(self._futures) == _MAX_HELD:
            reduce()
        return future

    def _reduce(self, group: HvdProcessGroup) -> None:
        held, self._futures = self._futures, {}
        for kind in dict.fromkeys((each.dtype, each.layout) for each in held):  # a call has tensors of one kind
            alike = [each for each in held if (each.dtype, each.layout) == kind]
            work = group.allreduce(alike, dist.ReduceOp.AVG)
            work.get_future().add_done_callback(partial(_complete, [held[each] for each in alike]))


_held: WeakKeyDictionary[HvdProcessGroup, _HeldBuckets] = WeakKeyDictionary()


def _complete(futures: list[_HeldFuture], done: torch.futures.Future[list[torch.Tensor]]) -> None:
    try:
        results = done.value()
    except Exception as error:  # noqa: BLE001 - the futures hand it to those who wait
        for future in futures:
            future.fail(error)
    else:
        for future, result in zip(futures, results, strict=True):
            future.set_result(result)


def _share(buffer: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    """Move a bucket and its gradients, which must be views of it, to shared memory.

    DDP keeps tensors of its own: the bucket and its views, which are the very tensors that the hook sees as buffer and
    gradients. ``set_`` gives them other memory, and nothing else.
    """
    storage = buffer.untyped_storage()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) < len(parameters):
        return
    if any(gradient.untyped_storage().data_ptr() != storage.data_ptr() for gradient in gradients):
        return
    try:
        place = shared_empty(buffer.shape, buffer.dtype)
    except MemoryError:
        return
    if not is_shared(place):
        return
    place.copy_(buffer)
    with torch.no_grad():
        for tensor in (*gradients, buffer):
            start = place.storage_offset() + tensor.storage_offset() - buffer.storage_offset()
            tensor.set_(place.untyped_storage(), start, tensor.shape, tensor.stride())
