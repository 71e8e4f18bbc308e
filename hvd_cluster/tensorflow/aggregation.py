"""Gradients of several passes, summed on their own rank before they are reduced; for ``tf.compat.v1`` optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class LocalAggregation:
    """Sums gradients of ``passes_per_step`` passes, and lets every so manyth through.

    Works eagerly, in a ``tf.function`` and in v1 graphs; there the sums are local variables, which
    ``tf.compat.v1.local_variables_initializer()`` sets to zero.

    Args:
        passes_per_step: how many passes make a step.
        average: divide the sums by the number of passes.
        sparse_as_dense: ``tf.IndexedSlices`` are turned into dense gradients.
    """

    def __init__(self, passes_per_step: int, *, average: bool, sparse_as_dense: bool) -> None:
        self._passes_per_step = passes_per_step
        self._average = average
        self._sparse_as_dense = sparse_as_dense
        self._sums: list[Any] | None = None
        self._counter: Any = None
        self._is_step: Any = None

    def aggregate(self, gradients: Sequence[Any], reduce: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """Add ``gradients`` to the sums.

        Args:
            gradients: a tensor or None for each variable.
            reduce: reduces the sums over all ranks.

        Returns:
            In the pass that completes a step what ``reduce`` gave, else the sums so far, which are not to be applied.

        Raises:
            ValueError: a gradient is sparse.
        """
        dense = [self._as_dense(gradient) for gradient in gradients]
        present = [index for index, gradient in enumerate(dense) if gradient is not None]
        if self._sums is None:
            with tf.init_scope():
                self._counter = local_variable(tf.zeros((), tf.int32), "hvd_passes")
                self._sums = [
                    None if each is None else local_variable(tf.zeros(each.shape, each.dtype), "hvd_sum")
                    for each in dense
                ]
        sums = self._sums
        added = [sums[index].assign_add(dense[index], read_value=True) for index in present]
        passes = self._counter.assign_add(1, read_value=True)
        self._is_step = tf.equal(passes % self._passes_per_step, 0)

        def complete() -> list[tf.Tensor]:
            totals = [tf.identity(each) for each in added]
            if self._average:
                totals = [each / tf.cast(self._passes_per_step, each.dtype) for each in totals]
            everything: list[Any] = [None] * len(dense)
            for index, total in zip(present, totals, strict=True):
                everything[index] = total
            reduced = reduce(everything)
            with tf.control_dependencies([reduced[index] for index in present]):
                resets = [sums[index].assign(tf.zeros_like(sums[index])) for index in present]
            with tf.control_dependencies(operations(resets)):
                return [tf.identity(reduced[index]) for index in present]

        results: list[Any] = [None] * len(dense)
        outcome = tf.cond(self._is_step, complete, lambda: [tf.identity(each) for each in added])
        for index, value in zip(present, outcome, strict=True):
            results[index] = value
        return results

    def apply(self, apply: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Call ``apply`` where the pass completes a step, else ``skip``; in a graph the operation that does so."""

        def branch(act: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> tf.Tensor:
                operation = act()
                with tf.control_dependencies(operations([operation])):
                    return tf.constant(True)

            return run

        done = tf.cond(self._is_step, branch(apply), branch(skip))
        return None if tf.executing_eagerly() else tf.group(done)

    def _as_dense(self, gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            if not self._sparse_as_dense:
                raise ValueError(
                    "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is "
                    "False: use sparse_as_dense=True"
                )
            return tf.convert_to_tensor(gradient)
        return gradient


def local_variable(value: tf.Tensor, name: str) -> Any:
    """A variable of this rank alone, which no broadcast and no checkpoint of a v1 graph takes."""
    return tf.compat.v1.Variable(
        value,
        trainable=False,
        name=name,
        use_resource=True,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
    )


def operations(values: Sequence[Any]) -> list[Any]:
    """What ``tf.control_dependencies`` takes of ``values``: nothing eagerly, where they are done."""
    return [] if tf.executing_eagerly() else [value for value in values if value is not None]
