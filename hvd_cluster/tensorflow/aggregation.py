"""Sums gradients of several passes on each rank before they are reduced; for ``tf.compat.v1`` optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.settings import Settings
from hvd_cluster.tensorflow.gradients import variable_key
from hvd_cluster.tensorflow.interop import is_v1_graph


class LocalAggregation:
    """Sums gradients, and passes the sums on after every ``passes_per_step`` passes.

    Works eagerly, in a ``tf.function`` and in v1 graphs; there the sums are local variables, which
    ``tf.compat.v1.local_variables_initializer()`` sets to zero. Every variable has a sum, also one that no gradient has
    been seen of: which gradients there are is known only of the trace that is made now, and another may complete the
    step.

    Args:
        passes_per_step: how many passes make a step.
        average: divide the sums by the number of passes.
        sparse_as_dense: ``tf.IndexedSlices`` are turned into dense gradients.
    """

    def __init__(self, passes_per_step: int, *, average: bool, sparse_as_dense: bool) -> None:
        self._passes_per_step = passes_per_step
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
            gradients: a tensor or None for each variable; one that is missing in one pass counts as zero there.
            variables: what they belong to; the same ones in every pass.
            reduce: reduces the sums over all ranks.

        Returns:
            In the pass that completes a step what ``reduce`` gave, else the sums so far, which are not to be applied;
            None for each variable where there has been no gradient of any.

        Raises:
            ValueError: a gradient is sparse, or the variables are others than in the passes before.
            NotImplementedError: the job is elastic, and the passes are not those of a v1 graph.
        """
        self._check_variables(variables)
        keys = [variable_key(variable) for variable in variables]
        dense = [self._as_dense(gradient) for gradient in gradients]
        self._has_gradients = self._has_gradients or any(each is not None for each in dense)
        with tf.init_scope():
            if self._counter is None:
                self._counter = pass_variable(tf.zeros((), tf.int32), "hvd_passes")
                for key, variable in zip(keys, variables, strict=True):
                    dtype = tf.as_dtype(variable.dtype).base_dtype
                    self._sums[key] = pass_variable(tf.zeros(variable.shape, dtype), "hvd_sum")
        sums = [self._sums[key] for key in keys] if self._has_gradients else []
        added = [
            total.read_value() if each is None else total.assign_add(each, read_value=True)
            for total, each in zip(sums, dense, strict=False)  # no sums without gradients
        ]
        passes = self._counter.assign_add(1, read_value=True)
        self._is_step = tf.equal(passes % self._passes_per_step, 0)

        def complete() -> list[tf.Tensor]:
            totals = [tf.identity(each) for each in added]
            if self._average:
                totals = [each / tf.cast(self._passes_per_step, each.dtype) for each in totals]
            reduced = reduce(totals)
            with tf.control_dependencies(reduced):
                resets = [total.assign(tf.zeros_like(total)) for total in sums]
            with tf.control_dependencies(operations(resets)):
                return [tf.identity(each) for each in reduced]

        if not sums:
            return [None] * len(dense)
        return list(tf.cond(self._is_step, complete, lambda: [tf.identity(each) for each in added]))

    def apply(self, apply: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Call ``apply`` if the pass completes a step, otherwise ``skip``; in a graph, an operation that does so."""

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


#: The collection of a v1 graph for the variables that optimizers keep between passes, which elastic states save.
PASS_VARIABLES = "hvd_pass_variables"


def pass_variable(value: tf.Tensor, name: str) -> Any:
    """A variable that elastic states save, but broadcasts and checkpoints of a v1 graph do not.

    Raises:
        NotImplementedError: the job is elastic, and this is not a v1 graph, in which a state would find it.
    """
    if not is_v1_graph() and Settings.from_env().elastic:
        raise NotImplementedError(
            "an elastic job cannot give a newcomer the passes that a tf.compat.v1 optimizer has summed outside of a v1 "
            "graph: use a Keras optimizer, or backward_passes_per_step=1"
        )
    return tf.compat.v1.Variable(
        value,
        trainable=False,
        name=name,
        use_resource=True,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES, PASS_VARIABLES],
    )


def operations(values: Sequence[Any]) -> list[Any]:
    """``values`` for ``tf.control_dependencies``; empty in eager mode, in which they are computed already."""
    return [] if tf.executing_eagerly() else [value for value in values if value is not None]
