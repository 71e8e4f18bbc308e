"""Sums of sparse tensors, for the sparse gradients of embeddings: the entries of all ranks are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_cluster.engine.request import Kind, ReduceOp, Signature, describe
from hvd_cluster.torch.distributed.calls import Call, OrderedCalls
from hvd_cluster.torch.distributed.reductions import Reduction, reduction_of


def sum_sparse(
    calls: OrderedCalls, num_ranks: int, tensor: torch.Tensor, op: Any
) -> tuple[Call, Callable[[list[torch.Tensor]], None]]:
    """Replace a COO tensor by its sum over all ranks; the number of entries may differ between ranks.

    Returns:
        The call, and what adds up its results: to count the entries, the host waits for a GPU, and the engine must not.

    Raises:
        ValueError: ``op`` is neither SUM nor AVG.
    """
    how = reduction_of(op, tensor.dtype)
    if not isinstance(how, Reduction) or how not in (Reduction(ReduceOp.SUM), Reduction(ReduceOp.AVERAGE)):
        raise ValueError("unsupported reduction operation: sparse tensors can be summed and averaged only")
    own = tensor.detach().coalesce()

    def add_up(results: list[torch.Tensor]) -> None:
        indices, values = results
        if how == Reduction(ReduceOp.AVERAGE):
            values.div_(num_ranks)
        total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=False).coalesce()
        with torch.no_grad():
            tensor.copy_(total)

    # Indices have the shape (dimensions, entries); the entries of all ranks are concatenated.
    entries = [own.indices().t().contiguous(), own.values().contiguous()]
    metas = tuple([describe(each, any_first_dimension=True) for each in entries])
    signature = Signature(Kind.ALLGATHER, metas, how.op, sparse_shapes=(tuple(own.shape),))
    return calls.submit(signature, entries, [], finish=lambda results: results), add_up
