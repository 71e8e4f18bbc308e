"""How the gradients of an optimizer or a tape are reduced, in any framework."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_cluster.engine.compression import Compressor, NoneCompressor
from hvd_cluster.engine.fusion import group_indices
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import ReduceOp

#: How many groups, or which parameters' gradients are reduced together; None for as few requests as fit.
Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True, kw_only=True)
class ReductionConfig:
    """The options that all distributed optimizers share.

    Raises:
        ValueError: the options contradict each other.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    compression: type[Compressor] = NoneCompressor
    #: Make sparse gradients dense before they are reduced.
    sparse_as_dense: bool = False
    #: Divide an average by this before the sum, and by the rest after it.
    predivide_factor: float = 1.0
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    #: Divide the gradients of local variables by the number of ranks, as if the other ranks' were zero.
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.predivide_factor != 1.0 and self.op != ReduceOp.AVERAGE:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.predivide_factor == 0.0:
            raise ValueError("gradient_predivide_factor=0 must be another number: gradients are divided by it")
        self.group_indices([None])

    def group_indices(self, variables: Sequence[Any], key: Callable[[Any], Hashable] = id) -> list[list[int]]:
        """The groups as lists of indices into ``variables``, compared by ``key``.

        Raises:
            ValueError: ``groups`` is not a number or a list of lists, or holds a variable twice.
        """
        groups = self.groups
        if isinstance(groups, (list, tuple)):
            groups = [list(map(key, group)) if isinstance(group, (list, tuple)) else group for group in groups]
        return group_indices(groups, list(map(key, variables)))

    @property
    def keeps_sparse(self) -> bool:
        """Sparse gradients are gathered, not made dense."""
        return not self.sparse_as_dense and self.op in (ReduceOp.AVERAGE, ReduceOp.SUM)
