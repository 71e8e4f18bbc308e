"""Sums gradients of several passes on each rank before they are reduced and applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from hvd_cluster.keras.reduction.reducer import Reduction


class Passes:
    """The passes of an optimizer since its last step.

    The sums and their counter are variables of the optimizer, because a compiled step of JAX keeps nothing else and an
    elastic state must contain them. A saved model does not contain them, so that it loads into the wrapped optimizer.

    A sum without gradients takes part as zeros: only the current trace knows which gradients exist, and another trace
    may complete the step.

    Args:
        per_step: how many passes make a step; 1 sums nothing.
        average: divide the sums by the number of passes.
    """

    def __init__(self, per_step: int, *, average: bool) -> None:
        self.per_step = per_step
        self._average = average
        self._counter: Any = None
        self._sums: dict[int, Any] = {}
        #: Whether there was any gradient so far.
        self._has_gradients = False
        self._is_hidden = False

    def of_another(self) -> Passes:
        """The same for another optimizer, without any pass so far."""
        return Passes(self.per_step, average=self._average)

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the sums for ``variables``; only the first call has an effect."""
        if self.per_step == 1 or self._sums:
            return
        self._counter = optimizer.add_variable((), dtype="int32", name="hvd_passes")
        self._sums = {id(v): optimizer.add_variable_from_reference(v, name="hvd_sum") for v in variables}

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        optimizer: Any,
        reduction: Reduction,
        apply: Callable[[list[Any]], Any],
    ) -> None:
        """Add gradients to the sums; if this completes a step, reduce and apply them.

        Args:
            gradients: a tensor or None for each variable.
            variables: Keras's variables.
            optimizer: whose step it is; a pass that completes none counts as one of its iterations too.
            reduction: reduces.
            apply: takes the step with reduced gradients.

        Raises:
            ValueError: a gradient is sparse, or that of a variable that the optimizer was not built with.
        """
        unknown = [variable.path for variable in variables if id(variable) not in self._sums]
        if unknown:
            raise ValueError(
                f"with backward_passes_per_step={self.per_step} an optimizer sums the gradients of the variables that "
                f"it was built with, and {unknown} are not among them: use an optimizer for each set of variables"
            )
        self._has_gradients = self._has_gradients or any(gradient is not None for gradient in gradients)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                self._sums[id(variable)].assign_add(_dense(gradient, reduction))
        self._counter.assign_add(1)

        is_step = keras.ops.equal(keras.ops.mod(self._counter.value, self.per_step), 0)
        everything = [*optimizer.variables, *variables]
        reduction.choose(
            is_step,
            lambda: self._step(self.per_step, variables, reduction, apply),
            lambda: optimizer.iterations.assign_add(1),
            everything,
        )

    def complete(
        self, variables: Sequence[Any], optimizer: Any, reduction: Reduction, apply: Callable[[list[Any]], Any]
    ) -> None:
        """Take a step with the passes so far, if they are too few for one; the next pass starts a new step.

        For the end of an epoch, outside compiled functions; every rank takes part. The arguments are those of
        :meth:`add`.
        """
        count = 0 if self._counter is None else int(keras.ops.convert_to_numpy(self._counter)) % self.per_step
        if not count:
            return
        optimizer.iterations.assign_sub(1)  # which the passes have been counted in
        self._step(count, variables, reduction, apply)
        self._counter.assign(0)

    def _step(
        self, passes: int, variables: Sequence[Any], reduction: Reduction, apply: Callable[[list[Any]], Any]
    ) -> None:
        """Reduce and apply the sums of ``passes`` passes."""
        sums = [self._sums[id(variable)] for variable in variables]
        divisor = passes if self._average else 1
        # Without any gradient Keras says what is wrong.
        means = [total.value / divisor if self._has_gradients else None for total in sums]
        apply(reduction(means, variables))
        for total in sums:
            total.assign(keras.ops.zeros_like(total.value))

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While a model is saved or loaded, :meth:`shown` omits the sums."""
        self._is_hidden = True
        try:
            yield
        finally:
            self._is_hidden = False

    def shown(self, variables: Sequence[Any]) -> list[Any]:
        """The variables of an optimizer that are visible now."""
        if not self._is_hidden:
            return list(variables)
        own = {id(total) for total in self._sums.values()} | {id(self._counter)}
        return [variable for variable in variables if id(variable) not in own]


def sums_hidden(optimizer: Any) -> AbstractContextManager[None]:
    """While entered, ``optimizer.variables`` has only those of the optimizer that was wrapped.

    The sums are each rank's own: they are neither broadcast nor part of a model that is returned.

    Args:
        optimizer: any; only a distributed one, which may be inside a LossScaleOptimizer, has sums.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    context: AbstractContextManager[None] = getattr(inner, "sums_hidden", nullcontext)()
    return context


def _dense(gradient: Any, reduction: Reduction) -> Any:
    if type(gradient).__name__ != "IndexedSlices":
        return gradient
    if not reduction.config.sparse_as_dense:
        raise ValueError(
            "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False: use "
            "sparse_as_dense=True"
        )
    return keras.ops.convert_to_tensor(gradient)
