"""What programs import from Horovod's TensorFlow modules although its name begins with an underscore, and helpers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import ReduceOp
from hvd_cluster.tensorflow.collectives.allreduce import allreduce, grouped_allreduce
from hvd_cluster.tensorflow.collectives.reducescatter import grouped_reducescatter, reducescatter
from hvd_cluster.tensorflow.naming import normalized

T = TypeVar("T")

_LegacyOptimizer = tf.compat.v1.train.Optimizer
_SessionRunHook = tf.compat.v1.train.SessionRunHook
_normalize_name = normalized


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """``hvd.allreduce`` that sums by default, and does not compress."""
    return allreduce(
        tensor,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """``hvd.grouped_allreduce`` that sums by default, and does not compress."""
    return grouped_allreduce(
        tensors,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
        name=name,
    )


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """``hvd.reducescatter`` that sums by default, and does not compress."""
    return reducescatter(
        tensor,
        op=op,
        name=name,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's signature
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """``hvd.grouped_reducescatter`` that sums by default, and does not compress."""
    return grouped_reducescatter(
        tensors,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


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
    """The hashable references of variables, in tuples where ``vars`` has lists."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables that :func:`vars_to_refs` was given, in lists where ``refs`` has tuples."""
    if isinstance(refs, Iterable):
        return [refs_to_vars(each) for each in refs]
    return refs.deref()
