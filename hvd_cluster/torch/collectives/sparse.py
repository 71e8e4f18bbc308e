"""Allreduce of sparse tensors: the entries of all ranks are gathered, not added."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from hvd_cluster.engine.membership import num_members
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.scaling import copy_scaled
from hvd_cluster.engine.signature import Kind, ReduceOp
from hvd_cluster.engine.submission import check_reduction, submit
from hvd_cluster.torch.submission import checked


@none_is_default
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to sum or average a sparse tensor over all ranks.

    Args:
        tensor: a COO tensor, of the same shape on all ranks; the number of entries may differ.
        name: matches the call with those of the other ranks.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the sparse result, or raises HorovodInternalError, for instance where the
        ranks differ in ``op``, shape or dtype. An index of several ranks occurs several times in the result: call
        ``coalesce()`` to add the values.

    Raises:
        ValueError: ``op`` is neither Average nor Sum, a bool tensor would be averaged, or the tensor has an
            unsupported dtype or is not a COO tensor.
    """
    result = begin_sparse_allreduce(tensor, name, op, process_set)
    return lambda: result()[0]


def begin_sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    identity: int = -1,
    notes: Sequence[torch.Tensor] = (),
) -> Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]:
    """:func:`sparse_allreduce_async` with a number that must be equal on all ranks.

    Args:
        tensor, name, op, process_set: as above.
        identity: as for :func:`~hvd_cluster.engine.submission.submit`.
        notes: tensors that the same request gathers; the result is the sparse tensor, and the notes of all ranks.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"sparse_allreduce supports op=hvd.Average and op=hvd.Sum, not {ReduceOp(op).name}")
    if tensor.layout != torch.sparse_coo:
        raise ValueError(
            f"sparse_allreduce expects a COO tensor, got {tensor.layout}: use hvd.allreduce, or tensor.to_sparse_coo()"
        )
    check_reduction([tensor], op, 1.0, 1.0, process_set)
    tensor = tensor.coalesce()
    # Indices have the shape (dimensions, entries); the entries of all ranks are concatenated.
    entries = [tensor.indices().t().contiguous(), tensor.values().contiguous()]
    # One request for both: if the values cannot be sent, the indices are not sent either.
    handle = submit(
        Kind.ALLGATHER,
        [*entries, *notes],
        process_set=process_set,
        name=None if name is None else f"{name}.sparse",  # beside a gather of the same name
        unnamed="sparse.noname",
        op=ReduceOp(op),
        identity=identity,
        sparse_shapes=(tuple(tensor.shape),),
        prepare=checked,
        labels=[]
        if name is None
        else [f"allgather.{name}.{part}" for part in ("indices", "values", *["note"] * len(notes))],
    )
    divisor = num_members(process_set) if op == ReduceOp.AVERAGE else 1

    @functools.cache
    def result() -> tuple[torch.Tensor, list[torch.Tensor]]:
        indices, values, *gathered = handle.wait()
        copy_scaled(values, values, divisor=divisor)
        total = torch.sparse_coo_tensor(
            indices.t(), values, tensor.shape, dtype=values.dtype, device=values.device, check_invariants=False
        )
        return total, gathered

    return result
