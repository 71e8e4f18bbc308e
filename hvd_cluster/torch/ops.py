"""The collectives on torch tensors: blocking, asynchronous and in place, and their gradients.

Every function is a few lines over :func:`hvd_cluster.torch.submission.submit`. Names follow Horovod: a request called
"foo" is matched as "allreduce.foo", and one without a name by its number among the unnamed ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_cluster.engine import basics
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import Kind, ReduceOp
from hvd_cluster.errors import HorovodInternalError, NotInitializedError
from hvd_cluster.torch.compression import Compression, Compressor
from hvd_cluster.torch.submission import keep, poll, submit, synchronize

Average, Sum, Adasum, Min, Max, Product = ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "join",
    "poll",
    "synchronize",
]


# ---- allreduce ------------------------------------------------------------------------------------------------------


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks.

    Args:
        tensor: any shape; equal shape and type on all ranks. bool, 8- to 64-bit integers and 16- to 64-bit floats.
        average: deprecated; True is ``op=Average``, False is ``op=Sum``.
        name: what the ranks are matched by.
        compression: how the tensor travels.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies it afterwards. Integers are scaled in float64 and truncated.
        process_set: whose ranks take part.

    Returns:
        A new tensor like ``tensor``. Its gradient is the gradient's allreduce with the same op and factors.

    Raises:
        ValueError: the tensor cannot be sent, or the arguments contradict each other.
        HorovodInternalError: the ranks disagree, or the job has ended.
    """
    op = _reduce_op(average, op)
    compressed, ctx = compression.compress(tensor)
    (result,) = _allreduce(name, op, prescale_factor, postscale_factor, process_set, False, compressed)
    return compression.decompress(result, ctx)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce` that returns a handle at once; :func:`synchronize` gives the new tensor. No gradient."""
    op = _reduce_op(average, op)
    return _submit_allreduce([tensor], name, op, prescale_factor, postscale_factor, process_set, False, False)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """:func:`allreduce` in place; returns ``tensor``."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    synchronize(handle)
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce_async` in place: ``tensor`` holds the result once :func:`synchronize` has returned it."""
    op = _reduce_op(average, op)
    return _submit_allreduce([tensor], name, op, prescale_factor, postscale_factor, process_set, True, False)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors as one request: all of them are reduced, or none is."""
    op = _reduce_op(average, op)
    if not tensors:
        return []
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    results = _allreduce(name, op, prescale_factor, postscale_factor, process_set, True, *compressed)
    return [compression.decompress(result, ctx) for result, ctx in zip(results, ctxs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce` that returns one handle at once; :func:`synchronize` gives the list."""
    op = _reduce_op(average, op)
    return _submit_allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set, False, True)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`grouped_allreduce` in place; returns ``tensors`` as a list."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    synchronize(handle)
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce_async` in place."""
    op = _reduce_op(average, op)
    return _submit_allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set, True, True)


def _reduce_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    chosen = ReduceOp.AVERAGE if op is None else ReduceOp(op)
    if chosen == ReduceOp.ADASUM:
        raise NotImplementedError("Adasum is not available in this version: use op=hvd.Average or op=hvd.Sum")
    return chosen


def _submit_allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool,
    as_list: bool,
) -> int:
    if not tensors:
        return keep_finished([])
    is_scaled = op == ReduceOp.AVERAGE or prescale != 1.0 or postscale != 1.0
    if is_scaled and any(getattr(tensor, "dtype", None) == torch.bool for tensor in tensors):
        raise ValueError("bool tensors cannot be averaged or scaled: use op=hvd.Sum (any), hvd.Min (all) or hvd.Max")
    originals = list(tensors)

    def finish(results: list[torch.Tensor]) -> Any:
        given = originals if in_place else results
        return given if as_list else given[0]

    return submit(
        Kind.ALLREDUCE,
        originals,
        process_set=process_set,
        name=name,
        in_place=in_place,
        op=op,
        prescale=prescale,
        postscale=postscale,
        finish=finish,
    )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        is_group: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (op, prescale, postscale, process_set, is_group)
        handle = _submit_allreduce(tensors, name, op, prescale, postscale, process_set, False, True)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        op, prescale, postscale, process_set, is_group = ctx.arguments
        dense = [gradient.contiguous() for gradient in gradients]
        reduced = _allreduce(None, op, prescale, postscale, process_set, is_group, *dense)
        return (None,) * 6 + tuple(reduced)


# ---- allgather ------------------------------------------------------------------------------------------------------


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension.

    Args:
        tensor: shape (rows, ...); ``rows`` may differ between ranks and be 0, the rest is equal on all of them.
        name: what the ranks are matched by.
        process_set: whose ranks take part.

    Returns:
        A tensor of shape (sum of rows, ...), in the order of the ranks. Its gradient is this rank's slice of the
        gradients' average, as in Horovod.

    Raises:
        ValueError: the tensor cannot be sent.
        HorovodInternalError: the ranks disagree, the tensor has no dimension, or the job has ended.
    """
    (result,) = _allgather(name, process_set, tensor)
    return result


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """:func:`allgather` that returns a handle at once. No gradient."""
    return _submit_allgather([tensor], name, process_set, as_list=False)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """:func:`allgather` of several tensors as one request."""
    return list(_allgather(name, process_set, *tensors)) if tensors else []


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`grouped_allgather` that returns one handle at once. No gradient."""
    return _submit_allgather(tensors, name, process_set, as_list=True)


def _submit_allgather(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, as_list: bool) -> int:
    if not tensors:
        return keep_finished([])
    for tensor in tensors:
        if getattr(tensor, "ndim", None) == 0:  # what is no tensor at all is refused by submit()
            label = "a tensor" if name is None else f"tensor {name!r}"
            raise HorovodInternalError(f"Rank {basics.rank()} tried to ALLGATHER a rank-zero tensor. ({label})")
    return submit(
        Kind.ALLGATHER,
        tensors,
        process_set=process_set,
        name=name,
        finish=lambda results: results if as_list else results[0],
    )


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return tuple(synchronize(_submit_allgather(tensors, name, process_set, as_list=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        process_set = ctx.process_set
        averages = grouped_allreduce([gradient.contiguous() for gradient in gradients], process_set=process_set)
        rows = allgather(torch.tensor([ctx.rows]), process_set=process_set)  # (ranks, tensors)
        before = rows[: _index_in(process_set)].sum(dim=0).tolist()
        slices = [
            average[start : start + count] for average, start, count in zip(averages, before, ctx.rows, strict=True)
        ]
        return (None, None, *slices)


# ---- broadcast ------------------------------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Give every rank the root's tensor.

    Args:
        tensor: any shape; equal shape and type on all ranks.
        root_rank: the global rank whose tensor all get; it belongs to the process set.
        name: what the ranks are matched by.
        process_set: whose ranks take part.

    Returns:
        A new tensor. Its gradient is the gradients' average on the root, and zero elsewhere.

    Raises:
        ValueError: the tensor cannot be sent, or there is no such root.
        HorovodInternalError: the ranks disagree, or the job has ended.
    """
    return _broadcast(tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`broadcast` that returns a handle at once; :func:`synchronize` gives the new tensor. No gradient."""
    return _submit_broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """:func:`broadcast` in place; returns ``tensor``."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`broadcast_async` in place."""
    return _submit_broadcast(tensor, root_rank, name, process_set, in_place=True)


def _submit_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> int:
    ranks = process_set.ranks
    if ranks is not None and root_rank not in ranks:
        raise ValueError(f"root_rank={root_rank} is not among the ranks that take part, {_short(ranks)}")
    return submit(
        Kind.BROADCAST,
        [tensor],
        process_set=process_set,
        name=name,
        in_place=in_place,
        root=root_rank,
        finish=lambda results: tensor if in_place else results[0],
    )


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        average = allreduce(gradient.contiguous(), process_set=ctx.process_set)
        return (average if basics.rank() == ctx.root_rank else torch.zeros_like(average), None, None, None)


# ---- join and barrier -----------------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """Say that this rank has run out of data; blocks until all ranks have.

    Until then the others' allreduces take zeros from this rank, and an average still divides by all ranks.

    Args:
        device: the GPU for the zeros, or -1 for the CPU; they follow the others' tensors here.

    Returns:
        The rank that joined last, the same number on all ranks.
    """
    del device
    try:
        handle = basics.engine().join()
    except NotInitializedError as error:
        raise HorovodInternalError(str(error)) from None
    result: int = handle.wait()
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank has come here. Operations submitted before are not waited for."""
    synchronize(submit(Kind.BARRIER, [], process_set=process_set, name=None, finish=lambda _: None))


# autograd.Function.apply is untyped.
_allreduce: Callable[..., tuple[torch.Tensor, ...]] = _Allreduce.apply
_allgather: Callable[..., tuple[torch.Tensor, ...]] = _Allgather.apply
_broadcast: Callable[..., torch.Tensor] = _Broadcast.apply


# ---- inside ---------------------------------------------------------------------------------------------------------


def keep_finished(value: Any) -> int:
    """The handle of an operation that had nothing to do."""
    from hvd_cluster.engine.request import Handle

    handle = Handle()
    handle.succeed(value)
    return keep(handle)


def _index_in(process_set: ProcessSet) -> int:
    return basics.rank() if process_set.ranks is None else process_set.ranks.index(basics.rank())


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"{ranks[:4]} ... {ranks[-1]}"
