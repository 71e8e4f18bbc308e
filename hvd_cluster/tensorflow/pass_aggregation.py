"""The sums of several passes under Horovod's names and arguments, for programs that use them without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_cluster.tensorflow.aggregation import LocalAggregation


class LocalGradientAggregationHelper:
    """Sums gradients of several passes, and reduces every so manyth sum.

    Args:
        backward_passes_per_step: how many passes make a step.
        allreduce_func: called with the sums and their variables; gives the reduced ones.
        sparse_as_dense: ``tf.IndexedSlices`` are turned into dense gradients.
        average_aggregated_gradients: divide the sums by the number of passes.
        options: accepted, and without effect.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        **options: Any,
    ) -> None:
        del options
        self._reduce = allreduce_func
        self._aggregation = LocalAggregation(
            backward_passes_per_step, average=average_aggregated_gradients, sparse_as_dense=sparse_as_dense
        )

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add a pass: the reduced sums where it completes a step, else the sums so far, not to be applied."""
        return self._aggregation.aggregate(grads, vars, lambda sums: self._reduce(sums, vars))

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``apply_grads_closure`` where the last pass has completed a step, else count an iteration only."""
        step = kwargs.get("global_step", getattr(optimizer, "iterations", None))
        return self._aggregation.apply(apply_grads_closure, lambda: None if step is None else step.assign_add(1))


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """The same: nothing differs between graphs and eager execution."""
