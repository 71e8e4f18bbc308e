"""Private names and helpers of Horovod's TensorFlow modules that programs import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.tensorflow.collectives.allreduce import allreduce, grouped_allreduce
from hvd_cluster.tensorflow.collectives.reducescatter import grouped_reducescatter, reducescatter
from hvd_cluster.tensorflow.gradient_accumulation import GradientAccumulator
from hvd_cluster.tensorflow.naming import normalized

T = TypeVar("T")

_LegacyOptimizer = tf.compat.v1.train.Optimizer
_SessionRunHook = tf.compat.v1.train.SessionRunHook
_normalize_name = normalized


def _summing(function: Callable[..., Any], *order: str) -> Callable[..., Any]:
    """``function`` with its arguments in the order of Horovod's private function.

    It sums unless ``op`` is given.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**{"op": ReduceOp.SUM, **dict(zip(order, args, strict=False)), **kwargs})

    return call


def _unscoped_reducescatter(*, ignore_name_scope: bool = False, **options: Any) -> Any:
    del ignore_name_scope  # only Horovod's function uses it
    return grouped_reducescatter(**options)


_FACTORS = ("prescale_factor", "postscale_factor")
_SCOPE_AND_SET = ("ignore_name_scope", "process_set")
_allreduce = _summing(allreduce, "tensor", "name", "op", *_FACTORS, *_SCOPE_AND_SET)
_grouped_allreduce = _summing(grouped_allreduce, "tensors", "name", "op", *_FACTORS, *_SCOPE_AND_SET)
_reducescatter = _summing(reducescatter, "tensor", "name", "op", *_SCOPE_AND_SET, *_FACTORS)
_grouped_reducescatter = _summing(_unscoped_reducescatter, "tensors", "name", "op", *_SCOPE_AND_SET, *_FACTORS)


def _executing_eagerly() -> bool:
    """Whether TensorFlow executes eagerly here."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """``tf.function``."""
    return tf.function(f)


def _cache(f: Callable[..., T]) -> Callable[..., T]:
    """``f``, called once for each set of arguments."""
    return functools.lru_cache(maxsize=None)(f)


def vars_to_refs(vars: Any) -> Any:
    """The hashable references of variables; lists become tuples."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables of :func:`vars_to_refs`'s result; tuples become lists."""
    if isinstance(refs, Iterable):
        return [refs_to_vars(each) for each in refs]
    return refs.deref()


class LocalGradientAggregationHelper:
    """Accumulates gradients over several backward passes, then reduces the sums.

    Args:
        backward_passes_per_step: the number of backward passes per optimizer step.
        allreduce_func: called with the sums and their variables; returns the reduced sums.
        sparse_as_dense: convert ``tf.IndexedSlices`` to dense gradients.
        average_aggregated_gradients: divide the sums by the number of passes.
        options: accepted and ignored.
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
        self._aggregation = GradientAccumulator(
            backward_passes_per_step, average=average_aggregated_gradients, sparse_as_dense=sparse_as_dense
        )

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add a pass; return the reduced sums if it completes a step.

        Otherwise the result is the sums so far; do not apply these.
        """
        return self._aggregation.aggregate(grads, vars, lambda sums: self._reduce(sums, vars))

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``apply_grads_closure`` if the last pass completed a step.

        Otherwise count only an iteration.
        """
        step = kwargs.get("global_step", getattr(optimizer, "iterations", None))
        return self._aggregation.apply(apply_grads_closure, lambda: None if step is None else step.assign_add(1))


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """The same class: graphs and eager execution do not differ."""
