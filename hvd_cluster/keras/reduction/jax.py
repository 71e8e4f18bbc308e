"""Gradients on Keras's JAX backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
import torch
from jax.experimental import io_callback

from hvd_cluster.engine.compiled_steps import keep_error
from hvd_cluster.engine.submission import Present
from hvd_cluster.keras.reduction.reducer import Reduction
from hvd_cluster.keras.values import from_torch, to_torch
from hvd_cluster.monitor.callback_steps import callback_steps


class JaxReduction(Reduction):
    """Reduction by one callback from the compiled step, with all gradients."""

    def reduce(
        self, tensors: Sequence[Any], groups: list[list[int]], held: Present | None = None, *, ends_step: bool = False
    ) -> list[Any]:
        """Reduce JAX arrays, or the tracers of a compiled step."""

        def callback(*arrays: Any) -> tuple[Any, ...]:
            given = [to_torch(np.asarray(array)) for array in arrays]
            with callback_steps.callback(ends_step=ends_step), torch.no_grad(), keep_error():
                results = self.reduce_torch(given, groups, held)
            return tuple(
                from_torch(result, np.asarray(array).dtype) for result, array in zip(results, arrays, strict=True)
            )

        shape_of: Any = jax.ShapeDtypeStruct
        shapes = tuple(shape_of(tensor.shape, tensor.dtype) for tensor in tensors)
        return list(io_callback(callback, shapes, *tensors, ordered=True))

    @property
    def is_eager(self) -> bool:
        """Never: the reduction is a callback."""
        return False

    def num_members(self, dtype: Any) -> Any:
        """The number of ranks when the compiled step runs.

        The size of an elastic world changes.
        """
        shape_of: Any = jax.ShapeDtypeStruct
        return io_callback(lambda: np.asarray(self.config.process_set.size(), dtype), shape_of((), dtype), ordered=True)

    def choose(
        self, condition: Any, act: Callable[[], Any], otherwise: Callable[[], Any], variables: Sequence[Any]
    ) -> None:
        """Run each function on values, then assign the results to the variables.

        JAX's conditional requires that.
        """

        def pure(function: Callable[[], Any]) -> Callable[[list[Any]], list[Any]]:
            def call(values: list[Any]) -> list[Any]:
                with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
                    function()
                return [scope.get_current_value(variable) for variable in variables]

            return call

        before = [variable.value for variable in variables]
        for variable, value in zip(variables, jax.lax.cond(condition, pure(act), pure(otherwise), before), strict=True):
            variable.assign(value)


def forget_failed_step() -> None:
    """Let steps follow one whose callback has failed.

    A step on a GPU fails after JAX has taken the token that orders its callbacks as that of the next step, which fails
    with the same error. JAX has no public function that drops the token.
    """
    from jax._src.dispatch import runtime_tokens

    runtime_tokens.clear()  # type: ignore[no-untyped-call]
