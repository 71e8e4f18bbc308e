"""Gradients of several passes, summed on their own rank before they are reduced; for ``tf.compat.v1`` optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.tensorflow.gradients import variable_key


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
        #: The sum of each variable whose gradient has ever been there, by :func:`variable_key`.
        self._sums: dict[int, Any] = {}
        #: The variables of the first pass, which are those of all.
        self._variables: list[Any] | None = None
        self._counter: Any = None
        self._is_step: Any = None

    def aggregate(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        reduce: Callable[[Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Add ``gradients`` to the sums.

        Args:
            gradients: a tensor or None for each variable; one that is missing in one pass counts as zero there.
            variables: what they belong to; the same ones in every pass.
            reduce: reduces the sums over all ranks.

        Returns:
            In the pass that completes a step what ``reduce`` gave, else the sums so far, which are not to be applied.
            None for a variable that has had no gradient yet.

        Raises:
            ValueError: a gradient is sparse, or the variables are others than in the passes before.
        """
        self._check_variables(variables)
        keys = [variable_key(variable) for variable in variables]
        dense = [self._as_dense(gradient) for gradient in gradients]
        with tf.init_scope():
            if self._counter is None:
                self._counter = local_variable(tf.zeros((), tf.int32), "hvd_passes")
            for key, each in zip(keys, dense, strict=True):
                if each is not None and key not in self._sums:
                    self._sums[key] = local_variable(tf.zeros(each.shape, each.dtype), "hvd_sum")
        present = [index for index, key in enumerate(keys) if key in self._sums]
        sums = {index: self._sums[keys[index]] for index in present}
        added = [
            sums[index].read_value() if dense[index] is None else sums[index].assign_add(dense[index], read_value=True)
            for index in present
        ]
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

    def _check_variables(self, variables: Sequence[Any]) -> None:
        if self._variables is None:
            self._variables = list(variables)
        known = {variable_key(variable): variable.name for variable in self._variables}
        given = {variable_key(variable): variable.name for variable in variables}
        if known.keys() != given.keys():
            raise ValueError(
                f"with backward_passes_per_step={self._passes_per_step} an optimizer sums the gradients of the "
                f"variables of its first pass, {sorted(known.values())}, and was now given those of "
                f"{sorted(given.values())}: use an optimizer for each set of variables"
            )

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
