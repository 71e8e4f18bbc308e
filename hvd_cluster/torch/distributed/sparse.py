"""Sums of sparse tensors, such as embeddings' gradients, by gathering entries."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from hvd_cluster.engine.request import describe
from hvd_cluster.engine.signature import Kind, ReduceOp, Signature
from hvd_cluster.torch.distributed.calls import OrderedCalls
from hvd_cluster.torch.distributed.reductions import ScaledOp, reduction_of
from hvd_cluster.torch.distributed.work import HandleWork


def sum_sparse(calls: OrderedCalls, num_ranks: int, tensor: torch.Tensor, op: Any, timeout: timedelta) -> HandleWork:
    """Replace a COO tensor by its sum over all ranks; entry counts may differ.

    Args:
        calls: those of the group.
        num_ranks: how many ranks the group has.
        tensor: gets the sum.
        op: torch's SUM or AVG.
        timeout: overrides that of the group, if it is set.

    Raises:
        ValueError: ``op`` is neither SUM nor AVG.
    """
    how = reduction_of(op, tensor.dtype)
    if not isinstance(how, ScaledOp) or how not in (ScaledOp(ReduceOp.SUM), ScaledOp(ReduceOp.AVERAGE)):
        raise ValueError("unsupported reduction operation: sparse tensors can be summed and averaged only")
    own = tensor.detach().coalesce()
    is_mean = how == ScaledOp(ReduceOp.AVERAGE)

    # Not for the engine to do: to count the entries, the host waits for a GPU.
    def add_up(results: list[torch.Tensor]) -> None:
        indices, values = results
        is_whole = not (values.is_floating_point() or values.is_complex())
        if is_mean and not is_whole:
            values.div_(num_ranks)
        total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=False).coalesce()
        if is_mean and is_whole:  # rounded once, as the means of dense tensors
            total.values().div_(num_ranks, rounding_mode="trunc")
        with torch.no_grad():
            tensor.copy_(total)

    # Indices have the shape (dimensions, entries); the entries of all ranks are concatenated.
    entries = [own.indices().t().contiguous(), own.values().contiguous()]
    metas = tuple([describe(each, any_first_dimension=True) for each in entries])
    signature = Signature(Kind.ALLGATHER, metas, how.op, sparse_shapes=(tuple(own.shape),))
    call = calls.submit(signature, entries, [], finish=lambda results: results, timeout=timeout)
    return HandleWork(call.handle, [tensor], call=call, finish=add_up)
