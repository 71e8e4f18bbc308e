"""Gradient accumulation before the reduction, for ``tf.compat.v1`` optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.settings import Settings
from hvd_cluster.tensorflow.gradients import variable_key
from hvd_cluster.tensorflow.interop import is_v1_graph


class GradientAccumulator:
    """Accumulates the gradients of several backward passes, then reduces them.

    ``accumulation_steps`` is the number of passes. Works in eager mode, in a ``tf.function`` and in v1 graphs; there
    the sums are local variables, which ``tf.compat.v1.local_variables_initializer()`` sets to zero. Every variable has
    a sum, even without a gradient so far: the current trace knows only its own gradients, and another trace may
    complete the step.

    Args:
        accumulation_steps: the number of backward passes per optimizer step.
        average: divide the sums by the number of passes.
        sparse_as_dense: convert ``tf.IndexedSlices`` to dense gradients.
    """

    def __init__(self, accumulation_steps: int, *, average: bool, sparse_as_dense: bool) -> None:
        self._accumulation_steps = accumulation_steps
        self._average = average
        self._sparse_as_dense = sparse_as_dense
        #: The sum of each variable, by :func:`variable_key`.
        self._sums: dict[int, Any] = {}
        #: Whether there was any gradient so far.
        self._has_gradients = False
        #: The variables of the first pass; all passes have the same.
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
            gradients: a tensor or None for each variable; None counts as zero.
            variables: the variables of the gradients; the same in every pass.
            reduce: reduces the sums over all ranks.

        Returns:
            In the pass that completes a step, the result of ``reduce``; else the sums so far, which must not be
            applied. None for each variable if no pass had a gradient.

        Raises:
            ValueError: a gradient is sparse, or the variables differ from those of earlier passes.
            NotImplementedError: the job is elastic, and this is not a v1 graph.
        """
        self._check_variables(variables)
        keys = [variable_key(variable) for variable in variables]
        dense = [self._as_dense(gradient) for gradient in gradients]
        self._has_gradients = self._has_gradients or any(each is not None for each in dense)
        with tf.init_scope():
            if self._counter is None:
                self._counter = accumulation_variable(tf.zeros((), tf.int32), "hvd_passes")
                for key, variable in zip(keys, variables, strict=True):
                    dtype = tf.as_dtype(variable.dtype).base_dtype
                    self._sums[key] = accumulation_variable(tf.zeros(variable.shape, dtype), "hvd_sum")
        sums = [self._sums[key] for key in keys] if self._has_gradients else []
        added = [
            total.read_value() if each is None else total.assign_add(each, read_value=True)
            for total, each in zip(sums, dense, strict=False)  # no sums without gradients
        ]
        passes = self._counter.assign_add(1, read_value=True)
        self._is_step = tf.equal(passes % self._accumulation_steps, 0)

        def complete() -> list[tf.Tensor]:
            totals = [tf.identity(each) for each in added]
            if self._average:
                totals = [each / tf.cast(self._accumulation_steps, each.dtype) for each in totals]
            reduced = reduce(totals)
            with tf.control_dependencies(reduced):
                resets = [total.assign(tf.zeros_like(total)) for total in sums]
            with tf.control_dependencies(operations(resets)):
                return [tf.identity(each) for each in reduced]

        if not sums:
            return [None] * len(dense)
        return list(tf.cond(self._is_step, complete, lambda: [tf.identity(each) for each in added]))

    def apply(self, apply: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Call ``apply`` if the pass completes a step, otherwise ``skip``.

        In a graph, return an operation that does so.
        """

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
                f"with backward_passes_per_step={self._accumulation_steps} an optimizer accumulates the gradients "
                f"of the variables of its first pass, {sorted(known.values())}, but this pass has gradients of "
                f"{sorted(given.values())}: use one optimizer for each set of variables"
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


#: The collection of a v1 graph for the variables that optimizers keep between passes, which elastic states save.
ACCUMULATION_VARIABLES = "hvd_pass_variables"


def accumulation_variable(value: tf.Tensor, name: str) -> Any:
    """A variable that elastic states save, but a v1 graph's checkpoints do not.

    Nor do broadcasts include it.

    Raises:
        NotImplementedError: the job is elastic, and this is not a v1 graph, in which a state would find it.
    """
    if not is_v1_graph() and Settings.from_env().elastic:
        raise NotImplementedError(
            "an elastic job cannot send the gradients that a tf.compat.v1 optimizer has accumulated outside of a v1 "
            "graph to a new worker: use a Keras optimizer, or backward_passes_per_step=1"
        )
    return tf.compat.v1.Variable(
        value,
        trainable=False,
        name=name,
        use_resource=True,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES, ACCUMULATION_VARIABLES],
    )


def operations(values: Sequence[Any]) -> list[Any]:
    """The values for ``tf.control_dependencies``; empty in eager mode.

    There they are computed already.
    """
    return [] if tf.executing_eagerly() else [value for value in values if value is not None]
