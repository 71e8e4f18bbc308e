"""Sums a rank's gradients of several passes before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from hvd_cluster.keras.reduction.reducer import Reduction


class GradientAccumulator:
    """The passes of an optimizer since its last step.

    The sums and their counter are variables of the optimizer, because a compiled step of JAX keeps nothing else and an
    elastic state must contain them. A saved model does not contain them, so that it loads into the wrapped optimizer.

    A sum without gradients takes part as zeros: only the current trace knows which gradients exist, and another trace
    may complete the step.

    Args:
        steps: the number of backward passes per optimizer step; 1 disables accumulation.
        average: divide the sums by the number of passes.
    """

    def __init__(self, steps: int, *, average: bool) -> None:
        self.steps = steps
        self.average = average
        self._counter: Any = None
        self._sums: dict[int, Any] = {}
        #: Whether there was any gradient so far.
        self._has_gradients = False
        self._is_hidden = False

    def fresh_copy(self) -> GradientAccumulator:
        """The same for another optimizer, without any pass so far."""
        return GradientAccumulator(self.steps, average=self.average)

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the sums for ``variables``; only the first call has an effect."""
        if self.steps == 1 or self._sums:
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
            optimizer: the optimizer; a pass that only accumulates also counts as one of its iterations.
            reduction: reduces the gradients.
            apply: applies the reduced gradients.

        Raises:
            ValueError: a gradient is sparse, or the optimizer was not built with its variable.
        """
        unknown = [variable.path for variable in variables if id(variable) not in self._sums]
        if unknown:
            raise ValueError(
                f"with backward_passes_per_step={self.steps} an optimizer accumulates the gradients of the variables "
                f"that it was built with, but {unknown} are not among them: use one optimizer for each set of variables"
            )
        self._has_gradients = self._has_gradients or any(gradient is not None for gradient in gradients)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                self._sums[id(variable)].assign_add(_dense(gradient, reduction))
        self._counter.assign_add(1)

        is_step = keras.ops.equal(keras.ops.mod(self._counter.value, self.steps), 0)
        everything = [*optimizer.variables, *variables]
        reduction.choose(
            is_step,
            lambda: self._step(self.steps, variables, reduction, apply),
            lambda: self._count_pass(optimizer),
            everything,
        )

    def start_averages(self, optimizer: Any) -> None:
        """Set the averages of ``use_ema`` to the variables.

        Up to and including the first step. Keras does so in iteration 0, but the passes before the first step are
        iterations too.
        """
        averages = _averages(optimizer) if self.steps > 1 else []
        if not averages:
            return
        passes, counted = self._counter.value, keras.ops.cast(optimizer.iterations, "int32")
        # Otherwise steps precede these passes: a state was loaded, or the passes of an epoch were completed.
        are_all = keras.ops.equal(passes, counted + 1)
        is_first = keras.ops.logical_and(are_all, keras.ops.less_equal(passes, self.steps))
        for variable, average in averages:
            own, kept = keras.ops.convert_to_tensor(variable), keras.ops.convert_to_tensor(average)
            average.assign(keras.ops.where(is_first, own, kept))

    def _count_pass(self, optimizer: Any) -> None:
        """Count a pass that only accumulates as an iteration."""
        self.start_averages(optimizer)
        optimizer.iterations.assign_add(1)

    def complete(
        self, variables: Sequence[Any], optimizer: Any, reduction: Reduction, apply: Callable[[list[Any]], Any]
    ) -> None:
        """Take a step with the passes so far, if they are too few for one.

        The next pass starts a new step. Call it at the end of an epoch, outside of compiled functions, on every rank.
        The arguments are those of :meth:`add`.
        """
        count = 0 if self._counter is None else int(keras.ops.convert_to_numpy(self._counter)) % self.steps
        if not count:
            return
        optimizer.iterations.assign_sub(1)  # it counted the passes
        self._step(count, variables, reduction, apply)
        self._counter.assign(0)

    def _step(
        self, passes: int, variables: Sequence[Any], reduction: Reduction, apply: Callable[[list[Any]], Any]
    ) -> None:
        """Reduce and apply the sums of ``passes`` passes."""
        sums = [self._sums[id(variable)] for variable in variables]
        divisor = passes if self.average else 1
        # If there is no gradient at all, Keras raises with an explanation.
        means = [total.value / divisor if self._has_gradients else None for total in sums]
        apply(reduction(means, variables))
        for total in sums:
            total.assign(keras.ops.zeros_like(total.value))

    @contextmanager
    def hide(self) -> Iterator[None]:
        """While a model is saved or loaded, :meth:`visible` omits the sums."""
        self._is_hidden = True
        try:
            yield
        finally:
            self._is_hidden = False

    def visible(self, variables: Sequence[Any]) -> list[Any]:
        """The variables of an optimizer that are visible now."""
        if not self._is_hidden:
            return list(variables)
        own = {id(total) for total in self._sums.values()} | {id(self._counter)}
        return [variable for variable in variables if id(variable) not in own]


def without_accumulators(optimizer: Any) -> AbstractContextManager[None]:
    """Inside, ``optimizer.variables`` has only the wrapped optimizer's variables.

    The sums differ between ranks: they are neither broadcast nor part of a returned model.

    Args:
        optimizer: any optimizer; only a distributed one, possibly inside a LossScaleOptimizer, has sums.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    context: AbstractContextManager[None] = getattr(inner, "without_accumulators", nullcontext)()
    return context


def _averages(optimizer: Any) -> list[tuple[Any, Any]]:
    """The variables with averages, each with its average.

    An optimizer or the members of a MultiOptimizer keep them.
    """
    return [
        (variable, average)
        for member in getattr(optimizer, "optimizers", [optimizer])
        if member.use_ema and member.built
        for variable, average in zip(member._trainable_variables, member._model_variables_moving_average, strict=True)
        if average is not None
    ]


def _dense(gradient: Any, reduction: Reduction) -> Any:
    if type(gradient).__name__ != "IndexedSlices":
        return gradient
    if not reduction.config.sparse_as_dense:
        raise ValueError(
            "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False: use "
            "sparse_as_dense=True"
        )
    return keras.ops.convert_to_tensor(gradient)
