"""All collectives, of ``mx.nd`` and of ``mx.np`` arrays.

They block: a result is there when the call returns. ``priority`` is accepted by all of them and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_cluster.engine.membership import rows_by_rank
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import Collective, reduce_op, scatter_op
from hvd_cluster.mxnet.interop import to_mxnet, to_torch

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]

Average, Sum, Adasum, Min, Max, Product = ReduceOp


@none_is_default
def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Any:
    """Reduce an array over all ranks.

    Args:
        tensor: of any shape, with the same shape and dtype on all ranks.
        average: deprecated; True is ``op=Average``, False is ``op=Sum``.
        name: matches the call with those of the other ranks.
        priority: accepted and ignored.
        prescale_factor: multiplies the array before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.
        op: Average (the default), Sum, Adasum, Min, Max or Product.

    Returns:
        A new array.

    Raises:
        ValueError: the array is sparse or has an unsupported dtype.
        HorovodInternalError: the ranks disagree, or the job has ended.
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], average, name, priority, *factors, process_set, op)[0]


@none_is_default
def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Any:
    """:func:`allreduce` in place; returns ``tensor``."""
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce_([tensor], average, name, priority, *factors, process_set, op)[0]


@none_is_default
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> list[Any]:
    """:func:`allreduce` of several arrays as one request: all or none."""
    op = reduce_op(average, op)
    collective = _reduction(Kind.ALLREDUCE, op, name, prescale_factor, postscale_factor, process_set)
    return _results(collective, tensors)


@none_is_default
def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> list[Any]:
    """:func:`grouped_allreduce` in place; returns ``tensors``."""
    op = reduce_op(average, op)
    collective = _reduction(Kind.ALLREDUCE, op, name, prescale_factor, postscale_factor, process_set)
    return _in_place(collective, tensors)


@none_is_default
def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all ranks along the first dimension.

    Its length may differ between ranks.
    """
    return grouped_allgather([tensor], name, priority, process_set)[0]


@none_is_default
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """:func:`allgather` of several arrays as one request."""
    return _results(Collective(kind=Kind.ALLGATHER, process_set=process_set, name=name), tensors)


@none_is_default
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcast ``root_rank``'s array to all ranks; return a new array.

    ``root_rank`` is a global rank.
    """
    collective = Collective(kind=Kind.BROADCAST, process_set=process_set, name=name, root=root_rank)
    return _results(collective, [tensor])[0]


@none_is_default
def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """:func:`broadcast` in place; returns ``tensor``."""
    collective = Collective(kind=Kind.BROADCAST, process_set=process_set, name=name, root=root_rank)
    return _in_place(collective, [tensor])[0]


@none_is_default
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a slice of the rows to each rank.

    Args:
        tensor: shape (rows, ...).
        splits: the number of rows to send to each rank: a list, or an int32 array of shape (ranks,). By default the
            rows are split equally.
        name: matches the call with those of the other ranks.
        priority: accepted and ignored.
        process_set: the ranks that take part.

    Returns:
        The received rows, in the order of the ranks; with ``splits``, a pair of this array and the number of rows from
        each rank.

    Raises:
        ValueError: ``splits`` does not match ``tensor``.
        HorovodInternalError: the ranks disagree, or the job has ended.
    """
    (sent,) = to_torch([tensor])
    given = [] if splits is None else [torch.as_tensor(getattr(splits, "asnumpy", lambda: splits)()).int()]
    collective = Collective(kind=Kind.ALLTOALL, process_set=process_set, name=name)
    output, received = collective.begin([sent], splits=rows_by_rank(sent, given, process_set)).wait()
    results = to_mxnet([output, received], [tensor, tensor])
    return results[0] if splits is None else tuple(results)


@none_is_default
def reducescatter(
    tensor: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce an array over all ranks and keep this rank's rows of the result.

    ``op`` is Average or Sum.
    """
    return grouped_reducescatter([tensor], op, name, priority, process_set, prescale_factor, postscale_factor)[0]


@none_is_default
def grouped_reducescatter(
    tensors: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """:func:`reducescatter` of several arrays as one request.

    Raises:
        UnsupportedReductionError: ``op`` is neither Average nor Sum.
    """
    collective = _reduction(Kind.REDUCESCATTER, scatter_op(op), name, prescale_factor, postscale_factor, process_set)
    return _results(collective, tensors)


@none_is_default
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank has called this."""
    Collective(kind=Kind.BARRIER, process_set=process_set).begin([]).wait()


def _reduction(
    kind: Kind, op: ReduceOp, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
) -> Collective:
    return Collective(kind=kind, process_set=process_set, name=name, op=op, prescale=prescale, postscale=postscale)


def _results(collective: Collective, arrays: Sequence[Any]) -> list[Any]:
    """New arrays."""
    if not arrays:
        return []
    return to_mxnet(collective.begin(to_torch(arrays)).wait(), arrays)


def _in_place(collective: Collective, arrays: Sequence[Any]) -> list[Any]:
    """The same arrays, overwritten."""
    if arrays:
        tensors = to_torch(arrays, for_writing=True)
        for tensor, result in zip(tensors, collective.begin(tensors).wait(), strict=True):
            if tensor.data_ptr() != result.data_ptr():
                tensor.copy_(result)
    return list(arrays)
